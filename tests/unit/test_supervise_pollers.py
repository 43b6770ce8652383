"""When a job's health is looked at, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.model import Gpu, GpuProcess
from safelaunch.supervise import health
from safelaunch.supervise.health import HEALTH_AFTER_S, HEALTH_AGAIN_S, HealthPoller, LinkPoller, Note
from safelaunch.supervise.pollers import BackgroundPoller, Poller
from safelaunch.supervise.watch.quiet import Spell
from safelaunch.supervise.watch.work import Background

SHARED = Note("pid 1", "pid 1, not of this job, holds 40% of GPU 9")


class Watched:
    """Stub of a watch."""

    def __init__(self, first_step_s: float | None) -> None:
        first_ns = int(first_step_s * 1e9) if first_step_s else 0
        self.last_progress = {0: SimpleNamespace(first_step_ns=first_ns)}
        self.roster = SimpleNamespace(attempt=0)
        self.notes: tuple[str, ...] = ()
        self.gpus: tuple[Gpu, ...] = ()

    def keep_gpus(self, gpus: tuple[Gpu, ...], at_s: float) -> None:
        self.gpus = gpus

    def targets(self) -> tuple[Any, ...]:
        return ()

    def note(self, source: str, notes: tuple[str, ...]) -> None:
        self.notes = notes


def run(poller: Poller[Any], now: float) -> None:
    poller.advance(now)
    if poller._asking is not None:
        assert poller._asking.wait(10)
        poller.advance(now)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Note, ...]]:
    """Notes that the next looks return, in order."""
    found: list[tuple[Note, ...]] = []
    monkeypatch.setattr(health, "read_gpus", lambda: (Gpu(0),))
    monkeypatch.setattr(health, "notes_on_gpus", lambda gpus, ranks, own: found.pop(0) if found else ())
    return found


def test_note_is_printed_once_and_kept(looks: list[tuple[Note, ...]], capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watched(first_step_s=100.0)
    one = HealthPoller(watch, list)  # type: ignore[arg-type]
    looks += [(SHARED,), (Note("pid 1", SHARED.words.replace("40%", "45%")),), ()]
    run(one, 100.0 + HEALTH_AFTER_S - 1)
    assert len(looks) == 3
    run(one, 100.0 + HEALTH_AFTER_S)
    assert (watch.notes, len(looks), watch.gpus) == ((SHARED.words,), 2, (Gpu(0),))
    assert capfd.readouterr().err == f"safelaunch: {SHARED.words} (the job continues)\n"
    run(one, 100.0 + HEALTH_AFTER_S + 5)
    assert len(looks) == 2
    run(one, 100.0 + HEALTH_AFTER_S + HEALTH_AGAIN_S)
    assert "45%" in watch.notes[0]
    assert capfd.readouterr().err == ""
    run(one, 100.0 + HEALTH_AFTER_S + 2 * HEALTH_AGAIN_S)
    assert watch.notes == ()


def test_poller_asks_nothing_before_the_first_steps(looks: list[tuple[Note, ...]]) -> None:
    looks += [(SHARED,)]
    run(HealthPoller(Watched(None), list), 1e6)  # type: ignore[arg-type]
    assert len(looks) == 1


def test_new_attempt_resets_the_poller(looks: list[tuple[Note, ...]]) -> None:
    watch = Watched(first_step_s=100.0)
    one = HealthPoller(watch, list)  # type: ignore[arg-type]
    looks += [(SHARED,)]
    run(one, 200.0)
    watch.roster.attempt, watch.last_progress = 1, {}
    run(one, 210.0)
    assert watch.notes == ()


@pytest.mark.parametrize(
    ("quiet_s", "longest_s", "reads"), [(4.0, 0.1, False), (6.0, 0.1, True), (6.0, 4.0, False), (13.0, 4.0, True)]
)
def test_links_are_read_once_in_a_quiet_time(quiet_s: float, longest_s: float, reads: bool) -> None:
    kept: list[object] = []
    watch = SimpleNamespace(
        spell=lambda now: Spell(100.0, "steps", longest_s=longest_s),
        roster=SimpleNamespace(attempt=0),
        quiet_links=None,
        keep_links=kept.append,
    )
    poller = LinkPoller(watch)  # type: ignore[arg-type]
    run(poller, 100.0 + quiet_s)
    assert len(kept) == reads
    watch.quiet_links = {}
    run(poller, 200.0)
    assert len(kept) == reads
    watch.quiet_links, watch.spell = None, lambda now: None
    run(poller, 300.0)
    assert len(kept) == reads, "an announced phase"


# --- what is learned of the background --------------------------------------------------------------------------------


def cpu(seconds: float, **threads: float) -> Counters:
    # ``threads``: milliseconds of CPU by thread, as t1, t2, ...
    used = {int(name[1:]): CpuTime(ms) for name, ms in threads.items()}
    return Counters(seconds, int(100 * seconds), {(10, 1): ProcessCounters(10, threads=used)})


def taught(*readings: tuple[Counters, float]) -> Background:
    """Returns the background learned from readings, each with the time of the latest step."""
    newest = SimpleNamespace(since_s=0.0)
    watch = SimpleNamespace(
        background=Background(),
        quiet=None,
        usual_step_s=0.1,
        last_progress={0: SimpleNamespace(first_step_ns=1)},
        roster=SimpleNamespace(attempt=0),
        spell=lambda now: newest,
        keep_quiet_counters=lambda answer: None,
    )
    taker = BackgroundPoller(watch)  # type: ignore[arg-type]
    taker.reset()
    for reading, step_s in readings:
        newest.since_s = step_s
        taker.take(reading, reading.at_s)
    return watch.background


def test_window_after_the_last_step_is_not_learned() -> None:
    """A thread that computes from then on: the window in which it began had a step, too."""
    steps = ((cpu(0.0, t11=0), 0.0), (cpu(2.0, t11=100), 2.0), (cpu(4.0, t11=200, t12=1500), 2.5))
    learned = taught(*steps, (cpu(14.0, t11=200, t12=9000), 2.5))
    assert ("cpu", 10, 1, 11) in learned.peaks
    assert ("cpu", 10, 1, 12) not in learned.peaks
    went_on = taught(*steps, (cpu(6.0, t11=300, t12=1600), 5.5), (cpu(8.0, t11=400, t12=1600), 7.5))
    assert ("cpu", 10, 1, 12) in went_on.peaks


def test_background_from_before_the_quiet_time_is_kept() -> None:
    learned = taught((cpu(0.0, t11=0), 0.0), (cpu(2.0, t11=100), 2.0), (cpu(14.0, t11=100), 2.1))
    assert ("cpu", 10, 1, 11) in learned.peaks


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpu(index: int, *processes: tuple[int, int | None]) -> Gpu:
    return Gpu(index, processes=tuple(GpuProcess(pid, held) for pid, held in processes))


def test_two_ranks_on_one_gpu_give_a_note() -> None:
    gpus = [gpu(0, (100, 1 << 30), (101, 1 << 30)), gpu(1)]
    (note,) = health.notes_on_gpus(gpus, {0: 100, 1: 101}, {100, 101})
    assert note.words.startswith("ranks 0, 1 are on the same GPU 0")


def test_foreign_memory_on_a_used_gpu_gives_a_note() -> None:
    gpus = [gpu(0, (100, 1 << 30), (999, 3 << 30)), gpu(1, (998, 3 << 30)), gpu(2, (101, 5), (997, 1000))]
    (note,) = health.notes_on_gpus(gpus, {0: 100, 1: 101}, {100, 101, 102})
    assert note.words == "pid 999, not of this job, holds 3.0 GiB of GPU 0, which rank 0 uses"


@pytest.mark.parametrize(
    "gpus",
    [
        [],
        [Gpu(0, error="lost")],
        [gpu(0, (100, None), (5, None))],
    ],
)
def test_driver_without_process_facts_gives_no_note(gpus: list[Gpu]) -> None:
    assert health.notes_on_gpus(gpus, {0: 100}, {100}) == []
