"""Different operations, sizes or types that ranks recorded under one sequence number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safelaunch.model import Collective
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import Signature, fits, op_name, signature
from safelaunch.verdict.columns import Numbering, first_difference
from safelaunch.verdict.majority import sides_of, vote


@dataclass(frozen=True)
class Mismatch:
    """A sequence number under which ranks recorded different things."""

    group: str
    seq: int
    classes: Mapping[Signature, tuple[int, ...]]
    odd: tuple[int, ...]  # the minority, or all ranks in a tie
    majority: bool
    entries: Mapping[int, Collective]


def mismatch_at(alignment: Alignment, group: str, seq: int) -> Mismatch | None:
    """Returns how the operations, sizes or types that members recorded under ``seq`` differ; None if they don't."""
    members, _ = alignment.members(group)
    entries = {rank: entry for rank in sorted(members) if (entry := alignment.entry(rank, group, seq)) is not None}
    classes = sides_of({rank: signature(entry) for rank, entry in entries.items()})
    if any(None in key for key in classes):
        classes = _with_incomplete_classes(classes)
    if len(classes) < 2:
        return None
    odd, majority = vote(classes)
    return Mismatch(group, seq, {key: tuple(ranks) for key, ranks in classes.items()}, odd, majority, entries)


def _with_incomplete_classes(classes: Mapping[Signature, list[int]]) -> dict[Signature, list[int]]:
    """Adds ranks with incomplete records to the largest class that they might match."""
    complete = {key: ranks for key, ranks in classes.items() if None not in key}
    for key in (key for key in classes if None in key):
        fitting = [complete_key for complete_key in complete if fits(key, complete_key)]
        joined = max(fitting, key=lambda candidate: len(complete[candidate]), default=key)
        complete[joined] = sorted([*complete.get(joined, ()), *classes[key]])
    return complete


def first_mismatch(alignment: Alignment) -> Mismatch | None:
    """Returns the oldest mismatch in the windows of all groups, among calls that a rank has reached."""
    signatures = Numbering(lambda entry, _: signature(entry))
    names = Numbering(lambda entry, _: op_name(entry))
    mismatches = []
    front = alignment.front()
    for group in alignment.groups():
        windows = {rank: alignment.window(rank, group) for rank in sorted(alignment.members(group)[0])}
        present = [window for window in windows.values() if window is not None]
        seq = first_difference(map(signatures.column, present))
        if seq is not None and mismatch_at(alignment, group, seq) is None:  # unknown parts made the difference
            seq = first_difference(map(names.column, present))
            seq = seq if seq is not None and mismatch_at(alignment, group, seq) is not None else None
        if seq is not None and seq <= front.get(group, -1):
            mismatches.append((seq, group))
    return mismatch_at(alignment, min(mismatches)[1], min(mismatches)[0]) if mismatches else None
