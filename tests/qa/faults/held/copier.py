"""The copier of bundles, which stops itself once its target directory exists."""

import os
import runpy
import signal

make = os.mkdir


def mkdir_and_stop(path: str, mode: int = 0o777) -> None:
    make(path, mode)
    if path.endswith(".partial"):
        os.kill(os.getpid(), signal.SIGSTOP)


os.mkdir = mkdir_and_stop  # type: ignore[assignment]
runpy.run_path(os.environ["THE_COPIER"], run_name="__main__")
