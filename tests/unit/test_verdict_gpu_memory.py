"""Out of memory on a GPU: where its memory went, and what to do about it."""

from __future__ import annotations

import pytest
from evidence import at, job, rank
from msgspec.structs import replace
from test_verdict_reading_failures import FULL

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
    stranger, peer = out_of_memory(FULL), out_of_memory(FULL, peer=4711)
    assert "Process 4711, which is none of this job, has 5.0 GiB of the same GPU." in stranger.summary
    assert "Rank 1 has 5.0 GiB of the same GPU." in peer.summary
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
