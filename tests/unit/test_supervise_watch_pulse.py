"""A job that marks no step: when it is known to be in its loop, and what threshold follows from its collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_supervise_watch_threshold import POLICY, Ranks

from safelaunch.supervise import pollers
from safelaunch.supervise.pollers import PulseTaker
from safelaunch.supervise.watch import pulse
from safelaunch.supervise.watch.job import Watch
from safelaunch.supervise.watch.pulse import LOOP_AFTER, LOOP_AFTER_EXPLICIT, Limits, Pulse
from safelaunch.supervise.watch.rhythm import Bounds

AUTO = Limits(1800.0, 600.0, Bounds(60.0, 1800.0, 600.0))
EXPLICIT = Limits(1800.0, 30.0, None)


def beats(count: int, every_s: float = 15.0, longest_s: float = 0.0) -> Pulse:
    found, now = Pulse(), 100.0
    for number in range(count):
        found = pulse.heard(found, {0: number, 1: number}, now)
        now += longest_s if longest_s and number == 1 else every_s
    return found


@pytest.mark.parametrize(("limits", "enough"), [(AUTO, LOOP_AFTER), (EXPLICIT, LOOP_AFTER_EXPLICIT)])
def test_a_few_collectives_may_be_of_the_start(limits: Limits, enough: int) -> None:
    assert pulse.threshold(beats(enough - 1), limits, None).seconds == 1800.0
    assert pulse.threshold(beats(enough), limits, None).seconds < 1800.0


@pytest.mark.parametrize(
    ("limits", "longest_s", "cap_s", "seconds"),
    [
        (AUTO, 0.0, None, 600.0),
        (AUTO, 400.0, None, 1200.0),
        (AUTO, 4000.0, None, 1800.0),
        (AUTO, 0.0, 420.0, 420.0),
        (Limits(1800.0, 600.0, Bounds(5.0, 1800.0, 600.0)), 0.0, None, 50.0),
        (Limits(4.0, 600.0, Bounds(60.0, 1800.0, 600.0)), 0.0, None, 4.0),
        (Limits(9000.0, 600.0, Bounds(60.0, 700.0, 600.0)), 400.0, None, 700.0),
        (EXPLICIT, 400.0, None, 30.0),
    ],
)
def test_the_threshold_follows_the_longest_wait(
    limits: Limits, longest_s: float, cap_s: float | None, seconds: float
) -> None:
    assert pulse.threshold(beats(20, longest_s=longest_s), limits, cap_s).seconds == pytest.approx(seconds)


def test_looks_that_find_nothing_new_are_no_beats() -> None:
    one = beats(5)
    assert pulse.heard(one, {0: 4, 1: 4}, 1e6) is one
    assert pulse.heard(one, {}, 1e6) is one
    assert pulse.heard(one, {1: 5}, 1e6).beats == 6


def test_looks_are_as_rare_as_the_threshold_allows() -> None:
    assert AUTO.period_s == 15.0 and EXPLICIT.period_s == 30.0 / 8
    assert Limits(1800.0, 1.0, None).period_s == 0.5


def test_the_watch_of_a_job_without_steps() -> None:
    ranks = Ranks(2)
    watch = Watch(ranks, POLICY, 10.0, Bounds(5.0))  # type: ignore[arg-type]
    now = 10.0
    watch.tick(now)
    for number in range(LOOP_AFTER):
        now += 4.0
        watch.hear({0: number}, now)
        assert watch.tick(now).event is None
    assert watch.is_in_loop and watch.threshold_without_steps().seconds == 50.0
    for _ in range(24):  # 48 s
        now += 2.0
        assert watch.tick(now).event is None
    event = watch.tick(now + 3.0).event
    assert event is not None and event.kind == "suspect" and event.stall is not None
    assert event.stall.before_first_step and event.stall.threshold_s == 50.0
    watch.hear({0: 99}, now + 4.0)
    found = watch.conclude(event.stall, "active", now + 4.0)
    assert found is not None and found.kind == "undecided", "nobody that computes is given up"
    recovered = watch.tick(now + 4.5).event
    assert recovered is not None and recovered.kind == "recovered"


def test_another_attempt_begins_anew() -> None:
    ranks = Ranks(2)
    watch = Watch(ranks, POLICY, 10.0, Bounds(5.0))  # type: ignore[arg-type]
    watch.tick(10.0)
    for number in range(LOOP_AFTER):
        watch.hear({0: number}, 11.0 + number)
    assert watch.policy.startup_s < POLICY.startup_s
    ranks.attempt = 1
    watch.tick(30.0)
    assert (watch.policy.startup_s, watch.is_in_loop) == (POLICY.startup_s, False)


class Watched:
    """As much of a watch as is asked."""

    has_pulse_only, pulse_period_s = True, 5.0

    def __init__(self) -> None:
        self.roster = SimpleNamespace(attempt=0)
        self.heard: list[dict[int, int]] = []

    def targets(self) -> tuple[Any, ...]:
        return (SimpleNamespace(socket="/s"),)

    def hear(self, newest: dict[int, int], now: float) -> None:
        self.heard.append(newest)


def test_who_steps_is_not_asked_and_an_answer_from_an_ended_attempt_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(pollers, "newest_entries", lambda targets: asked.append(1) or {0: len(asked)})
    watch = Watched()
    taker = PulseTaker(watch)  # type: ignore[arg-type]

    def run(now: float) -> None:
        taker.advance(now)
        if taker._asking is not None:
            assert taker._asking.wait(10)

    for now in (10.0, 11.0, 14.0, 15.5, 16.0):
        run(now)
    assert (len(asked), watch.heard) == (2, [{0: 1}, {0: 2}])
    run(21.0)
    watch.roster.attempt = 1
    run(21.1)
    assert len(watch.heard) == 2
    watch.has_pulse_only = False
    run(100.0)
    assert len(asked) == 3
