"""Out of memory on a GPU: where its memory went, and what to do about it."""

from __future__ import annotations

from evidence import at, job, rank
from msgspec.structs import replace
from test_reading_device_memory import FULL

from safelaunch.diagnose import diagnose
from safelaunch.model import RankEvidence, RankException, RankExit, Verdict

SMALL = FULL.replace("6.00 GiB is reserved", "0.50 GiB is reserved")
IN_A_CONTAINER = SMALL.replace("Including non-PyTorch memory, this process has 73.50 GiB memory in use. ", "")


def out_of_memory(message: str, peer: int = 4712) -> Verdict:
    exception = RankException("torch.OutOfMemoryError", message, 100.0, (at(41, "step"), at(100, "<module>")))
    first = rank(0, seen=False, more={"exception": exception, "exit": RankExit(1, 100.2)})
    return diagnose(job(first, terminated(peer), outcome="crash"))


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
