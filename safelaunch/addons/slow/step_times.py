"""Finds the step from which a job's steps take longer than before. Has no side effects.

Steps are grouped into windows, and a window's value is the median of its steps, so an evaluation or a checkpoint in it
doesn't count. A change counts once two windows in a row show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

WINDOW_S, WINDOW_STEPS = 5.0, 8
WARM_UP_WINDOWS = 1
LEAST_WINDOWS = 3  # before a change can be found
MOST_WINDOWS = 200
GROWTH = 0.10
SIGMAS = 4.0
SIGMA_OF_MAD = 1.4826
RARE = 2.0  # times the median, above which a step counts as a rare long one
IS_OVER = 0.5  # share of the growth that has to disappear


@dataclass(frozen=True, slots=True)
class StepWindow:
    points: tuple[tuple[float, int], ...]
    """end and number of its steps, from the last one before it"""
    step_s: float
    """median duration of a step"""


@dataclass(frozen=True, slots=True)
class Onset:
    """A lasting change of the step time."""

    step: int
    at_s: float
    before_s: float
    now_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of a job's steps. Times are seconds of CLOCK_MONOTONIC."""

    points: tuple[tuple[float, int], ...] = ()
    """end and number of steps in the open window"""
    normal: tuple[StepWindow, ...] = ()
    """windows before a change"""
    skipped: int = 0
    """windows of the warm-up"""
    recent: tuple[StepWindow, ...] = ()
    """windows since a change that isn't confirmed"""
    onset: Onset | None = None

    def after(self, end_s: float, step: int) -> StepTimes:
        """Adds the newest step and the time at which it ended."""
        if self.points and (end_s <= self.points[-1][0] or step <= self.points[-1][1]):
            return self if step >= self.points[-1][1] else StepTimes()  # the count restarts with the script
        points = (*self.points, (end_s, step))
        (begin_s, first), (end_s, last) = points[0], points[-1]
        if end_s - begin_s < WINDOW_S or last - first < WINDOW_STEPS:
            return replace(self, points=points)
        window = StepWindow(points, median(_durations(points)))
        return replace(self, points=points[-1:])._closed(window)

    def interrupted(self) -> StepTimes:
        """Drops the open window, because of a pause or an announced phase."""
        return replace(self, points=())

    def _closed(self, window: StepWindow) -> StepTimes:
        if self.skipped < WARM_UP_WINDOWS:
            return replace(self, skipped=self.skipped + 1)
        if self.onset is not None:
            return self._while_slow(window)
        if len(self.normal) < LEAST_WINDOWS or window.step_s <= self.limit_s:
            return self._with_normal(window)
        if not self.recent:
            return replace(self, recent=(window,))
        first = self.recent[0]
        points = (*self.normal[-1].points[:-1], *first.points)  # the change can begin in a window that looks normal
        at_s, step = points[_change(points)]
        onset = Onset(step + 1, at_s, self.usual_s, min(first.step_s, window.step_s))
        return replace(self, onset=onset, recent=())

    def _with_normal(self, window: StepWindow) -> StepTimes:
        # only the newest window keeps its points
        older = tuple(replace(each, points=each.points[:1]) for each in (*self.normal[-1:], *self.recent))
        return replace(self, normal=(*self.normal[:-1], *older, window)[-MOST_WINDOWS:], recent=(), onset=None)

    def _while_slow(self, window: StepWindow) -> StepTimes:
        assert self.onset is not None
        over_s = self.onset.before_s + IS_OVER * (self.onset.now_s - self.onset.before_s)
        if window.step_s > over_s:
            return replace(self, recent=())
        if not self.recent:
            return replace(self, recent=(window,))
        return self._with_normal(window)

    @property
    def usual_s(self) -> float:
        """Median step time before a change; 0 before the first windows."""
        return median([window.step_s for window in self.normal])

    @property
    def limit_s(self) -> float:
        """Step time above which a window differs clearly from the usual ones."""
        usual_s = self.usual_s
        sigma_s = SIGMA_OF_MAD * median([abs(window.step_s - usual_s) for window in self.normal])
        return usual_s + max(GROWTH * usual_s, SIGMAS * sigma_s)


def _durations(points: Sequence[tuple[float, int]]) -> list[float]:
    # several steps between two points share their time
    durations: list[float] = []
    for (before_s, before), (end_s, step) in pairwise(points):
        durations += [(end_s - before_s) / (step - before)] * (step - before)
    return durations


def _change(points: Sequence[tuple[float, int]]) -> int:
    """Returns the index of the point after which steps take longer: the cut that leaves the least deviation."""
    durations = [(end_s - before_s) / (step - before) for (before_s, before), (end_s, step) in pairwise(points)]
    most_s = RARE * median(durations)
    durations = [min(duration, most_s) for duration in durations]  # a checkpoint isn't the change

    def deviation(part: Sequence[float]) -> float:
        middle = median(part)
        return sum(abs(duration - middle) for duration in part)

    cuts = range(1, len(durations))
    return min(cuts, key=lambda cut: deviation(durations[:cut]) + deviation(durations[cut:]), default=0)


def median(values: Sequence[float]) -> float:
    # ``statistics`` would import ``fractions`` into this long-lived process.
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
