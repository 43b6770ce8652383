"""When a job's health is looked at, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.supervise import pollers
from safelaunch.supervise.pollers import HEALTH_AFTER_S, HEALTH_AGAIN_S, Health, Note

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
