"""Out of memory on a GPU: where its memory went, and what to do about it."""

from __future__ import annotations

import pytest
from evidence import at, job, rank
from msgspec.structs import replace
from test_verdict_reading_device_memory import FULL

from safelaunch.model import (
    Allocations,
    DeviceMemory,
    Frame,
    GpuUse,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.verdict.diagnose import diagnose

GIB = 1 << 30

SMALL = FULL.replace("6.00 GiB is reserved", "0.50 GiB is reserved")
IN_A_CONTAINER = SMALL.replace("Including non-PyTorch memory, this process has 73.50 GiB memory in use. ", "")


def out_of_memory(
    message: str, peer: int = 4712, memory: DeviceMemory | None = None, gpus: tuple[GpuUse, ...] = (), pid: int = 1000
) -> Verdict:
    exception = RankException("torch.OutOfMemoryError", message, 100.0, (at(41, "step"), at(100, "<module>")))
    more = {"exception": exception, "exit": RankExit(1, 100.2), "device_memory": memory}
    first = replace(rank(0, seen=False, more=more), pid=pid)
    return diagnose(job(first, terminated(peer), outcome="crash", gpus=gpus))


def terminated(pid: int) -> RankEvidence:
    return replace(rank(1, seen=False, more={"exit": RankExit(-15, 105.0, before_close=False)}), pid=pid)


def test_the_verdict_tells_where_the_memory_is() -> None:
    verdict = out_of_memory(FULL)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [0])
    assert "torch.OutOfMemoryError: CUDA out of memory at train.py:41" in verdict.summary
    assert "asked for 2.0 GiB of GPU 1 (79.0 GiB, 512 MiB free)" in verdict.summary
    assert "66.0 GiB in tensors and 6.0 GiB reserved and unused" in verdict.summary
    assert verdict.evidence[0].file == "ranks/0/exception.json"


def test_another_process_on_the_gpu_is_named() -> None:
    stranger, peer = out_of_memory(FULL), out_of_memory(FULL, peer=4711)
    assert "Process 4711, which is none of this job, has 5.0 GiB of the same GPU." in stranger.summary
    assert "Rank 1 has 5.0 GiB of the same GPU." in peer.summary
    assert any("`safelaunch gpus`" in one for one in stranger.suggestions)
    assert any("LOCAL_RANK" in one for one in peer.suggestions)


def test_a_process_that_may_be_the_rank_itself_is_no_stranger() -> None:
    """In a container the driver tells pids of the host, and torch does not find its own among them."""
    verdict = out_of_memory(IN_A_CONTAINER)
    assert "4711" not in verdict.summary
    assert not any("safelaunch gpus" in one for one in verdict.suggestions)


def test_fragmentation_and_a_full_gpu_have_advice_of_their_own() -> None:
    pieces, full = out_of_memory(FULL), out_of_memory(SMALL)
    assert "pieces that are too small" in pieces.summary
    assert any("expandable_segments" in one for one in pieces.suggestions)
    assert "pieces" not in full.summary
    assert any("sharded over the ranks" in one for one in full.suggestions)


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


@pytest.mark.parametrize(("left", "then"), [(60, True), (2, False)])
def test_what_is_left_after_the_script_is_not_what_filled_the_gpu(left: int, then: bool) -> None:
    """Without a history the beacon looks when the exception has unwound the stack: by then much may be free."""
    memory = DeviceMemory(0, allocated=left * GIB, largest=GIB, blocks=(Allocations(2 * GIB, 2),))
    verdict = out_of_memory(SMALL, memory=memory)
    assert ("Its largest allocation" in verdict.summary) == then
    assert any("2 blocks" in one.claim for one in verdict.evidence) == then
