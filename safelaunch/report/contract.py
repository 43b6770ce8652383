"""The environment contract of a job: which device each local rank has, and how large the batch of a rank is.

Many a first multi-GPU job breaks one of the two: it takes ``RANK`` for a device, or the batch of a rank for the batch
of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safelaunch.model import Evidence, RankEvidence, format_ranks

MOST = 8
NO_SUCH_DEVICE = "invalid device ordinal"


def world(size: int, mesh: Sequence[tuple[str, int]] = ()) -> str:
    """``8 ranks = dp 2 x tp 4``. ``mesh``: dimensions and sizes."""
    shape = " x ".join(f"{name} {length}" for name, length in mesh)
    return f"{size} ranks{f' = {shape}' if shape else ''}" if size else ""


def devices(evidence: Evidence) -> str:
    """``local rank 0: GPU 0, 1: GPU 1``, by ``CUDA_VISIBLE_DEVICES``; and who asked for a device that is not there."""
    chosen: dict[int, dict[str, None]] = {}
    for rank in evidence.ranks:
        if rank.gpu and rank.local_rank >= 0:
            chosen.setdefault(rank.local_rank, {})[_name(rank.gpu)] = None
    pairs = [f"{local}: {' or '.join(names)}" for local, names in sorted(chosen.items())]
    more = f" and {len(pairs) - MOST} more" if len(pairs) > MOST else ""
    parts = [f"local rank {', '.join(pairs[:MOST])}{more}"] if pairs else []
    for rank in [one for one in evidence.ranks if one.device not in (None, one.local_rank)][:MOST]:
        parts.append(f"rank {rank.rank} computed on cuda:{rank.device}")
    wrong = [rank for rank in evidence.ranks if _asked_in_vain(rank)]
    if wrong:
        who = format_ranks([rank.rank for rank in wrong])
        parts.append(f"{'rank' if who.isdigit() else 'ranks'} {who} asked for a device that is not there{_why(wrong)}")
    return "; ".join(parts)


def _name(gpu: str) -> str:
    return f"GPU {gpu}" if gpu.isdecimal() else gpu[:12]


def _asked_in_vain(rank: RankEvidence) -> bool:
    return rank.exception is not None and NO_SUCH_DEVICE in rank.exception.message


def _why(wrong: list[RankEvidence]) -> str:
    """Where the number of the rank is not that of the local rank, the script has most likely taken the wrong one."""
    mixed_up = all(rank.local_rank not in (-1, rank.rank) for rank in wrong)
    return ": a device is numbered by LOCAL_RANK, not by RANK" if mixed_up else ""


def batches(evidence: Evidence) -> str:
    """``32 a rank (loader), 512 over 16 data-parallel ranks``, as far as the ranks' DataLoaders tell."""
    fed = {rank.batch for rank in evidence.ranks}
    batch = fed.pop() if len(fed) == 1 else None
    if batch is not None:
        return f"{batch} a rank{_step(batch, evidence.world_size)}"
    told = [rank.gil.batches for rank in evidence.ranks if rank.gil.batches]
    if not told:
        return ""
    if any(one != told[0] for one in told):
        return f"not the same on all ranks: {_sizes(told[0])} or {_sizes(next(o for o in told if o != told[0]))}"
    sizes = set(told[0].values())
    return f"{_sizes(told[0])} a rank{_step(sizes.pop(), evidence.world_size) if len(sizes) == 1 else ''}"


def _step(batch: int, world: int) -> str:
    return f", {batch * world} a step if all {world} ranks are data-parallel"


def _sizes(loaders: Mapping[str, int]) -> str:
    return ", ".join(f"{size} ({name})" for name, size in list(loaders.items())[:MOST])
