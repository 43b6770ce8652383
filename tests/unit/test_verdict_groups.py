"""Whom the blame reaches beside the rank: its groups and its GPU."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace

from safelaunch.model import (
    DeviceMemory,
    GilTest,
    GpuUse,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.groups import mesh
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import OUT_OF_MEMORY, at, in_user, job, rank

WORLD = tuple(range(4))


# --- device meshes ----------------------------------------------------------------------------------------------------


def in_mesh(number: int, *names: str) -> RankEvidence:
    """A rank that tells its groups itself: the world, and one for each dimension."""
    groups = {"0": WORLD, "1": (0, 1) if number < 2 else (2, 3), "2": (number % 2, number % 2 + 2), "3": WORLD}
    called = {"0": "default_pg", **{str(at): name for at, name in enumerate(names, 1)}}
    told = GilTest(True, True, groups=groups, called=called)
    return structs.replace(rank(number, in_user(7), "sleep"), gil=told)


def test_the_dimensions_of_a_mesh_are_read_from_its_groups() -> None:
    ranks = [in_mesh(n, "mesh_dp", "mesh_tp", "mesh_dp_tp") for n in WORLD]
    assert mesh(CaseFacts.of(job(*ranks))) == (("dp", 2), ("tp", 2)), "a flattened dimension comes after them"


def test_groups_that_do_not_make_up_the_world_are_no_mesh_of_it() -> None:
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "mesh_dp") for n in WORLD)))) == ()
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "tensor", "pipeline") for n in WORLD)))) == ()
    differing = [in_mesh(n, "mesh_dp", f"mesh_{'tp' if n else 'pp'}") for n in WORLD]
    assert mesh(CaseFacts.of(job(*differing))) == (), "the ranks do not agree"


# --- out of memory on a GPU: where its memory went, and what to do about it -------------------------------------------

GIB = 1 << 30

SMALL = OUT_OF_MEMORY.replace("6.00 GiB is reserved", "0.50 GiB is reserved")


def out_of_memory(
    message: str, peer: int = 4712, memory: DeviceMemory | None = None, gpus: tuple[GpuUse, ...] = (), pid: int = 1000
) -> Verdict:
    exception = RankException("torch.OutOfMemoryError", message, 100.0, (at(41, "step"), at(100, "<module>")))
    more = {"exception": exception, "exit": RankExit(1, 100.2), "device_memory": memory}
    first = replace(rank(0, seen=False, more=more), pid=pid)
    return diagnose(job(first, terminated(peer), outcome="crash", gpus=gpus))


def terminated(pid: int) -> RankEvidence:
    return replace(rank(1, seen=False, more={"exit": RankExit(-15, 105.0, before_close=False)}), pid=pid)


@pytest.mark.parametrize(("whole", "said"), [(8, True), (1, False)])
def test_parameters_that_are_not_sharded_are_named(whole: int, said: bool) -> None:
    names = ("embed.weight", "head.weight")
    memory = DeviceMemory(0, allocated=66 * GIB, sharded=2 * GIB, whole=whole * GIB, whole_names=names)
    verdict = out_of_memory(SMALL, memory=memory)
    assert ("8.0 GiB of its parameters whole (embed.weight, head.weight)" in verdict.summary) == said
    assert any("fully_shard" in one for one in verdict.suggestions) == said
