"""The log of the beacon's own errors: a file in the run directory. They never reach the job's output."""

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
    """Logs the exception being handled. The job loses only the evidence that depended on the failed step."""
    try:
        import traceback

        text = f"[pid {os.getpid()}] {where}: {''.join(traceback.format_exception(*sys.exc_info()))}\n"
        fd = os.open(os.path.join(run_dir, layout.LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)
    except Exception:
        return  # the run directory is gone or full, and the job's own output must stay untouched


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: logs an exception of ``function``, which is safelaunch's own fault, and keeps it from the script."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            fault(getattr(function, "__name__", "step"))
            return None

    return call


def private(path: str, flags: int) -> int:
    """An ``opener`` for files that only their owner may read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def absolute(path: str) -> str:
    """Returns ``os.path.abspath(path)``, or ``path`` if the working directory has been removed."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path
