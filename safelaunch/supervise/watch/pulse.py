"""Progress of a job that marks no steps, from its collectives. Pure."""

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
    """The recurring collectives of a job that marks no steps.

    A start also has collectives (a broadcast of parameters, a barrier while a dataset is prepared), and can then be
    silent for long. So a job is taken to be in its loop only once many looks, some time apart, found new collectives.
    """

    newest: Mapping[int, int] = field(default_factory=dict)
    """rank → number of its newest collective"""
    seen_s: Mapping[int, float] = field(default_factory=dict)
    """rank → time of the look that first found that collective (CLOCK_MONOTONIC)"""
    beats: int = 0
    """number of looks that found a newer collective on a rank"""
    longest_s: float = 0.0
    """longest time between two such looks"""

    @property
    def last_s(self) -> float | None:
        """Time of the last look that found a new collective; None: none did."""
        return max(self.seen_s.values(), default=None)

    def after_look(self, newest: Mapping[int, int], now: float) -> Pulse:
        """Adds a look that found ``newest``, which lacks ranks that didn't respond."""
        news = {rank: number for rank, number in newest.items() if number > self.newest.get(rank, -1)}
        if not news:
            return self
        last_s = self.last_s
        waited_s = 0.0 if last_s is None else now - last_s
        seen_s = {**self.seen_s, **dict.fromkeys(news, now)}
        return Pulse({**self.newest, **news}, seen_s, self.beats + 1, max(self.longest_s, waited_s))

    def is_in_loop(self, limits: PulseLimits) -> bool:
        """Returns whether the job is in its loop. A given --stall-timeout applies sooner than a learned threshold."""
        return self.beats >= (LOOP_AFTER if limits.bounds is not None else LOOP_AFTER_EXPLICIT)

    def threshold(self, limits: PulseLimits, cap_s: float | None) -> Threshold:
        """Returns the limit of the time without a collective, with its reason.

        Args:
            cap_s: see ``rhythm.cap_of``.
        """
        if not self.is_in_loop(limits):
            return Threshold(limits.startup_s, "before the first step")
        seconds = limits.least_s
        if limits.bounds is not None:
            seconds = min(limits.bounds.ceiling_s, max(seconds, TIMES_LONGEST * self.longest_s))
        seconds = min(seconds, limits.startup_s, cap_s or seconds)
        return Threshold(seconds, f"no steps; so far at least one collective every {self.longest_s:.0f} s")


@dataclass(frozen=True, slots=True)
class PulseLimits:
    """Limits of a pulse's threshold."""

    startup_s: float
    """threshold until the job is in its loop, and upper limit after that"""
    stall_s: float
    bounds: ThresholdBounds | None
    """bounds of the learned threshold; None if ``stall_s`` was given (--stall-timeout)"""

    @property
    def least_s(self) -> float:
        return self.stall_s if self.bounds is None else TIMES_FLOOR * self.bounds.floor_s

    @property
    def period_s(self) -> float:
        """Time between two looks: each costs every rank's worker server a dump."""
        least, most = PERIOD_S
        return min(most, max(least, min(self.startup_s, self.least_s) / LOOKS_PER_THRESHOLD))
