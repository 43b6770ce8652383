"""The stall detector over histories. No clock runs here: times are numbers in the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import Answer, JobCondition
from safelaunch.supervise.watch.stall import (
    ALIVE_BUNDLE_S,
    CLOCK_GAP_S,
    UNLIMITED,
    DetectorState,
    Limits,
    Policy,
    ProgressMark,
    Stall,
    StallEvent,
    Status,
    conclude,
    ends_after_s,
    initial_state,
    slowest,
    suspect_after_s,
    tick,
)

POLICY = Policy(stall_s=30.0, startup_s=100.0, max_stall_s=360.0, confirm_s=2.0)
GIVEN = replace(POLICY, stall_given=True, startup_given=True)
TICK_S = 0.25
START_S = 1000.0  # CLOCK_MONOTONIC does not begin at 0 when a job does


def rank(number: int, stepped: float | None = None, *, claimed: float = 0.0, **more: object) -> ProgressMark:
    """A mark; times are seconds since the start of the watch."""
    last = None if stepped is None else START_S + stepped
    mark = ProgressMark(number, START_S + claimed, last, step=None if stepped is None else 7)
    return replace(mark, **more)  # type: ignore[arg-type]


@dataclass
class Replay:
    """Plays a job: ``marks`` at each tick, and ``found`` by closer looks. Collects events with their times."""

    marks: Callable[[float], Sequence[ProgressMark]]
    found: Callable[[float], JobCondition] = lambda now: "dead"
    policy: Policy = POLICY
    state: DetectorState = field(default_factory=lambda: initial_state(START_S))
    now: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    _look: tuple[float, Stall] | None = None

    def until(self, end: float) -> list[tuple[float, str]]:
        """Ticks to ``end``; each suspicion is concluded ``confirm_s`` later, as the supervisor does it."""
        while self.now + TICK_S <= end:
            self.step(TICK_S)
        return self.events

    def step(self, seconds: float) -> None:
        self.now += seconds
        clock = START_S + self.now
        self.state, event = tick(self.state, tuple(self.marks(self.now)), self.policy, clock)
        self._note(event)
        if event is not None and event.kind == "suspect" and event.stall is not None:
            self._look = (self.now + self.policy.confirm_s, event.stall)
        elif event is not None and event.kind == "clock-restarted":
            self._look = None
        elif self._look is not None and self.now >= self._look[0]:
            stall, self._look = self._look[1], None
            self.state, event = conclude(self.state, stall, self.found(self.now), self.policy, clock)
            self._note(event)

    def _note(self, event: StallEvent | None) -> None:
        if event is not None:
            self.events.append((self.now, event.kind))
            if event.stall is not None:
                self.stalls.append(event.stall)

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind in self.events]


def stepping(now: float, every: float, *, until: float = 1e9, first: float = 10.0) -> float | None:
    """When a rank that steps ``every`` seconds from ``first`` on, but not after ``until``, last stepped."""
    if now < first:
        return None
    return first + (min(now, until) - first) // every * every


def paused(number: int, since: float, until: float, now: float) -> ProgressMark:
    """A rank that last stepped at 10 s and pauses from ``since`` to ``until``."""
    at = until if now >= until else since if now >= since else 0.0
    return rank(number, 10.0, paused=since <= now < until, phase_since_s=START_S + at if at else 0.0)


def phase(name: str, since: float, timeout_s: float = 0.0) -> dict[str, Any]:
    return {"phase": name, "phase_since_s": START_S + since, "phase_timeout_s": timeout_s}


def suspected(at: float) -> list[tuple[float, str]]:
    """Returns the events of a suspicion that finds the job dead."""
    return [(at, "suspect"), (at + 2.0, "hang")]


@dataclass(frozen=True)
class Case:
    """A history, played to ``until_s``, and all its events."""

    marks: Callable[[float], Sequence[ProgressMark]]
    until_s: float
    events: list[tuple[float, str]]
    found: Callable[[float], JobCondition] = lambda now: "dead"


CASES = {
    "steps": Case(lambda now: [rank(r, stepping(now, 2.0)) for r in range(4)], 600, []),
    "slow steps below the threshold": Case(lambda now: [rank(0, stepping(now, 29.5))], 600, []),
    "nobody has come": Case(lambda now: [], 2000, []),
    "a hang is said once": Case(lambda now: [rank(0, 10.0)], 5000, suspected(40.0)),
    # Its evidence is being collected, so the verdict stays.
    "moves after the verdict": Case(lambda now: [rank(0, 10.0 if now < 50 else now)], 100, suspected(40.0)),
    # Before the first step.
    "the latest arrival": Case(
        lambda now: [rank(0, claimed=1.0), *([rank(1, claimed=60.0)] if now >= 60 else [])], 200, suspected(160.0)
    ),
    "the first step": Case(lambda now: [rank(0, stepping(now, 1.0, first=90.0, until=90.0))], 130, suspected(120.0)),
    "an evaluator next to trainers": Case(lambda now: [rank(0), rank(1, stepping(now, 1.0))], 2000, []),
    "no step at all": Case(lambda now: [rank(0)], 200, suspected(100.0)),
    # Ranks that are not judged.
    "one has exited": Case(lambda now: [rank(0, 10.0, exited=True), rank(1, stepping(now, 1.0))], 600, []),
    "all have exited": Case(lambda now: [rank(0, 10.0, exited=True), rank(1, exited=True)], 2000, []),
    "a peer has exited": Case(lambda now: [rank(0, 10.0, exited=True), rank(1, 12.0)], 60, suspected(42.0)),
    # One rank waits for its user's input; its peers wait for it, and are not blamed when it continues.
    "a pause of one": Case(lambda now: [paused(0, 15, 500, now), rank(1, 10.0)], 540, suspected(530.0)),
    "a pause during the look": Case(
        lambda now: [paused(0, 41, 600, now), rank(1, 10.0)],
        640,
        [(40.0, "suspect"), (42.0, "recovered"), *suspected(630.0)],
    ),
    "pauses one after another": Case(
        lambda now: [paused(0, 12, 200, now), paused(1, 100, 400, now), rank(2, 10.0)], 440, suspected(430.0)
    ),
    "a pause ends an undecided wait": Case(
        lambda now: [rank(0, 10.0, paused=now >= 60)],
        100,
        [
            (40.0, "suspect"),
            (42.0, "undecided"),
            (49.5, "suspect"),
            (51.5, "undecided"),
            (59.0, "suspect"),
            (61.0, "recovered"),
        ],
        lambda now: "alive",
    ),
    # Phases.
    "a phase is entered": Case(
        lambda now: [rank(0, 10.0, **phase("eval" if now >= 35 else "", 35 * (now >= 35)))], 80, suspected(65.0)
    ),
    "a phase with its timeout": Case(lambda now: [rank(0, 10.0, **phase("eval", 20, 200.0))], 300, suspected(220.0)),
    "a shorter timeout": Case(lambda now: [rank(0, 10.0, **phase("step", 20, 5.0))], 60, suspected(25.0)),
    "a timeout outside its phase": Case(lambda now: [rank(0, 10.0, **phase("", 20, 200.0))], 60, suspected(50.0)),
    "a peer's phase": Case(
        lambda now: [rank(0, 10.0, **phase("eval", 20, 200.0)), rank(1, 19.0)], 300, suspected(219.0)
    ),
    "a phase of a rank without steps": Case(
        lambda now: [rank(0, 10.0), rank(1, None, **phase("eval", 12, 200.0))], 300, suspected(210.0)
    ),
    "a short phase of a rank without steps": Case(
        lambda now: [rank(0, 10.0), rank(1, None, **phase("eval", 12, 5.0))], 300, suspected(40.0)
    ),
    # Rank 0 evaluates for 150 s with leave to do so; rank 1, in a barrier, has been waiting for it.
    "the end of a long phase": Case(
        lambda now: [
            rank(0, 10.0, **(phase("eval", 20, 200.0) if now < 170 else {"phase_since_s": START_S + 170})),
            rank(1, 10.0),
        ],
        240,
        suspected(200.0),
    ),
    # Every rank wraps its step into a phase; rank 1 is stuck in its own.
    "phases within each step": Case(
        lambda now: [rank(0, now, **phase("step", now // 1, 5.0)), rank(1, 10.0, **phase("step", 10, 5.0))],
        60,
        suspected(15.0),
    ),
    # A suspended job (kill -STOP, a frozen cgroup): when it continues, it has its whole threshold again.
    "all are stopped": Case(
        lambda now: [rank(0, 10.0)],
        80,
        [(40.0, "suspect"), (42.0, "clock-restarted"), (72.0, "suspect"), (74.0, "clock-restarted")],
        lambda now: "stopped",
    ),
    "a mark during the look": Case(
        lambda now: [rank(0, 10.0 if now < 41 else 41.0)],
        80,
        [(40.0, "suspect"), (42.0, "recovered"), *suspected(71.0)],
        lambda now: "moving" if now < 50 else "dead",
    ),
    # A long evaluation: recovered once.
    "a step while it is undecided": Case(
        lambda now: [rank(0, 10.0 if now < 45 else stepping(now, 1.0))],
        200,
        [(40.0, "suspect"), (42.0, "undecided"), (45.0, "recovered")],
        lambda now: "alive",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_job_gives_expected_events(case: str) -> None:
    one = CASES[case]
    assert Replay(one.marks, one.found).until(one.until_s) == one.events


def test_slowest_rank_is_suspected_while_its_peers_step() -> None:
    """Rank 2 stops at 40 s; a collective is far away: measured from rank 2."""
    job = Replay(lambda now: [rank(r, stepping(now, 1.0, until=40 if r == 2 else 1e9)) for r in range(4)])
    assert job.until(80) == suspected(70.0)
    stall = job.stalls[0]
    assert (stall.ranks, stall.mark_s, stall.stalled_s, stall.threshold_s) == ((2,), START_S + 40, 30.0, 30.0)
    assert (stall.before_first_step, stall.step) == (False, 7)


def test_ranks_with_equal_marks_are_suspected_together() -> None:
    job = Replay(lambda now: [rank(r, stepping(now, 1.0, until=20 if r != 3 else 25)) for r in range(4)])
    job.until(60)
    assert job.stalls[0].ranks == (0, 1, 2)
    start = Replay(lambda now: [rank(0, claimed=1.0), rank(1, claimed=60.0)])
    start.until(200)
    stall = start.stalls[0]
    assert (stall.before_first_step, stall.ranks, stall.threshold_s, stall.step) == (True, (0, 1), 100.0, None)


def test_suspicion_is_raised_within_a_tick_of_the_threshold() -> None:
    job = Replay(lambda now: [rank(0, stepping(now, 0.1, until=33.33))])
    (at, kind), *_ = job.until(80)
    assert kind == "suspect"
    assert 0 <= at - (33.3 + POLICY.stall_s) <= TICK_S + 1e-6


def test_working_rank_without_steps_ends_at_user_limit() -> None:
    job = Replay(lambda now: [rank(0)], lambda now: "alive")
    job.until(20_000)
    assert set(job.kinds) == {"suspect", "undecided"} and len(job.events) > 300
    job = Replay(lambda now: [rank(0)], lambda now: "alive", GIVEN)
    job.until(600)
    assert job.events[-1] == (360.0, "hang")


def test_user_threshold_counts_from_the_last_observed_work() -> None:
    """On a starved machine, it might work only between two looks."""
    job = Replay(lambda now: [rank(0, 10.0)], lambda now: "alive" if now < 60 else "unknown", GIVEN)
    worked = [at for at, kind in job.until(400) if kind == "undecided" and at < 60]
    assert job.events[-1][1] == "hang"
    assert 30.0 <= job.events[-1][0] - worked[-1] < 40.0
    capped = replace(POLICY, max_stall_given=True)
    learned = Replay(lambda now: [rank(0, 10.0)], lambda now: "alive" if now < 60 else "unknown", capped)
    assert learned.until(400)[-1] == (370.0, "hang")


def test_short_pauses_do_not_hide_another_ranks_hang() -> None:
    """Rank 0 pauses briefly and often, and steps between; rank 1 is stuck."""

    def marks(now: float) -> list[ProgressMark]:
        since = now // 10 * 10
        return [rank(0, since, paused=now - since < 1, phase_since_s=START_S + since), rank(1, 10.0)]

    job = Replay(marks)
    job.until(80)
    assert job.kinds[:2] == ["suspect", "hang"]
    assert 40 <= job.events[0][0] <= 41.25, "no earlier than without the pauses, and no later than one pause"


# --- the clock --------------------------------------------------------------------------------------------------------


def test_gap_between_ticks_restarts_the_clock() -> None:
    """The supervisor was stopped (Ctrl-Z, a debugger) for an hour, which is not a stall."""
    job = Replay(lambda now: [rank(0, 10.0)])
    job.until(20)
    job.step(3600.0)
    assert job.events == [(3620.0, "clock-restarted")]
    assert job.until(3649.5) == job.events
    assert job.until(3660)[1] == (3650.0, "suspect")


def test_longest_tick_is_no_clock_gap() -> None:
    job = Replay(lambda now: [rank(0, 10.0)])
    job.until(39.75)
    job.step(CLOCK_GAP_S)
    assert job.kinds == ["suspect"]


def test_clock_gap_discards_a_look_but_no_hang() -> None:
    job = Replay(lambda now: [rank(0, 10.0)])
    job.until(41)
    assert job.kinds == ["suspect"]
    state, event = tick(job.state, (rank(0, 10.0),), POLICY, START_S + 100)
    assert event is not None
    assert event.kind == "clock-restarted"
    assert conclude(state, job.stalls[0], "dead", POLICY, START_S + 100) == (state, None)
    job.until(50)
    job.step(3600.0)
    assert (job.kinds[-1], job.state.status) == ("hang", Status.HUNG)


def test_new_attempt_starts_the_clock() -> None:
    """Marks older than the start of the watch count as made then."""
    state = initial_state(START_S + 100)
    assert tick(state, (rank(0, 10.0),), POLICY, START_S + 100.25)[1] is None
    stall = slowest((rank(0, 10.0),), POLICY, state.base_s, START_S + 110)
    assert stall is not None
    assert stall.stalled_s == 10.0


# --- the conclusion ---------------------------------------------------------------------------------------------------


def test_working_job_is_undecided_until_max_stall() -> None:
    job = Replay(lambda now: [rank(0, 10.0)], lambda now: "alive", GIVEN)
    job.until(400)
    assert job.events[-1] == (370.0, "hang"), "360 s after the last step, exactly"
    assert set(job.kinds[:-1]) == {"suspect", "undecided"}


def test_job_polling_for_hours_never_ends_by_default() -> None:
    job = Replay(lambda now: [rank(0, 10.0)], lambda now: "unknown", AUTO)
    job.until(24 * 3600)
    looks = [at for at, kind in job.events if kind == "suspect"]
    assert set(job.kinds) == {"suspect", "undecided"}
    assert max(b - a for a, b in pairwise(looks)) < 610, "a proof is still looked for"
    assert sum(at > 20 * 3600 for at in looks) < 30


def test_looks_at_a_working_job_are_a_minute_apart() -> None:
    job = Replay(lambda now: [rank(0, 10.0)], lambda now: "alive", replace(GIVEN, stall_s=600.0, max_stall_s=7200.0))
    job.until(7000)
    looks = [at for at, kind in job.events if kind == "suspect"]
    assert len(looks) > 10
    assert {round(b - a, 2) for a, b in pairwise(looks)} == {62.0}


STALL = Stall((0,), START_S, 40.0, 30.0, before_first_step=False)
CONCLUSIONS: dict[str, tuple[Stall, JobCondition, float, Policy, str, Status]] = {
    "a mark": (STALL, "moving", 40, POLICY, "recovered", Status.WATCHING),
    "a mark beats the limit": (STALL, "moving", 4000, GIVEN, "recovered", Status.WATCHING),
    "stopped": (STALL, "stopped", 40, POLICY, "clock-restarted", Status.WATCHING),
    "stopped beats the limit": (STALL, "stopped", 4000, GIVEN, "clock-restarted", Status.WATCHING),
    "dead": (STALL, "dead", 40, POLICY, "hang", Status.HUNG),
    "alive": (STALL, "alive", 1e6, POLICY, "undecided", Status.UNDECIDED),
    "unknown": (STALL, "unknown", 40, POLICY, "undecided", Status.UNDECIDED),
    "unknown, whatever its age": (STALL, "unknown", 1e6, POLICY, "undecided", Status.UNDECIDED),
    "unknown at the user's limit": (STALL, "unknown", 360, replace(POLICY, max_stall_given=True), "hang", Status.HUNG),
    "unknown, by the user's threshold": (STALL, "unknown", 40, GIVEN, "hang", Status.HUNG),
    "unseen, by the user's threshold": (STALL, "unseen", 40, GIVEN, "undecided", Status.UNDECIDED),
}


@pytest.mark.parametrize("case", CONCLUSIONS)
def test_conclusion_follows_from_the_answer(case: str) -> None:
    stall, found, now, policy, kind, status = CONCLUSIONS[case]
    state = DetectorState(Status.CONFIRMING, START_S, START_S + now, mark_s=stall.mark_s)
    after, event = conclude(state, stall, found, policy, START_S + now)
    assert event == StallEvent(kind, stall)  # type: ignore[arg-type]
    assert after.status is status
    assert after.base_s == (START_S + now if kind == "clock-restarted" else START_S)


AUTO = Policy(stall_s=60.0, startup_s=1800.0, max_stall_s=1800.0)
EIGHT = Policy(stall_s=8.0, startup_s=1800.0, max_stall_s=96.0, stall_given=True)
CAPPED = replace(AUTO, max_stall_s=300.0, max_stall_given=True)
STARTS = replace(AUTO, startup_s=20.0, max_stall_s=240.0, startup_given=True)
GROUP = Limits(600.0)
# policy, threshold, answer, limits: when it is ended, and when the bundle of a job that continues is due
TABLE: dict[str, tuple[Policy, bool, Answer, Limits, float | None, float | None]] = {
    "dead": (AUTO, False, "dead", UNLIMITED, 60.0, 60.0),
    "alive": (AUTO, False, "alive", UNLIMITED, None, ALIVE_BUNDLE_S),
    "alive, in a group": (AUTO, False, "alive", GROUP, None, 540.0),
    "unknown": (AUTO, False, "unknown", UNLIMITED, None, 60.0),
    "unknown, in a group": (AUTO, False, "unknown", GROUP, 540.0, 60.0),
    "unknown, in a group of a short timeout": (AUTO, False, "unknown", Limits(15.0), 60.0, 60.0),
    "unknown, in a group whose timeout raises an error": (
        *(AUTO, False, "unknown", Limits(100.0, raises=True)),
        *(None, 60.0),
    ),
    "unknown, in a group of a long timeout": (AUTO, False, "unknown", Limits(7200.0), 7140.0, 60.0),
    "unseen": (AUTO, False, "unseen", UNLIMITED, None, 60.0),
    "unseen, in a group": (AUTO, False, "unseen", GROUP, None, 60.0),
    "given: dead": (EIGHT, False, "dead", UNLIMITED, 8.0, None),
    "given: alive": (EIGHT, False, "alive", GROUP, 96.0, None),
    "given: unknown": (EIGHT, False, "unknown", GROUP, 8.0, None),
    "given: unseen": (EIGHT, False, "unseen", GROUP, 96.0, None),
    "max-stall: alive": (CAPPED, False, "alive", UNLIMITED, 300.0, ALIVE_BUNDLE_S),
    "max-stall: unknown": (CAPPED, False, "unknown", UNLIMITED, 300.0, 60.0),
    "start: dead": (AUTO, True, "dead", UNLIMITED, 1800.0, 1800.0),
    "start: alive": (AUTO, True, "alive", UNLIMITED, None, 1800.0),
    "start: unknown": (AUTO, True, "unknown", UNLIMITED, None, 1800.0),
    "start: unknown, in a group": (AUTO, True, "unknown", Limits(7200.0), 7140.0, 1800.0),
    "start: the threshold of steps says nothing": (EIGHT, True, "unknown", UNLIMITED, None, 1800.0),
    "start given: unknown": (STARTS, True, "unknown", UNLIMITED, 20.0, None),
    "start given: alive": (STARTS, True, "alive", UNLIMITED, 240.0, None),
}


@pytest.mark.parametrize("case", TABLE)
def test_limit_depends_on_the_answer(case: str) -> None:
    policy, before_first_step, answer, limits, ends_s, bundle_s = TABLE[case]
    threshold_s = policy.startup_s if before_first_step else policy.stall_s
    stall = Stall((0,), START_S, threshold_s, threshold_s, before_first_step=before_first_step)
    assert ends_after_s(policy, stall, answer, limits) == ends_s
    assert suspect_after_s(policy, stall, answer, limits) == bundle_s


PROVED = replace(POLICY, proved_s=15.0)
STEPS, STARTING = [rank(0, 0.0), rank(1, 0.0)], [rank(0), rank(1)]
# policy, marks, whether the looks of the suspicion find the proof as well: the events
PROOFS: dict[str, tuple[Policy, list[ProgressMark], JobCondition, list[tuple[float, str]]]] = {
    "steps": (PROVED, STEPS, "dead", [(15.0, "suspect"), (17.0, "hang")]),
    "start": (PROVED, STARTING, "dead", [(15.0, "suspect"), (17.0, "hang")]),
    "given": (replace(GIVEN, proved_s=15.0), STEPS, "dead", [(30.0, "suspect"), (32.0, "hang")]),
    "not again": (PROVED, STEPS, "unknown", [(15.0, "suspect"), (30.0, "suspect"), (32.0, "undecided")]),
    "of another time": (PROVED, [rank(0, 0.5)], "dead", [(30.5, "suspect"), (32.5, "hang")]),
    "in a phase": (PROVED, [rank(0, 0.0, phase="evaluate", phase_timeout_s=25.0)], "dead", [(25.0, "suspect")]),
}


@pytest.mark.parametrize("case", PROOFS)
def test_early_proof_lowers_the_threshold_while_it_holds(case: str) -> None:
    policy, marks, found, events = PROOFS[case]
    job = Replay(lambda now: marks, lambda now: found, policy, replace(initial_state(START_S), proved_mark_s=START_S))
    assert job.until(32.5)[: len(events)] == events


def test_last_look_before_the_limit_leaves_time_to_decide() -> None:
    state = DetectorState(Status.CONFIRMING, START_S, START_S + 355, mark_s=START_S)
    after, _ = conclude(state, STALL, "alive", GIVEN, START_S + 355)
    assert after.look_again_s == START_S + 360 - POLICY.confirm_s


def test_next_suspicion_is_due_from_the_slowest_rank() -> None:
    state = initial_state(START_S)
    marks = (rank(0, 3.0), rank(1, 2.0))
    state, event = tick(state, marks, POLICY, START_S + 4.0)
    assert (event, state.due_s) == (None, START_S + 2.0 + POLICY.stall_s)
    state = replace(state, last_tick_s=state.due_s)
    _, early = tick(state, marks, POLICY, state.due_s - 0.001)
    _, due = tick(state, marks, POLICY, state.due_s + 0.001)
    assert early is None
    assert due is not None and due.kind == "suspect"
    state, _ = tick(state, (rank(0, 3.0, paused=True),), POLICY, state.due_s)
    assert state.due_s == 0.0, "nobody is judged"
