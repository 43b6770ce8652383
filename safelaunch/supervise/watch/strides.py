"""A short history of a rank's steps, for the report. Pure: it grows to a bound, and then keeps every second entry."""

from __future__ import annotations

from array import array

MOST_POINTS = 128


class Strides:
    """When a rank marked which step. However long the job runs, at most ``most`` points are kept, the newest with them.

    Full, it forgets every second point, and takes half as many from then on, so that the points stay evenly spread over
    the steps.
    """

    __slots__ = ("_every", "_most", "_newest", "_points")

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._every = 1  # so many steps apart
        self._points = array("q")  # time, step, time, step, ...
        self._newest = (0, 0)

    def saw(self, at_ns: int, step: int) -> None:
        """Takes what a progress page says now; most of the time, nothing is new."""
        if at_ns <= self._newest[0]:
            return
        self._newest = (at_ns, step)
        if self._points and step - self._points[-1] < self._every:
            return
        self._points.extend((at_ns, step))
        if len(self._points) >= 2 * self._most:
            pairs = [self._points[at : at + 2] for at in range(0, len(self._points), 4)]
            self._points = array("q", [number for pair in pairs for number in pair])
            first, last = self._points[1], self._points[-1]
            self._every = max(2 * self._every, (last - first) // self._most)

    def points(self) -> tuple[tuple[int, int], ...]:
        """Oldest first, as ``(nanoseconds of CLOCK_MONOTONIC, step)``."""
        kept = [(self._points[at], self._points[at + 1]) for at in range(0, len(self._points), 2)]
        return tuple(kept if kept and kept[-1] == self._newest else [*kept, *([self._newest] if kept else [])])
