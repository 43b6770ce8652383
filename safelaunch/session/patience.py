"""Patience with a rank that waits for its DataLoader: workers that sleep a few seconds an item look dead meanwhile.

Between two looks a few seconds apart such a worker has used no CPU and stands at one line. What gives it away is that
it wakes up at all: a worker that is stuck in a lock, a read or a sleep without end is not scheduled once. Nothing is
attached to the processes here, so that their being scheduled is their own doing. The same tells a rank that polls a
child which computes from one that is stuck in a sleep beside such a child.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safelaunch.capture.proc import times_scheduled
from safelaunch.watch.stall import Movement

LEAST_S, MOST_S = 6.0, 15.0
PART = 0.75  # of the threshold
SETTLE_S = 0.5  # the look before this has stopped and continued them
EVERY_S = 0.5


class Patience:
    """Watches ``pids`` for a while, and says whether one of them moved. ``advance`` never blocks."""

    def __init__(self, pids: Sequence[int], threshold_s: float, now: float) -> None:
        self._pids = tuple(pids)
        self._before: Mapping[int, int] | None = None
        self._next_s = now + SETTLE_S
        self._until_s = self._next_s + min(MOST_S, max(LEAST_S, PART * threshold_s))

    def advance(self, now: float) -> Movement | None:
        """None: not decided yet."""
        if now < self._next_s:
            return None
        self._next_s = now + EVERY_S
        seen = {pid: times_scheduled(pid) for pid in self._pids}
        if self._before is None:
            self._before = seen
        elif seen != self._before:
            return "active"
        return "still" if now >= self._until_s else None
