"""When has a job stopped making progress? A pure state machine over the ranks' marks.

``tick`` is given the marks several times a second and says when to *suspect* a stall; the caller then looks closer
(two samples of stacks and process states some seconds apart) and tells ``conclude`` what it found: is the job proved
dead, does something work, or is neither known? ``ends_after_s`` is the table of what follows. The job is as far as its
slowest stepping rank. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec
from msgspec.structs import replace

from safelaunch.model import Answer, JobCondition

# Between two ticks the supervisor itself was stopped or the machine suspended: what it missed is no stall.
CLOCK_GAP_S = 5.0


class Policy(msgspec.Struct, frozen=True):
    """Thresholds in seconds. ``stall_given``, ``startup_given``, ``max_stall_given``: by the user.

    ``max_stall_s``: applies only if the user has set it or the threshold.
    ``proved_s``: of a job that an early look has proved dead, where the threshold is not the user's.
    """

    stall_s: float
    startup_s: float
    max_stall_s: float
    confirm_s: float = 2.0
    stall_given: bool = False
    startup_given: bool = False
    max_stall_given: bool = False
    proved_s: float = math.inf

    @property
    def has_one_limit(self) -> bool:
        """Whether the user's threshold between steps holds before the first one, too."""
        return self.stall_given and self.startup_given and self.startup_s == self.stall_s

    def is_given(self, stall: Stall) -> bool:
        """Whether the threshold that ``stall`` has passed is the user's."""
        return self.startup_given if stall.before_first_step else self.stall_given


def confirm_after_s(stall_s: float) -> float:
    """How far apart the two looks lie: further where steps are slow."""
    return min(10.0, max(2.0, 0.02 * stall_s))


class ProgressMark(msgspec.Struct, frozen=True):
    """One rank's progress: when it last stepped (None: never). ``exited``: its script has ended.

    ``claimed_s``: when it started; of a job that marks no step, when it was last heard of.
    """

    rank: int
    claimed_s: float
    last_step_s: float | None = None
    step: int | None = None
    exited: bool = False
    paused: bool = False
    phase: str = ""
    phase_since_s: float = 0.0
    phase_timeout_s: float = 0.0


class Status(Enum):
    WATCHING = "watching"
    CONFIRMING = "confirming"  # the caller is taking a closer look
    UNDECIDED = "undecided"  # no step, and no reason to end the job yet
    HUNG = "hung"


class DetectorState(msgspec.Struct, frozen=True):
    """``base_s``: marks older than this count as made then (start of the watch, or the clock started again).

    ``covers``: pauses, and phases with a timeout of their own, that are under way: (rank, since).
    ``excused``: there is nobody to judge just now.
    """

    status: Status = Status.WATCHING
    base_s: float = 0.0
    last_tick_s: float = 0.0
    look_again_s: float = 0.0
    mark_s: float = 0.0  # the slowest rank's mark that the present suspicion rests on
    covers: frozenset[tuple[int, float]] = frozenset()
    excused: bool = False
    proved_mark_s: float = 0.0  # the slowest rank's mark since when an early look has proved the job dead
    worked_s: float = 0.0  # when a look last saw the job work, an early one included
    due_s: float = 0.0  # when the slowest rank is suspected unless it marks progress; 0: nobody is judged


class Stall(msgspec.Struct, frozen=True):
    """Why the job is suspected. ``ranks``: those whose mark is the oldest. ``before_first_step``: none has stepped.

    ``proved``: an early look has proved the job dead, which lowers the threshold.
    """

    ranks: tuple[int, ...]
    mark_s: float
    stalled_s: float
    threshold_s: float
    before_first_step: bool
    step: int | None = None
    phase: str = ""
    proved: bool = False


@dataclass(frozen=True, slots=True)
class StallEvent:
    kind: Literal["suspect", "hang", "undecided", "recovered", "clock-restarted"]
    stall: Stall | None = None


class Limits(msgspec.Struct, frozen=True):
    """The time limits of the groups in which ranks wait, as ages of the stall in seconds; None: none is known.

    ``abort_s``: when the first of them is over, and torch aborts the job, or only ``raises`` an error, which the script
    may handle.
    """

    abort_s: float | None = None
    raises: bool = False

    @property
    def before_abort_s(self) -> float | None:
        """Shortly before then: the evidence has to be taken first."""
        if self.abort_s is None:
            return None
        return max(0.0, self.abort_s - min(MOST_MARGIN_S, max(LEAST_MARGIN_S, MARGIN_PART * self.abort_s)))


UNLIMITED = Limits()
LEAST_MARGIN_S, MOST_MARGIN_S, MARGIN_PART = 5.0, 60.0, 0.1


def initial_state(now: float) -> DetectorState:
    """The state at the beginning of an attempt."""
    return DetectorState(base_s=now, last_tick_s=now)


def slowest(marks: tuple[ProgressMark, ...], policy: Policy, base_s: float, now: float) -> Stall | None:
    """How far behind the slowest rank is; None when there is nobody to judge (no rank yet, all done, one paused)."""
    live = [mark for mark in marks if not mark.exited]
    if not live or any(mark.paused for mark in live):
        return None
    stepping = [mark for mark in live if mark.last_step_s is not None]
    judged = stepping or live
    times = {mark.rank: _mark_s(mark, base_s) for mark in judged}
    # Before the first step the latest arrival counts: ranks of one job may start far apart.
    slowest_s = min(times.values()) if stepping else max(times.values())
    slowest = [mark for mark in judged if times[mark.rank] == slowest_s]
    threshold = policy.stall_s if stepping else policy.startup_s
    threshold = max((mark.phase_timeout_s for mark in judged if mark.phase), default=0.0) or threshold
    # For a rank that makes no steps, too, its peers wait as long as it has announced.
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
    """One look at the marks. Emits ``suspect`` (take a closer look now), ``recovered`` or ``clock-restarted``."""
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
        # While the closer look is under way its own conclusion decides.
        return state, None
    if state.status is Status.CONFIRMING or stall.stalled_s < stall.threshold_s or now < state.look_again_s:
        return state, None
    return replace(state, status=Status.CONFIRMING, mark_s=stall.mark_s), StallEvent("suspect", stall)


def _if_proved(stall: Stall | None, state: DetectorState, policy: Policy) -> Stall | None:
    """With the lower threshold, if an early look has proved the job dead: only a healthy job needs patience."""
    if stall is None or stall.mark_s != state.proved_mark_s or stall.phase or policy.is_given(stall):
        return stall
    return replace(stall, threshold_s=min(stall.threshold_s, policy.proved_s), proved=True)


def _base_s(state: DetectorState, covers: frozenset[tuple[int, float]], policy: Policy, now: float) -> float:
    """Starts the clock again when a long pause or timed phase has ended: its peers have waited for it all the while.

    Those no longer than the plain threshold start nothing again: ranks that go in and out of them must not hide another
    that is stuck.
    """
    waited_s = max((now - since for _, since in state.covers - covers), default=0.0)
    return now if waited_s > policy.stall_s else state.base_s


def ends_after_s(policy: Policy, stall: Stall, answer: Answer, limits: Limits) -> float | None:
    """How long the job may go without progress before it is ended; None: for ever.

    A job is ended only if it is proved dead, or if the user has said so, or shortly before torch would end it.
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
    """How long the job has gone without progress. The user's threshold, without a proof, is that of a job that was not
    seen to work either: on a starved machine, it may be between two looks only.
    """
    worked = state.worked_s if answer == "unknown" and policy.is_given(stall) else 0.0
    return now - max(stall.mark_s, worked)


def suspect_after_s(policy: Policy, stall: Stall, answer: Answer, limits: Limits) -> float | None:
    """When a bundle of the job that continues is due; None: never, as the user's threshold decides."""
    if policy.is_given(stall):
        return None
    if answer != "alive":
        return stall.threshold_s
    before_s = limits.before_abort_s
    return max(stall.threshold_s, ALIVE_BUNDLE_S if before_s is None else min(ALIVE_BUNDLE_S, before_s))


ALIVE_BUNDLE_S = 1800.0


def next_look_after_s(policy: Policy, stall: Stall, now: float) -> float:
    """Two looks and what they ask for take about a second of CPU, so they grow rarer as the wait grows longer.

    They are at most a minute apart within the first two hours, and ten minutes later on.
    """
    waited_s = now - stall.mark_s
    most_s = min(600.0, max(60.0, waited_s / 120))
    return max(policy.confirm_s, 5.0, min(max(stall.threshold_s / 4, 0.15 * waited_s), most_s))


def conclude(
    state: DetectorState, stall: Stall, condition: JobCondition, policy: Policy, now: float, limits: Limits = UNLIMITED
) -> tuple[DetectorState, StallEvent | None]:
    """What the closer look found. Emits ``hang``, ``undecided`` (each time; say it once), ``recovered`` or
    ``clock-restarted``; nothing when the clock was started again while the look was under way.
    """
    if state.status is not Status.CONFIRMING:
        return state, None
    if condition == "moving" or state.excused:
        return replace(state, status=Status.WATCHING), StallEvent("recovered", stall)
    if condition == "stopped":
        return DetectorState(base_s=now, last_tick_s=now), StallEvent("clock-restarted", stall)
    if stall.proved and condition != "dead":  # the ordinary threshold counts again
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
