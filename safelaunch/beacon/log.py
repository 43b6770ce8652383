"""The log of the beacon's own errors: a file in the run directory. They never reach the job's output."""

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
_OURS = (os.path.join(_BEACON, ""), os.path.join(os.path.dirname(_BEACON), "addons", ""))  # with the probes of add-ons


def fault(where: str) -> None:
    """Logs the exception being handled. The job loses only the evidence that depended on the failed step."""
    try:
        import traceback

        text = f"[pid {os.getpid()}] {where}: {''.join(traceback.format_exception(*sys.exc_info()))}\n"
        page.append(os.path.join(run_dir, layout.LOG), text.encode("utf-8", "backslashreplace"))
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


def absolute(path: str) -> str:
    """Returns ``os.path.abspath(path)``, or ``path`` if the working directory has been removed."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path


def without_our_frames(error: BaseException) -> None:
    """Takes our own frames out of the tracebacks of an exception that is about to be printed.

    It was raised below a function that we have wrapped: a traceback is to look as without us. Where our own code
    raised it, the frames stay.
    """
    one: BaseException | None = error
    for _ in range(16):
        if one is None:
            return
        chain = []
        traceback = one.__traceback__
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
                    kept.pop()  # the interpreter hides these itself where nothing of ours is in between
            for before, after in pairwise(kept):
                before.tb_next = after
            one.__traceback__ = kept[0]
        one = one.__cause__ or one.__context__


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OURS)
