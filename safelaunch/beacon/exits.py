"""Records which line of the rank called ``sys.exit`` or ``os._exit``. Neither leaves a traceback.

Both functions are wrapped. They behave as before, but first write the caller's stack to the run directory. A script may
catch ``SystemExit``, so only the last call counts, and only if the process ended with that call's code.
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
_real_os_exit = os._exit


def install(path: str) -> None:
    """Records the exit calls of this process in the file ``path``."""
    global _owner, _path, _real_exit, _real_os_exit
    _owner, _path = os.getpid(), path
    _real_exit, sys.exit = sys.exit, _exit
    _real_os_exit, os._exit = os._exit, _os_exit


def detach() -> None:
    """Restores both functions in a forked child, whose exit is not the rank's."""
    if sys.exit is _exit:
        sys.exit = _real_exit
    if os._exit is _os_exit:
        os._exit = _real_os_exit


def _exit(status: object = None, /) -> NoReturn:
    if os.getpid() == _owner:
        _note("sys.exit", _code_of(status), sys._getframe(1))
    _real_exit(status)  # type: ignore[arg-type]


def _os_exit(status: int) -> NoReturn:
    if os.getpid() == _owner and isinstance(status, int):
        _note("os._exit", status & 0xFF, sys._getframe(1))
    _real_os_exit(status)


def _code_of(status: object) -> int:
    """Returns the exit code for an argument of ``sys.exit``: None is 0, a number is itself, anything else is 1."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


@log.guarded
def _note(call: str, code: int, frame: FrameType | None) -> None:
    """Writes ``call TAB code``, then ``line TAB function TAB file`` for each frame, innermost first.

    The format is plain text because importing json costs too much.
    """
    lines = [f"{call}\t{code}"]
    while frame is not None and len(lines) <= MAX_FRAMES:
        made = frame.f_code
        lines.append(f"{frame.f_lineno or 0}\t{made.co_name}\t{log.absolute(made.co_filename)}".replace("\n", " "))
        frame = frame.f_back
    with open(_path, "wb", opener=log.private) as file:
        file.write("\n".join(lines).encode("utf-8", "surrogateescape"))
