"""The DeviceMesh over all ranks, by the descriptions of its groups."""

from __future__ import annotations

from math import prod

from safelaunch.verdict.rank_state import CaseFacts

_MESH_PREFIX = "mesh_"  # prefix of the description of a DeviceMesh's groups, before the dimension's name


def mesh(facts: CaseFacts) -> tuple[tuple[str, int], ...]:
    """Returns the dimensions and sizes of the DeviceMesh over all ranks, the outermost first; empty if there is none.

    Only the descriptions of a mesh's groups show it. Groups of flattened dimensions are created after them.
    """
    meshes = {_dimensions(facts, rank) for rank in facts.ranks} - {()}
    return meshes.pop() if len(meshes) == 1 else ()


def _dimensions(facts: CaseFacts, rank: int) -> tuple[tuple[str, int], ...]:
    labels, dimensions = facts.alignment.labels_of(rank), []
    for name, members in facts.alignment.groups_of(rank).items():
        label = labels.get(name, "")
        if label.startswith(_MESH_PREFIX) and rank in members:
            dimensions.append((label.removeprefix(_MESH_PREFIX), len(members)))
            if prod(size for _, size in dimensions) == facts.evidence.world_size:
                return tuple(dimensions)
    return ()
