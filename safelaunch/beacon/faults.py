"""Records how a rank ends: its stacks at a fatal signal, its first uncaught exception, and the line that made it exit.

``sys.exit`` and ``os._exit`` leave no traceback, so both are wrapped: they first write the caller's stack to the run
directory. A script can catch ``SystemExit``, so only the last call counts, and only if the process ended with the exit
code of that call.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from time import monotonic_ns, time

from . import layout, log, marks, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import NoReturn

MAX_FRAMES = 64  # in the stack of an exit call or of an earlier exception
MAX_EARLIER = 8  # exceptions that led to the uncaught one, from the first on
MAX_LINKS = 64  # of the chain to them
PR_SET_PTRACER = 0x59616D61
SIGTERM = 15  # importing signal costs a rank 2 ms
YAMA = "/proc/sys/kernel/yama/ptrace_scope"

_owner = 0
_supervisor = 0
_words = memoryview(bytes(layout.SIZE)).cast("Q")
_base = ""
_previous_hook = sys.excepthook
_real_exit = sys.exit
_real_os_exit = os._exit
_enabled_ours = False
_fault_fd = -1
_fault_file = (0, 0)


def install(base: str, words: memoryview, supervisor: int) -> None:
    """Installs this rank's handlers and lets the supervisor trace it. ``base`` is the path of its page."""
    global _owner, _supervisor, _words, _base, _previous_hook, _real_exit, _real_os_exit
    _owner, _supervisor, _words, _base = os.getpid(), supervisor, words, base
    log.guarded(_install_faulthandler)(base + layout.FAULT_SUFFIX)
    log.guarded(allow_tracing)()
    _previous_hook = sys.excepthook
    sys.excepthook = _excepthook
    atexit.register(_at_exit)
    _real_exit, sys.exit = sys.exit, _exit
    _real_os_exit, os._exit = os._exit, _os_exit


def _install_faulthandler(path: str) -> None:
    global _enabled_ours, _fault_fd, _fault_file
    fd = page.out_of_the_way(page.private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    _fault_fd, _fault_file = fd, _identity(fd)
    if not faulthandler.is_enabled():  # else PYTHONFAULTHANDLER is set: the user wants stderr
        faulthandler.enable(file=fd, all_threads=True)
        _enabled_ours = True
    faulthandler.register(SIGTERM, file=fd, all_threads=True, chain=True)


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def allow_tracing() -> None:
    """Lets the supervisor and its descendants trace this process. By default, Yama refuses this (ptrace_scope 1)."""
    if not _supervisor or not os.path.exists(YAMA):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(_supervisor), 0, 0, 0)


def detach() -> None:
    """Removes the handlers in a forked child, which must not write to the rank's files."""
    global _enabled_ours
    if sys.exit is _exit:
        sys.exit = _real_exit
    if os._exit is _os_exit:
        os._exit = _real_os_exit
    faulthandler.unregister(SIGTERM)
    if _enabled_ours:
        faulthandler.disable()
        _enabled_ours = False
    if sys.excepthook is _excepthook:
        sys.excepthook = _previous_hook
    try:
        if _fault_fd >= 0 and _identity(_fault_fd) == _fault_file:
            os.close(_fault_fd)
    except OSError:
        pass  # the script closed it before us
    allow_tracing()


def _excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    if value is not None and traceback is value.__traceback__:
        log.guarded(log.without_our_frames)(value)
        traceback = value.__traceback__
    _note_exception(kind, value, traceback)
    _previous_hook(kind, value, traceback)
    _end_with(value)


def raised(value: Exception) -> None:
    """Records the exception that ends this rank's function. torch's workers catch it, so no hook sees it."""
    _note_exception(type(value), value, value.__traceback__)
    _end_with(value)


def _end_with(value: BaseException) -> None:
    """Records the GPU's memory if that is what the exception is about, and waits for the supervisor.

    The supervisor samples this rank's peers first, because they will fail, too, once this rank closes its connections.
    """
    if os.getpid() != _owner:
        return
    if type(value).__name__ == "OutOfMemoryError":
        log.guarded(_note_memory)(value)
    if isinstance(value, Exception):
        log.guarded(page.wait_for_ack)(_words, _supervisor)


def _note_memory(value: BaseException) -> None:
    from . import device_memory

    device_memory.raised(_base, value)


@log.guarded
def _note_exception(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    if os.getpid() != _owner or _words[layout.EXCEPTION_NS] or issubclass(kind, KeyboardInterrupt):
        # After a KeyboardInterrupt, the interpreter ends itself by SIGINT unless a string of code has run since, and
        # importing json or traceback runs one. Besides, an interrupt is no fault of the rank's code.
        return
    _words[layout.EXCEPTION_NS] = monotonic_ns()
    record = {
        "type": _name_of(kind),
        "message": _text_of(value)[:4096],
        "time_unix_s": time(),
        "frames": _frames_of(traceback),
        "text": _formatted(value)[-32768:],
        "earlier": log.guarded(_earlier)(value) or [],
    }
    page.note(_base + layout.EXCEPTION_SUFFIX, record)
    marks.set_state(layout.EXCEPTION)


def _name_of(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__


def _frames_of(traceback: TracebackType | None) -> list[dict[str, object]]:
    frames: list[dict[str, object]] = []
    while traceback is not None:
        frames.append(_frame(traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def _earlier(value: BaseException) -> list[dict[str, object]]:
    chain: list[tuple[BaseException, bool]] = []
    visited, error = {id(value)}, value
    while len(chain) < MAX_LINKS:
        explicit = error.__cause__ is not None
        before = error.__cause__ if explicit or error.__suppress_context__ else error.__context__
        if before is None or id(before) in visited:
            break
        chain.append((before, explicit))
        visited.add(id(before))
        error = before
    return [
        {
            "type": _name_of(type(each)),
            "message": _text_of(each)[:4096],
            "frames": _frames_of(each.__traceback__)[:MAX_FRAMES],
            "explicit": explicit,
        }
        for each, explicit in chain[::-1][:MAX_EARLIER]
    ]


def _frame(frame: FrameType, line: int | None) -> dict[str, object]:
    code = frame.f_code
    return {"file": log.absolute(code.co_filename), "line": line or 0, "function": code.co_name}


def _formatted(value: BaseException) -> str:
    try:
        from traceback import format_exception

        return "".join(format_exception(type(value), value, value.__traceback__))
    except Exception:  # the script's own re.py or token.py can shadow the library's: only the frames remain
        return ""


def _text_of(value: BaseException) -> str:
    try:
        return str(value)
    except Exception as error:  # the exception's own __str__ failed
        return f"<unprintable: {type(error).__name__}>"


@log.guarded
def _at_exit() -> None:
    if os.getpid() != _owner:
        return
    # The interpreter sets it even if the script replaced sys.excepthook.
    value = getattr(sys, "last_value", None)
    if value is not None and not _words[layout.EXCEPTION_NS]:
        _note_exception(type(value), value, value.__traceback__)
    _words[layout.EXIT_NS] = monotonic_ns()
    server = sys.modules.get("_safelaunch_beacon.server")
    asked = _words[layout.EXCEPTION_NS] and _words[layout.ACK]  # the supervisor has read the record of this failure
    if server is not None and not asked:
        log.guarded(server.keep_flight_record)(_base + layout.FLIGHT_SUFFIX)
    marks.set_state(layout.EXITED)
    if page.wait_for_answers(_words) and server is not None:
        server.stop()


# --- calls of exit ----------------------------------------------------------------------------------------------------


def _exit(status: object = None, /) -> NoReturn:
    if os.getpid() == _owner:
        _note_exit("sys.exit", _code_of(status), sys._getframe(1))
    _real_exit(status)  # type: ignore[arg-type]


def _os_exit(status: int) -> NoReturn:
    if os.getpid() == _owner and isinstance(status, int):
        _note_exit("os._exit", status & 0xFF, sys._getframe(1))
    _real_os_exit(status)


def _code_of(status: object) -> int:
    # As the interpreter does.
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


@log.guarded
def _note_exit(call: str, code: int, frame: FrameType | None) -> None:
    frames: list[dict[str, object]] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(_frame(frame, frame.f_lineno))
        frame = frame.f_back
    page.note(_base + layout.EXIT_SUFFIX, {"function": call, "code": code, "frames": frames})
