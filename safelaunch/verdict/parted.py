"""Where the ways of two sides part in the source: what it depends on which way a rank goes.

Said where no condition on the rank, no loop that a rank has left and no words of its own explain it. It never makes a
finding surer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from safelaunch.model import Frame
from safelaunch.verdict.causes import DRAWN, LEFT_OUT, UNUSUAL_GROUP
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Annotation, Finding, ranks_do
from safelaunch.verdict.guarding import by_stack, where_they_wait, whereabouts
from safelaunch.verdict.rank_state import Facts
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.reading.frames import short
from safelaunch.verdict.reading.guards import called_at
from safelaunch.verdict.reading.parting import Condition, Parting, parting
from safelaunch.verdict.reading.said import ways_around
from safelaunch.verdict.reading.source import loops_at
from safelaunch.verdict.remarks import says_why

_MOST = 2  # conditions of a side
Side = tuple[Sequence[Frame], Sequence[int]]  # the user's frames, innermost first, and the ranks that are there


def parted(facts: Facts, finding: Finding) -> Iterator[Annotation]:
    """The conditions that only one of two ways has, those of the ranks at fault first. Where all of these ask for the
    round alone, who is in the later one has made fewer calls.
    """
    is_told = any(one.kept for one in finding.branches) or Doubt.MAY_SKIP_CALLS in finding.doubts
    is_told |= finding.advice >= DRAWN or UNUSUAL_GROUP in finding.advice  # by its own words, or by its group
    if finding.cause != "collective-mismatch" or is_told:
        return
    stacks = finding.calls or where_they_wait(facts, finding)
    sides = _sides(facts, finding, stacks)
    found = parting(sides[0][0], sides[1][0], facts.read_source) if sides else None
    if found is None:
        return
    parts = [[one.guard.words for one in way if _may_part(facts, one, stacks)][-_MOST:] for way in found.ways]
    later = [n for n, way in enumerate(found.ways) if any(one.by_round for one in way)]
    if told := [f"`{words}`" for part in parts for words in part]:
        yield Annotation(f"Which way a rank goes depends on {' and '.join(told)}.", advice=DRAWN)
    elif len(later) == 1:
        yield from _in_a_later_round(facts, found, sides, later[0])


def _sides(facts: Facts, finding: Finding, stacks: Mapping[int, Sequence[Frame]]) -> Sequence[Side]:
    """Of those at fault, and of most of the others; none where they are at several places, or say why they are."""
    named = {one.rank for one in finding.culprits}
    places = by_stack(stacks)
    odd = [side for side in places.items() if named.issuperset(side[1])]
    rest = sorted((side for side in places.items() if side not in odd), key=lambda side: -len(side[1]))
    if (rest and any(says_why(facts, rank) for rank in named)) or len(odd) != (1 if rest else 2):
        return ()
    return [*odd, *rest[:1]]


def _may_part(facts: Facts, one: Condition, ranks: Iterable[int]) -> bool:
    """Neither what is the same on all ranks in one round, nor what the rank alone decides: that is known already."""
    return not one.by_round and any(one.guard.admits(whereabouts(facts, rank)) is None for rank in ranks)


def _in_a_later_round(facts: Facts, found: Parting, sides: Sequence[Side], later: int) -> Iterator[Annotation]:
    """Of those that should meet under one number. None where a library made a call on the way, under conditions of its
    own.
    """
    waits = [facts.ranks[rank].wait for _, ranks in sides for rank in ranks]
    numbers = {(one.group, one.seq) if one is not None else ("", None) for one in waits}
    if len(numbers) != 1 or None in next(iter(numbers)):
        return
    way, stack = found.stacks[later], found.stacks[1 - later]
    if any(called_at(one, facts.read_source) != short(into.function) for one, into in pairwise(way)):
        return
    loops = loops_at(stack[0], facts.read_source)
    skips = ways_around(stack[::-1], loops[-1].line, facts.read_source) if loops else []
    ahead, behind = sides[later][1], sides[1 - later][1]
    text = f"All ranks get to {fr.place(way[-1])} in the same rounds (`{found.ways[later][-1].guard.words}`), so "
    text += f"{ranks_do(ahead, 'has', 'have')} left out calls before, or {ranks_do(behind, 'has', 'have')} made more"
    yield Annotation(f"{text}{f' ({skips[0]})' if skips else ''}.", advice=frozenset({LEFT_OUT}))
