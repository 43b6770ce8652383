"""How long may this job go without a step? Learned from its own steps, or, where it marks none, its collectives. Pure.

What is learned is exactly what the watch thresholds: how long the slowest stepping rank's mark stands still. Ordinary
steps go into a histogram that forgets (a curriculum, a growing batch); pauses much longer than an ordinary step are
kept one by one with the step they came after, and are taken for a rhythm where their places repeat: every so many
steps, or every so many seconds. At a place where the rhythm is due, a pause of its length is expected; elsewhere it is
not, and the threshold stays close to the ordinary steps. A pause that fits no rhythm counts once it has come twice: one
alone is an accident, and must not blind the watch.

Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import msgspec
from msgspec.structs import replace

from safelaunch.model import duration

# Nothing is concluded from the first steps (compilation, autotuning, filling caches), nor before so many are known.
WARM_UP = 3
ENOUGH = 24
# The histogram: buckets a tenth apart from 1 ms to a day, each step's weight halved after so many more.
RATIO = 1.1
SHORTEST_S = 0.001
BUCKETS = 200
HALF_LIFE = 500.0
QUANTILE = 0.99
# From the quantile to the threshold. A freeze is to be suspected within three of the longest ordinary steps.
MARGIN = 2.5
# A pause stands out when it is so many times the ordinary step, and longer than what nobody would notice.
STANDS_OUT = 4.0
STANDS_OUT_S = 1.0
KEPT = 24
# Of the default group's timeout: evidence must be taken before that expires.
CAP_PART = 0.7
# How exactly a rhythm has to be kept: in steps, and in seconds.
STEPS_OFF = 0.01
SECONDS_OFF = 0.05
SECONDS_OFF_LEAST = 5.0


@dataclass(frozen=True, slots=True)
class ThresholdBounds:
    """``initial_s`` holds until enough is known; then what is learned, between ``floor_s`` and ``ceiling_s``."""

    floor_s: float = 60.0
    ceiling_s: float = 1800.0
    initial_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A long time without a step: after step ``step``, which was made at ``at_s``, for ``lasted_s``."""

    step: int
    at_s: float
    lasted_s: float


class Learned(msgspec.Struct, frozen=True):
    """What is known so far. ``weights``: the histogram, by bucket. ``last_*``: the newest mark that was taken in.

    Instead of all older weights fading, each new one is worth more: ``worth`` is what the next step adds.

    ``irregular_s``: the second longest of the pauses that fit no rhythm, 0 without one.
    """

    weights: tuple[float, ...] = (0.0,) * BUCKETS
    worth: float = 1.0
    count: int = 0
    last_step: int | None = None
    last_s: float = 0.0
    seen_s: float = 0.0  # when the mark was last seen to stand still
    begun_s: float = 0.0  # the first mark
    begun_step: int = 0
    pauses: tuple[Pause, ...] = ()
    irregular_s: float = 0.0

    @property
    def knows_enough(self) -> bool:
        return self.count >= ENOUGH


@dataclass(frozen=True, slots=True)
class Threshold:
    """``why`` is a clause for people: ``2.5 x the longest ordinary step (1.2 s)``."""

    seconds: float
    why: str

    @property
    def facts(self) -> dict[str, float | str]:
        """As the evidence of an incident states it."""
        return {"threshold_s": self.seconds, "threshold_why": self.why}


NONE = Threshold(0.0, "")


def learn(known: Learned, step: int, mark_s: float, now: float, *, excused: bool = False) -> Learned:
    """Takes in the slowest rank's mark: ``step`` made at ``mark_s``, as seen at ``now``.

    ``excused``: the job is paused, in a phase with a timeout of its own, or the clock was started again; what lies
    between the marks then says nothing about its rhythm.
    """
    if known.last_step is None or excused or step < known.last_step or mark_s < known.last_s:
        started = known.begun_s or mark_s
        return replace(known, last_step=step, last_s=mark_s, seen_s=now, begun_s=started)
    if step == known.last_step:
        return replace(known, seen_s=now)
    made = step - known.last_step
    mean_s = (mark_s - known.last_s) / made
    # Of several steps between two looks one may have been long: at least as long as it was seen to last.
    longest_s = max(mean_s, min(known.seen_s, mark_s) - known.last_s)
    rest_s = (mark_s - known.last_s - longest_s) / (made - 1) if made > 1 else 0.0
    after = Pause(known.last_step, known.last_s, longest_s)
    known = replace(known, last_step=step, last_s=mark_s, seen_s=now)
    if known.count + made <= WARM_UP:
        return replace(known, count=known.count + made, begun_step=step, begun_s=mark_s)
    if made > 1:
        known = _add(known, rest_s, made - 1)
    if _stands_out(known, longest_s):
        pauses = (*known.pauses, after)[-KEPT:]
        return replace(known, count=known.count + 1, pauses=pauses, irregular_s=_second_irregular_s(known, pauses))
    return _add(known, longest_s, 1)


def threshold(known: Learned, bounds: ThresholdBounds, *, cap_s: float | None = None) -> Threshold:
    """What holds after the newest mark. ``cap_s``: never more, whatever was learned (``cap_of``)."""
    found = _uncapped(known, bounds)
    if cap_s is not None and found.seconds > cap_s:
        return Threshold(cap_s, "the timeout of the default process group")
    return found


def cap_of(timeout_s: float, floor_s: float) -> float:
    """The longest threshold for a job whose default group has the timeout ``timeout_s``.

    It goes below the floor only if that timeout does: else a short one would make every quiet moment a suspicion. A
    group beside the default one, such as that of a health check, says nothing of the job's steps.
    """
    part_s = CAP_PART * timeout_s
    return part_s if timeout_s < floor_s else max(part_s, floor_s)


def _uncapped(known: Learned, bounds: ThresholdBounds) -> Threshold:
    if not known.knows_enough or known.last_step is None:
        return Threshold(bounds.initial_s, f"{known.count} steps known, too few to learn from")
    ordinary_s = quantile_s(known)
    options = [(MARGIN * ordinary_s, f"{MARGIN:g} x its longest ordinary step ({duration(ordinary_s)})")]
    if known.irregular_s:
        options.append((1.5 * known.irregular_s, f"1.5 x a pause that came twice ({duration(known.irregular_s)})"))
    due = expected(known, known.last_step, known.last_s)
    if due is not None:
        options.append((1.5 * due[0], f"1.5 x the pause that is due here ({duration(due[0])}, {due[1]})"))
    seconds, why = max(options)
    if seconds < bounds.floor_s:
        return Threshold(bounds.floor_s, f"the floor; {why} would be {duration(seconds)}")
    if seconds > bounds.ceiling_s:
        return Threshold(bounds.ceiling_s, f"the ceiling; {why} would be {duration(seconds)}")
    return Threshold(seconds, why)


# --- ordinary steps ---------------------------------------------------------------------------------------------------


def _bucket(seconds: float) -> int:
    if seconds <= SHORTEST_S:
        return 0
    return min(BUCKETS - 1, int(math.log(seconds / SHORTEST_S, RATIO)) + 1)


def _add(known: Learned, seconds: float, count: int) -> Learned:
    growth = 2.0 ** (min(count, 20 * HALF_LIFE) / HALF_LIFE)
    weights = list(known.weights)
    # The sum of ``count`` weights, each worth more than the one before it.
    weights[_bucket(seconds)] += known.worth * (growth - 1) / (2.0 ** (1 / HALF_LIFE) - 1)
    worth = known.worth * growth
    if worth > 1e100:
        weights, worth = [weight / worth for weight in weights], 1.0
    return replace(known, weights=tuple(weights), worth=worth, count=known.count + count)


def quantile_s(known: Learned, part: float = QUANTILE) -> float:
    """The length that ``part`` of the recent ordinary steps do not exceed (a bucket's upper edge); 0 without any."""
    total = sum(known.weights)
    if not total:
        return 0.0
    below = 0.0
    for number, weight in enumerate(known.weights):
        below += weight
        if below >= part * total:
            return float(SHORTEST_S * RATIO**number)
    return float(SHORTEST_S * RATIO**BUCKETS)


def usual_s(known: Learned) -> tuple[float, float]:
    """The median and the longest of the recent ordinary steps; zeros while there are too few to tell."""
    if known.count <= WARM_UP:
        return 0.0, 0.0
    return quantile_s(known, 0.5), quantile_s(known)


def _stands_out(known: Learned, seconds: float) -> bool:
    if seconds <= STANDS_OUT_S or known.count < ENOUGH:
        return False
    return seconds > STANDS_OUT * quantile_s(known, 0.5) and seconds > 1.5 * quantile_s(known, 0.9)


# --- pauses -----------------------------------------------------------------------------------------------------------


def expected(known: Learned, step: int, at_s: float) -> tuple[float, str] | None:
    """The pause that the rhythm lets expect after ``step``, made at ``at_s``: its length, and the rhythm in words."""
    origin = Pause(known.begun_step, known.begun_s, 0.0)
    best: tuple[float, str] | None = None
    for first, second in combinations((origin, *known.pauses), 2):
        lasted_s = max(first.lasted_s, second.lasted_s) if first is not origin else second.lasted_s
        if first is not origin and not 1 / 3 <= first.lasted_s / second.lasted_s <= 3:
            continue
        if best is not None and lasted_s <= best[0]:
            continue
        words = _returns(first, second, step, at_s, beats=1 if first is origin else 3)
        if words:
            best = (lasted_s, words)
    return best


def _returns(first: Pause, second: Pause, step: int, at_s: float, beats: int = 3) -> str:
    """Whether what came at ``first`` and ``second`` is due again: one period on, or a few where some were missed.

    One pause and the beginning of the job make a poor rhythm: of that only the next beat is believed (``beats`` 1).
    """
    period = second.step - first.step
    if period > 1:
        times = round((step - second.step) / period)
        if 1 <= times <= beats and abs(step - second.step - times * period) <= max(1.0, STEPS_OFF * period):
            return f"every {period} steps"
    # From the end of one pause to the beginning of the next: that is how a clock in a loop runs.
    period_s = second.at_s - first.at_s - first.lasted_s
    if period_s > SECONDS_OFF_LEAST and beats > 1:
        late_s = at_s - second.at_s - second.lasted_s - period_s
        if abs(late_s) <= max(SECONDS_OFF_LEAST, SECONDS_OFF * period_s):
            return f"every {duration(period_s)}"
    return ""


def _second_irregular_s(known: Learned, pauses: tuple[Pause, ...]) -> float:
    """The second longest of the pauses that neither those before them nor those after them explain."""
    irregular = []
    for number, pause in enumerate(pauses):
        before, after = pauses[:number], pauses[number + 1 :]
        if expected(replace(known, pauses=before), pause.step, pause.at_s) or _leads_on(pause, after):
            continue
        irregular.append(pause.lasted_s)
    return sorted(irregular)[-2] if len(irregular) > 1 else 0.0


def _leads_on(pause: Pause, after: tuple[Pause, ...]) -> bool:
    """Whether ``pause`` was the first of a rhythm that two later ones have kept up."""
    return any(
        _returns(pause, second, third.step, third.at_s)
        for second, third in combinations(after, 2)
        if 1 / 3 <= pause.lasted_s / second.lasted_s <= 3
    )


# --- the pulse of a job that marks no step ----------------------------------------------------------------------------


LOOP_AFTER = 10
LOOP_AFTER_EXPLICIT = 5
TIMES_FLOOR = 10.0  # of the floor between steps: 600 s by default
TIMES_LONGEST = 3.0
LOOKS_PER_THRESHOLD = 8
PERIOD_S = (0.5, 15.0)


@dataclass(frozen=True, slots=True)
class Pulse:
    """Of a job that marks no step: are there collectives again and again, and how far apart?

    A start, too, has collectives (parameters are broadcast, a dataset is prepared behind a barrier) and may then be
    silent for long; so only a job that has called them in many looks, some time apart, is taken to be in its loop.

    ``newest``: rank → the number of its newest collective; ``heard_s``: when a look first found that
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

    def heard(self, newest: Mapping[int, int], now: float) -> Pulse:
        """After one more look, which found ``newest``; ranks that did not answer are left out of it."""
        news = {rank: number for rank, number in newest.items() if number > self.newest.get(rank, -1)}
        if not news:
            return self
        last_s = self.last_s
        waited_s = 0.0 if last_s is None else now - last_s
        heard_s = {**self.heard_s, **dict.fromkeys(news, now)}
        return Pulse({**self.newest, **news}, heard_s, self.beats + 1, max(self.longest_s, waited_s))

    def is_in_loop(self, limits: PulseLimits) -> bool:
        """Where a --stall-timeout was given, that is to hold soon."""
        return self.beats >= (LOOP_AFTER if limits.bounds is not None else LOOP_AFTER_EXPLICIT)

    def threshold(self, limits: PulseLimits, cap_s: float | None) -> Threshold:
        """How long the job may go without a collective, and why. ``cap_s``: see ``cap_of``."""
        if not self.is_in_loop(limits):
            return Threshold(limits.startup_s, "before the first step")
        seconds = limits.least_s
        if limits.bounds is not None:
            seconds = min(limits.bounds.ceiling_s, max(seconds, TIMES_LONGEST * self.longest_s))
        seconds = min(seconds, limits.startup_s, cap_s or seconds)
        return Threshold(seconds, f"no steps; so far at least one collective every {self.longest_s:.0f} s")


@dataclass(frozen=True, slots=True)
class PulseLimits:
    """In seconds. ``startup_s`` holds until the job is known to be in its loop, and bounds everything.

    ``bounds``: of what is learned; None where ``stall_s`` was given (--stall-timeout).
    """

    startup_s: float
    stall_s: float
    bounds: ThresholdBounds | None

    @property
    def least_s(self) -> float:
        return self.stall_s if self.bounds is None else TIMES_FLOOR * self.bounds.floor_s

    @property
    def period_s(self) -> float:
        """How often to look: a look costs each rank's worker server a dump."""
        least, most = PERIOD_S
        return min(most, max(least, min(self.startup_s, self.least_s) / LOOKS_PER_THRESHOLD))
