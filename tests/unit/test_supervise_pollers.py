"""When a job's health is looked at, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.capture.counters import Counters, ProcessCounters, Used
from safelaunch.supervise import pollers
from safelaunch.supervise.pollers import HEALTH_AFTER_S, HEALTH_AGAIN_S, Health, Note, WorkTaker
from safelaunch.supervise.watch.work import Background

SLOW = Note("rank 1", "rank 1 is slower than its peers: they waited for it 40% of 9 s")


class Watched:
    """As much of a watch as is asked."""

    def __init__(self, first_step_s: float | None) -> None:
        first_ns = int(first_step_s * 1e9) if first_step_s else 0
        self.last_progress = {0: SimpleNamespace(first_step_ns=first_ns)}
        self.roster = SimpleNamespace(attempt=0)
        self.notes: tuple[str, ...] = ()

    def targets(self) -> tuple[Any, ...]:
        return ()


def run(health_: Health, now: float) -> None:
    health_.advance(now)
    if health_._asking is not None:
        assert health_._asking.wait(10)
        health_.advance(now)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Note, ...]]:
    """What the next looks will find; each takes the first."""
    found: list[tuple[Note, ...]] = []
    monkeypatch.setattr(pollers, "look", lambda targets, own: found.pop(0) if found else ())
    return found


def test_a_note_comes_once_and_is_kept(looks: list[tuple[Note, ...]], capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watched(first_step_s=100.0)
    one = Health(watch, list)  # type: ignore[arg-type]
    looks += [(SLOW,), (Note("rank 1", SLOW.words.replace("40%", "45%")),), ()]
    run(one, 100.0 + HEALTH_AFTER_S - 1)
    assert len(looks) == 3
    run(one, 100.0 + HEALTH_AFTER_S)
    assert (watch.notes, len(looks)) == ((SLOW.words,), 2)
    assert capfd.readouterr().err == f"safelaunch: {SLOW.words} (the job continues)\n"
    run(one, 100.0 + HEALTH_AFTER_S + 5)
    assert len(looks) == 2
    run(one, 100.0 + HEALTH_AFTER_S + HEALTH_AGAIN_S)
    assert "45%" in watch.notes[0]
    assert capfd.readouterr().err == ""
    run(one, 100.0 + HEALTH_AFTER_S + 2 * HEALTH_AGAIN_S)
    assert watch.notes == ()


def test_nothing_is_asked_before_the_first_steps(looks: list[tuple[Note, ...]]) -> None:
    looks += [(SLOW,)]
    run(Health(Watched(None), list), 1e6)  # type: ignore[arg-type]
    assert len(looks) == 1


def test_another_attempt_begins_anew(looks: list[tuple[Note, ...]]) -> None:
    watch = Watched(first_step_s=100.0)
    one = Health(watch, list)  # type: ignore[arg-type]
    looks += [(SLOW,)]
    run(one, 200.0)
    watch.roster.attempt, watch.last_progress = 1, {}
    run(one, 210.0)
    assert watch.notes == ()


# --- what is learned of the background --------------------------------------------------------------------------------


def cpu(seconds: float, **threads: float) -> Counters:
    """``threads``: milliseconds of CPU so far, by ``t`` and their number."""
    used = {int(name[1:]): Used(ms) for name, ms in threads.items()}
    return Counters(seconds, int(100 * seconds), {(10, 1): ProcessCounters(10, threads=used)})


def taught(*readings: tuple[Counters, float]) -> Background:
    """What was learned from readings, each with the time of the newest step then."""
    newest = SimpleNamespace(since_s=0.0)
    watch = SimpleNamespace(
        background=Background(),
        quiet=None,
        usual_step_s=0.1,
        last_progress={0: SimpleNamespace(first_step_ns=1)},
        roster=SimpleNamespace(attempt=0),
        spell=lambda now: newest,
        take_quiet=lambda answer: None,
    )
    taker = WorkTaker(watch)  # type: ignore[arg-type]
    taker.reset()
    for reading, step_s in readings:
        newest.since_s = step_s
        taker.take(reading, reading.at_s)
    return watch.background


def test_what_begins_behind_the_last_step_is_no_background() -> None:
    """A thread that computes from then on: the window in which it began had a step, too."""
    steps = ((cpu(0.0, t11=0), 0.0), (cpu(2.0, t11=100), 2.0), (cpu(4.0, t11=200, t12=1500), 2.5))
    learned = taught(*steps, (cpu(14.0, t11=200, t12=9000), 2.5))
    assert ("cpu", 10, 1, 11) in learned.peaks
    assert ("cpu", 10, 1, 12) not in learned.peaks
    went_on = taught(*steps, (cpu(6.0, t11=300, t12=1600), 5.5), (cpu(8.0, t11=400, t12=1600), 7.5))
    assert ("cpu", 10, 1, 12) in went_on.peaks


def test_what_was_learned_before_the_quiet_is_kept() -> None:
    learned = taught((cpu(0.0, t11=0), 0.0), (cpu(2.0, t11=100), 2.0), (cpu(14.0, t11=100), 2.1))
    assert ("cpu", 10, 1, 11) in learned.peaks
