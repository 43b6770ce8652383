"""Logs the beacon's own errors in the run directory, never in the job's output."""

from __future__ import annotations

import os
import sys
from itertools import pairwise

from . import layout, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

run_dir = ""
_BEACON = os.path.dirname(__file__)
_OURS = (os.path.join(_BEACON, ""), os.path.join(os.path.dirname(_BEACON), "addons", ""))


def fault(where: str) -> None:
    """Logs the current exception. The failed step costs the job only the evidence that depends on it."""
    try:
        import traceback

        text = f"[pid {os.getpid()}] {where}: {''.join(traceback.format_exception(*sys.exc_info()))}\n"
        page.append(os.path.join(run_dir, layout.LOG), text.encode("utf-8", "backslashreplace"))
    except Exception:
        return  # the run directory is gone or full


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Logs exceptions of the decorated function and keeps them from the script, because they are safelaunch's fault."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            fault(getattr(function, "__name__", "step"))
            return None

    return call


def absolute(path: str) -> str:
    """Returns ``os.path.abspath(path)``, or ``path`` if the working directory has been removed."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path


def without_our_frames(error: BaseException) -> None:
    """Removes safelaunch's frames from the tracebacks of an exception that is about to be printed.

    The frames are there because safelaunch wraps the function that raised. If safelaunch itself raised, they stay.
    """
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return
        chain = []
        traceback = link.__traceback__
        while traceback is not None:
            chain.append(traceback)
            traceback = traceback.tb_next
        if chain and not _is_ours(chain[-1]):
            kept = []
            for entry in chain:
                if not _is_ours(entry):
                    kept.append(entry)
                    continue
                while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                    kept.pop()  # the interpreter hides these itself if no frame of safelaunch is among them
            for before, after in pairwise(kept):
                before.tb_next = after
            link.__traceback__ = kept[0]
        link = link.__cause__ or link.__context__


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OURS)
