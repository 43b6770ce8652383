"""The groups and the GPU that are blamed together with a rank."""

from __future__ import annotations

from msgspec import structs

from safelaunch.model import (
    GilTest,
    RankEvidence,
)
from safelaunch.verdict.device_mesh import mesh
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import in_user, job, rank

WORLD = tuple(range(4))


# --- device meshes ----------------------------------------------------------------------------------------------------


def in_mesh(number: int, *names: str) -> RankEvidence:
    """A rank that tells its groups itself: the world, and one for each dimension."""
    groups = {"0": WORLD, "1": (0, 1) if number < 2 else (2, 3), "2": (number % 2, number % 2 + 2), "3": WORLD}
    called = {"0": "default_pg", **{str(at): name for at, name in enumerate(names, 1)}}
    told = GilTest(True, True, groups=groups, called=called)
    return structs.replace(rank(number, in_user(7), "sleep"), gil=told)


def test_mesh_dimensions_are_read_from_its_groups() -> None:
    ranks = [in_mesh(n, "mesh_dp", "mesh_tp", "mesh_dp_tp") for n in WORLD]
    assert mesh(CaseFacts.of(job(*ranks))) == (("dp", 2), ("tp", 2)), "a flattened dimension comes after them"


def test_groups_not_forming_the_world_give_no_mesh() -> None:
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "mesh_dp") for n in WORLD)))) == ()
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "tensor", "pipeline") for n in WORLD)))) == ()
    differing = [in_mesh(n, "mesh_dp", f"mesh_{'tp' if n else 'pp'}") for n in WORLD]
    assert mesh(CaseFacts.of(job(*differing))) == (), "the ranks do not agree"


# --- out of memory on a GPU: where its memory went, and what to do about it -------------------------------------------
