"""Where the beacon's own faults go: a file in the run directory, never the job's output."""

from __future__ import annotations

import os
import sys

from . import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

run_dir = ""


def fault(where: str) -> None:
    """Notes the exception being handled. Costs the evidence that depended on it, nothing else."""
    try:
        import traceback

        text = f"[pid {os.getpid()}] {where}: {''.join(traceback.format_exception(*sys.exc_info()))}\n"
        fd = os.open(os.path.join(run_dir, layout.LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)
    except Exception:
        return  # the run directory is gone or full: there is nowhere left to say it but the job's own output


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: an exception of ``function`` (safelaunch's own fault) is noted and does not reach the script."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            fault(getattr(function, "__name__", "step"))
            return None

    return call


def private(path: str, flags: int) -> int:
    """An ``opener`` for files that are nobody else's to read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def absolute(path: str) -> str:
    """``os.path.abspath``, where there is a working directory: it may have been removed."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path
