"""Time limits on code that checks for signals, such as a C parser. Main thread only."""

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
    """Raises TimeoutError (an OSError) in the body after ``seconds``.

    ``timer``: ``WALL`` counts clock time, ``CPU`` counts the CPU time of this process.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(_SIGNALS[timer], give_up)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(_SIGNALS[timer], before)
