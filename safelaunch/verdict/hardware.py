"""GPUs that might be broken, and how often earlier bundles named the same hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from safelaunch.model import (
    Culprit,
    Evidence,
    RankEvidence,
    Verdict,
)

# What the CUDA driver and NVML report only for a defective device or link.
_OF_A_BAD_GPU = re.compile(
    r"uncorrectable|hardware stack error|hardware error|gpu is lost|fallen off the bus", re.IGNORECASE
)
_MOST_TEXT = 200


def with_gpus(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Names the culprits' GPUs if a GPU itself might be broken."""
    ranks = {rank.rank: rank for rank in evidence.ranks}
    named = tuple(_with_gpu(verdict.cause, culprit, ranks.get(culprit.rank), evidence) for culprit in verdict.culprits)
    return msgspec.structs.replace(verdict, culprits=named)


def with_repeats(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Adds how many of the last bundles have blamed the same hardware."""
    repeats = tuple(_lines(verdict, evidence.earlier or ()))
    return msgspec.structs.replace(verdict, blamed_before=repeats) if repeats else verdict


def _lines(verdict: Verdict, earlier: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    gpus = [culprit.gpu for culprit in verdict.culprits if culprit.gpu]
    for name in dict.fromkeys((*gpus, *(node.host for node in verdict.nodes_at_fault))):
        times = sum(name in names for names in earlier)
        if times and verdict.outcome in ("hang", "crash"):
            last = f"the last {len(earlier)} bundles" if len(earlier) > 1 else "the last bundle"
            yield f"{name} was named in {f'{times} of ' if len(earlier) > 1 else ''}{last} here"


def _with_gpu(cause: str, culprit: Culprit, rank: RankEvidence | None, evidence: Evidence) -> Culprit:
    if rank is None or not _may_be_its_gpu(cause, rank):
        return culprit
    uuid = _gpu_uuid(rank, evidence)
    return msgspec.structs.replace(culprit, gpu=uuid[:_MOST_TEXT]) if uuid else culprit


def _may_be_its_gpu(cause: str, rank: RankEvidence) -> bool:
    message = rank.exception.message if cause == "rank-exception" and rank.exception is not None else ""
    return cause in ("gpu-kernel", "gpu-lost") or _OF_A_BAD_GPU.search(message) is not None


def _gpu_uuid(rank: RankEvidence, evidence: Evidence) -> str:
    # CUDA and NVML number GPUs differently
    if rank.gpu.startswith(("GPU-", "MIG-")):
        return rank.gpu
    used = {
        gpu.uuid for gpu in evidence.gpus if gpu.host == rank.host and any(p.pid == rank.pid for p in gpu.processes)
    }
    return used.pop() if len(used) == 1 else ""
