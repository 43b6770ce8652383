"""A rank that is always last, and what looks like one and is none."""

from __future__ import annotations

import random

import pytest

from safelaunch.model import Gpu, GpuProcess
from safelaunch.supervise import pollers
from safelaunch.supervise.watch.stragglers import find

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
def test_who_is_always_last_is_named(ranks: int, buckets: int, slow: int) -> None:
    found = find(steps([[150.0 if rank == slow else 100.0 for rank in range(ranks)]] * 80, buckets=buckets))
    assert found is not None
    assert (found.rank, found.last) == (slow, 1.0)
    assert 0.25 < found.waited < 0.4  # a third, however many buckets
    assert found.words.startswith(f"rank {slow} is slower than its peers")


def test_noise_is_no_straggler() -> None:
    noise = random.Random(3)
    for _ in range(50):
        assert find(steps([[100 + noise.uniform(0, 60) for _ in range(4)] for _ in range(100)])) is None


def test_always_last_by_a_hair_is_no_straggler() -> None:
    assert find(steps([[100.0, 102.0]] * 100)) is None


def test_one_long_evaluation_of_rank_0_is_no_straggler() -> None:
    work = [[100.0, 100.5] for _ in range(100)]
    work[50][0] = 30_000.0
    assert find(steps(work)) is None


@pytest.mark.parametrize("count", [0, 1, 19])
def test_too_few_to_tell(count: int) -> None:
    assert find(steps([[1000.0, 5000.0]] * 19) if count else {}) is None
    assert find({0: {("0", 1): 5}}) is None


def test_the_slowest_of_a_group_of_its_own() -> None:
    rows = steps([[100.0, 100.2]] * 90, group="rows")
    columns = steps([[100.0, 180.0]] * 90, group="columns")
    arrivals = {0: rows[0], 1: {**rows[1], **columns[0]}, 2: columns[1]}
    found = find(arrivals)
    assert found is not None and found.rank == 2


def test_windows_that_wrapped_at_different_points() -> None:
    arrivals = steps([[100.0, 160.0, 100.0]] * 100)
    arrivals[0] = {key: at for key, at in arrivals[0].items() if key[1] > 30}
    found = find(arrivals)
    assert found is not None and (found.rank, found.collectives) == (1, 70)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpu(index: int, *processes: tuple[int, int | None]) -> Gpu:
    return Gpu(index, processes=tuple(GpuProcess(pid, held) for pid, held in processes))


def test_two_ranks_on_one_gpu() -> None:
    gpus = [gpu(0, (100, 1 << 30), (101, 1 << 30)), gpu(1)]
    (note,) = pollers.notes_on_gpus(gpus, {0: 100, 1: 101}, {100, 101})
    assert note.words.startswith("ranks 0, 1 are on the same GPU 0")


def test_a_strangers_memory_on_a_gpu_of_ours() -> None:
    gpus = [gpu(0, (100, 1 << 30), (999, 3 << 30)), gpu(1, (998, 3 << 30)), gpu(2, (101, 5), (997, 1000))]
    (note,) = pollers.notes_on_gpus(gpus, {0: 100, 1: 101}, {100, 101, 102})
    assert note.words == "pid 999, not of this job, holds 3.0 GiB of GPU 0, which rank 0 uses"


@pytest.mark.parametrize(
    "gpus",
    [
        [],
        [Gpu(0, error="lost")],
        [gpu(0, (100, None), (5, None))],
    ],
)
def test_a_driver_that_says_little(gpus: list[Gpu]) -> None:
    assert pollers.notes_on_gpus(gpus, {0: 100}, {100}) == []
