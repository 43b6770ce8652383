"""Detects when a job has stopped making progress: a state machine over the ranks' marks, without side effects.

``tick`` gets the marks several times a second and emits *suspect*. The caller then looks twice at stacks and process
states, and passes the job's condition to ``conclude``. ``ends_after_s`` is the table of consequences. The slowest
stepping rank counts as the job's progress. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec
from msgspec.structs import replace

from safelaunch.model import Answer, JobCondition

# After a longer gap, the supervisor was stopped or the machine suspended.
CLOCK_GAP_S = 5.0


class Policy(msgspec.Struct, frozen=True):
    """Thresholds in seconds. ``*_given`` fields say whether the user set them."""

    stall_s: float
    startup_s: float
    max_stall_s: float  # applies only if the user set it or the threshold
    confirm_s: float = 2.0
    stall_given: bool = False
    startup_given: bool = False
    max_stall_given: bool = False
    proved_s: float = math.inf  # after an early look's proof, unless the user set a threshold

    @property
    def has_one_limit(self) -> bool:
        return self.stall_given and self.startup_given and self.startup_s == self.stall_s

    def is_given(self, stall: Stall) -> bool:
        return self.startup_given if stall.before_first_step else self.stall_given


def confirm_after_s(stall_s: float) -> float:
    return min(10.0, max(2.0, 0.02 * stall_s))


class ProgressMark(msgspec.Struct, frozen=True):
    rank: int
    claimed_s: float  # its start or, without steps, its latest sign of progress
    last_step_s: float | None = None
    step: int | None = None
    exited: bool = False
    paused: bool = False
    phase: str = ""
    phase_since_s: float = 0.0
    phase_timeout_s: float = 0.0


class Status(Enum):
    WATCHING = "watching"
    CONFIRMING = "confirming"
    UNDECIDED = "undecided"  # no step, but no reason to end the job
    HUNG = "hung"


class DetectorState(msgspec.Struct, frozen=True):
    status: Status = Status.WATCHING
    base_s: float = 0.0  # older marks count as made then
    last_tick_s: float = 0.0
    look_again_s: float = 0.0
    mark_s: float = 0.0  # slowest rank's mark when the suspicion began
    covers: frozenset[tuple[int, float]] = frozenset()  # (rank, start) of pauses and timed phases
    excused: bool = False  # no rank is judged now
    proved_mark_s: float = 0.0  # slowest rank's mark at an early look's proof
    worked_s: float = 0.0  # last look that saw the job work
    due_s: float = 0.0  # next suspicion without progress; 0: no rank is judged


class Stall(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...]  # ranks with the oldest mark
    mark_s: float
    stalled_s: float
    threshold_s: float
    before_first_step: bool
    step: int | None = None
    phase: str = ""
    proved: bool = False  # by an early look, which lowers the threshold


@dataclass(frozen=True, slots=True)
class StallEvent:
    kind: Literal["suspect", "hang", "undecided", "recovered", "clock-restarted"]
    stall: Stall | None = None


class Limits(msgspec.Struct, frozen=True):
    """The shortest timeout of the groups that ranks wait in, expressed as the age of the stall in seconds."""

    abort_s: float | None = None  # when torch aborts the job
    raises: bool = False  # torch only raises an error, which the script can handle

    @property
    def before_abort_s(self) -> float | None:
        if self.abort_s is None:
            return None
        return max(0.0, self.abort_s - min(MOST_MARGIN_S, max(LEAST_MARGIN_S, MARGIN_PART * self.abort_s)))


UNLIMITED = Limits()
LEAST_MARGIN_S, MOST_MARGIN_S, MARGIN_PART = 5.0, 60.0, 0.1


def initial_state(now: float) -> DetectorState:
    return DetectorState(base_s=now, last_tick_s=now)


def slowest(marks: tuple[ProgressMark, ...], policy: Policy, base_s: float, now: float) -> Stall | None:
    """Returns the stall of the slowest rank; None if no rank can be judged."""
    live = [mark for mark in marks if not mark.exited]
    if not live or any(mark.paused for mark in live):
        return None
    stepping = [mark for mark in live if mark.last_step_s is not None]
    judged = stepping or live
    times = {mark.rank: _mark_s(mark, base_s) for mark in judged}
    # Ranks can start far apart: before the first step, the latest start counts.
    slowest_s = min(times.values()) if stepping else max(times.values())
    slowest = [mark for mark in judged if times[mark.rank] == slowest_s]
    threshold = policy.stall_s if stepping else policy.startup_s
    threshold = max((mark.phase_timeout_s for mark in judged if mark.phase), default=0.0) or threshold
    # A rank without steps counts during a timed phase, as its peers wait for it.
    threshold = max([threshold, *(mark.phase_timeout_s for mark in live if mark.phase)])
    return Stall(
        ranks=tuple(mark.rank for mark in (slowest if stepping else live)),
        mark_s=slowest_s,
        stalled_s=now - slowest_s,
        threshold_s=threshold,
        before_first_step=not stepping,
        step=slowest[0].step,
        phase=slowest[0].phase,
    )


def _mark_s(mark: ProgressMark, base_s: float) -> float:
    last = mark.claimed_s if mark.last_step_s is None else mark.last_step_s
    return max(last, mark.phase_since_s, base_s)


def tick(
    state: DetectorState, marks: tuple[ProgressMark, ...], policy: Policy, now: float
) -> tuple[DetectorState, StallEvent | None]:
    """Processes the ranks' marks.

    Returns the new state and an event: ``suspect``, ``recovered`` or ``clock-restarted``.

    ``suspect`` asks the caller for a closer look.
    """
    if now - state.last_tick_s > CLOCK_GAP_S and state.status is not Status.HUNG:
        return DetectorState(base_s=now, last_tick_s=now), StallEvent("clock-restarted")
    covers = frozenset((m.rank, m.phase_since_s) for m in marks if m.paused or (m.phase and m.phase_timeout_s))
    base_s = _base_s(state, covers, policy, now)
    if state.status is Status.HUNG:
        return replace(state, last_tick_s=now, base_s=base_s, covers=covers), None
    stall = _if_proved(slowest(marks, policy, base_s, now), state, policy)
    due_s = max(stall.mark_s + stall.threshold_s, state.look_again_s) if stall is not None else 0.0
    state = replace(state, last_tick_s=now, base_s=base_s, covers=covers, excused=stall is None, due_s=due_s)
    if stall is None or (stall.mark_s > state.mark_s and state.status is not Status.WATCHING):
        if state.status is Status.UNDECIDED:
            return replace(state, status=Status.WATCHING), StallEvent("recovered", stall)
        return state, None
    if state.status is Status.CONFIRMING or stall.stalled_s < stall.threshold_s or now < state.look_again_s:
        return state, None
    return replace(state, status=Status.CONFIRMING, mark_s=stall.mark_s), StallEvent("suspect", stall)


def _if_proved(stall: Stall | None, state: DetectorState, policy: Policy) -> Stall | None:
    if stall is None or stall.mark_s != state.proved_mark_s or stall.phase or policy.is_given(stall):
        return stall
    return replace(stall, threshold_s=min(stall.threshold_s, policy.proved_s), proved=True)


def _base_s(state: DetectorState, covers: frozenset[tuple[int, float]], policy: Policy, now: float) -> float:
    # After a long pause or timed phase, the clock restarts, because the peers waited. After a short one it doesn't,
    # because another rank might be stuck.
    waited_s = max((now - since for _, since in state.covers - covers), default=0.0)
    return now if waited_s > policy.stall_s else state.base_s


def ends_after_s(policy: Policy, stall: Stall, answer: Answer, limits: Limits) -> float | None:
    """Returns after how much time without progress the job ends; None if it continues.

    The job ends if it is proved dead, if the user's limit says so, or shortly before torch would end it.
    """
    threshold_s = stall.threshold_s
    by_user = policy.is_given(stall)
    if answer == "dead" or (answer == "unknown" and by_user):
        return threshold_s
    if by_user or policy.max_stall_given:
        return max(policy.max_stall_s, threshold_s)
    if answer == "unknown" and limits.before_abort_s is not None and not limits.raises:
        return max(threshold_s, limits.before_abort_s)
    return None


def idle_s(state: DetectorState, policy: Policy, stall: Stall, answer: Answer, now: float) -> float:
    # Without a proof, the user's threshold counts from the last work: on a starved machine, the job might idle only
    # during looks.
    worked = state.worked_s if answer == "unknown" and policy.is_given(stall) else 0.0
    return now - max(stall.mark_s, worked)


def suspect_after_s(policy: Policy, stall: Stall, answer: Answer, limits: Limits) -> float | None:
    """Returns after how much time without progress a bundle is written although the job continues.

    None if the user's threshold decides.
    """
    if policy.is_given(stall):
        return None
    if answer != "alive":
        return stall.threshold_s
    before_s = limits.before_abort_s
    return max(stall.threshold_s, ALIVE_BUNDLE_S if before_s is None else min(ALIVE_BUNDLE_S, before_s))


ALIVE_BUNDLE_S = 1800.0


def next_look_after_s(policy: Policy, stall: Stall, now: float) -> float:
    """Returns the time until the next closer look, which costs about a second of CPU.

    This time grows to a minute within the first two hours, and to ten minutes later.
    """
    waited_s = now - stall.mark_s
    most_s = min(600.0, max(60.0, waited_s / 120))
    return max(policy.confirm_s, 5.0, min(max(stall.threshold_s / 4, 0.15 * waited_s), most_s))


def conclude(
    state: DetectorState, stall: Stall, condition: JobCondition, policy: Policy, now: float, limits: Limits = UNLIMITED
) -> tuple[DetectorState, StallEvent | None]:
    """Processes the result of the closer look.

    The event is ``hang``, ``undecided`` (each time), ``recovered`` or ``clock-restarted``; None if the clock restarted
    during the look.
    """
    if state.status is not Status.CONFIRMING:
        return state, None
    if condition == "moving" or state.excused:
        return replace(state, status=Status.WATCHING), StallEvent("recovered", stall)
    if condition == "stopped":
        return DetectorState(base_s=now, last_tick_s=now), StallEvent("clock-restarted", stall)
    if stall.proved and condition != "dead":  # the plain threshold applies again
        return replace(state, status=Status.WATCHING, proved_mark_s=0.0), None
    state = replace(state, worked_s=now) if condition == "alive" else state
    limit, without_s = ends_after_s(policy, stall, condition, limits), idle_s(state, policy, stall, condition, now)
    if limit is not None and without_s >= limit:
        return replace(state, status=Status.HUNG), StallEvent("hang", stall)
    wait = next_look_after_s(policy, stall, now)
    for due in (limit, suspect_after_s(policy, stall, condition, limits)):
        if due is not None and without_s < due:
            wait = min(wait, max(0.0, due - without_s - policy.confirm_s))
    return replace(state, status=Status.UNDECIDED, look_again_s=now + wait), StallEvent("undecided", stall)
