"""Whom the blame reaches beside the rank: its groups and its GPU."""

from __future__ import annotations

from evidence import behind, entry, in_user, job, rank, waiting
from msgspec import structs

from safelaunch.model import GilTest, RankEvidence
from safelaunch.verdict.belonging import mesh
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import Facts

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


# --- device meshes ----------------------------------------------------------------------------------------------------


def in_mesh(number: int, *names: str) -> RankEvidence:
    """A rank that tells its groups itself: the world, and one for each dimension."""
    groups = {"0": WORLD, "1": (0, 1) if number < 2 else (2, 3), "2": (number % 2, number % 2 + 2), "3": WORLD}
    called = {"0": "default_pg", **{str(at): name for at, name in enumerate(names, 1)}}
    told = GilTest(True, True, groups=groups, called=called)
    return structs.replace(rank(number, in_user(7), "sleep"), gil=told)


def test_the_dimensions_of_a_mesh_are_read_from_its_groups() -> None:
    ranks = [in_mesh(n, "mesh_dp", "mesh_tp", "mesh_dp_tp") for n in WORLD]
    assert mesh(Facts.of(job(*ranks))) == (("dp", 2), ("tp", 2)), "a flattened dimension comes after them"


def test_groups_that_do_not_make_up_the_world_are_no_mesh_of_it() -> None:
    assert mesh(Facts.of(job(*(in_mesh(n, "mesh_dp") for n in WORLD)))) == ()
    assert mesh(Facts.of(job(*(in_mesh(n, "tensor", "pipeline") for n in WORLD)))) == ()
    differing = [in_mesh(n, "mesh_dp", f"mesh_{'tp' if n else 'pp'}") for n in WORLD]
    assert mesh(Facts.of(job(*differing))) == (), "the ranks do not agree"


def test_groups_that_the_rank_tells_itself_belong_to_it_without_a_record() -> None:
    ranks = [in_mesh(n, "mesh_dp", "mesh_tp") for n in WORLD]
    busy = structs.replace(waiting(0), gil=ranks[0].gil, flight_record=None)
    verdict = diagnose(job(busy, *(structs.replace(waiting(n), flight_record=None) for n in (1, 2)), ranks[3]))
    assert any("mesh_tp (ranks 1,3)" in claim.claim for claim in verdict.evidence)
