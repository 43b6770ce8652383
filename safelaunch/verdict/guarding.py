"""The condition that sent ranks different ways: read from the source wherever they stand on different sides.

``if rank == 0: dist.all_gather(...)`` is the commonest collective that peers never call, and ``if rank != 0: continue``
the commonest that one leaves out. What other rules find is true without it; this says which line sends ranks which way.
Where no condition on the rank does, it says what the way depends on. It never makes a finding surer. Where several
ranks went another way and nothing sets them apart, the finding is less sure, and names nobody: ``unless_drawn``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise, takewhile
from math import comb

from safelaunch.model import Claim, Frame
from safelaunch.model.entries import Entries
from safelaunch.stacks import frames as fr
from safelaunch.stacks.guards import Guard, Whereabouts, guards_of, way_to
from safelaunch.stacks.parting import Parting, loop_of_both, parting, ways_around
from safelaunch.stacks.source import SourceLoop, loops_at, names_called_at
from safelaunch.verdict import causes
from safelaunch.verdict.causes import Advice
from safelaunch.verdict.collectives import signature
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Annotation, Finding, GuardedCall, by_place, capital, ranks_do, ranks_word
from safelaunch.verdict.rank_state import CaseFacts, user_stack_of
from safelaunch.verdict.remarks import says_why

# Findings that say who went another way than its peers, and not why.
_EXPLAINED = frozenset({"collective-mismatch", "missing-from-collective", "uneven-batches", "group-order", "p2p-cycle"})
_OF_A_LOOP = {Doubt.ROUND_UNKNOWN, Doubt.HABIT_ALONE}  # what the finding says of the loop around them already
_MOST = 2


def guards(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The conditions on the rank that sent those at fault another way than their peers; and where none did, whether
    each rank may have decided for itself.
    """
    if finding.cause not in _EXPLAINED or not finding.culprits:
        return
    stacks = finding.calls or _where_they_wait(facts, finding)
    named = frozenset(culprit.rank for culprit in finding.culprits)
    found = branches(facts, stacks, named)
    # Nobody expects the other end of a send or receive at the same line.
    found = [one for one in found if not all(_is_in_a_transfer(facts, rank, one.call) for rank in one.ranks)]
    cause = finding.cause
    if Doubt.ROUND_UNKNOWN in finding.doubts and any(one.kept and named.issuperset(one.ranks) for one in found):
        cause = "collective-mismatch"  # they are there by this, not as a loop has ended
    told = [one for one in found if one.kept][:_MOST]
    yield Annotation(
        " ".join(map(_sentence, told)),
        tuple(claim_of(facts, one) for one in found),
        advice=_advice(facts, finding, found),
        cause=cause,
        branches=tuple(found),
    )
    if not told and cause == "collective-mismatch" and causes.GROUPS_MADE not in finding.advice:
        yield _unless_drawn(facts, finding, found)


def _advice(facts: CaseFacts, finding: Finding, found: Sequence[GuardedCall]) -> frozenset[Advice]:
    """Of an ``if`` with its ``else``, each side is kept from the other's call: who made the odd one counts. Where they
    wait in several groups, each side may call the other group next.
    """
    named = frozenset(culprit.rank for culprit in finding.culprits)
    if finding.cause == "group-order":
        found = [one for one in found if one.kept]
        if named <= {rank for one in found for rank in one.kept}:
            return frozenset()
    advice = frozenset[Advice]().union(*(_advice_on(facts, one, named) for one in found))
    return frozenset({causes.GUARDED}) if causes.GUARDED in advice else advice


def _advice_on(facts: CaseFacts, one: GuardedCall, named: frozenset[int]) -> frozenset[Advice]:
    """Whether those at fault came to the call by the condition, or were kept from it: where both sides are named, the
    fewer ones did what they should not.
    """
    came, kept = named & set(one.ranks), named - set(one.ranks)
    if not one.kept and _may_have_admitted(facts, one):
        return frozenset()
    if came and kept:
        admitted = [one.guard.admits(whereabouts(facts, rank)) for rank in facts.world]
        return frozenset({causes.LEFT_OUT if 2 * admitted.count(True) > len(admitted) else causes.GUARDED})
    return frozenset({causes.GUARDED if came else causes.LEFT_OUT})


def _may_have_admitted(facts: CaseFacts, one: GuardedCall) -> bool:
    """Whether peers have made such a call before: the condition asks for more than the rank, and may let them pass."""
    wait = facts.ranks[one.ranks[0]].wait
    if wait is None or wait.group is None or wait.seq is None:
        return False
    for rank in [rank for rank in facts.ranks if rank not in one.ranks][:_MOST]:
        window = facts.alignment.window(rank, wait.group)
        entries = (window.at(number) for number in window.numbers if number < wait.seq) if window is not None else ()
        if any(entry is not None and signature(entry) == wait.signature for entry in entries):
            return True
    return False


_MOST_RANKS = 1 << 14  # of which patterns are looked for: their number times their size is what it takes
CHANCE = 0.01  # that ranks which draw for themselves make a pattern


def _drawn(facts: CaseFacts, finding: Finding) -> tuple[Doubt, ...]:
    """Whether several ranks at fault on one side may have drawn for themselves, or decided by data of their own.

    Then no rank is wrong. A decision by the rank parts those of a group, of a node, or in an order among all ranks; of
    few ranks a draw may do so as well. Who waits in a send or receive has decided nothing: it has a peer. Nor has
    anybody where the source shows no condition that ranks have passed on one side alone.
    """
    places = {
        culprit.rank: (culprit.frame.file, culprit.frame.line) if culprit.frame else ("", 0)
        for culprit in finding.culprits
    }
    sides = by_place(places)
    if Doubt.EITHER_SIDE in finding.doubts or (Doubt.NO_MAJORITY not in finding.doubts and len(sides) > 1):
        return ()
    chances = [_chance(facts, {*side}) for _, side in sides]
    if any(_is_in_a_transfer(facts, culprit.rank, culprit.frame) for culprit in finding.culprits):
        return (Doubt.MAY_BE_OWED,) if 1.0 in chances else ()
    if not _may_have_decided(facts, finding):
        return (Doubt.SEVERAL_PLACES,) if 1.0 in chances else ()
    if 1.0 in chances:
        return (Doubt.NO_PATTERN,)
    return (Doubt.PATTERN_BY_CHANCE,) if max(chances, default=0.0) > CHANCE else ()


def _is_in_a_transfer(facts: CaseFacts, rank: int, frame: Frame | None) -> bool:
    wait = facts.ranks[rank].wait
    return wait is not None and wait.kind == "p2p" and wait.frame == frame


def _may_have_decided(facts: CaseFacts, finding: Finding) -> bool:
    """Some ranks stand behind a condition, whatever it asks for, that others do not; or the source does not say."""
    ways = set()
    for stack in _where_they_wait(facts, finding).values():
        if not stack or any(not facts.read_source(frame.file) for frame in stack):
            return True
        steps = (step for frame in stack for step in way_to(frame, facts.read_source) if not step.loop)
        ways.add(frozenset((step.file, step.line, step.taken) for step in steps))
    return len(ways) != 1


def _unless_drawn(facts: CaseFacts, finding: Finding, found: Iterable[GuardedCall]) -> Annotation:
    """Nobody is at fault where each rank has decided for itself which way to go: by a random number, or by data of its
    own.

    The numbers of those on either side are then no property of theirs, and the next run has others. What is wrong is
    the decision, which all ranks make at one line. Unless a rank says itself why it is where it is, or came to its call
    by a condition that asks for the rank: then the decision is the rank's, whatever else it asks for.
    """
    doubts, named = _drawn(facts, finding), {culprit.rank for culprit in finding.culprits}
    if Doubt.NO_PATTERN not in doubts or any(says_why(facts, rank) for rank in named):
        return Annotation(doubts=doubts)
    if any(named.issuperset(one.ranks) for one in found):
        return Annotation(doubts=(Doubt.RANK_AND_MORE,))
    return Annotation(_DRAWN, doubts=doubts, culprits=(), advice=causes.DRAWN)


_DRAWN = (
    "Nothing distinguishes the two sides: each rank seems to decide for itself, by a random number or its own data, so "
    "no rank is named."
)


def is_scattered(facts: CaseFacts, ranks: Set[int]) -> bool:
    """Neither these ranks nor all the others are a pattern, and both are several."""
    return _chance(facts, ranks) == 1.0


def _chance(facts: CaseFacts, ranks: Set[int]) -> float:
    """How many of all sets of so many ranks make a pattern; 1.0 where ``ranks`` make none, nor do all the others."""
    sides = [set(side) for side in (ranks, facts.world - ranks)]
    if any(len(side) < 2 for side in sides) or len(facts.world) > _MOST_RANKS:
        return 0.0
    patterns = {frozenset(pattern) for side in sides for pattern in _patterns(facts, len(side))}
    if not any(frozenset(side) in patterns for side in sides):
        return 1.0
    return len(patterns) / comb(len(facts.world), len(ranks))


def _patterns(facts: CaseFacts, size: int) -> Iterator[Iterable[int]]:
    """The sets of ``size`` ranks that are the first or last ones, every k-th, a group's or a node's."""
    world = sorted(facts.world)
    yield from (world[:size], world[-size:])
    for step in range(2, len(world) // size + 2):
        yield from (found for first in range(step) if len(found := world[first::step]) == size)
    hosts = [ranks for _, ranks in by_place({rank: one.evidence.host for rank, one in facts.ranks.items()})]
    groups = (members for record in facts.alignment.records.values() for members in record.groups.values())
    yield from (found for found in (*hosts, *set(groups)) if len(found) == size)


def _where_they_wait(facts: CaseFacts, finding: Finding) -> dict[int, tuple[Frame, ...]]:
    named = {culprit.rank for culprit in finding.culprits}
    waiting = (rank for rank, one in facts.ranks.items() if one.wait is not None or rank in named)
    return {rank: user_stack_of(facts.ranks[rank].evidence) for rank in waiting}


def by_stack(stacks: Mapping[int, Sequence[Frame]]) -> dict[tuple[Frame, ...], list[int]]:
    """The ranks with each stack. Those of exceptions have no names of classes."""
    places = by_place({rank: tuple(map(fr.spot, stack)) for rank, stack in sorted(stacks.items())})
    return {tuple(stacks[ranks[0]]): ranks for _, ranks in places}


def branches(facts: CaseFacts, stacks: Mapping[int, Sequence[Frame]], named: frozenset[int]) -> list[GuardedCall]:
    """The guards of each call that are not those of the others' calls, the most telling first.

    ``stacks``: rank → the user's frames of the call that it made there, innermost first; none for no call.
    ``named``: the ranks at fault.
    A guard counts where it keeps some of the others away, on either side; or where it asks for the rank and more, and
    the ranks on the other side are not past it.
    """
    places = by_stack({rank: stack for rank, stack in stacks.items() if stack})
    guards = {place: guards_of(place, facts.read_source) for place in places}
    found = []
    for place, ranks in places.items():
        others = [rank for other, there in places.items() if other != place for rank in there]
        others += [rank for rank in {*named, *stacks} if not stacks.get(rank)]
        shared = {guard for other in places if other != place for guard in guards[other]}
        for guard in guards[place]:
            if guard not in shared and (named & set(ranks) or named & set(others)):
                one = _branch(facts, guard, place[0], ranks, others)
                found += [one] if one is not None and _tells(one, named, others) else []
    return sorted(found, key=lambda one: (not one.kept, one.ranks))


def _tells(one: GuardedCall, named: Set[int], others: Sequence[int]) -> bool:
    """Where ranks on either side may be at fault, it has to keep one of these away: the rest is where it always is."""
    both = bool(named & set(one.ranks)) and bool(named & set(others))
    return not both or not one.kept or bool(named & set(one.kept))


def _branch(
    facts: CaseFacts, guard: Guard, call: Frame, ranks: Sequence[int], others: Sequence[int]
) -> GuardedCall | None:
    here = {guard.admits(whereabouts(facts, rank)) for rank in ranks}
    there = {rank: guard.admits(whereabouts(facts, rank)) for rank in others}
    if False in here or (there and all(there.values())):
        return None  # it is not what it seems, or keeps nobody away
    return GuardedCall(
        guard, call, tuple(sorted(ranks)), tuple(sorted(rank for rank, comes in there.items() if comes is False))
    )


def whereabouts(facts: CaseFacts, rank: int) -> Whereabouts:
    local = facts.ranks[rank].evidence.local_rank if rank in facts.ranks else -1
    return Whereabouts(rank, local, facts.evidence.world_size)


def _sentence(one: GuardedCall) -> str:
    if one.kept:
        kept = capital(ranks_do(one.kept, "never reaches", "never reach"))
        return f"{kept} {fr.place(one.call)} because of `{one.guard.words}`."
    return f"{capital(ranks_do(one.ranks, 'comes', 'come'))} to {fr.place(one.call)} under `{one.guard.words}`."


def claim_of(facts: CaseFacts, one: GuardedCall) -> Claim:
    return facts.ranks[one.ranks[0]].line_claim(_sentence(one).rstrip("."))


def guard_of(facts: CaseFacts, rank: int, others: Iterable[int]) -> Guard | None:
    """The innermost condition on the rank around where ``rank`` is that may keep ``others`` away; None without one."""
    for guard in guards_of(user_stack_of(facts.ranks[rank].evidence), facts.read_source):
        if any(guard.admits(whereabouts(facts, other)) is not True for other in others):
            return guard
    return None


# --- any condition at all, where two sides part -----------------------------------------------------------------------

RankSide = tuple[Sequence[Frame], Sequence[int]]  # the user's frames, innermost first, and the ranks that are there


def parted(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The conditions that only one of two ways has, those of the ranks at fault first. Where all of these ask for the
    round alone, who is in the later one has made fewer calls; and where there are none, a loop has ended for one side.
    """
    is_told = any(branch.kept for branch in finding.branches) or Doubt.MAY_SKIP_CALLS in finding.doubts
    # by its own words, or by its group
    is_told |= finding.advice >= causes.DRAWN or causes.UNUSUAL_GROUP in finding.advice
    if finding.cause != "collective-mismatch" or is_told:
        return
    waits = _where_they_wait(facts, finding)
    sides = _sides(facts, finding, finding.calls or waits)
    if not sides and _in_several_groups(facts, waits):
        sides = _sides(facts, finding, waits)
    if not sides:
        return
    (one, _), (other, _) = sides
    found = parting(one, other, facts.read_source)
    if found is None:
        loop = loop_of_both(one, other, facts.read_source)
        if loop is not None:
            yield _of_other_items(facts, *loop)
        return
    ended = None if _OF_A_LOOP & {*finding.doubts} else _in_another_round(facts, found, sides)
    if ended is not None:
        yield ended[1]
    parts = [
        [one for one in way if _may_part(facts, one, waits) and (ended is None or ended[0].has(one))]
        for way in found.ways
    ]
    later = [n for n, way in enumerate(found.ways) if any(one.by_round for one in way)]
    if told := [one for part in parts for one in part[-_MOST:]]:
        advice = frozenset({causes.TRIED_AGAIN}) if all(one.again for one in told) else causes.DRAWN
        words = " and ".join(f"`{one.words}`" for one in told)
        yield Annotation(f"Which way a rank goes depends on {words}.", advice=advice)
    elif ended is None and len(later) == 1:
        yield from _in_a_later_round(facts, found, sides, later[0])


def _sides(facts: CaseFacts, finding: Finding, stacks: Mapping[int, Sequence[Frame]]) -> Sequence[RankSide]:
    """Of those at fault, and of most of the others; none where they are at several places, or say why they are. Twice
    the same where all pass different sizes at one line.

    Who waits where a rank at fault does is on its side, unless in a group of its own.
    """
    named = {culprit.rank for culprit in finding.culprits}
    places = by_stack(stacks)
    if len(places) == 1 and causes.SIZES_DIFFER in finding.advice:
        return [*places.items()] * 2
    odd = [(place, [rank for rank in ranks if rank in named]) for place, ranks in places.items() if named & {*ranks}]
    rest = [(place, ranks) for place, ranks in places.items() if not named & {*ranks}]
    if len(odd) == 2 and not rest:
        return odd
    if any(not named.issuperset(ranks) for ranks in places.values() if named & {*ranks}):
        peers = _members_of_waits(facts, named) if _in_several_groups(facts, stacks) else frozenset[int]()
        rest = [(place, among) for place, ranks in rest if (among := [rank for rank in ranks if rank in peers])]
        if not rest:
            return ()
    rest = sorted(rest, key=lambda side: -len(side[1]))
    return [*odd, rest[0]] if len(odd) == 1 and rest and not any(says_why(facts, rank) for rank in named) else ()


def _in_several_groups(facts: CaseFacts, ranks: Iterable[int]) -> bool:
    return len({wait.group for rank in ranks if (wait := facts.ranks[rank].wait) is not None}) > 1


def _members_of_waits(facts: CaseFacts, ranks: Iterable[int]) -> frozenset[int]:
    """Those in the groups in which ``ranks`` wait."""
    waits = [wait for rank in ranks if (wait := facts.ranks[rank].wait) is not None and wait.group is not None]
    return frozenset[int]().union(*(facts.alignment.members(str(wait.group))[0] for wait in waits))


def _may_part(facts: CaseFacts, one: Guard, ranks: Iterable[int]) -> bool:
    """Neither what is the same on all ranks in one round, nor what the rank alone decides: that is known already."""
    return not one.by_round and any(one.admits(whereabouts(facts, rank)) is None for rank in ranks)


def _of_other_items(facts: CaseFacts, loop: Guard, around: Sequence[Frame]) -> Annotation:
    """Both sides are in the call that the loop makes with each of its items, by the way ``around``, innermost first."""
    skips = ways_around(around, loop.line, facts.read_source)
    text = f"Both sides come from one line of `{loop.words}`: they go through different items, or in another order"
    return Annotation(f"{text}{f' ({skips[0]})' if skips else ''}.", advice=frozenset({causes.OTHER_ITEMS}))


def _in_another_round(
    facts: CaseFacts, found: Parting, sides: Sequence[RankSide]
) -> tuple[SourceLoop, Annotation] | None:
    """One side makes once more the call that the other has made last: a loop around it has ended for one of them.

    Under a condition, the other may not call in each round of what is around them, and the calls be those of several.
    """
    for mine, (way, ranks) in enumerate(sides):
        there = found.stacks[mine]
        loops = [loop for frame in there for loop in loops_at(frame, facts.read_source)]
        loops = [loop for loop in loops if not loop.has(found.stacks[1 - mine][0])]
        others = sides[1 - mine][1]
        if (
            len(loops) == 1
            and not found.ways[1 - mine]
            and _run(facts, ranks[0], way, 0) > _run(facts, others[0], way, 1) > 0
        ):
            text = f"{capital(ranks_do(others, 'has', 'have'))} called last from {fr.place(way[0])}, too: the loop at "
            text += f"{loops[0].place} has ended there, and goes on for {ranks_word(ranks)}"
            return loops[0], Annotation(f"{text}.", advice=frozenset({causes.OTHER_ITEMS}))
    return None


def _run(facts: CaseFacts, rank: int, way: Sequence[Frame], before: int) -> int:
    """How many calls in a row the rank has made by this way, of whatever groups, up to the one that it waits in, or up
    to so many ``before`` that; 0 where records do not tell.
    """
    wait, record = facts.ranks[rank].wait, facts.alignment.records.get(rank)
    if wait is None or record is None or wait.group is None or wait.seq is None:
        return 0
    now = facts.alignment.entry(rank, wait.group, wait.seq)
    entries, spots = Entries.of(record.entries), [*map(fr.spot, way)]
    at = entries.record_ids.index(now.record_id) if now is not None else 0
    made = ([*map(fr.spot, facts.alignment.stack(rank, entries[n]).user_frames)] for n in range(at - before, -1, -1))
    return len(list(takewhile(lambda stack: stack == spots, made)))


def _in_a_later_round(facts: CaseFacts, found: Parting, sides: Sequence[RankSide], later: int) -> Iterator[Annotation]:
    """Of those that should meet under one number. None where a library made a call on the way, under conditions of its
    own.
    """
    waits = [facts.ranks[rank].wait for _, ranks in sides for rank in ranks]
    numbers = {(wait.group, wait.seq) if wait is not None else ("", None) for wait in waits}
    if len(numbers) != 1 or None in next(iter(numbers)):
        return
    way, stack = found.stacks[later], found.stacks[1 - later]
    if any(fr.short(into.function) not in names_called_at(one, facts.read_source) for one, into in pairwise(way)):
        return
    loops = loops_at(stack[0], facts.read_source)
    skips = ways_around(stack[::-1], loops[-1].line, facts.read_source) if loops else []
    ahead, behind = sides[later][1], sides[1 - later][1]
    text = f"All ranks get to {fr.place(way[-1])} in the same rounds (`{found.ways[later][-1].words}`), so "
    text += f"{ranks_do(ahead, 'has', 'have')} left out calls before, or {ranks_do(behind, 'has', 'have')} made more"
    yield Annotation(f"{text}{f' ({skips[0]})' if skips else ''}.", advice=frozenset({causes.LEFT_OUT}))
