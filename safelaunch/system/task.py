"""Work with an end: in a thread of its own, for which the supervisor's loop need not wait; within a time limit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Starts ``work`` in a thread. ``result`` raises the exception that ``work`` raised, if any."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds. Returns whether the work is done."""
        self._thread.join(timeout_s)
        return self.done

    def joined(self) -> T:
        """Waits without a limit, then returns the result."""
        self._thread.join()
        return self.result()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]


# --- time limits, in the main thread only -----------------------------------------------------------------------------

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
