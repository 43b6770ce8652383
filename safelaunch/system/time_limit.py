"""Sets time limits with signal timers, which work in the main thread only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WALL = signal.ITIMER_REAL
CPU = signal.ITIMER_VIRTUAL
_SIGNALS = {WALL: signal.SIGALRM, CPU: signal.SIGVTALRM}


@contextmanager
def at_most(seconds: float, timer: int = WALL) -> Iterator[None]:
    """Raises TimeoutError (an OSError) in the body after ``seconds`` of clock time, or of this process's CPU time."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(_SIGNALS[timer], give_up)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(_SIGNALS[timer], before)
