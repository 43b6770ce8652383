"""Any other condition at which two sides diverge: a loop that ended, a later round, other items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile

from safelaunch.model import Frame
from safelaunch.model.entries import Entries
from safelaunch.stacks import frames as fr
from safelaunch.stacks.diverging import DivergingStacks, diverging_stacks
from safelaunch.stacks.diverging_loops import common_loop
from safelaunch.stacks.guards import Guard, Retry, SourceLoop, loops_at
from safelaunch.stacks.source import context, names_called
from safelaunch.stacks.ways_out import ways_around
from safelaunch.verdict import suggestions
from safelaunch.verdict.findings import Annotation, Finding, LeftLoop, stacks_of_waiters
from safelaunch.verdict.guarding import MOST_NAMED, by_stack
from safelaunch.verdict.own_words import explains_itself
from safelaunch.verdict.phrases import capital, ranks_do, ranks_word
from safelaunch.verdict.rank_state import CaseFacts

RankSide = tuple[Sequence[Frame], Sequence[int]]  # the user's frames, innermost first, and the ranks with them


def diverging_conditions(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields conditions that only one of two sides passed, starting with the side at fault.

    If conditions on the round are all there is, the side in the later round has made fewer calls. If there is no
    condition, a loop has ended for one side.
    """
    left = finding.of if isinstance(finding.of, LeftLoop) else None
    is_explained = finding.of in ("own choice", "usual group") or (left is not None and left.skips)
    if is_explained or any(branch.kept for branch in finding.branches):
        return
    waits = stacks_of_waiters(facts, finding)
    sides = _sides(facts, finding, finding.calls or waits)
    if not sides and _in_several_groups(facts, waits):
        sides = _sides(facts, finding, waits)
    if not sides:
        return
    (first_side, _), (second_side, _) = sides
    branching = diverging_stacks(first_side, second_side, facts.read_source)
    if branching is None:
        loop = common_loop(first_side, second_side, facts.read_source)
        if loop is not None:
            yield _different_items(facts, *loop)
        return
    # Otherwise the finding already describes the loop around the ranks.
    of_no_loop = finding.of != "usual call" and (left is None or left.sure)
    ended = _loop_ended(facts, branching, sides) if of_no_loop else None
    if ended is not None:
        yield ended[1]
    parts = [
        [guard for guard in way if _can_differ(facts, guard, waits) and (ended is None or ended[0].has(guard))]
        for way in branching.ways
    ]
    later = [n for n, way in enumerate(branching.ways) if any(guard.by_round for guard in way)]
    if deciding := [guard for part in parts for guard in part[-MOST_NAMED:]]:
        again = all(isinstance(guard, Retry) for guard in deciding)
        words = " and ".join(f"`{guard.words}`" for guard in deciding)
        yield Annotation(
            f"Which way a rank goes depends on {words}.",
            advice=frozenset({suggestions.TRIED_AGAIN} if again else ()),
            of="" if again else "own choice",
        )
    elif ended is None and len(later) == 1:
        yield from _later_round(facts, branching, sides, later[0])


def _sides(facts: CaseFacts, finding: Finding, stacks: Mapping[int, Sequence[Frame]]) -> Sequence[RankSide]:
    """Returns the side at fault and the largest other side.

    Empty if the ranks at fault are at several places, or their own state explains why they are there. If all ranks pass
    different sizes at the same line, both sides are the same. A rank at the same place as a rank at fault is on its
    side, unless it waits in a different group.
    """
    named = {culprit.rank for culprit in finding.culprits}
    places = by_stack(stacks)
    if len(places) == 1 and finding.of == "sizes":
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
    return [*odd, rest[0]] if len(odd) == 1 and rest and not any(explains_itself(facts, rank) for rank in named) else ()


def _in_several_groups(facts: CaseFacts, ranks: Iterable[int]) -> bool:
    return len({wait.group for rank in ranks if (wait := facts.ranks[rank].wait) is not None}) > 1


def _members_of_waits(facts: CaseFacts, ranks: Iterable[int]) -> frozenset[int]:
    waits = [wait for rank in ranks if (wait := facts.ranks[rank].wait) is not None and wait.group is not None]
    return frozenset[int]().union(*(facts.alignment.members(str(wait.group))[0] for wait in waits))


def _can_differ(facts: CaseFacts, guard: Guard, ranks: Iterable[int]) -> bool:
    return not guard.by_round and any(guard.admits(facts.whereabouts(rank)) is None for rank in ranks)


def _different_items(facts: CaseFacts, loop: SourceLoop, around: Sequence[Frame]) -> Annotation:
    skips = ways_around(around, loop, facts.read_source)
    text = (
        f"Both sides come from one line of `{loop.words}`: they iterate over different items, or in a different order"
    )
    return Annotation(f"{text}{f' ({skips[0]})' if skips else ''}.", advice=frozenset({suggestions.OTHER_ITEMS}))


def _loop_ended(
    facts: CaseFacts, branching: DivergingStacks, sides: Sequence[RankSide]
) -> tuple[SourceLoop, Annotation] | None:
    """Explains sides that diverged as a loop ended for one of them: the other makes that side's last call again.

    Not under a condition: then a side might skip the call in some rounds, and the calls might be of several rounds.
    """
    for side, (way, ranks) in enumerate(sides):
        stack = branching.stacks[side]
        loops = [loop for frame in stack for loop in loops_at(frame, facts.read_source)]
        loops = [loop for loop in loops if not loop.has(branching.stacks[1 - side][0])]
        peers = sides[1 - side][1]
        if (
            len(loops) == 1
            and not branching.ways[1 - side]
            and _calls_in_a_row(facts, ranks[0], way, 0) > _calls_in_a_row(facts, peers[0], way, 1) > 0
        ):
            text = f"{capital(ranks_do(peers, 'has', 'have'))} called last from {fr.place(way[0])}, too: the loop at "
            text += f"{loops[0].place} has ended there, and continues for {ranks_word(ranks)}"
            return loops[0], Annotation(f"{text}.", advice=frozenset({suggestions.OTHER_ITEMS}))
    return None


def _calls_in_a_row(facts: CaseFacts, rank: int, way: Sequence[Frame], before: int) -> int:
    """Returns how many calls in a row the rank made from this place, in any group; 0 if records don't show it.

    Args:
        before: Skips this many calls before the pending one.
    """
    wait, record = facts.ranks[rank].wait, facts.alignment.records.get(rank)
    if wait is None or record is None or wait.group is None or wait.seq is None:
        return 0
    now = facts.alignment.entry(rank, wait.group, wait.seq)
    entries, spots = Entries.of(record.entries), [*map(fr.spot, way)]
    at = entries.record_ids.index(now.record_id) if now is not None else 0
    stacks = ([*map(fr.spot, facts.alignment.stack(rank, entries[n]).user_frames)] for n in range(at - before, -1, -1))
    return len(list(takewhile(lambda stack: stack == spots, stacks)))


def _later_round(
    facts: CaseFacts, branching: DivergingStacks, sides: Sequence[RankSide], later: int
) -> Iterator[Annotation]:
    """Explains sides that should meet under the same number, one of them in a later round.

    Yields nothing if a library makes a call in between, under its own conditions.
    """
    waits = [facts.ranks[rank].wait for _, ranks in sides for rank in ranks]
    numbers = {(wait.group, wait.seq) if wait is not None else ("", None) for wait in waits}
    if len(numbers) != 1 or None in next(iter(numbers)):
        return
    way, stack = branching.stacks[later], branching.stacks[1 - later]
    if any(
        fr.short(callee.function) not in names_called(context(caller, facts.read_source).calls)
        for caller, callee in pairwise(way)
    ):
        return
    loops = loops_at(stack[0], facts.read_source)
    skips = ways_around(stack[::-1], loops[-1], facts.read_source) if loops else []
    ahead, behind = sides[later][1], sides[1 - later][1]
    text = f"All ranks get to {fr.place(way[-1])} in the same rounds (`{branching.ways[later][-1].words}`), so "
    text += f"{ranks_do(ahead, 'has', 'have')} left out calls before, or {ranks_do(behind, 'has', 'have')} made more"
    yield Annotation(f"{text}{f' ({skips[0]})' if skips else ''}.", advice=frozenset({suggestions.LEFT_OUT}))
