"""Whom the blame reaches beside the rank: its groups and its GPU."""

from __future__ import annotations

from evidence import behind, entry, in_user, job, past, rank, record, waiting
from msgspec import structs

from safelaunch.diagnose import diagnose
from safelaunch.model import RankEvidence

WORLD = tuple(range(4))


def member(number: int, *, asleep: bool, name: str = "mesh_pp", gpu: str = "") -> RankEvidence:
    """A rank of a mesh of 2 x 2: in the group of its half, in that of its position, and in the world."""
    half = (0, 1) if number < 2 else (2, 3)
    groups = {"0": WORLD, "1": half, "2": (number % 2, number % 2 + 2)}
    one = rank(number, in_user(7), "sleep", flight=behind()) if asleep else waiting(number)
    assert one.flight_record is not None
    used = structs.replace(entry("all_reduce", 1, group="1", done=True), description=name)
    entries = (used, *one.flight_record.entries)
    return structs.replace(
        one, gpu=gpu, flight_record=structs.replace(one.flight_record, entries=entries, groups=groups)
    )


def test_all_ranks_of_one_group_are_told_as_that_group() -> None:
    verdict = diagnose(job(*(member(n, asleep=n >= 2) for n in WORLD)))
    assert [one.rank for one in verdict.culprits] == [2, 3]
    assert verdict.summary.endswith("These are all ranks of group mesh_pp.")
    assert any(claim.claim == "rank 2 is in '2' (ranks 0,2), mesh_pp (ranks 2-3)" for claim in verdict.evidence)


def test_one_rank_of_a_group_is_told_with_its_groups_and_its_gpu() -> None:
    verdict = diagnose(job(*(member(n, asleep=n == 3, gpu=f"GPU-{n}") for n in WORLD)))
    assert [one.rank for one in verdict.culprits] == [3]
    assert "all ranks of group" not in verdict.summary
    claims = [claim for claim in verdict.evidence if claim.claim.startswith("rank 3")]
    assert any("'2' (ranks 1,3), mesh_pp (ranks 2-3)" in claim.claim for claim in claims)
    assert any("has GPU GPU-3" in claim.claim and claim.file == "ranks/3/rank.json" for claim in claims)


def test_the_whole_world_is_no_group_to_be_named() -> None:
    flight = record(*past(3), groups={"0": WORLD})
    ranks = [rank(n, in_user(7), "sleep", flight=flight) for n in WORLD]
    verdict = diagnose(job(*ranks))
    assert "all ranks of group" not in verdict.summary
    assert not any(" is in " in claim.claim for claim in verdict.evidence)
