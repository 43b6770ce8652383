"""GPUs that ran out of memory: what torch had allocated, and which other processes use the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Allocations, Claim, DeviceMemory, RankEvidence
from safelaunch.model.words import size as words
from safelaunch.stacks import frames as fr
from safelaunch.stacks.failures import Shortage, shortage
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
_SHARE = 10  # a tenth of what is in tensors


def gpu_memory(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Where the memory of each rank's GPU is that had none left; the first one's in a sentence."""
    ranks = [facts.ranks[culprit.rank].evidence for culprit in finding.culprits]
    short = [(rank, told) for rank in ranks if (told := shortage_of(rank)) is not None]
    for rank, told in short[:MOST_RANKS]:
        words = [f"Rank {rank.rank} {_sizes(told)}.", *_held(rank), *_whole(rank), *_others(facts, told)]
        claim = Claim(f"rank {rank.rank}: {_sizes(told)}", f"ranks/{rank.rank}/exception.json")
        text = " ".join(words) if rank is short[0][0] else ""
        yield Annotation(text, (claim, *_held_claims(rank)), advice=frozenset(_advice(facts, rank, told)))


def shortage_of(rank: RankEvidence) -> Shortage | None:
    return shortage(rank.exception.message) if rank.exception is not None else None


def _sizes(told: Shortage) -> str:
    """``requested 2.0 GiB on GPU 0 (79.2 GiB, 1.1 GiB free); torch has 70.0 GiB in tensors and 6.1 GiB unused``."""
    gpu = f"GPU {told.device}" if told.device >= 0 else "its GPU"
    free = f", {words(told.free)} free" if told.free is not None else ""
    size = f" ({words(told.total)}{free})" if told.total is not None else ""
    text = f"requested {words(told.asked)} on {gpu}{size}" if told.asked is not None else f"used up {gpu}"
    if told.allocated is not None and told.unused is not None:
        text += f"; torch has {words(told.allocated)} in tensors and {words(told.unused)} reserved and unused"
    return text


def _seen_then(rank: RankEvidence) -> DeviceMemory | None:
    """What filled the GPU when the allocation failed; None where the end of the script had freed some of it before."""
    seen, told = rank.device_memory, shortage_of(rank)
    if seen is None or told is None or seen.at_allocation or told.allocated is None:
        return seen
    return seen if (seen.allocated or 0) * 10 >= told.allocated * 9 else None


def _held(rank: RankEvidence) -> Iterator[str]:
    """Where most of the memory was allocated, if that is known and is much of it; else how large the blocks are."""
    seen = _seen_then(rank)
    if seen is None or not seen.blocks:
        return
    first = seen.blocks[0]
    if first.frames and _SHARE * first.size >= (seen.allocated or 0):
        yield f"The largest part is {_block(rank, first)}."
    elif seen.largest:
        yield f"Its largest allocation is {words(seen.largest)}."


def _held_claims(rank: RankEvidence) -> Iterator[Claim]:
    seen = _seen_then(rank)
    for block in seen.blocks[:_BLOCKS] if seen is not None else ():
        yield Claim(f"rank {rank.rank} holds {_block(rank, block)}", f"ranks/{rank.rank}/device_memory.json")


def _block(rank: RankEvidence, block: Allocations) -> str:
    """``41.2 GiB in 96 blocks, allocated at model.py:88 (forward)``."""
    frame = fr.stack_of(rank, block.frames).user_frame or (block.frames[0] if block.frames else None)
    count = "1 block" if block.count == 1 else f"{block.count} blocks"
    each = f" of {words(block.size // block.count)}" if block.count and not block.frames else ""
    return f"{words(block.size)} in {count}{each}{', allocated' if frame else ''}{fr.at(frame)}"


def _whole(rank: RankEvidence) -> Iterator[str]:
    seen = rank.device_memory
    if seen is None or not _is_hardly_sharded(seen):
        return
    names = ", ".join(seen.whole_names[:_NAMES])
    yield (
        f"Each rank holds {words(seen.whole or 0)} of its parameters whole ({names}); those that are sharded take"
        f" {words(seen.sharded or 0)} of it."
    )


def _is_hardly_sharded(seen: DeviceMemory) -> bool:
    """Most of what it holds of the parameters, and with gradients and optimizer state a part that counts."""
    return bool(
        seen.whole and seen.sharded and seen.whole >= seen.sharded and seen.whole * 4 * _SHARE >= (seen.allocated or 0)
    )


def _others(facts: CaseFacts, told: Shortage) -> Iterator[str]:
    """Who else is on that GPU."""
    by_pid = _by_pid(facts)
    for pid, size in told.others:
        who = by_pid.get(pid) or f"Process {pid}, which does not belong to this job,"
        yield f"{who} uses {words(size)} of the same GPU."
    if told.is_fragmented:
        yield "The memory that torch holds unused would have been enough, but it is fragmented."


def _advice(facts: CaseFacts, rank: RankEvidence, told: Shortage) -> Iterator[Advice]:
    by_pid = _by_pid(facts)
    others = [pid for pid, _ in told.others]
    if any(pid in by_pid for pid in others):
        yield GPU_OF_TWO_RANKS
    if any(pid not in by_pid for pid in others):
        yield GPU_SHARED
    if rank.device_memory is not None and _is_hardly_sharded(rank.device_memory):
        yield GPU_UNSHARDED
    if told.is_fragmented:
        yield from GPU_FRAGMENTED
    elif told.allocated is not None and told.total and 2 * told.allocated > told.total:
        yield GPU_FULL


def _by_pid(facts: CaseFacts) -> dict[int, str]:
    """The processes of the job's ranks, in words."""
    found: dict[int, str] = {}
    for number, one in facts.ranks.items():
        found |= {child.pid: f"A {child.role} of rank {number}" for child in one.evidence.children}
        found[one.evidence.pid] = f"Rank {number}"
    return found
