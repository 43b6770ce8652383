"""Describes the job in a bundle's manifest: mesh, process groups, devices and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safelaunch.model import (
    Evidence,
    GroupMembers,
    JobShape,
    format_ranks,
)

if TYPE_CHECKING:
    pass


MOST_GROUPS = 1024


def job_entry(evidence: Evidence, shape: dict[str, int]) -> JobShape:
    return JobShape(
        outcome=evidence.outcome,
        world_size=evidence.world_size,
        moving=evidence.moving,
        for_finding=evidence.for_finding,
        mesh=shape,
        groups=_groups(evidence),
        devices={str(rank.rank): rank.gpu for rank in evidence.ranks if rank.gpu},
        computes_on={str(rank.rank): rank.device for rank in evidence.ranks if rank.device is not None},
        batch={str(rank.rank): rank.batch for rank in evidence.ranks if rank.batch is not None},
        global_batch_if_data_parallel=_global_batch(evidence),
        batches={str(rank.rank): rank.gil.batches for rank in evidence.ranks if rank.gil.batches},
    )


def _global_batch(evidence: Evidence) -> int | None:
    batches = [rank.batch for rank in evidence.ranks]
    alike = len(batches) == evidence.world_size and len(set(batches)) == 1
    return batches[0] * evidence.world_size if alike and batches[0] is not None else None


def _groups(evidence: Evidence) -> dict[str, GroupMembers]:
    groups: dict[str, GroupMembers] = {}
    for rank in evidence.ranks:
        for name, members in rank.gil.groups.items():
            if name not in groups and len(groups) < MOST_GROUPS:
                groups[name] = GroupMembers(rank.gil.called.get(name, ""), format_ranks(members))
    return groups
