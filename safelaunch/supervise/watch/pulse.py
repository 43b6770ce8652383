"""Treats recurring collectives as the progress of a job that marks no steps. Has no side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.supervise.watch.rhythm import Threshold, ThresholdBounds

LOOP_AFTER = 10
LOOP_AFTER_EXPLICIT = 5
TIMES_FLOOR = 10.0  # multiple of the floor between steps: 600 s by default
TIMES_LONGEST = 3.0
LOOKS_PER_THRESHOLD = 8
PERIOD_S = (0.5, 15.0)


@dataclass(frozen=True, slots=True)
class Pulse:
    """Recurring collectives of a job that marks no steps.

    A job's start also has collectives (a broadcast of parameters, a barrier), followed by a long silence. So the job
    counts as being in its loop only after many looks, some time apart, found new collectives.
    """

    newest: Mapping[int, int] = field(default_factory=dict)
    """rank → number of its newest collective"""
    seen_s: Mapping[int, float] = field(default_factory=dict)
    """rank → time of the look that first found that collective (CLOCK_MONOTONIC)"""
    beats: int = 0
    """number of looks that found a newer collective"""
    longest_s: float = 0.0
    """longest time between two such looks"""

    @property
    def last_s(self) -> float | None:
        return max(self.seen_s.values(), default=None)

    def after_look(self, newest: Mapping[int, int], now: float) -> Pulse:
        """Adds a look. ``newest`` lacks the ranks that didn't respond."""
        news = {rank: number for rank, number in newest.items() if number > self.newest.get(rank, -1)}
        if not news:
            return self
        last_s = self.last_s
        waited_s = 0.0 if last_s is None else now - last_s
        seen_s = {**self.seen_s, **dict.fromkeys(news, now)}
        return Pulse({**self.newest, **news}, seen_s, self.beats + 1, max(self.longest_s, waited_s))

    def is_in_loop(self, limits: PulseLimits) -> bool:
        """Returns whether the job is in its loop; with --stall-timeout, fewer looks suffice."""
        return self.beats >= (LOOP_AFTER if limits.bounds is not None else LOOP_AFTER_EXPLICIT)

    def threshold(self, limits: PulseLimits, cap_s: float | None) -> Threshold:
        """Returns how long the job can go without a collective. See ``rhythm.cap_of`` for ``cap_s``."""
        if not self.is_in_loop(limits):
            return Threshold(limits.startup_s, "before the first step")
        seconds = limits.least_s
        if limits.bounds is not None:
            seconds = min(limits.bounds.ceiling_s, max(seconds, TIMES_LONGEST * self.longest_s))
        seconds = min(seconds, limits.startup_s, cap_s or seconds)
        return Threshold(seconds, f"no steps; so far at least one collective every {self.longest_s:.0f} s")


@dataclass(frozen=True, slots=True)
class PulseLimits:
    startup_s: float
    """threshold before the loop, and upper limit in it"""
    stall_s: float
    bounds: ThresholdBounds | None
    """bounds of the learned threshold; None with --stall-timeout"""

    @property
    def least_s(self) -> float:
        return self.stall_s if self.bounds is None else TIMES_FLOOR * self.bounds.floor_s

    @property
    def period_s(self) -> float:
        """Returns the time between looks.

        It isn't short, because every rank's worker server writes a dump for each look.
        """
        least, most = PERIOD_S
        return min(most, max(least, min(self.startup_s, self.least_s) / LOOKS_PER_THRESHOLD))
