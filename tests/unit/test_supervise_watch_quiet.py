"""When a quiet job gets an early look: a history of spells, and the looks at them."""

from __future__ import annotations

from typing import Any

import pytest

from safelaunch.supervise.watch import quiet
from safelaunch.supervise.watch.quiet import (
    FORGETS_S,
    GROWTH,
    LEAST_S,
    MOST_S,
    OUTLASTS,
    UNKNOWN_S,
    QuietHistory,
    Spell,
    Stage,
)
from safelaunch.supervise.watch.rhythm import ThresholdBounds
from tests.support.watched import BOUNDS, train, watched

TICK_S = 0.25


class Job:
    """Ticks a job's quiet, from its first step on; ``looks`` are the times of the early looks, since the last mark."""

    def __init__(self, longest_s: float = 0.1, stage: Stage = "steps") -> None:
        self.now = self.mark_s = 1000.0
        self.quiet = QuietHistory()
        self.longest_s, self.stage = longest_s, stage
        self.looks: list[float] = []
        self.step()

    def spell(self, *, made: bool = True) -> Spell:
        known_s = self.longest_s if self.stage == "steps" else 0.0
        return Spell(self.mark_s, self.stage, known_s / 2, known_s, made)

    def step(self, *, made: bool = True) -> None:
        self.mark_s = self.now
        self.quiet = quiet.follow(self.quiet, self.spell(made=made), self.now)

    def wait(self, seconds: float, *, judged: bool = True) -> list[float]:
        """No step for so long; returns the looks."""
        self.looks = []
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            spell = self.spell() if judged else None
            self.quiet = quiet.follow(self.quiet, spell, self.now)
            if spell is not None and quiet.is_due(self.quiet, spell, self.now):
                self.quiet = quiet.with_look(self.quiet, self.now)
                self.looks.append(self.now - self.mark_s)
        return self.looks


def first_look(job: Job) -> float:
    looks = job.wait(300)
    return looks[0] if looks else 0.0


@pytest.mark.parametrize(
    ("longest_s", "after_s"),
    [(0.05, LEAST_S), (0.5, LEAST_S), (1.0, 8.0), (5.0, 40.0), (20.0, MOST_S), (60.0, OUTLASTS * 60)],
)
def test_first_look_comes_after_a_few_longest_steps(longest_s: float, after_s: float) -> None:
    job = Job(longest_s)
    assert after_s <= first_look(job) <= after_s + TICK_S


@pytest.mark.parametrize("stage", ["start", "first steps"])
def test_first_look_without_a_usual_step_comes_later(stage: Stage) -> None:
    job = Job(stage=stage)
    assert UNKNOWN_S <= first_look(job) <= UNKNOWN_S + TICK_S


def test_stepping_job_is_never_looked_at() -> None:
    job = Job(1.0)
    for _ in range(1000):
        job.step()
        assert job.wait(1.0) == []


def test_looks_at_one_spell_follow_at_growing_intervals() -> None:
    job = Job()
    first, second, third = job.wait(60)
    assert (first, second, third) == pytest.approx((LEAST_S, GROWTH * LEAST_S, GROWTH**2 * LEAST_S), abs=1.0)


def test_recurring_evaluation_is_looked_at_once() -> None:
    job = Job()
    lengths = [30.0, 32.0, 29.0, 40.0, 35.0]
    seen = []
    for length in lengths:
        job.step()
        seen.append(len(job.wait(length)))
    assert seen == [2, 0, 0, 0, 0]
    job.step()
    assert first_look(job) == pytest.approx(OUTLASTS * 40, abs=1.0), "a hang outlasts them"


def test_old_spell_is_forgotten() -> None:
    job = Job()
    job.wait(100)
    job.step()
    assert job.wait(100) == []
    job.step()
    job.now += FORGETS_S
    job.step(made=False)
    assert first_look(job) == pytest.approx(LEAST_S, abs=1.0)


def test_length_of_a_start_is_not_learned() -> None:
    job = Job(stage="start")
    job.wait(50)
    job.stage = "first steps"
    job.step()
    job.wait(50)
    job.stage = "steps"
    job.step()
    assert first_look(job) == pytest.approx(LEAST_S, abs=1.0)


def test_announced_quiet_does_not_count() -> None:
    """After a pause, a timed phase or a time without a judged rank, the peers' marks are as old as it lasted."""
    job = Job()
    assert job.wait(100, judged=False) == []
    begin_s = job.now
    looks = job.wait(20)
    assert looks[0] - (begin_s - job.mark_s) == pytest.approx(LEAST_S, abs=1.0)


def test_restart_of_the_clock_ends_no_spell() -> None:
    job = Job()
    job.wait(60)
    job.step(made=False)
    assert first_look(job) == pytest.approx(LEAST_S, abs=1.0)


# --- of a watched job -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [BOUNDS, None])
def test_usual_step_is_known_under_a_fixed_threshold(bounds: ThresholdBounds | None) -> None:
    watch, ranks = watched(bounds)
    now, _ = train(watch, ranks, 100, 1.0)
    spell = watch.spell(now + 5.0)
    assert spell is not None and (spell.since_s, spell.stage, spell.made) == (now, "steps", True)
    assert (spell.usual_s, spell.longest_s) == pytest.approx((1.0, 1.0), rel=0.11)


def test_usual_step_of_few_steps_is_their_mean() -> None:
    watch, ranks = watched()
    train(watch, ranks, 2, 1.0)
    spell = watch.spell(20.0)
    assert spell is not None and (spell.stage, spell.longest_s) == ("first steps", 0.0)
    watch, ranks = watched()
    ranks.step(0, 5, 14.0, first_step_ns=int(10e9))
    ranks.step(1, 5, 14.0, first_step_ns=int(10e9))
    watch.tick(14.1)
    spell = watch.spell(20.0)
    assert spell is not None and (spell.stage, spell.longest_s) == ("steps", pytest.approx(1.0, rel=0.11))


def test_spell_before_the_first_step_has_stage_start() -> None:
    watch, _ = watched()
    watch.tick(10.5)
    spell = watch.spell(20.0)
    assert spell is not None and (spell.stage, spell.since_s, spell.made) == ("start", 10.0, False)


@pytest.mark.parametrize(
    "fields", [{"paused": True}, {"phase": "eval", "phase_timeout_s": 60.0, "phase_since_ns": int(30e9)}]
)
def test_paused_or_timed_rank_has_no_quiet_spell(fields: dict[str, Any]) -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 20, 1.0)
    ranks.step(0, 20, now, **fields)
    watch.tick(now + 1.0)
    assert watch.spell(now + 20.0) is None


# --- frozen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual_s", "longest_s", "quiet_s", "frozen"),
    [
        (0.1, 0.2, 1.9, False),  # ten usual steps, but too short to count as frozen
        (0.1, 0.2, 2.0, True),
        (1.0, 1.5, 9.9, False),
        (1.0, 1.5, 10.0, True),
        (0.1, 4.0, 5.9, False),  # one step in a hundred takes four seconds
        (0.1, 4.0, 6.0, True),
        (0.0, 0.0, 3600.0, False),  # nothing is usual yet
    ],
)
def test_job_is_frozen_after_ten_usual_steps(usual_s: float, longest_s: float, quiet_s: float, frozen: bool) -> None:
    spell = Spell(1000.0, "steps", usual_s, longest_s)
    expected = quiet_s if frozen else 0.0
    assert quiet.frozen_s(None, spell, 1000.0 + quiet_s) == pytest.approx(expected)
    assert quiet.frozen_s(QuietHistory("steps"), spell, 1000.0 + quiet_s) == pytest.approx(expected)
    assert quiet.frozen_s(None, None, 1000.0 + quiet_s) == 0.0


def test_evaluation_of_usual_length_is_not_frozen() -> None:
    job = Job(longest_s=0.1)
    job.wait(20.0)
    assert quiet.frozen_s(job.quiet, job.spell(), job.now)
    job.step()
    job.wait(25.0)
    assert not quiet.frozen_s(job.quiet, job.spell(), job.now)
    job.wait(10.0)
    assert quiet.frozen_s(job.quiet, job.spell(), job.now)


def test_announced_time_does_not_count_as_frozen() -> None:
    job = Job(longest_s=0.1)
    job.wait(20.0, judged=False)
    job.wait(1.0)
    assert not quiet.frozen_s(job.quiet, job.spell(), job.now)
    job.wait(2.0)
    assert quiet.frozen_s(job.quiet, job.spell(), job.now) < 4.0
