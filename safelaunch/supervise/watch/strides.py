"""A bounded sample of a rank's steps."""

from __future__ import annotations

from array import array

MOST_POINTS = 128


class Strides:
    """A bounded sample of a rank's steps with their times. Always includes the newest step.

    A full sample drops every second point, and from then on records half as many, so that points stay evenly spread.
    """

    __slots__ = ("_every", "_most", "_newest", "_points")

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._every = 1
        self._points = array("q")  # time, step, time, step, ...
        self._newest = (0, 0)

    def add(self, at_ns: int, step: int) -> None:
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
        """Returns ``(nanoseconds of CLOCK_MONOTONIC, step)``, oldest first."""
        kept = [(self._points[at], self._points[at + 1]) for at in range(0, len(self._points), 2)]
        return tuple(kept if kept and kept[-1] == self._newest else [*kept, *([self._newest] if kept else [])])
