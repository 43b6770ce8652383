"""GPUs that ran out of memory: torch's allocations, and other processes on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Allocations, Claim, DeviceMemory, RankEvidence
from safelaunch.model.words import size as words
from safelaunch.stacks import frames as fr
from safelaunch.stacks.gpu_shortage import Shortage, shortage
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.groups import MOST_RANKS
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import (
    GPU_FRAGMENTED,
    GPU_FULL,
    GPU_OF_TWO_RANKS,
    GPU_SHARED,
    GPU_UNSHARDED,
    Advice,
)

_BLOCKS = 5
_NAMES = 3
_SHARE = 10  # a part counts from a tenth of the allocated memory on


def gpu_memory(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Describes the memory of each GPU that had none left. Only the first rank's becomes a sentence."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    short = [(rank, report) for rank in ranks if (report := shortage_of(rank)) is not None]
    for rank, report in short[:MOST_RANKS]:
        words = [
            f"Rank {rank.rank} {_sizes(report)}.",
            *_largest_part(rank),
            *_unsharded(rank),
            *_other_processes(facts, report),
        ]
        claim = Claim(f"rank {rank.rank}: {_sizes(report)}", f"ranks/{rank.rank}/exception.json")
        text = " ".join(words) if rank is short[0][0] else ""
        yield Annotation(text, (claim, *_block_claims(rank)), advice=frozenset(_advice(facts, rank, report)))


def shortage_of(rank: RankEvidence) -> Shortage | None:
    return shortage(rank.exception.message) if rank.exception is not None else None


def _sizes(report: Shortage) -> str:
    """Returns ``requested 2.0 GiB on GPU 0 (79.2 GiB, 1.1 GiB free); torch has 70.0 GiB in tensors and …``."""
    gpu = f"GPU {report.device}" if report.device >= 0 else "its GPU"
    free = f", {words(report.free)} free" if report.free is not None else ""
    size = f" ({words(report.total)}{free})" if report.total is not None else ""
    text = f"requested {words(report.asked)} on {gpu}{size}" if report.asked is not None else f"used up {gpu}"
    if report.allocated is not None and report.unused is not None:
        text += f"; torch has {words(report.allocated)} in tensors and {words(report.unused)} reserved and unused"
    return text


def _memory_at_failure(rank: RankEvidence) -> DeviceMemory | None:
    memory, report = rank.device_memory, shortage_of(rank)
    if memory is None or report is None or memory.at_allocation or report.allocated is None:
        return memory
    return memory if (memory.allocated or 0) * 10 >= report.allocated * 9 else None


def _largest_part(rank: RankEvidence) -> Iterator[str]:
    """Describes the largest part by its line if that is known and large enough, or else the largest allocation."""
    memory = _memory_at_failure(rank)
    if memory is None or not memory.blocks:
        return
    first = memory.blocks[0]
    if first.frames and _SHARE * first.size >= (memory.allocated or 0):
        yield f"The largest part is {_block(rank, first)}."
    elif memory.largest:
        yield f"Its largest allocation is {words(memory.largest)}."


def _block_claims(rank: RankEvidence) -> Iterator[Claim]:
    memory = _memory_at_failure(rank)
    for block in memory.blocks[:_BLOCKS] if memory is not None else ():
        yield Claim(f"rank {rank.rank} holds {_block(rank, block)}", f"ranks/{rank.rank}/device_memory.json")


def _block(rank: RankEvidence, block: Allocations) -> str:
    frame = fr.stack_of(rank, block.frames).user_frame or (block.frames[0] if block.frames else None)
    count = "1 block" if block.count == 1 else f"{block.count} blocks"
    each = f" of {words(block.size // block.count)}" if block.count and not block.frames else ""
    return f"{words(block.size)} in {count}{each}{', allocated' if frame else ''}{fr.at(frame)}"


def _unsharded(rank: RankEvidence) -> Iterator[str]:
    memory = rank.device_memory
    if memory is None or not _is_hardly_sharded(memory):
        return
    names = ", ".join(memory.whole_names[:_NAMES])
    yield (
        f"Each rank holds {words(memory.whole or 0)} of its parameters unsharded ({names}); the sharded ones"
        f" take {words(memory.sharded or 0)} of it."
    )


def _is_hardly_sharded(memory: DeviceMemory) -> bool:
    return bool(
        memory.whole
        and memory.sharded
        and memory.whole >= memory.sharded
        and memory.whole * 4 * _SHARE >= (memory.allocated or 0)
    )


def _other_processes(facts: CaseFacts, report: Shortage) -> Iterator[str]:
    by_pid = _by_pid(facts)
    for pid, size in report.others:
        who = by_pid.get(pid) or f"Process {pid}, which does not belong to this job,"
        yield f"{who} uses {words(size)} of the same GPU."
    if report.is_fragmented:
        yield "The memory that torch holds unused would have been enough, but it is fragmented."


def _advice(facts: CaseFacts, rank: RankEvidence, report: Shortage) -> Iterator[Advice]:
    by_pid = _by_pid(facts)
    other_pids = [pid for pid, _ in report.others]
    if any(pid in by_pid for pid in other_pids):
        yield GPU_OF_TWO_RANKS
    if any(pid not in by_pid for pid in other_pids):
        yield GPU_SHARED
    if rank.device_memory is not None and _is_hardly_sharded(rank.device_memory):
        yield GPU_UNSHARDED
    if report.is_fragmented:
        yield from GPU_FRAGMENTED
    elif report.allocated is not None and report.total and 2 * report.allocated > report.total:
        yield GPU_FULL


def _by_pid(facts: CaseFacts) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, rank in facts.ranks.items():
        names |= {child.pid: f"A {child.role} of rank {number}" for child in rank.evidence.children}
        names[rank.evidence.pid] = f"Rank {number}"
    return names
