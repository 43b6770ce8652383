"""The sides that ranks take under one number, and whether one of them may outvote the others.

A vote by operation counts ranks that made the same call there. They outvote the others only where they agree among
themselves: where they stand at different places of the program, or go on with different calls, each of them may be off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from safelaunch.model import Frame
from safelaunch.verdict.collectives import Mismatch, fits, op_name, signature, vote
from safelaunch.verdict.rank_state import Facts, user_stack_of
from safelaunch.verdict.reading.guards import way_to

_NEXT = 3  # calls after the one that does not fit
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # whose root may call from a line of its own

Place = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Sides:
    """The ranks that agree with each other, side by side; none of them is a majority. ``under``: the innermost user
    frame that all their stacks share. ``once_more``: the line that some called once more than others on the way there,
    and ``condition``: what decides whether a rank comes to it, as the source shows.
    """

    ranks: tuple[tuple[int, ...], ...]
    under: Frame | None = None
    once_more: Frame | None = None
    condition: str = ""


def sides_without_majority(facts: Facts, found: Mismatch) -> Sides | None:
    """Three or more sides, none of them a majority, where a vote by operation has one, or sees as many sides.

    None for two sides that stand against each other: one of them is at fault, and both are named.
    """
    if not found.majority and len(found.classes) < 3:
        return None
    split = [
        tuple(side)
        for ranks in found.classes.values()
        for there in _by_place(facts, found, ranks)
        for side in _by_next_calls(facts, found, there)
    ]
    voters = sum(map(len, split))
    if len(split) < 3 or any(2 * len(side) > voters for side in split):
        return None
    ranks = sorted(rank for side in split for rank in side)
    once_more, condition = _once_more(facts, found, ranks)
    return Sides(tuple(sorted(split)), _shared(facts, found, ranks), once_more, condition)


def _by_place(facts: Facts, found: Mismatch, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks that made the same call, by the place that they made it from; whose place is not known goes with most.

    Different places agree that have met under one number before: by design, ranks call from there.
    """
    places: dict[Place, list[int]] = {}
    unknown = []
    for rank in ranks:
        entry = facts.alignment.entry(rank, found.group, found.seq)
        stack = _user_frames(facts, found, rank) or (entry.frames if entry is not None else ())
        if stack:
            places.setdefault(tuple((frame.file, frame.line) for frame in stack), []).append(rank)
        else:
            unknown.append(rank)
    sides: list[list[int]] = []
    for side in sorted(places.values(), key=len, reverse=True):
        known = next((one for one in sides if _met_before(facts, found, one[0], side[0])), None)
        if known is not None or (sides and len(side) == 1 and _is_rooted(facts, found, side[0])):
            (known or sides[0]).extend(side)
        else:
            sides.append(side)
    if not sides:
        return [unknown]
    sides[0].extend(unknown)
    return sides


def _user_frames(facts: Facts, found: Mismatch, rank: int) -> tuple[Frame, ...]:
    """The user's frames of the call, innermost first: as recorded, else as the main thread shows them that waits in it.

    Behind a device's queue the main thread runs ahead, and waits wherever it needs a result.
    """
    entry = facts.alignment.entry(rank, found.group, found.seq)
    recorded = facts.alignment.stack(rank, entry).user_frames if entry is not None else ()
    wait = facts.ranks[rank].wait
    is_queued = entry is not None and entry.started is not None
    is_there = wait is not None and not is_queued and (wait.group, wait.seq) == (found.group, found.seq)
    return recorded or (tuple(user_stack_of(facts.ranks[rank].evidence)) if is_there else ())


def _is_rooted(facts: Facts, found: Mismatch, rank: int) -> bool:
    entry = facts.alignment.entry(rank, found.group, found.seq)
    return entry is not None and op_name(entry) in _ROOTED


def _met_before(facts: Facts, found: Mismatch, rank: int, other: int) -> bool:
    """The two made these calls under one number before they called from one place the last time."""
    histories = facts.histories.in_group(found.group).histories
    if rank not in histories or other not in histories:
        return False
    mine, its = histories[rank].column, histories[other].column
    wanted = mine.at(found.seq), its.at(found.seq)
    if wanted[0] == wanted[1]:  # then it is their stacks that differ
        return False
    numbers = range(max(mine.numbers[0], its.numbers[0]), found.seq)
    met = next((number for number in numbers if (mine.at(number), its.at(number)) == wanted), None)
    return met is not None and any(mine.at(number) == its.at(number) for number in range(met, found.seq))


def _by_next_calls(facts: Facts, found: Mismatch, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks that agree under the number, by what they called next. Who has called nothing yet goes with most of them,
    and for itself where there is no most.
    """
    for number in range(found.seq + 1, found.seq + 1 + _NEXT):
        made = {rank: facts.alignment.entry(rank, found.group, number) for rank in ranks}
        calls = {rank: signature(entry) for rank, entry in made.items() if entry is not None}
        sides: list[list[int]] = []
        for rank, call in calls.items():
            known = next((side for side in sides if fits(calls[side[0]], call)), None)
            known.append(rank) if known is not None else sides.append([rank])
        if len(sides) > 1:
            silent = [rank for rank in ranks if rank not in calls]
            _, majority = vote(dict(enumerate(sides)))
            if majority:
                max(sides, key=len).extend(silent)
            elif silent:
                sides.append(silent)
            return sides
    return [list(ranks)]


def _shared(facts: Facts, found: Mismatch, ranks: Iterable[int]) -> Frame | None:
    """The innermost user frame that the stacks of all have in common; None for the script's outermost line, which
    tells nothing. A comprehension counts as the function that it stands in.
    """
    stacks = [tuple(reversed(_user_frames(facts, found, rank))) for rank in ranks]
    level = zip(*stacks, strict=False)
    shared = [frames[0] for frames in takewhile(lambda f: len({(one.file, one.line) for one in f}) == 1, level)]
    return next((frame for frame in reversed(shared[1:]) if not frame.function.endswith(">")), None)


def _once_more(facts: Facts, found: Mismatch, ranks: Sequence[int]) -> tuple[Frame | None, str]:
    """The line from which all called last before their lines parted, if some called from there again; and the innermost
    condition before it."""
    parted = facts.histories.in_group(found.group).parted_before(ranks, found.seq)
    before = facts.alignment.entry(ranks[0], found.group, parted[0] - 1) if parted is not None else None
    if parted is None or before is None:
        return None, ""
    site = facts.alignment.stack(ranks[0], before).user_frame
    if site is None or not any((frame.file, frame.line) == (site.file, site.line) for frame in parted[1]):
        return None, ""
    conditions = [step.guard.words for step in way_to(site, facts.read_source) if not step.loop]
    return site, conditions[-1] if conditions else ""
