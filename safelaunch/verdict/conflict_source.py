"""Source code that explains a conflict: a loop that ranks have left, a condition on the rank, a handler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from safelaunch.model import Frame
from safelaunch.stacks.diverging_loops import loop_left, loop_returned_from
from safelaunch.stacks.guards import SourceLoop, loops_at
from safelaunch.stacks.ways_out import ways_around
from safelaunch.verdict.call_history import UNKNOWN
from safelaunch.verdict.conflict import Call, Conflict
from safelaunch.verdict.divergence import AlignedHistories
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import LeftLoop
from safelaunch.verdict.guarding import branches
from safelaunch.verdict.own_words import is_interrupted, is_outside_normal_flow
from safelaunch.verdict.phrases import by_place, ranks_do, wait_verb
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import BROKEN_OFF, LEFT_OUT, UNUSED_PARAMETERS


def by_the_source(facts: CaseFacts, conflict: Conflict) -> Conflict:
    """Revises which ranks are odd by the source, and adds what it shows.

    Odd is a call outside the program's normal flow, past the loop that others are in, or under a condition on the
    rank.
    """
    aside = _outside_normal_flow(facts, conflict)
    if aside:  # a rank that handles an exception might have made the call that half of the ranks should have made
        open_still = 2 * len(aside) == len(conflict.calls) and not all(is_interrupted(facts, rank) for rank in aside)
        return _with_steps(facts, replace(conflict, odd=aside, vote="open" if open_still else ""))
    left, guarded = _find_left_loop(facts, conflict), _odd_by_guard(facts, conflict)
    if left is not None and left.behind == guarded:
        left = None  # a rank past the loop would not come to that call in any round
    judged = _judged(conflict, left) if left is not None else conflict
    if guarded and judged.tie:
        judged = replace(conflict, odd=guarded, vote="open")
    if left is not None:
        return _with_loop(facts, judged, left)
    if not guarded and len(judged.odd) == 1 and len(judged.calls) == 3:
        judged = replace(judged, vote="two to one")
    return _with_steps(facts, judged)


def _outside_normal_flow(facts: CaseFacts, conflict: Conflict) -> tuple[int, ...]:
    aside = [rank for rank in conflict.calls if is_outside_normal_flow(facts, rank)]
    return tuple(sorted(aside)) if aside in _sides(conflict) and 2 * len(aside) <= len(conflict.calls) else ()


def _sides(conflict: Conflict) -> list[list[int]]:
    return [ranks for _, ranks in by_place({rank: call.words for rank, call in conflict.calls.items()})]


def _odd_by_guard(facts: CaseFacts, conflict: Conflict) -> tuple[int, ...]:
    # A condition on the rank excludes all others from their call.
    guarded = branches(facts, conflict.user_stacks, frozenset(conflict.odd))
    telling = [branch for branch in guarded if branch.kept]
    sides = {branch.ranks for branch in telling if {*branch.ranks, *branch.kept} == conflict.calls.keys()}
    return next(iter(sides)) if len(sides) == len({branch.ranks for branch in telling}) == 1 else ()


# --- steps ------------------------------------------------------------------------------------------------------------


def _with_steps(facts: CaseFacts, conflict: Conflict) -> Conflict:
    """Adds a note if the odd ranks made more steps with as many calls; a single step might be the same round."""
    peers = [rank for rank in conflict.calls if rank not in conflict.odd]
    more, fewer = _more_steps(facts, conflict.odd, peers), _more_steps(facts, peers, conflict.odd)
    if not conflict.group or conflict.tie or max(more, fewer) < 2:
        return conflict
    than, make = ("more", "fewer") if more else ("fewer", "more")
    text = f"{ranks_do(conflict.odd, 'has', 'have')} made {max(more, fewer)} {than} steps with as many calls"
    return replace(conflict, note=f"{text}: some steps there make {make}")


def _more_steps(facts: CaseFacts, ranks: Sequence[int], peers: Sequence[int]) -> int:
    steps = {rank: step for rank in (*ranks, *peers) if (step := facts.ranks[rank].step) is not None}
    if not ranks or not peers or len(steps) < len(ranks) + len(peers):
        return 0
    return max(min(steps[rank] for rank in ranks) - max(steps[rank] for rank in peers), 0)


# --- loops ------------------------------------------------------------------------------------------------------------

_CALLS_PER_STEP = 1.5  # calls per step


def _judged(conflict: Conflict, left: LeftLoop) -> Conflict:
    # If the sides are equal, the ranks that left the loop had fewer batches; otherwise the minority had more, or fewer.
    # If another loop encloses both, earlier rounds decide: if each had as many calls, ``behind`` skipped the call that
    # ends the loop; if that is unknown, either side might be odd, and the majority counts.
    doubts = (Doubt.STACKS_ALONE,) if conflict.doubts else ()  # the loop shows more than the lines
    conflict = replace(conflict, doubts=doubts, of=left)
    if left.sure or left.by_habit:
        minority = left.behind if left.by_habit or len(left.behind) < len(left.ahead) else left.ahead
        return replace(conflict, odd=minority, vote="")
    return conflict


def _with_loop(facts: CaseFacts, conflict: Conflict, left: LeftLoop) -> Conflict:
    """Adds cause, words and advice to a conflict of which the odd ranks are known."""
    is_ahead = conflict.odd == left.ahead
    advice = {BROKEN_OFF: bool(left.loop.breaks), LEFT_OUT: bool(left.skips)}
    advice |= {UNUSED_PARAMETERS: bool(left.skips and left.more_steps)}
    some_calls = left.cut_short or (left.of_a_step and is_ahead)
    return replace(
        conflict,
        calls={rank: _described(facts, rank, call, left) for rank, call in conflict.calls.items()},
        cause=left.cause if left.sure or is_ahead else conflict.cause,
        note=left.says,
        advice=frozenset({LEFT_OUT}) if some_calls else frozenset(each for each, fits in advice.items() if fits),
    )


def _described(facts: CaseFacts, rank: int, call: Call, left: LeftLoop) -> Call:
    waits = f"{wait_verb(facts, rank)} in {call.words}"
    loop, inside = f"the loop at {left.loop.place}", left.loop.inside
    if rank in left.ahead:
        does = f"has left {loop} that its peers are still in, and {waits}"
        return replace(call, does=does, left=Frame(inside.file, left.loop.line, inside.function))
    return replace(call, does=f"is still in {loop}, which its peers have left, and {waits}") if left.sure else call


def _find_left_loop(facts: CaseFacts, conflict: Conflict) -> LeftLoop | None:
    sides = _sides(conflict)
    if len(sides) != 2:
        return None
    group, number, read_source = conflict.group, conflict.seq, facts.read_source
    for ahead, behind in (sides, sides[::-1]):
        first_ahead, other = ahead[0], behind[0]
        past, within = conflict.calls[first_ahead].stack, conflict.calls[other].stack
        around, stack = loop_left(past.frames, within.frames, read_source), within.frames
        loop = around or loop_returned_from(past.user_frames, within.user_frames, read_source)
        if loop is None:
            continue
        if group and _were_past_it(facts, group, number, (first_ahead, other), loop):
            return None
        aligned = facts.histories.in_group(group) if group else AlignedHistories({})
        times = len(aligned.times_called(other, number))
        often = times > _CALLS_PER_STEP * max(facts.ranks[other].step or times, 1) and _is_innermost(facts, loop, stack)
        more = _more_steps(facts, ahead, behind)
        if around is None and (often or more > 1):
            return None
        made = aligned.round_before(first_ahead, number) if around is not None else ""  # rounds around the call
        skips = _skips(facts, stack, loop, more) if not often else ""
        return LeftLoop(tuple(sorted(ahead)), tuple(sorted(behind)), loop, made, often, skips, more)
    return None


def _is_innermost(facts: CaseFacts, loop: SourceLoop, stack: Sequence[Frame]) -> bool:
    innermost = next((loops[-1] for frame in stack if (loops := loops_at(frame, facts.read_source))), loop)
    return (innermost.inside.file, innermost.line) == (loop.inside.file, loop.line)


def _skips(facts: CaseFacts, stack: Sequence[Frame], loop: SourceLoop, more: int) -> str:
    part = next((n for n, frame in enumerate(stack) if frame == loop.inside), len(stack) - 1)
    skips = ways_around(stack[: part + 1], loop, facts.read_source)
    skips += [f"{more} more step{'s' * (more > 1)}, with as many calls"] if more > 0 else []
    return ", ".join(skips[:2])


def _were_past_it(facts: CaseFacts, group: str, number: int, ends: tuple[int, int], loop: SourceLoop) -> bool:
    """Returns whether both last made the same call after ``loop``: then only the second has begun a new round."""
    aligned = facts.histories.in_group(group)
    made = [aligned.histories[rank].at(number - 1) if rank in aligned.histories else UNKNOWN for rank in ends]
    if UNKNOWN in made or made[0] != made[1]:
        return False
    entries = [facts.alignment.entry(ends[1], group, n) for n in (number - 1, number)]
    was, now = (facts.alignment.stack(ends[1], entry).user_frames if entry is not None else () for entry in entries)
    return loop_left(was, now, facts.read_source) == loop
