"""Records the exceptions that the script catches. A rank that continues after one might have skipped a collective.

In Python 3.12+, ``sys.monitoring`` slows down only the catching itself. Older versions have no cheap way to do this, so
nothing is recorded there. An exception counts only if the user's own code catches it on the main thread. The newest
exceptions are in a shared file, so that the supervisor can read them while the rank is stuck. The file consists of
fixed-size text slots, each written in one operation.
"""

from __future__ import annotations

import _thread  # importing threading takes a millisecond
import os
import sys
import time

from . import log, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from types import CodeType
    from typing import Any

SLOTS = 64
SLOT_BYTES = 1024
MOST_PER_SECOND = 500  # mean rate since the first exception; above it, recording stops
_BURST = 2000
_TOOL_IDS = (4, 3)  # not reserved for debuggers, coverage, profilers or optimizers
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)

_slots: mmap.mmap | None = None
_monitoring: Any = getattr(sys, "monitoring", None)
_tool = -1
_main = 0
_count = 0
_since_ns = 0
_latest: BaseException | None = None
_is_users: dict[str, bool] = {}
_libraries: tuple[str, ...] = ()


def install(path: str) -> None:
    """Starts recording to file ``path``. Does nothing before Python 3.12, or if other tools use both tool ids."""
    global _slots, _tool, _main, _libraries
    free = [number for number in _TOOL_IDS if _monitoring and _monitoring.get_tool(number) is None]
    if not free:
        return
    _libraries = (os.path.dirname(os.__file__), os.path.dirname(__file__))
    _main = _thread.get_ident()
    _slots = page.mapped(path, SLOTS * SLOT_BYTES)
    page.keep(_slots)
    _tool = free[0]
    events = _monitoring.events
    _monitoring.use_tool_id(_tool, "safelaunch")
    _monitoring.register_callback(_tool, events.EXCEPTION_HANDLED, _handled)
    _monitoring.register_callback(_tool, events.RERAISE, _reraised)
    _monitoring.set_events(_tool, events.EXCEPTION_HANDLED | events.RERAISE)


def detach() -> None:
    """Stops recording, either in a forked child, which isn't the rank, or after too many exceptions."""
    global _slots, _tool, _latest
    if _tool >= 0:
        _monitoring.set_events(_tool, 0)
        _monitoring.free_tool_id(_tool)
    _slots, _tool, _latest = None, -1, None


def _handled(code: CodeType, offset: int, exception: BaseException) -> None:
    """Records an exception on entry to an ``except``, or to a ``finally`` or ``with`` that reraises it."""
    file = code.co_filename
    users = _is_users.get(file)
    if users is None:
        if len(_is_users) > 10_000:
            _is_users.clear()
        users = _is_users[file] = _belongs_to_user(file)
    if users and _thread.get_ident() == _main and not isinstance(exception, _CONTROL_FLOW):
        _note(code, offset, exception)


@log.guarded
def _note(code: CodeType, offset: int, exception: BaseException) -> None:
    global _count, _since_ns, _latest
    now_ns = time.time_ns()
    _since_ns = _since_ns or now_ns
    _count += 1
    if _count > _BURST and _count > MOST_PER_SECOND * (now_ns - _since_ns) / 1e9:
        detach()
        return
    raised, line = code, 0
    entry = exception.__traceback__
    while entry is not None:
        made = entry.tb_frame.f_code
        if _belongs_to_user(made.co_filename):
            raised, line = made, entry.tb_lineno
        entry = entry.tb_next
    words = exception.args[0] if exception.args and type(exception.args[0]) is str else ""  # calls no user code
    # The handler's entry has no line: take the next one.
    caught_line = next((line for _, end, line in code.co_lines() if end > offset and line), 0)
    fields = (
        now_ns, type(exception).__qualname__, words[:200],
        line, raised.co_name, log.absolute(raised.co_filename),
        caught_line, code.co_name, log.absolute(code.co_filename),
    )  # fmt: skip
    text = "\t".join(str(field).replace("\t", " ").replace("\n", " ") for field in fields)
    _latest = exception
    _write((_count - 1) % SLOTS, text.encode("utf-8", "replace")[: SLOT_BYTES - 1])


def _reraised(code: CodeType, offset: int, exception: BaseException) -> None:
    # The handler did not catch the exception, so its slot is freed.
    global _latest, _count
    if exception is _latest and _thread.get_ident() == _main:
        _latest = None
        _count -= 1
        _write(_count % SLOTS, b"")


def _write(slot: int, text: bytes) -> None:
    if _slots is not None:
        begin = slot * SLOT_BYTES
        _slots[begin : begin + SLOT_BYTES] = text.ljust(SLOT_BYTES, b"\0")


def _belongs_to_user(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = log.absolute(file)
    return not ("site-packages" in path or "dist-packages" in path or path.startswith(_libraries))
