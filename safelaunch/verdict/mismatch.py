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
    """One sequence number under which ranks recorded different things: ``entries``. ``odd`` is the minority, or all
    when tied.
    """

    group: str
    seq: int
    classes: Mapping[Signature, tuple[int, ...]]
    odd: tuple[int, ...]
    majority: bool
    entries: Mapping[int, Collective]


def mismatch_at(alignment: Alignment, group: str, seq: int) -> Mismatch | None:
    """Whether the members of ``group`` recorded different operations, sizes or types under ``seq``."""
    members, _ = alignment.members(group)
    entries = {rank: entry for rank in sorted(members) if (entry := alignment.entry(rank, group, seq)) is not None}
    classes = sides_of({rank: signature(entry) for rank, entry in entries.items()})
    if any(None in key for key in classes):
        classes = _told_apart(classes)
    if len(classes) < 2:
        return None
    odd, majority = vote(classes)
    return Mismatch(group, seq, {key: tuple(ranks) for key, ranks in classes.items()}, odd, majority, entries)


def _told_apart(classes: Mapping[Signature, list[int]]) -> dict[Signature, list[int]]:
    """Ranks whose records do not tell it all go with the largest class that they fit."""
    found = {key: ranks for key, ranks in classes.items() if None not in key}
    for key in classes.keys() - found.keys():
        fitting = [known for known in found if fits(key, known)]
        joined = max(fitting, key=lambda known: len(found[known]), default=key)
        found[joined] = sorted([*found.get(joined, ()), *classes[key]])
    return found


def first_mismatch(alignment: Alignment) -> Mismatch | None:
    """The oldest mismatch that the windows still hold, over all groups, as far as any rank has come."""
    signatures = Numbering(lambda entry, _: signature(entry))
    names = Numbering(lambda entry, _: op_name(entry))
    found = []
    front = alignment.front()
    for group in alignment.groups():
        windows = {rank: alignment.window(rank, group) for rank in sorted(alignment.members(group)[0])}
        held = [window for window in windows.values() if window is not None]
        seq = first_difference(map(signatures.column, held))
        if seq is not None and mismatch_at(alignment, group, seq) is None:  # what differs there, some do not tell
            seq = first_difference(map(names.column, held))
            seq = seq if seq is not None and mismatch_at(alignment, group, seq) is not None else None
        if seq is not None and seq <= front.get(group, -1):
            found.append((seq, group))
    return mismatch_at(alignment, min(found)[1], min(found)[0]) if found else None
