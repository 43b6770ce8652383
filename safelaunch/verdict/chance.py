"""Ranks that might each have decided on their own, by a random number or their own data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from math import comb

from safelaunch.model import Frame
from safelaunch.stacks.guards import conditions_to
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import Annotation, Finding, GuardedCall, stacks_of_waiters
from safelaunch.verdict.own_words import explains_itself
from safelaunch.verdict.phrases import by_place
from safelaunch.verdict.rank_state import CaseFacts

_MOST_RANKS = 1 << 14  # largest job whose patterns are listed: costs ranks times size
CHANCE = 0.01  # accepted probability that a random choice looks like a pattern


def is_in_transfer(facts: CaseFacts, rank: int, frame: Frame | None) -> bool:
    wait = facts.ranks[rank].wait
    return wait is not None and wait.kind == "p2p" and wait.frame == frame


def _condition_differs(facts: CaseFacts, finding: Finding) -> bool:
    ways = set()
    for stack in stacks_of_waiters(facts, finding).values():
        if not stack or any(not facts.read_source(frame.file) for frame in stack):
            return True
        ways.add(frozenset(guard for frame in stack for guard in conditions_to(frame, facts.read_source)))
    return len(ways) != 1


def unless_random(facts: CaseFacts, finding: Finding, guarded: Iterable[GuardedCall]) -> Annotation:
    """Withdraws the blame if each rank decided on its own, by a random number or its own data.

    Then no rank is wrong: the next run has different ranks on each side, and all ranks make the decision at the same
    line. A decision by rank selects a group, a node, or a regular pattern; among few ranks, a random choice might look
    the same. A rank in a send or receive has made no such choice: it has a peer. Neither has any rank if the source
    shows no condition that only one side passed. The blame stays if a rank's own state explains its place, or if it
    came to its call by a condition on the rank.
    """
    named = {culprit.rank for culprit in finding.culprits}
    sides = by_place({c.rank: (c.frame.file, c.frame.line) if c.frame else ("", 0) for c in finding.culprits})
    if finding.vote == "open" or (finding.vote != "tie" and len(sides) > 1):
        return Annotation()
    chances = [_chance(facts, {*side}) for _, side in sides]
    random = 1.0 in chances
    if any(is_in_transfer(facts, culprit.rank, culprit.frame) for culprit in finding.culprits):
        return Annotation(doubts=doubts_if({Doubt.MAY_BE_OWED: random}))
    if not _condition_differs(facts, finding):
        return Annotation(doubts=doubts_if({Doubt.SEVERAL_PLACES: random}))
    if not random:
        return Annotation(doubts=doubts_if({Doubt.PATTERN_BY_CHANCE: max(chances, default=0.0) > CHANCE}))
    if any(explains_itself(facts, rank) for rank in named):
        return Annotation(doubts=(Doubt.NO_PATTERN,))
    if any(named.issuperset(branch.ranks) for branch in guarded):
        return Annotation(doubts=(Doubt.RANK_AND_MORE,))
    return Annotation(_NO_PATTERN_TEXT, doubts=(Doubt.NO_PATTERN,), culprits=(), of="own choice")


_NO_PATTERN_TEXT = (
    "Nothing distinguishes the two sides: each rank seems to decide on its own, by a random number or its own data, so "
    "no rank is named."
)


def has_no_pattern(facts: CaseFacts, ranks: Set[int]) -> bool:
    """Returns whether neither these ranks nor all the others form a pattern."""
    return _chance(facts, ranks) == 1.0


def _chance(facts: CaseFacts, ranks: Set[int]) -> float:
    """Returns the share of equally large sets that form a pattern; 1.0 if ``ranks`` and all the others form none."""
    sides = [set(side) for side in (ranks, facts.world - ranks)]
    if any(len(side) < 2 for side in sides) or len(facts.world) > _MOST_RANKS:
        return 0.0
    patterns = {frozenset(pattern) for side in sides for pattern in _patterns(facts, len(side))}
    if not any(frozenset(side) in patterns for side in sides):
        return 1.0
    return len(patterns) / comb(len(facts.world), len(ranks))


def _patterns(facts: CaseFacts, size: int) -> Iterator[Iterable[int]]:
    """Yields the sets of ``size`` ranks that are the first, the last, every k-th, a group or a node."""
    world = sorted(facts.world)
    yield from (world[:size], world[-size:])
    for step in range(2, len(world) // size + 2):
        yield from (pattern for first in range(step) if len(pattern := world[first::step]) == size)
    hosts = [ranks for _, ranks in by_place({rank: state.evidence.host for rank, state in facts.ranks.items()})]
    groups = (members for record in facts.alignment.records.values() for members in record.groups.values())
    yield from (pattern for pattern in (*hosts, *set(groups)) if len(pattern) == size)
