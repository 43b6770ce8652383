"""When a job's health is looked at, and what is said of it."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.model import Gpu, GpuProcess
from safelaunch.supervise import health, stragglers
from safelaunch.supervise.health import HEALTH_AFTER_S, HEALTH_AGAIN_S, HealthPoller, Note
from safelaunch.supervise.pollers import BackgroundPoller
from safelaunch.supervise.stragglers import find_straggler
from safelaunch.supervise.watch.work import Background

SLOW = Note("rank 1", "rank 1 is slower than its peers: they waited for it 40% of 9 s")


class Watched:
    """Stub of a watch."""

    def __init__(self, first_step_s: float | None) -> None:
        first_ns = int(first_step_s * 1e9) if first_step_s else 0
        self.last_progress = {0: SimpleNamespace(first_step_ns=first_ns)}
        self.roster = SimpleNamespace(attempt=0)
        self.notes: tuple[str, ...] = ()

    def targets(self) -> tuple[Any, ...]:
        return ()


def run(health_: HealthPoller, now: float) -> None:
    health_.advance(now)
    if health_._asking is not None:
        assert health_._asking.wait(10)
        health_.advance(now)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Note, ...]]:
    """Notes that the next looks return, in order."""
    found: list[tuple[Note, ...]] = []
    monkeypatch.setattr(health, "find_notes", lambda targets, own: found.pop(0) if found else ())
    return found


def test_note_is_printed_once_and_kept(looks: list[tuple[Note, ...]], capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watched(first_step_s=100.0)
    one = HealthPoller(watch, list)  # type: ignore[arg-type]
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


def test_straggler_is_reported_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    straggler = stragglers.Straggler(5, 0.9, 0.4, 100, 30.0)
    monkeypatch.setattr(health, "find_straggler", lambda arrivals: straggler)
    monkeypatch.setattr(health, "has_driver", lambda environ: False)
    run(HealthPoller(Watched(first_step_s=100.0), list), 100.0 + HEALTH_AFTER_S)  # type: ignore[arg-type]
    said = capfd.readouterr().err
    assert "rank 5 is slower than its peers" in said
    assert said.endswith(f"(the job continues). To see where its time goes: safelaunch record {os.getpid()}\n")


def test_poller_asks_nothing_before_the_first_steps(looks: list[tuple[Note, ...]]) -> None:
    looks += [(SLOW,)]
    run(HealthPoller(Watched(None), list), 1e6)  # type: ignore[arg-type]
    assert len(looks) == 1


def test_new_attempt_resets_the_poller(looks: list[tuple[Note, ...]]) -> None:
    watch = Watched(first_step_s=100.0)
    one = HealthPoller(watch, list)  # type: ignore[arg-type]
    looks += [(SLOW,)]
    run(one, 200.0)
    watch.roster.attempt, watch.last_progress = 1, {}
    run(one, 210.0)
    assert watch.notes == ()


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


MS = 1_000_000


def steps(delays: list[list[float]], *, buckets: int = 1, group: str = "0") -> dict[int, dict[tuple[str, int], int]]:
    """Synchronous steps: ``delays[step][rank]`` milliseconds of work each, then ``buckets`` collectives together."""
    arrivals: dict[int, dict[tuple[str, int], int]] = {rank: {} for rank in range(len(delays[0]))}
    now, number = 0.0, 1
    for work in delays:
        for bucket in range(buckets):
            for rank, delay in enumerate(work):
                arrivals[rank][group, number] = int((now + delay + bucket) * MS)
            number += 1
        now += max(work) + buckets
    return arrivals


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_is_always_last_is_the_straggler(ranks: int, buckets: int, slow: int) -> None:
    found = find_straggler(steps([[150.0 if rank == slow else 100.0 for rank in range(ranks)]] * 80, buckets=buckets))
    assert found is not None
    assert (found.rank, found.last) == (slow, 1.0)
    assert 0.25 < found.waited < 0.4  # a third, however many buckets
    assert found.words.startswith(f"rank {slow} is slower than its peers")


def test_noise_gives_no_straggler() -> None:
    noise = random.Random(3)
    for _ in range(50):
        assert find_straggler(steps([[100 + noise.uniform(0, 60) for _ in range(4)] for _ in range(100)])) is None


def test_microsecond_delays_give_no_straggler() -> None:
    assert find_straggler(steps([[100.0, 102.0]] * 100)) is None


def test_one_long_evaluation_gives_no_straggler() -> None:
    work = [[100.0, 100.5] for _ in range(100)]
    work[50][0] = 30_000.0
    assert find_straggler(steps(work)) is None


@pytest.mark.parametrize("count", [0, 1, 19])
def test_too_few_collectives_give_no_straggler(count: int) -> None:
    assert find_straggler(steps([[1000.0, 5000.0]] * 19) if count else {}) is None
    assert find_straggler({0: {("0", 1): 5}}) is None


def test_straggler_is_found_in_its_own_group() -> None:
    rows = steps([[100.0, 100.2]] * 90, group="rows")
    columns = steps([[100.0, 180.0]] * 90, group="columns")
    arrivals = {0: rows[0], 1: {**rows[1], **columns[0]}, 2: columns[1]}
    found = find_straggler(arrivals)
    assert found is not None and found.rank == 2


def test_straggler_is_found_in_differently_wrapped_windows() -> None:
    arrivals = steps([[100.0, 160.0, 100.0]] * 100)
    arrivals[0] = {key: at for key, at in arrivals[0].items() if key[1] > 30}
    found = find_straggler(arrivals)
    assert found is not None and (found.rank, found.collectives) == (1, 70)


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
