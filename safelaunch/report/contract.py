"""Describes a job's devices, by local rank, and its batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safelaunch.model import Evidence, RankEvidence, rank_words

MOST = 8
NO_SUCH_DEVICE = "invalid device ordinal"


def world(size: int, mesh: Sequence[tuple[str, int]] = ()) -> str:
    """Describes the ranks and their mesh: ``8 ranks = dp 2 x tp 4``. ``mesh`` lists dimensions with their sizes."""
    shape = " x ".join(f"{name} {length}" for name, length in mesh)
    count = "1 rank" if size == 1 else f"{size} ranks"
    return f"{count}{f' = {shape}' if shape else ''}" if size else ""


def devices(evidence: Evidence) -> str:
    """Describes each local rank's GPU by CUDA_VISIBLE_DEVICES, and names ranks whose GPU doesn't exist.

    Example: ``local rank 0: GPU 0, 1: GPU 1``.
    """
    chosen: dict[int, dict[str, None]] = {}
    for rank in evidence.ranks:
        if rank.gpu and rank.local_rank >= 0:
            chosen.setdefault(rank.local_rank, {})[_name(rank.gpu)] = None
    pairs = [f"{local}: {' or '.join(names)}" for local, names in sorted(chosen.items())]
    more = f" and {len(pairs) - MOST} more" if len(pairs) > MOST else ""
    parts = [f"local rank {', '.join(pairs[:MOST])}{more}"] if pairs else []
    for rank in [rank for rank in evidence.ranks if rank.device not in (None, rank.local_rank)][:MOST]:
        parts.append(f"rank {rank.rank} computed on cuda:{rank.device}")
    raised = {rank.rank: rank.exception.message for rank in evidence.ranks if rank.exception is not None}
    wrong = [rank for rank in evidence.ranks if NO_SUCH_DEVICE in raised.get(rank.rank, "")]
    if wrong:
        who = rank_words(rank.rank for rank in wrong)
        parts.append(f"{who} requested a device that does not exist{_why(wrong)}")
    return "; ".join(parts)


def _name(gpu: str) -> str:
    return f"GPU {gpu}" if gpu.isdecimal() else gpu[:12]


def _why(wrong: list[RankEvidence]) -> str:
    # The script probably chose the device by its global rank.
    mixed_up = all(rank.local_rank not in (-1, rank.rank) for rank in wrong)
    return ": a device is numbered by LOCAL_RANK, not by RANK" if mixed_up else ""


def batches(evidence: Evidence) -> str:
    """Describes the batch size: ``32 a rank (loader), 512 over 16 data-parallel ranks``; empty if unknown."""
    fed = {rank.batch for rank in evidence.ranks}
    batch = fed.pop() if len(fed) == 1 else None
    if batch is not None:
        return f"{batch} a rank{_step(batch, evidence.world_size)}"
    loaders = [rank.gil.batches for rank in evidence.ranks if rank.gil.batches]
    if not loaders:
        return ""
    if any(batches_of != loaders[0] for batches_of in loaders):
        return (
            f"not the same on all ranks: {_sizes(loaders[0])} or {_sizes(next(o for o in loaders if o != loaders[0]))}"
        )
    sizes = set(loaders[0].values())
    return f"{_sizes(loaders[0])} a rank{_step(sizes.pop(), evidence.world_size) if len(sizes) == 1 else ''}"


def _step(batch: int, world: int) -> str:
    return f", {batch * world} a step if all {world} ranks are data-parallel"


def _sizes(loaders: Mapping[str, int]) -> str:
    return ", ".join(f"{size} ({name})" for name, size in list(loaders.items())[:MOST])
