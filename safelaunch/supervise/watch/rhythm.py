"""Learns from a job's steps how long it can go without one. Has no side effects. Times are seconds of CLOCK_MONOTONIC.

What is learned is how long the slowest stepping rank's mark stays unchanged; the watch measures the same time. Ordinary
steps go into a histogram that forgets old ones, because the length of steps changes (a curriculum, a growing batch).
Much longer pauses form a rhythm if they repeat every N steps or seconds, and are expected only when the next one is
due. Other pauses count only from the second one on, because a single accident must not blind the watch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import msgspec
from msgspec.structs import replace

from safelaunch.model import duration

# The first steps are ignored (compilation, autotuning, caches).
WARM_UP = 3
ENOUGH = 24
# Buckets are 10 % apart, from 1 ms to a day. A step's weight halves after HALF_LIFE steps.
RATIO = 1.1
SHORTEST_S = 0.001
BUCKETS = 200
HALF_LIFE = 500.0
QUANTILE = 0.99
# Threshold = MARGIN x quantile: a freeze is suspected within three of the longest ordinary steps.
MARGIN = 2.5
# A pause is this many times an ordinary step, and noticeable.
STANDS_OUT = 4.0
STANDS_OUT_S = 1.0
KEPT = 24
# Share of the default group's timeout, before which evidence must be taken.
CAP_PART = 0.7
# Tolerance in steps and in seconds.
STEPS_OFF = 0.01
SECONDS_OFF = 0.05
SECONDS_OFF_LEAST = 5.0


@dataclass(frozen=True, slots=True)
class ThresholdBounds:
    """Bounds of the learned threshold. ``initial_s`` applies until enough steps are known."""

    floor_s: float = 60.0
    ceiling_s: float = 1800.0
    initial_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A long time without a step, which began at ``at_s``, after ``step``."""

    step: int
    at_s: float
    lasted_s: float


class StepRhythm(msgspec.Struct, frozen=True):
    weights: tuple[float, ...] = (0.0,) * BUCKETS
    worth: float = 1.0
    """weight of the next step, which grows instead of older weights fading"""
    count: int = 0
    last_step: int | None = None
    last_s: float = 0.0
    """time of the last mark"""
    seen_s: float = 0.0
    """when that mark was last seen as the newest"""
    begun_s: float = 0.0
    """time of the first mark"""
    begun_step: int = 0
    pauses: tuple[Pause, ...] = ()
    irregular_s: float = 0.0
    """second longest pause without a rhythm"""

    @property
    def knows_enough(self) -> bool:
        return self.count >= ENOUGH


@dataclass(frozen=True, slots=True)
class Threshold:
    seconds: float
    why: str
    """reason, such as ``2.5 x the longest ordinary step (1.2 s)``"""

    @property
    def facts(self) -> dict[str, float | str]:
        return {"threshold_s": self.seconds, "threshold_why": self.why}


NONE = Threshold(0.0, "")


def learn(rhythm: StepRhythm, step: int, mark_s: float, now: float, *, excused: bool = False) -> StepRhythm:
    """Records that the slowest rank completed ``step`` at ``mark_s``, as seen at ``now``.

    Args:
        excused: Whether to ignore the time since the last mark, because it includes a pause, a timed phase, or a clock
            restart.
    """
    if rhythm.last_step is None or excused or step < rhythm.last_step or mark_s < rhythm.last_s:
        started = rhythm.begun_s or mark_s
        return replace(rhythm, last_step=step, last_s=mark_s, seen_s=now, begun_s=started)
    if step == rhythm.last_step:
        return replace(rhythm, seen_s=now)
    made = step - rhythm.last_step
    mean_s = (mark_s - rhythm.last_s) / made
    # One of several steps between two looks can have been longer than their mean.
    longest_s = max(mean_s, min(rhythm.seen_s, mark_s) - rhythm.last_s)
    rest_s = (mark_s - rhythm.last_s - longest_s) / (made - 1) if made > 1 else 0.0
    after = Pause(rhythm.last_step, rhythm.last_s, longest_s)
    rhythm = replace(rhythm, last_step=step, last_s=mark_s, seen_s=now)
    if rhythm.count + made <= WARM_UP:
        return replace(rhythm, count=rhythm.count + made, begun_step=step, begun_s=mark_s)
    if made > 1:
        rhythm = _add(rhythm, rest_s, made - 1)
    if _stands_out(rhythm, longest_s):
        pauses = (*rhythm.pauses, after)[-KEPT:]
        return replace(rhythm, count=rhythm.count + 1, pauses=pauses, irregular_s=_second_irregular_s(rhythm, pauses))
    return _add(rhythm, longest_s, 1)


def threshold(rhythm: StepRhythm, bounds: ThresholdBounds, *, cap_s: float | None = None) -> Threshold:
    """Returns the threshold after the newest mark, at most ``cap_s``."""
    learned = _uncapped(rhythm, bounds)
    if cap_s is not None and learned.seconds > cap_s:
        return Threshold(cap_s, "the timeout of the default process group")
    return learned


def cap_of(timeout_s: float, floor_s: float) -> float:
    """Returns the upper limit of the threshold, given the default group's timeout.

    The limit is below the floor only if the timeout is: otherwise, a short timeout would make every pause suspicious.
    Other groups, such as a health check's, say nothing about the job's steps.
    """
    part_s = CAP_PART * timeout_s
    return part_s if timeout_s < floor_s else max(part_s, floor_s)


def _uncapped(rhythm: StepRhythm, bounds: ThresholdBounds) -> Threshold:
    if not rhythm.knows_enough or rhythm.last_step is None:
        return Threshold(bounds.initial_s, f"{rhythm.count} steps known, too few to learn from")
    ordinary_s = quantile_s(rhythm)
    options = [(MARGIN * ordinary_s, f"{MARGIN:g} x its longest ordinary step ({duration(ordinary_s)})")]
    if rhythm.irregular_s:
        options.append((1.5 * rhythm.irregular_s, f"1.5 x a pause that came twice ({duration(rhythm.irregular_s)})"))
    due = due_pause(rhythm, rhythm.last_step, rhythm.last_s)
    if due is not None:
        options.append((1.5 * due[0], f"1.5 x the pause that is due here ({duration(due[0])}, {due[1]})"))
    seconds, why = max(options)
    if seconds < bounds.floor_s:
        return Threshold(bounds.floor_s, f"{duration(bounds.floor_s)} floor; {why} would be only {duration(seconds)}")
    if seconds > bounds.ceiling_s:
        return Threshold(bounds.ceiling_s, f"{duration(bounds.ceiling_s)} ceiling; {why} would be {duration(seconds)}")
    return Threshold(seconds, why)


# --- ordinary steps ---------------------------------------------------------------------------------------------------


def _bucket(seconds: float) -> int:
    if seconds <= SHORTEST_S:
        return 0
    return min(BUCKETS - 1, int(math.log(seconds / SHORTEST_S, RATIO)) + 1)


def _add(rhythm: StepRhythm, seconds: float, count: int) -> StepRhythm:
    growth = 2.0 ** (min(count, 20 * HALF_LIFE) / HALF_LIFE)
    weights = list(rhythm.weights)
    # sum of ``count`` growing weights
    weights[_bucket(seconds)] += rhythm.worth * (growth - 1) / (2.0 ** (1 / HALF_LIFE) - 1)
    worth = rhythm.worth * growth
    if worth > 1e100:
        weights, worth = [weight / worth for weight in weights], 1.0
    return replace(rhythm, weights=tuple(weights), worth=worth, count=rhythm.count + count)


def quantile_s(rhythm: StepRhythm, part: float = QUANTILE) -> float:
    """Returns the upper edge of the quantile's bucket; 0 if there are no steps."""
    total = sum(rhythm.weights)
    if not total:
        return 0.0
    below = 0.0
    for number, weight in enumerate(rhythm.weights):
        below += weight
        if below >= part * total:
            return float(SHORTEST_S * RATIO**number)
    return float(SHORTEST_S * RATIO**BUCKETS)


def usual_s(rhythm: StepRhythm) -> tuple[float, float]:
    """Returns the duration of the median and of the longest recent step; zeros if unknown."""
    if rhythm.count <= WARM_UP:
        return 0.0, 0.0
    return quantile_s(rhythm, 0.5), quantile_s(rhythm)


def _stands_out(rhythm: StepRhythm, seconds: float) -> bool:
    if seconds <= STANDS_OUT_S or rhythm.count < ENOUGH:
        return False
    return seconds > STANDS_OUT * quantile_s(rhythm, 0.5) and seconds > 1.5 * quantile_s(rhythm, 0.9)


# --- pauses -----------------------------------------------------------------------------------------------------------


def due_pause(rhythm: StepRhythm, step: int, at_s: float) -> tuple[float, str] | None:
    """Returns the length of the pause that is due after ``step`` at ``at_s``, and its rhythm in words; else None."""
    origin = Pause(rhythm.begun_step, rhythm.begun_s, 0.0)
    best: tuple[float, str] | None = None
    for first, second in combinations((origin, *rhythm.pauses), 2):
        lasted_s = max(first.lasted_s, second.lasted_s) if first is not origin else second.lasted_s
        if first is not origin and not 1 / 3 <= first.lasted_s / second.lasted_s <= 3:
            continue
        if best is not None and lasted_s <= best[0]:
            continue
        words = _rhythm_words(first, second, step, at_s, beats=1 if first is origin else 3)
        if words:
            best = (lasted_s, words)
    return best


def _rhythm_words(first: Pause, second: Pause, step: int, at_s: float, beats: int = 3) -> str:
    """Describes the rhythm of two pauses if the next pause is due, after one or a few periods; else "".

    If the job has had a single pause since its start, the evidence is weak, so only the next due time counts (``beats``
    1).
    """
    period = second.step - first.step
    if period > 1:
        times = round((step - second.step) / period)
        if 1 <= times <= beats and abs(step - second.step - times * period) <= max(1.0, STEPS_OFF * period):
            return f"every {period} steps"
    # A timer in a loop runs from one pause's end to the next one's start.
    period_s = second.at_s - first.at_s - first.lasted_s
    if period_s > SECONDS_OFF_LEAST and beats > 1:
        late_s = at_s - second.at_s - second.lasted_s - period_s
        if abs(late_s) <= max(SECONDS_OFF_LEAST, SECONDS_OFF * period_s):
            return f"every {duration(period_s)}"
    return ""


def _second_irregular_s(rhythm: StepRhythm, pauses: tuple[Pause, ...]) -> float:
    irregular = []
    for number, pause in enumerate(pauses):
        before, after = pauses[:number], pauses[number + 1 :]
        if due_pause(replace(rhythm, pauses=before), pause.step, pause.at_s) or _leads_on(pause, after):
            continue
        irregular.append(pause.lasted_s)
    return sorted(irregular)[-2] if len(irregular) > 1 else 0.0


def _leads_on(pause: Pause, after: tuple[Pause, ...]) -> bool:
    return any(
        _rhythm_words(pause, second, third.step, third.at_s)
        for second, third in combinations(after, 2)
        if 1 / 3 <= pause.lasted_s / second.lasted_s <= 3
    )
