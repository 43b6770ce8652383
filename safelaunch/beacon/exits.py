"""Which line of the rank called ``sys.exit`` or ``os._exit``: neither leaves a traceback, and the latter no farewell.

Both are wrapped: what they do is unchanged, but for a note in the run directory before it happens. The last one counts
(a ``SystemExit`` may be caught), and only where its code is the one that the process really ended with.
"""

from __future__ import annotations

import os
import sys

from . import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

MAX_FRAMES = 64

_owner = 0
_path = ""
_real_exit = sys.exit
_real_now = os._exit


def install(path: str) -> None:
    """From now on the calls of this process are noted in the file ``path``."""
    global _owner, _path, _real_exit, _real_now
    _owner, _path = os.getpid(), path
    _real_exit, sys.exit = sys.exit, _exit
    _real_now, os._exit = os._exit, _exit_now


def detach() -> None:
    """In a forked child, whose exit is not the rank's."""
    if sys.exit is _exit:
        sys.exit = _real_exit
    if os._exit is _exit_now:
        os._exit = _real_now


def _exit(status: object = None, /) -> NoReturn:
    if os.getpid() == _owner:
        _note("sys.exit", _code_of(status), sys._getframe(1))
    _real_exit(status)  # type: ignore[arg-type]


def _exit_now(status: int) -> NoReturn:
    if os.getpid() == _owner and isinstance(status, int):
        _note("os._exit", status & 0xFF, sys._getframe(1))
    _real_now(status)


def _code_of(status: object) -> int:
    """As the interpreter maps it: None is success, a number is itself, anything else is printed and means 1."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


@log.guarded
def _note(call: str, code: int, frame: FrameType | None) -> None:
    """``call TAB code``, then ``line TAB function TAB file`` for each frame, innermost first (json is not imported)."""
    lines = [f"{call}\t{code}"]
    while frame is not None and len(lines) <= MAX_FRAMES:
        made = frame.f_code
        lines.append(f"{frame.f_lineno or 0}\t{made.co_name}\t{log.absolute(made.co_filename)}".replace("\n", " "))
        frame = frame.f_back
    with open(_path, "wb", opener=log.private) as file:
        file.write("\n".join(lines).encode("utf-8", "surrogateescape"))
