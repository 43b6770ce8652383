"""Conflicts: calls of ranks that should have met, and don't match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from safelaunch.model import Claim, Collective, Frame
from safelaunch.stacks.frames import Stack
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import Signature, fits, op_name, signature
from safelaunch.verdict.columns import Numbering, first_difference
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.suggestions import Advice

if TYPE_CHECKING:
    from safelaunch.verdict.findings import Deviation, LeftLoop, SideVote

_NO_STACK = Stack(())


@dataclass(frozen=True)
class Call:
    """A rank's call in a conflict."""

    words: str = ""
    """The call and its place."""
    site: Frame | None = None
    """The user's frame of the call."""
    stack: Stack = _NO_STACK
    """Frames from the site outwards."""
    does: str = ""
    """Predicate for the rank, if it doesn't only wait in a call that its peers don't make."""
    left: Frame | UnsetType = UNSET
    """Loop that the rank has left."""


@dataclass(frozen=True)
class Conflict:
    """Calls of ranks that should have met, and don't match."""

    calls: Mapping[int, Call]
    odd: tuple[int, ...]
    """Ranks at fault: the minority, or all ranks in a tie."""
    vote: SideVote = ""
    doubts: tuple[Doubt, ...] = ()
    """Doubts about the calls."""
    claims: tuple[Claim, ...] = ()
    group: str = ""
    """Group of the call, if a record shows it."""
    seq: int = 0
    sides: Mapping[Signature, tuple[int, ...]] = field(default_factory=dict)
    """Recorded operation, sizes and types → ranks."""
    entries: Mapping[int, Collective] = field(default_factory=dict)
    cause: str = "collective-mismatch"
    note: str = ""
    """Clause about what the source or the steps show."""
    advice: frozenset[Advice] = frozenset()
    of: Deviation | LeftLoop = ""

    @property
    def tie(self) -> bool:
        return self.vote == "tie"

    @property
    def user_stacks(self) -> dict[int, tuple[Frame, ...]]:
        return {rank: call.stack.user_frames for rank, call in self.calls.items()}


def outvoted(sides: Mapping[Any, Iterable[int]]) -> tuple[tuple[int, ...], SideVote]:
    """Returns the minority, or all ranks in a tie."""
    odd, majority = vote(sides)
    return odd, "" if majority else "tie"


def conflict_at(alignment: Alignment, group: str, seq: int) -> Conflict | None:
    """Returns how the operations, sizes or types that members recorded under ``seq`` differ; None if they don't."""
    members, _ = alignment.members(group)
    entries = {rank: entry for rank in sorted(members) if (entry := alignment.entry(rank, group, seq)) is not None}
    sides = sides_of({rank: signature(entry) for rank, entry in entries.items()})
    if any(None in key for key in sides):
        sides = _with_incomplete_sides(sides)
    if len(sides) < 2:
        return None
    recorded = {key: tuple(ranks) for key, ranks in sides.items()}
    return Conflict({}, *outvoted(sides), group=group, seq=seq, sides=recorded, entries=entries)


def _with_incomplete_sides(sides: Mapping[Signature, list[int]]) -> dict[Signature, list[int]]:
    """Adds ranks with incomplete records to the largest side that they might match."""
    complete = {key: ranks for key, ranks in sides.items() if None not in key}
    for key in [key for key in sides if key not in complete]:  # in order, so that equal evidence has equal verdicts
        fitting = [complete_key for complete_key in complete if fits(key, complete_key)]
        joined = max(fitting, key=lambda candidate: len(complete[candidate]), default=key)
        complete[joined] = sorted([*complete.get(joined, ()), *sides[key]])
    return complete


def first_conflict(alignment: Alignment) -> Conflict | None:
    """Returns the oldest recorded conflict in the windows of all groups, among calls that a rank has reached."""
    signatures = Numbering(lambda entry, _: signature(entry))
    names = Numbering(lambda entry, _: op_name(entry))
    conflicts = []
    front = alignment.front()
    for group in alignment.groups():
        windows = (alignment.window(rank, group) for rank in sorted(alignment.members(group)[0]))
        present = [window for window in windows if window is not None]
        for numbering in (signatures, names):  # unknown parts might make a difference of signatures
            seq = first_difference(map(numbering.column, present))
            conflict = conflict_at(alignment, group, seq) if seq is not None else None
            if seq is None or conflict is not None:
                break
        if conflict is not None and conflict.seq <= front.get(group, -1):
            conflicts.append(conflict)
    return min(conflicts, key=lambda conflict: (conflict.seq, conflict.group), default=None)
