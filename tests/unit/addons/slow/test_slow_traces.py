"""Three traces of real jobs: a slow worker, a long stage, uneven data (``tests.support.straggler_traces``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safelaunch.addons.record.shares import RankTime
from safelaunch.addons.record.slowness import split
from safelaunch.addons.slow.arrivals import find_straggler
from tests.support.straggler_traces import StragglerTrace, saved


def named(trace: StragglerTrace, seconds: float, steps: int) -> set[tuple[int, ...]]:
    windows = list(trace.windows(seconds, steps))
    found = [find_straggler(trace.arrivals(first, last)) for first, last in windows]
    assert windows
    return {straggler.ranks if straggler is not None else () for straggler in found}


@pytest.mark.parametrize(("seconds", "steps"), [(60, 1), (60, 4), (180, 1)])
def test_slow_worker_is_named_in_each_window(seconds: float, steps: int) -> None:
    assert named(saved("AR"), seconds, steps) == {(0,)}


@pytest.mark.parametrize(("seconds", "steps"), [(20, 1), (60, 1)])
def test_long_stage_is_named_whole_in_each_window(seconds: float, steps: int) -> None:
    trace = saved("ST")
    assert named(trace, seconds, steps) == {tuple(rank for rank, stage in trace.stages.items() if stage == 3)}


@pytest.mark.parametrize(("seconds", "steps"), [(60, 1), (60, 8), (180, 1)])
def test_uneven_data_names_no_rank(seconds: float, steps: int) -> None:
    assert named(saved("SE"), seconds, steps) == {()}


@pytest.mark.parametrize("name", ["AR", "ST", "SE"])
def test_order_of_steps_and_length_of_rings_change_nothing(name: str) -> None:
    trace = saved(name)
    turned = replace(trace, steps=trace.steps[::-1])
    expected = find_straggler(trace.arrivals(0, 8))
    for arrivals in (turned.arrivals(len(trace.steps) - 8, len(trace.steps)), trace.arrivals(0, 8, ring=400)):
        found = find_straggler(arrivals)
        assert (found and found.ranks) == (expected and expected.ranks)


@pytest.mark.parametrize(("name", "ranks"), [("AR", [0]), ("ST", [6, 7]), ("SE", None)])
def test_waits_of_the_ranks_agree_with_the_arrivals(name: str, ranks: list[int] | None) -> None:
    trace = saved(name)
    waits = trace.waits(0, len(trace.steps))
    groups = split([RankTime(rank, 160, {}, {}, {}, share, 0.0) for rank, share in waits.items()])
    assert (sorted(time.rank for time in groups[0]) if groups is not None else None) == ranks
