"""Whom the blame reaches beside the rank: its groups and its GPU."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace

from safelaunch.model import (
    Allocations,
    DeviceMemory,
    Frame,
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
from tests.support.evidence import OUT_OF_MEMORY, at, behind, entry, in_user, job, rank, waiting

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
    assert verdict.summary.endswith("These are all the ranks of group mesh_pp.")
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
    assert mesh(CaseFacts.of(job(*ranks))) == (("dp", 2), ("tp", 2)), "a flattened dimension comes after them"


def test_groups_that_do_not_make_up_the_world_are_no_mesh_of_it() -> None:
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "mesh_dp") for n in WORLD)))) == ()
    assert mesh(CaseFacts.of(job(*(in_mesh(n, "tensor", "pipeline") for n in WORLD)))) == ()
    differing = [in_mesh(n, "mesh_dp", f"mesh_{'tp' if n else 'pp'}") for n in WORLD]
    assert mesh(CaseFacts.of(job(*differing))) == (), "the ranks do not agree"


def test_groups_that_the_rank_tells_itself_belong_to_it_without_a_record() -> None:
    ranks = [in_mesh(n, "mesh_dp", "mesh_tp") for n in WORLD]
    busy = structs.replace(waiting(0), gil=ranks[0].gil, flight_record=None)
    verdict = diagnose(job(busy, *(structs.replace(waiting(n), flight_record=None) for n in (1, 2)), ranks[3]))
    assert any("mesh_tp (ranks 1,3)" in claim.claim for claim in verdict.evidence)


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


def test_another_process_on_the_gpu_is_named() -> None:
    stranger, peer = out_of_memory(OUT_OF_MEMORY), out_of_memory(OUT_OF_MEMORY, peer=4711)
    assert "Process 4711, which does not belong to this job, uses 5.0 GiB of the same GPU." in stranger.summary
    assert "Rank 1 uses 5.0 GiB of the same GPU." in peer.summary
    assert any("`safelaunch gpus`" in one for one in stranger.suggestions)
    assert any("LOCAL_RANK" in one for one in peer.suggestions)


def test_what_fills_the_gpu_is_told_by_line() -> None:
    inside = (Frame("/usr/lib/python3.11/site-packages/torch/nn/linear.py", 9, "forward"), at(88, "forward"))
    blocks = (Allocations(41 * GIB, 96, inside), Allocations(3 * GIB, 1, (at(20, "main"),)))
    verdict = out_of_memory(SMALL, memory=DeviceMemory(0, allocated=66 * GIB, blocks=blocks))
    assert "The largest part is 41.0 GiB in 96 blocks, allocated at train.py:88 (forward)." in verdict.summary
    claims = {one.claim: one.file for one in verdict.evidence}
    assert claims["rank 0 holds 3.0 GiB in 1 block, allocated at train.py:20 (main)"] == "ranks/0/device_memory.json"


def test_without_a_history_the_largest_allocation_is_told() -> None:
    memory = DeviceMemory(0, allocated=66 * GIB, largest=12 * GIB, blocks=(Allocations(36 * GIB, 3),))
    verdict = out_of_memory(SMALL, memory=memory)
    assert "Its largest allocation is 12.0 GiB." in verdict.summary
    assert "rank 0 holds 36.0 GiB in 3 blocks of 12.0 GiB" in [one.claim for one in verdict.evidence]


@pytest.mark.parametrize(("whole", "said"), [(8, True), (1, False)])
def test_parameters_that_are_not_sharded_are_named(whole: int, said: bool) -> None:
    names = ("embed.weight", "head.weight")
    memory = DeviceMemory(0, allocated=66 * GIB, sharded=2 * GIB, whole=whole * GIB, whole_names=names)
    verdict = out_of_memory(SMALL, memory=memory)
    assert ("8.0 GiB of its parameters whole (embed.weight, head.weight)" in verdict.summary) == said
    assert any("fully_shard" in one for one in verdict.suggestions) == said
