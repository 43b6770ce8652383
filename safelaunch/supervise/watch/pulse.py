"""The pulse of a job that marks no step: are there collectives again and again, and how far apart? Pure.

A start, too, has collectives (parameters are broadcast, a dataset is prepared behind a barrier) and may then be silent
for long; so only a job that has called them in many looks, some time apart, is taken to be in its loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.supervise.watch.rhythm import Bounds, Threshold

LOOP_AFTER = 10
LOOP_AFTER_EXPLICIT = 5
TIMES_FLOOR = 10.0  # of the floor between steps: 600 s by default
TIMES_LONGEST = 3.0
LOOKS_PER_THRESHOLD = 8
PERIOD_S = (0.5, 15.0)


@dataclass(frozen=True, slots=True)
class Pulse:
    """``newest``: rank → the number of its newest collective; ``heard_s``: when a look first found that
    (CLOCK_MONOTONIC). ``beats``: how many looks found a newer one on some rank. ``longest_s``: the longest wait between
    two such looks.
    """

    newest: Mapping[int, int] = field(default_factory=dict)
    heard_s: Mapping[int, float] = field(default_factory=dict)
    beats: int = 0
    longest_s: float = 0.0

    @property
    def last_s(self) -> float | None:
        """When some rank was last found in a new collective; None: no look has found any."""
        return max(self.heard_s.values(), default=None)


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds. ``startup_s`` holds until the job is known to be in its loop, and bounds everything.

    ``bounds``: of what is learned; None where ``stall_s`` was given (--stall-timeout).
    """

    startup_s: float
    stall_s: float
    bounds: Bounds | None

    @property
    def least_s(self) -> float:
        return self.stall_s if self.bounds is None else TIMES_FLOOR * self.bounds.floor_s

    @property
    def period_s(self) -> float:
        """How often to look: a look costs each rank's worker server a dump."""
        least, most = PERIOD_S
        return min(most, max(least, min(self.startup_s, self.least_s) / LOOKS_PER_THRESHOLD))


def heard(pulse: Pulse, newest: Mapping[int, int], now: float) -> Pulse:
    """After one more look, which found ``newest``; ranks that did not answer are left out of it."""
    news = {rank: number for rank, number in newest.items() if number > pulse.newest.get(rank, -1)}
    if not news:
        return pulse
    last_s = pulse.last_s
    waited_s = 0.0 if last_s is None else now - last_s
    heard_s = {**pulse.heard_s, **dict.fromkeys(news, now)}
    return Pulse({**pulse.newest, **news}, heard_s, pulse.beats + 1, max(pulse.longest_s, waited_s))


def is_in_loop(pulse: Pulse, limits: Limits) -> bool:
    """Where a --stall-timeout was given, that is to hold soon."""
    return pulse.beats >= (LOOP_AFTER if limits.bounds is not None else LOOP_AFTER_EXPLICIT)


def threshold(pulse: Pulse, limits: Limits, cap_s: float | None) -> Threshold:
    """How long the job may go without a collective, and why. ``cap_s``: see ``rhythm.cap_of``."""
    if not is_in_loop(pulse, limits):
        return Threshold(limits.startup_s, "before the first step")
    seconds = limits.least_s
    if limits.bounds is not None:
        seconds = min(limits.bounds.ceiling_s, max(seconds, TIMES_LONGEST * pulse.longest_s))
    seconds = min(seconds, limits.startup_s, cap_s or seconds)
    return Threshold(seconds, f"no steps; so far at least one collective every {pulse.longest_s:.0f} s")
