"""Programs as branches and loops: each rank does the same as before, and equal code occurs once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from safelaunch.addons.reproduce.fold import FoldNode, RankBranch, RankStep, RepeatedItems, done, merged

ROUND = ["a", "b", "c"]


def done_by(nodes: Sequence[FoldNode], rank: int) -> list[object]:
    return [step.item for step in done(nodes, rank)]


def check(programs: dict[int, list[str]]) -> tuple[FoldNode, ...]:
    nodes = merged(programs)
    for rank, items in programs.items():
        assert done_by(nodes, rank)[: len(items)] == items
    return nodes


items = st.lists(st.sampled_from("abcd"), max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(items, st.integers(0, 4), items), min_size=1, max_size=5))
def test_folded_program_keeps_each_ranks_steps(parts: list[tuple[list[str], int, list[str]]]) -> None:
    check({rank: [*first, *(times * ROUND), *last] for rank, (first, times, last) in enumerate(parts)})


def test_equal_ranks_share_one_loop() -> None:
    nodes = check(dict.fromkeys(range(512), 100 * ROUND))
    (loop,) = nodes
    assert isinstance(loop, RepeatedItems)
    assert (loop.times, len(loop.body)) == (100, 3)


def test_additional_call_becomes_branch() -> None:
    nodes = check({0: [*ROUND, "x", *ROUND], 1: 2 * ROUND, 2: 2 * ROUND})
    assert [node.sides for node in nodes if isinstance(node, RankBranch)] == [
        ((frozenset({0}), (RankStep("x", frozenset({0})),)),)
    ]


def test_call_missing_in_one_round_becomes_branch_between_loops() -> None:
    programs = dict.fromkeys(range(4), 5 * ROUND)
    programs[2] = [*(2 * ROUND), "b", "c", *(2 * ROUND)]
    nodes = check(programs)
    assert [type(node) for node in nodes] == [RepeatedItems, RankBranch, RepeatedItems, RankStep, RankStep]
