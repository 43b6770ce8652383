"""The rank that arrives last at collectives: ``arrivals.find_straggler``."""

from __future__ import annotations

import random

import pytest

from safelaunch.addons.slow.arrivals import find_straggler

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
