"""What a written script calls on each rank is what that rank has recorded, in that order."""

from __future__ import annotations

import random
from functools import partial

import pytest
import synthetic
from replayed import Called, replayed

from safelaunch.model import Evidence
from safelaunch.reproduce import Extent, Wish, reproduction_of
from safelaunch.reproduce.recorded import Recorded, recorded
from safelaunch.verdict.collectives import op_name
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import Facts

KINDS = ("stop", "skip", "extra", "swap", "shape", "op", "group")
VARIANTS = ("plain", "no stacks", "sends", "window", "sends, no stacks", "window, no stacks")
LAYOUTS = ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (8, 8, 1))
FEW = Extent(rounds=4)
EXTENTS = (FEW, Extent(everything=True), Extent(last=5))


def window_of(least: int, rank: int) -> int:
    return least + rank % 3


def generated(kind: str, variant: str, layout: tuple[int, int, int], seed: int) -> Evidence | None:
    dice, grid = random.Random(f"{kind} {variant} {layout} {seed}"), synthetic.Layout(*layout)
    for _ in range(20):
        programs = synthetic.schedule(grid, dice.randint(4, 9), dice.randint(1, 3), sends="sends" in variant)
        rank = dice.randrange(grid.world)
        fault = synthetic.Fault(kind, rank, dice.randrange(len(programs[rank]) - 1))
        planted = synthetic.inject(programs, fault)
        rest = synthetic.play(grid, planted) if planted else {}
        if planted and any(waits for _, waits in rest.values()):
            least = dice.randint(3, 12) if "window" in variant else 2000
            window = partial(window_of, least)
            found: Evidence = synthetic.evidence_of(
                grid, planted, rest, window=window, stacks="no stacks" not in variant
            )
            return found
    return None


def expected(facts: Facts, one: Recorded) -> tuple[object, ...]:
    entry = one.entry
    ranks = tuple(sorted(facts.alignment.members(entry.group)[0]))
    peer = ranks.index(one.transfer.peer) if one.transfer is not None else None
    return op_name(entry).split(" ")[0], ranks, entry.input_sizes[:1], peer


def called(one: Called) -> tuple[object, ...]:
    sizes = tuple(tensor.shape for tensor in one.tensors[-1:])  # what it gives stands last, or alone
    return one.op, one.ranks, sizes, one.peer


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_makes_its_recorded_calls(kind: str, variant: str) -> None:
    for seed, layout in enumerate(LAYOUTS):
        evidence = generated(kind, variant, layout, seed)
        if evidence is None or ("sends" in variant and layout[2] == 1):
            continue
        extent = EXTENTS[seed % len(EXTENTS)]
        facts = Facts.of(evidence)
        text = reproduction_of(evidence, Wish(extent)).text
        ranks = replayed(text, len(facts.ranks))
        sized = "times as many elements" not in text  # gloo would not notice sizes that differ
        for rank, calls in recorded(facts, extent).items():
            wanted = [expected(facts, one) for one in calls]
            made = [called(one) for one in ranks[rank].calls[: len(wanted)]]
            assert [(*one[:2], sized and one[2], one[3]) for one in made] == [
                (*one[:2], sized and one[2], one[3]) for one in wanted
            ], (layout, rank)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_that_stands_stands_behind_its_last_call(variant: str) -> None:
    evidence = generated("stop", variant, (4, 1, 1) if "sends" not in variant else (2, 2, 2), 1)
    assert evidence is not None
    (odd,) = {one.rank for one in diagnose(evidence).culprits}
    facts = Facts.of(evidence)
    ranks = replayed(reproduction_of(evidence, Wish(FEW)).text, len(facts.ranks))
    stands = {rank for rank, one in ranks.items() if one.ended}
    assert odd in stands
    assert len(ranks[odd].calls) == len(recorded(facts, FEW)[odd])


@pytest.mark.parametrize("extent", EXTENTS)
def test_what_meets_is_kept_or_left_out_on_all_members(extent: Extent) -> None:
    for seed in range(12):
        evidence = generated("stop", "window, no stacks" if seed % 2 else "no stacks", (2, 2, 2), seed)
        assert evidence is not None
        facts = Facts.of(evidence)
        kept = recorded(facts, extent)
        for rank, calls in kept.items():
            for one in calls:
                members, _ = facts.alignment.members(one.entry.group)
                if one.entry.completed:
                    assert all(one.key in {other.key for other in kept[peer]} for peer in members), (seed, rank)
