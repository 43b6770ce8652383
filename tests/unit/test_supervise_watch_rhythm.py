"""The learned threshold on replayed histories: healthy jobs are suspected at most once, freezes soon."""

from __future__ import annotations

import random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.supervise import pollers
from safelaunch.supervise.pollers import PulsePoller
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.pulse import LOOP_AFTER, LOOP_AFTER_EXPLICIT, Pulse, PulseLimits
from safelaunch.supervise.watch.rhythm import StepRhythm, ThresholdBounds, cap_of, learn, quantile_s, threshold
from tests.support.histories import BOUNDS, History, Replay, histories, recorded, replay
from tests.support.watched import POLICY, Ranks

# One group: all of them look at the same replays.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rhythm")]
EVERY = tuple(histories(20))


@pytest.fixture(scope="module")
def replays() -> list[Replay]:
    return [replay(history) for history in EVERY]


def test_recorded_histories_contain_enough_steps() -> None:
    assert len(EVERY) >= 200


def test_ordinary_jobs_are_never_suspected(replays: list[Replay]) -> None:
    """Even with a floor of 5 s, far below the default: steps, turns of steps, warm-up, a curriculum."""
    ordinary = ("steady", "compiled", "accumulated", "bimodal", "curriculum")
    wrong = [
        (r.history.kind, r.history.seed, r.suspected[:3]) for r in replays if r.history.kind in ordinary and r.suspected
    ]
    assert wrong == []


@pytest.mark.parametrize("history", list(recorded()), ids=lambda history: history.kind)
def test_recorded_jobs_are_never_suspected(history: History) -> None:
    """An evaluation that is longer than the floor of 5 s, a twelfth of the default, is looked at until it is known."""
    found = replay(history)
    assert found.known.count > 100
    assert len(found.suspected) <= (2 if max(history.gaps) > BOUNDS.floor_s else 0)
    assert max(history.gaps) < ThresholdBounds().floor_s


def test_rhythm_is_known_after_its_second_beat(replays: list[Replay]) -> None:
    """The first pauses are looked at (and let be: an evaluation computes); then they are expected."""
    for r in replays:
        if r.history.kind in ("evaluated", "long_evaluations"):
            assert len(r.suspected) <= 3, (r.history.kind, r.history.seed, r.suspected)


def test_irregular_pauses_are_rarely_suspected(replays: list[Replay]) -> None:
    for r in replays:
        if r.history.kind in ("hiccups", "by_the_clock"):
            assert len(r.suspected) <= 6, (r.history.kind, r.history.seed, r.suspected)


def test_single_long_pause_does_not_blind_the_watch(replays: list[Replay]) -> None:
    for r in replays:
        if r.history.kind == "one_accident":
            assert len(r.suspected) == 1
            # Twice as far as the accident it might come again; anywhere else it is forgotten.
            anywhere = [r.known, replay(r.history, len(r.history.gaps) - 23).known]
            assert min(threshold(known, BOUNDS).seconds for known in anywhere) <= max(5.0, 3 * quantile_s(r.known))


def test_freeze_is_suspected_soon() -> None:
    """At a random step: within three of the longest ordinary steps, or the floor, in the median."""
    delays = []
    for history in EVERY:
        dice = random.Random(history.seed)
        frozen_at = dice.randint(len(history.gaps) // 4, len(history.gaps) - 1)
        known = replay(history, frozen_at).known
        allowed = max(BOUNDS.floor_s, 3 * quantile_s(known))
        delays.append(threshold(known, BOUNDS).seconds / allowed)
    assert median(delays) <= 1.0
    assert sum(delay > 1.0 for delay in delays) < 0.35 * len(delays), "only jobs with long pauses"


def test_initial_threshold_applies_until_enough_steps_are_known() -> None:
    known = StepRhythm()
    for step in range(1, 8):
        known = learn(known, step, step * 100.0, step * 100.0 + 0.1)
        assert threshold(known, BOUNDS).seconds == BOUNDS.initial_s


def test_learned_threshold_respects_floor_ceiling_and_cap() -> None:
    known = StepRhythm()
    for step in range(1, 100):
        known = learn(known, step, step * 1000.0, step * 1000.0 + 0.1)
    assert threshold(known, ThresholdBounds(ceiling_s=1200.0)).seconds == 1200.0
    found = threshold(known, ThresholdBounds(), cap_s=420.0)
    assert (found.seconds, "process group" in found.why) == (420.0, True)
    quick = StepRhythm()
    for step in range(1, 100):
        quick = learn(quick, step, step * 0.05, step * 0.05 + 0.01)
    assert threshold(quick, ThresholdBounds()).seconds == ThresholdBounds().floor_s


@pytest.mark.parametrize(
    ("timeout_s", "cap"),
    [(1800.0, 1260.0), (600.0, 420.0), (86.0, 60.2), (70.0, 60.0), (60.0, 60.0), (15.0, 10.5)],
)
def test_threshold_below_the_floor_needs_a_shorter_timeout(timeout_s: float, cap: float) -> None:
    assert cap_of(timeout_s, floor_s=60.0) == pytest.approx(cap)


def test_excused_time_is_not_learned() -> None:
    known = StepRhythm()
    for step in range(1, 50):
        known = learn(known, step, step * 1.0, step + 0.1)
    known = learn(known, 49, 49.0, 900.0, excused=True)
    known = learn(known, 50, 1000.0, 1000.1, excused=True)
    assert known.pauses == () and quantile_s(known) < 1.2


def test_restart_counts_from_its_own_beginning() -> None:
    known = StepRhythm()
    for step in range(1, 50):
        known = learn(known, step, step * 1.0, step + 0.1)
    again = learn(known, 1, 500.0, 500.1)
    assert (again.last_step, again.pauses) == (1, ())


# --- the pulse of a job that marks no step ----------------------------------------------------------------------------


AUTO = PulseLimits(1800.0, 600.0, ThresholdBounds(60.0, 1800.0, 600.0))
EXPLICIT = PulseLimits(1800.0, 30.0, None)


def beats(count: int, every_s: float = 15.0, longest_s: float = 0.0) -> Pulse:
    found, now = Pulse(), 100.0
    for number in range(count):
        found = found.after_look({0: number, 1: number}, now)
        now += longest_s if longest_s and number == 1 else every_s
    return found


@pytest.mark.parametrize(("limits", "enough"), [(AUTO, LOOP_AFTER), (EXPLICIT, LOOP_AFTER_EXPLICIT)])
def test_few_collectives_do_not_make_a_loop(limits: PulseLimits, enough: int) -> None:
    assert beats(enough - 1).threshold(limits, None).seconds == 1800.0
    assert beats(enough).threshold(limits, None).seconds < 1800.0


@pytest.mark.parametrize(
    ("limits", "longest_s", "cap_s", "seconds"),
    [
        (AUTO, 0.0, None, 600.0),
        (AUTO, 400.0, None, 1200.0),
        (AUTO, 4000.0, None, 1800.0),
        (AUTO, 0.0, 420.0, 420.0),
        (PulseLimits(1800.0, 600.0, ThresholdBounds(5.0, 1800.0, 600.0)), 0.0, None, 50.0),
        (PulseLimits(4.0, 600.0, ThresholdBounds(60.0, 1800.0, 600.0)), 0.0, None, 4.0),
        (PulseLimits(9000.0, 600.0, ThresholdBounds(60.0, 700.0, 600.0)), 400.0, None, 700.0),
        (EXPLICIT, 400.0, None, 30.0),
    ],
)
def test_pulse_threshold_follows_the_longest_wait(
    limits: PulseLimits, longest_s: float, cap_s: float | None, seconds: float
) -> None:
    assert beats(20, longest_s=longest_s).threshold(limits, cap_s).seconds == pytest.approx(seconds)


def test_looks_without_new_collectives_are_no_beats() -> None:
    one = beats(5)
    assert one.after_look({0: 4, 1: 4}, 1e6) is one
    assert one.after_look({}, 1e6) is one
    assert one.after_look({1: 5}, 1e6).beats == 6


def test_pulse_period_depends_on_the_threshold() -> None:
    assert AUTO.period_s == 15.0 and EXPLICIT.period_s == 30.0 / 8
    assert PulseLimits(1800.0, 1.0, None).period_s == 0.5


def test_watch_without_steps_follows_the_collectives() -> None:
    ranks = Ranks(2)
    watch = Watch(ranks, POLICY, 10.0, ThresholdBounds(5.0))  # type: ignore[arg-type]
    now = 10.0
    watch.tick(now)
    for number in range(LOOP_AFTER):
        now += 4.0
        watch.note_collectives({0: number}, now)
        assert watch.tick(now).event is None
    assert watch.is_in_loop and watch.threshold_without_steps().seconds == 50.0
    for _ in range(24):  # 48 s
        now += 2.0
        assert watch.tick(now).event is None
    event = watch.tick(now + 3.0).event
    assert event is not None and event.kind == "suspect" and event.stall is not None
    assert event.stall.before_first_step and event.stall.threshold_s == 50.0
    watch.note_collectives({0: 99}, now + 4.0)
    found = watch.conclude(event.stall, "alive", now + 4.0)
    assert found is not None and found.kind == "undecided", "a computing rank must not be given up"
    recovered = watch.tick(now + 4.5).event
    assert recovered is not None and recovered.kind == "recovered"


def test_new_attempt_resets_the_pulse() -> None:
    ranks = Ranks(2)
    watch = Watch(ranks, POLICY, 10.0, ThresholdBounds(5.0))  # type: ignore[arg-type]
    watch.tick(10.0)
    for number in range(LOOP_AFTER):
        watch.note_collectives({0: number}, 11.0 + number)
    assert watch.policy.startup_s < POLICY.startup_s
    ranks.attempt = 1
    watch.tick(30.0)
    assert (watch.policy.startup_s, watch.is_in_loop) == (POLICY.startup_s, False)


class Watched:
    """Stub of a watch."""

    has_pulse_only, pulse_period_s = True, 5.0

    def __init__(self) -> None:
        self.roster = SimpleNamespace(attempt=0)
        self.heard: list[dict[int, int]] = []

    def targets(self) -> tuple[Any, ...]:
        return (SimpleNamespace(socket="/s"),)

    def note_collectives(self, newest: dict[int, int], now: float) -> None:
        self.heard.append(newest)


def test_pulse_poller_skips_stepping_jobs_and_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(pollers, "newest_entries", lambda targets: asked.append(1) or {0: len(asked)})
    watch = Watched()
    taker = PulsePoller(watch)  # type: ignore[arg-type]

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
