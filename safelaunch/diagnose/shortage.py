"""Out of memory on a GPU: what torch had of it, and who else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from safelaunch.diagnose.causes import Sign
from safelaunch.diagnose.findings import Finding
from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import Claim, RankEvidence
from safelaunch.reading import device_memory
from safelaunch.reading.device_memory import Shortage, words

_MOST = 4


def with_device_memory(facts: Facts, finding: Finding) -> Finding:
    """Adds where the memory of the first such rank's GPU is."""
    ranks = [facts.ranks[one.rank].evidence for one in finding.culprits]
    short = [(rank, told) for rank in ranks if (told := of_rank(rank)) is not None]
    if not short:
        return finding
    claims = [
        Claim(f"rank {rank.rank}: {_sizes(told)}", f"ranks/{rank.rank}/exception.json") for rank, told in short[:_MOST]
    ]
    rank, told = short[0]
    text = " ".join([finding.summary, f"Rank {rank.rank} {_sizes(told)}.", *_others(facts, told)])
    signs = frozenset(sign for _, one in short for sign in _signs(facts, one))
    return replace(finding, summary=text, claims=(*claims, *finding.claims), signs=finding.signs | signs)


def of_rank(rank: RankEvidence) -> Shortage | None:
    return device_memory.shortage(rank.exception.message) if rank.exception is not None else None


def _sizes(told: Shortage) -> str:
    """``asked for 2.0 GiB of GPU 0 (79.2 GiB, 1.1 GiB free); torch has 70.0 GiB in tensors and 6.1 GiB unused``."""
    which = f" of GPU {told.device}" if told.device >= 0 else ""
    free = f", {words(told.free)} free" if told.free is not None else ""
    size = f" ({words(told.total)}{free})" if told.total is not None else ""
    text = f"asked for {words(told.asked)}{which}{size}" if told.asked is not None else f"used up its GPU{which}"
    if told.allocated is not None and told.unused is not None:
        text += f"; torch has {words(told.allocated)} in tensors and {words(told.unused)} reserved and unused"
    return text


def _others(facts: Facts, told: Shortage) -> Iterator[str]:
    """Who else is on that GPU. Without a size of its own, the process may be one of those that are listed."""
    by_pid = _by_pid(facts)
    for pid, size in told.others if told.own is not None else ():
        yield f"{by_pid.get(pid) or f'Process {pid}, which is none of this job,'} has {words(size)} of the same GPU."
    if told.is_fragmented:
        yield "What torch holds unused would have been enough, and lies in pieces that are too small."


def _signs(facts: Facts, told: Shortage) -> Iterator[Sign]:
    by_pid = _by_pid(facts)
    others = [pid for pid, _ in told.others] if told.own is not None else []
    if any(pid in by_pid for pid in others):
        yield "gpu-of-two-ranks"
    if any(pid not in by_pid for pid in others):
        yield "gpu-shared"
    if told.is_fragmented:
        yield "gpu-fragmented"
    elif told.allocated is not None and told.total and 2 * told.allocated > told.total:
        yield "gpu-full"


def _by_pid(facts: Facts) -> dict[int, str]:
    """The processes of the job's ranks, in words."""
    found: dict[int, str] = {}
    for number, one in facts.ranks.items():
        found |= {child.pid: f"A {child.role} of rank {number}" for child in one.evidence.children}
        found[one.evidence.pid] = f"Rank {number}"
    return found
