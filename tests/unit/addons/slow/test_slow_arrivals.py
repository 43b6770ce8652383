"""The ranks that the others wait for at their calls: ``arrivals.find_straggler``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pytest

from safelaunch.addons.slow.arrivals import find_straggler

MS = 1_000_000
Step = int | tuple[str, ...]  # milliseconds of work, or calls made together; a send begins with "+"
Recorded = dict[int, dict[tuple[str, int], int]]


def simulated(programs: Mapping[int, Sequence[Step]], *, buffered: bool = False) -> Recorded:
    """Runs these programs.

    A collective waits for all ranks that call it, a receive for its send, and a send for its receive unless
    ``buffered``.
    """
    calls = {
        rank: [call for step in program if isinstance(step, tuple) for call in step]
        for rank, program in programs.items()
    }
    members: dict[str, set[int]] = {}
    for rank, made in calls.items():
        for call in made:
            members.setdefault(call.lstrip("+"), set()).add(rank)
    arrivals: Recorded = {rank: {} for rank in programs}
    clocks, places = dict.fromkeys(programs, 0.0), dict.fromkeys(programs, 0)
    pending: dict[int, list[tuple[str, int]]] = {rank: [] for rank in programs}
    counts: Counter[tuple[int, str]] = Counter()
    while moved := [rank for rank in programs if _is_free(rank, pending, arrivals, members)]:
        ends = 0
        for rank in moved:
            for key in pending[rank]:
                clocks[rank] = max(clocks[rank], *(arrivals[member][key] / MS + 1 for member in members[key[0]]))
            pending[rank] = []
            ends += places[rank] == len(programs[rank])
            if places[rank] == len(programs[rank]):
                continue
            step = programs[rank][places[rank]]
            places[rank] += 1
            if isinstance(step, int):
                clocks[rank] += step
                continue
            for call in step:
                key = (call.lstrip("+"), counts[rank, call])
                counts[rank, call] += 1
                arrivals[rank][key] = int(clocks[rank] * MS)
                if not (buffered and call.startswith("+")):
                    pending[rank].append(key)
        if ends == len(moved):
            break
    assert all(places[rank] == len(program) for rank, program in programs.items()), "a deadlock"
    return arrivals


def _is_free(
    rank: int, pending: Mapping[int, list[tuple[str, int]]], arrivals: Recorded, members: Mapping[str, set[int]]
) -> bool:
    return all(key in arrivals[member] for key in pending[rank] for member in members[key[0]])


def pipeline(
    steps: int,
    forward: Callable[[int, int], int],
    *,
    stages: int = 4,
    copies: int = 2,
    micro: int = 4,
    buffered: bool = False,
) -> Recorded:
    """Runs a pipeline of schedule 1F1B.

    Args:
        forward: copy and stage → milliseconds of a micro-batch's forward pass; its backward takes twice as long
    """
    programs: dict[int, list[Step]] = {}
    for copy in range(copies):
        for stage in range(stages):
            program: list[Step] = []
            for _ in range(steps):
                program += [
                    *_passes(f"pipe {copy}", stage, stages, micro, partial(forward, copy, stage)),
                    (f"data {stage}",),
                    ("world",),
                ]
            programs[stage * copies + copy] = program
    return simulated(programs, buffered=buffered)


def _passes(pipe: str, stage: int, stages: int, micro: int, work: Callable[[], int]) -> Iterator[Step]:
    first, last = stage == 0, stage == stages - 1
    get, send = ([f"{pipe} {stage - 1}->{stage}"], [f"+{pipe} {stage}->{stage - 1}"]) if not first else ([], [])
    get_back, send_on = ([f"{pipe} {stage + 1}->{stage}"], [f"+{pipe} {stage}->{stage + 1}"]) if not last else ([], [])
    ahead = min(stages - 1 - stage, micro)
    times = [work() for _ in range(micro)]
    for time in times[:ahead]:
        yield from [tuple(get), time, tuple(send_on)]
    yield tuple(get)
    for at in range(micro - ahead):
        yield from [times[ahead + at], (*send_on, *get_back), 2 * times[at]]
        yield (*send, *(get if at + 1 < micro - ahead else []))
    for time in times[micro - ahead :]:
        yield from [tuple(get_back), 2 * time, tuple(send)]


def steps(delays: Sequence[Sequence[float]], *, buckets: int = 1, group: str = "0") -> Recorded:
    """Synchronous steps: ``delays[step][rank]`` milliseconds of work each, then ``buckets`` collectives together."""
    arrivals: Recorded = {rank: {} for rank in range(len(delays[0]))}
    now, number = 0.0, 1
    for work in delays:
        for bucket in range(buckets):
            for rank, delay in enumerate(work):
                arrivals[rank][group, number] = int((now + delay + bucket) * MS)
            number += 1
        now += max(work) + buckets
    return arrivals


def late(arrivals: Recorded) -> tuple[int, ...] | None:
    found = find_straggler(arrivals)
    return found.ranks if found is not None else None


# --- one group --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_is_always_last_is_the_straggler(ranks: int, buckets: int, slow: int) -> None:
    found = find_straggler(steps([[150.0 if rank == slow else 100.0 for rank in range(ranks)]] * 80, buckets=buckets))
    assert found is not None
    assert (found.rank, found.ranks) == (slow, (slow,))
    assert 0.25 < found.waited < 0.4  # a third, however many buckets


def test_two_ranks_that_are_equally_late_are_named_together() -> None:
    found = find_straggler(steps([[100.0, 150.0, 100.0, 150.0, 100.0]] * 80))
    assert found is not None and (found.ranks, found.rank) == ((1, 3), None)


def test_noise_gives_no_straggler() -> None:
    noise = random.Random(3)
    for ranks in (2, 4, 16):
        for _ in range(30):
            assert late(steps([[100 + noise.uniform(0, 60) for _ in range(ranks)] for _ in range(100)])) is None


@pytest.mark.parametrize("every", [1, 2, 7, 50])
def test_late_rank_that_changes_gives_no_straggler(every: int) -> None:
    delays = [[150.0 if rank == at // every % 4 else 100.0 for rank in range(4)] for at in range(200)]
    assert late(steps(delays)) is None


def test_two_ranks_that_are_late_in_turn_give_no_straggler() -> None:
    delays = [[150.0 if rank == (at >= 50) else 100.0 for rank in range(8)] for at in range(100)]
    assert late(steps(delays)) is None


def test_uneven_work_of_experts_gives_no_straggler() -> None:
    tokens = random.Random(5)
    delays = [[100 + 80 * tokens.paretovariate(3) for _ in range(8)] for _ in range(150)]
    assert late(steps(delays, buckets=4)) is None


def test_straggler_is_found_despite_noise() -> None:
    noise = random.Random(3)
    delays = [[100 + noise.uniform(0, 30) + 40 * (rank == 5) for rank in range(8)] for _ in range(100)]
    assert late(steps(delays)) == (5,)


def test_microsecond_delays_give_no_straggler() -> None:
    assert late(steps([[100.0, 102.0]] * 100)) is None


def test_one_long_evaluation_gives_no_straggler() -> None:
    work = [[100.0, 100.5] for _ in range(100)]
    work[50][0] = 30_000.0
    assert late(steps(work)) is None


def test_slow_first_step_gives_no_straggler_and_hides_none() -> None:
    assert late(steps([[60_000.0, 5_000.0, 5_000.0], *[[100.0, 100.0, 100.0]] * 100])) is None
    assert late(steps([[5_000.0, 4_000.0, 5_000.0], *[[100.0, 200.0, 100.0]] * 300])) == (1,)


@pytest.mark.parametrize("count", [0, 1, 19])
def test_too_few_collectives_give_no_straggler(count: int) -> None:
    assert late(steps([[1000.0, 5000.0]] * count) if count else {}) is None
    assert late({0: {("0", 1): 5}}) is None


def test_too_short_a_window_gives_no_straggler() -> None:
    assert late(steps([[10.0, 50.0]] * 80)) is None


def test_straggler_is_found_in_differently_wrapped_windows() -> None:
    arrivals = steps([[100.0, 160.0, 100.0]] * 100)
    arrivals[0] = {key: at for key, at in arrivals[0].items() if key[1] > 30}
    assert late(arrivals) == (1,)


def test_straggler_is_found_while_a_rank_did_not_answer() -> None:
    arrivals = steps([[100.0, 160.0, 100.0, 100.0]] * 100)
    assert late({rank: calls for rank, calls in arrivals.items() if rank != 2}) == (1,)
    assert late({rank: calls for rank, calls in arrivals.items() if rank != 1}) is None
    assert late({rank: calls if rank != 2 else {} for rank, calls in arrivals.items()}) == (1,)


# --- several groups ---------------------------------------------------------------------------------------------------


def test_rank_that_waits_in_another_group_is_not_the_straggler() -> None:
    # Rank 1 is last in its row, because it waits for rank 3 in its column.
    assert late(
        simulated(
            {
                rank: [150 if rank == 3 else 100, (f"column {rank % 2}",), (f"row {rank // 2}",)] * 80
                for rank in range(4)
            }
        )
    ) == (3,)


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("stages", "copies", "micro"), [(4, 2, 4), (2, 4, 8), (4, 1, 16), (2, 2, 2), (8, 1, 8)])
def test_balanced_pipeline_has_no_straggler(stages: int, copies: int, micro: int, buffered: bool) -> None:
    assert (
        late(pipeline(20, lambda copy, stage: 60, stages=stages, copies=copies, micro=micro, buffered=buffered)) is None
    )


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("slow", [(0, 0), (1, 1), (0, 3)])
def test_slow_worker_of_a_pipeline_is_named_alone(slow: tuple[int, int], buffered: bool) -> None:
    arrivals = pipeline(20, lambda copy, stage: 90 if (copy, stage) == slow else 50, buffered=buffered)
    assert late(arrivals) == (slow[1] * 2 + slow[0],)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("long", [0, 1, 3])
def test_long_stage_is_named_whole(long: int, buffered: bool) -> None:
    assert late(pipeline(20, lambda copy, stage: 90 if stage == long else 50, buffered=buffered)) == (
        2 * long,
        2 * long + 1,
    )


def test_stage_with_uneven_work_names_no_rank() -> None:
    sizes = random.Random(2)
    arrivals = pipeline(40, lambda copy, stage: sizes.choice((20, 140)) + 30 * (stage == 1), stages=2, copies=4)
    assert late(arrivals) is None


def test_transfers_match_although_rings_begin_at_different_ones() -> None:
    whole = pipeline(20, lambda copy, stage: 90 if (copy, stage) == (1, 1) else 50)
    arrivals: Recorded = {}
    for rank, calls in whole.items():
        newest = sorted(calls.items(), key=lambda entry: entry[1])[rank * 17 :]
        counts: dict[str, int] = {}
        arrivals[rank] = {}
        for (name, number), at in newest:
            counts[name] = counts.get(name, 0) + 1
            arrivals[rank][name, counts[name] if "->" in name else number] = at
    assert late(arrivals) == (3,)


def test_rank_whose_transfers_cannot_be_matched_is_not_named() -> None:
    # Only two data-parallel peers are on this node: one of them waits for its stage's predecessor on another node.
    arrivals = pipeline(20, lambda copy, stage: 90 if (copy, stage) == (0, 0) else 50)
    assert late({rank: arrivals[rank] for rank in (2, 3)}) is None
    without_shared = {
        rank: {key: at for key, at in calls.items() if key[0] != "world"} for rank, calls in arrivals.items()
    }
    assert late(without_shared) is None
