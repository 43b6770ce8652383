"""Marks steps, phases and states with plain stores to the progress page, without system calls."""

from __future__ import annotations

import mmap
from time import monotonic_ns

from . import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Phase = tuple[str, float, int]  # name, timeout in seconds, beginning (CLOCK_MONOTONIC, ns)

LONGEST_S = 1e9

# In use before a page is claimed, and in a forked child.
_bytes: bytearray | mmap.mmap = bytearray(layout.SIZE)
_words = memoryview(_bytes).cast("Q")
_slots: dict[int, int] = {}


def _nothing() -> None:
    pass


before_first_step = _nothing
at_first_step: Callable[[], object] = _nothing


def use(buffer: bytearray | mmap.mmap, words: memoryview) -> None:
    """Directs all marks to one block of memory, given as bytes (``buffer``) and as 64-bit words (``words``)."""
    global _bytes, _words
    _bytes, _words = buffer, words


def detach() -> None:
    """Discards all further marks in a forked child, because the page belongs to its parent."""
    global at_first_step
    at_first_step = _nothing
    use(bytearray(layout.SIZE), memoryview(bytearray(layout.SIZE)).cast("Q"))


def optimizer_stepped(optimizer: object, args: object, kwargs: object) -> None:
    """Counts a step of one optimizer; installed as torch's post hook.

    Each optimizer is counted separately, so that a GAN with two optimizers doesn't look twice as fast.
    """
    slot = _slots.get(id(optimizer))
    if slot is None:
        slot = _new_slot(optimizer)
    words = _words
    try:
        words[slot] += 1
        words[layout.LAST_STEP_NS] = monotonic_ns()
    except ValueError:
        detach()  # the page was overwritten: stop marking


def _new_slot(optimizer: object) -> int:
    """Returns the index of this optimizer's counter.

    When the counters run out, the remaining optimizers share a spare counter that is never read.
    """
    number = len(_slots)
    if not number:
        _begin()
    if number >= layout.MAX_OPTIMIZERS:
        slot = layout.FIRST_OPTIMIZER + layout.MAX_OPTIMIZERS
    else:
        slot = layout.FIRST_OPTIMIZER + number
        _words[layout.OPTIMIZERS] = number + 1
    _slots[id(optimizer)] = slot
    return slot


def _begin() -> None:
    if not _words[layout.FIRST_STEP_NS]:
        before_first_step()
        at_first_step()
        _words[layout.FIRST_STEP_NS] = monotonic_ns()


on_loss: Callable[[object], None] | None = None  # set by a probe that compares losses


def user_stepped(loss: object = None) -> None:
    if loss is not None and on_loss is not None:
        on_loss(loss)
    _begin()
    words = _words
    try:
        words[layout.USER_STEPS] += 1
        words[layout.LAST_STEP_NS] = monotonic_ns()
    except ValueError:
        detach()


def set_state(state: int) -> None:
    """Sets the rank's state, from ``layout.STARTED`` to ``layout.EXITED``, unless a later state is already set."""
    if state > _words[layout.STATE]:
        _words[layout.STATE] = state


def renumber(rank: int, world_size: int) -> None:
    """Sets rank and world size from torch.distributed, once known, if the environment gave no rank."""
    _words[layout.RANK], _words[layout.LOCAL_RANK], _words[layout.WORLD_SIZE] = rank, rank, world_size


def set_launcher() -> None:
    _words[layout.KIND] = layout.LAUNCHER


def set_returned() -> None:
    """Marks that this rank's function has returned, so its process is only waiting to hand over the result."""
    _words[layout.RETURNED_NS] = monotonic_ns()


def set_server_up() -> None:
    _words[layout.SERVER_NS] = monotonic_ns()


def enter_phase(name: str, timeout_s: float) -> Phase:
    """Implements ``safelaunch.phase()``. Returns the previous phase, for ``leave_phase``.

    If ``timeout_s`` is 0, the surrounding phase's timeout keeps running; if there is no surrounding phase, the
    watchdog's threshold applies.
    """
    before, limit_s = get_phase(), min(timeout_s, LONGEST_S)
    if limit_s or not before[1]:
        _set_phase(str(name), limit_s, monotonic_ns())
    else:
        _set_phase(str(name), *before[1:])
    return before


def leave_phase(before: Phase) -> None:
    """Restores the surrounding phase. If the watch was paused since then, the phase's time starts at the pause."""
    name, timeout_s, since_ns = before
    _set_phase(name, timeout_s, max(since_ns, _words[layout.RESUMED_NS]))


def _set_phase(name: str, timeout_s: float, since_ns: int) -> None:
    data = name.encode("utf-8", "replace")[: layout.PHASE_MAX]
    _words[layout.PHASE_LENGTH] = 0  # a reader must never combine the new length with the old text
    _bytes[layout.PHASE_OFFSET : layout.PHASE_OFFSET + len(data)] = data
    _words[layout.PHASE_TIMEOUT_NS] = int(timeout_s * 1e9)
    _words[layout.PHASE_SINCE_NS] = since_ns
    _words[layout.MARKED_NS] = monotonic_ns()
    _words[layout.PHASE_LENGTH] = len(data)


def get_phase() -> Phase:
    """Returns ``(name, timeout_s, since_ns)`` of the current phase; outside a phase, no name and no timeout."""
    length = _words[layout.PHASE_LENGTH]
    text = bytes(_bytes[layout.PHASE_OFFSET : layout.PHASE_OFFSET + length])
    return text.decode("utf-8", "replace"), _words[layout.PHASE_TIMEOUT_NS] / 1e9, _words[layout.PHASE_SINCE_NS]


def pause(delta: int) -> None:
    """Implements ``safelaunch.pause()``: +1 pauses the watch of this rank, -1 resumes it.

    Both calls count as progress, and restart the current phase's time.
    """
    _words[layout.RESUMED_NS] = _words[layout.PHASE_SINCE_NS] = _words[layout.MARKED_NS] = monotonic_ns()
    _words[layout.PAUSED] = min(max(0, _words[layout.PAUSED] + delta), 1 << 32)
