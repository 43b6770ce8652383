"""Rules for ranks that don't meet: same group and number, but different operations, sizes, types or lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from safelaunch.model import Frame
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import blame_calls
from safelaunch.verdict.c10d import ROOTED, describe, fits, op_name, same_op, signature
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.conflict import Call, Conflict, conflict_at, outvoted
from safelaunch.verdict.conflict_source import by_the_source
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.phrases import ranks_word, wait_words
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rules_history import of_role, shifted
from safelaunch.verdict.rules_unequal import unequal_calls
from safelaunch.verdict.waits import Case


def mismatch(case: Case) -> Ruling:
    """The members of one group make different calls at the same sequence number: the minority is at fault.

    The Flight Recorder decides at the lowest pending number, counting also ranks that are past it. Without it, the
    functions and lines of the stacks are compared, with less confidence. If all ranks have arrived, their calls might
    differ in size, type or root, or they might have met in different operations before: a backend pairs by number, not
    by kind, and might let a wrong pair pass, which exchanges garbage and leaves the ranks one operation apart.

    The source can name a rank without a majority, or confirm two ranks against one.
    """
    if (unequal := unequal_calls(case)) is not None:
        return unequal
    if not case.waits.cycle:
        return _mispaired(case)
    waiting = [waiters.wait for waiters in case.waits.cycle]
    numbered = [w for w in waiting if w.kind == "collective" and w.seq is not None]
    if numbered:
        lowest = min(numbered, key=lambda w: w.seq or 0)
        recorded = conflict_at(case.alignment, str(lowest.group), lowest.seq or 0)
        if recorded is not None:
            role = case.histories.left_role(recorded.odd) if recorded.tie else None
            if role is not None and role.there[role.ranks[0]] == recorded.entries.get(role.ranks[0]):
                return of_role(case, role)  # the same role in another replica makes the same calls
            return of_record(case, recorded)
    conflict = _by_stacks(case, case.waits.ranks_in_cycle)
    if any(w.kind == "p2p" and w.seq is not None for w in waiting):  # by design, only some ranks send
        conflict = replace(conflict, odd=tuple(sorted(conflict.calls)), vote="tie")
    return blame_calls(case, by_the_source(case, conflict))


def _mispaired(case: Case) -> Ruling:
    recorded = case.histories.first_mismatch
    if recorded is None:
        return "all ranks recorded the same operations under the same numbers" if case.alignment.records else ""
    return "" if case.alignment.members(recorded.group)[0] & case.unseen else of_record(case, recorded)


def of_record(facts: CaseFacts, recorded: Conflict) -> Finding:
    """Returns the finding for a recorded conflict, or for its origin if it began earlier."""
    conflict = _located(facts, recorded)
    shift = facts.histories.in_group(conflict.group).shift
    if shift is not None and (shift.number < conflict.seq or (shift.number == conflict.seq and conflict.tie)):
        words = {rank: call.words for rank, call in conflict.calls.items()}
        return shifted(facts, shift, words, conflict.claims)
    sides = sides_without_majority(facts, conflict)
    if sides is None:
        return blame_calls(facts, by_the_source(facts, conflict))
    clauses = [f"{ranks_word(side)} {_calls_of(facts, conflict, side)}" for side in sides[:_MOST_SIDES]]
    clauses += [f"{len(sides) - _MOST_SIDES} more ways"] if len(sides) > _MOST_SIDES else []
    since = f"From collective #{conflict.seq} of {facts.group(conflict.group)} on"
    text = f"{since}, the ranks go {len(sides)} different ways, without a majority: {'; '.join(clauses)}."
    apart = replace(conflict, odd=(), vote="", doubts=(Doubt.OWN_WAYS,), of="")
    return replace(blame_calls(facts, apart, text), calls={})


_MOST_SIDES = 4


def _calls_of(facts: CaseFacts, conflict: Conflict, side: Sequence[int]) -> str:
    rank = max(side, key=lambda member: (facts.alignment.last(member, conflict.group), -member))
    later = (facts.alignment.entry(rank, conflict.group, conflict.seq + number) for number in range(1, _NEXT_CALLS + 1))
    names = [op_name(entry) for entry in later if entry is not None]
    return conflict.calls[rank].words + (f", then {', '.join(names)}" if names else "")


def _located(facts: CaseFacts, conflict: Conflict) -> Conflict:
    """Adds the calls in words with their places, and the claim."""
    sizes_differ = len({key[0] for key in conflict.sides}) == 1
    names = {rank: describe(e) if sizes_differ else op_name(e) for rank, e in conflict.entries.items()}
    calls: dict[int, Call] = {}
    for rank, entry in conflict.entries.items():
        site, stack = call_site(facts, rank, entry.frames)
        numbered = describe(entry, f" #{entry.seq}") if sizes_differ else f"{op_name(entry)} #{entry.seq}"
        calls[rank] = Call(f"{names[rank]} at {fr.place(site)}" if site else numbered, site, stack)
    parts = (f"{names[members[0]]} on {ranks_word(members)}" for members in conflict.sides.values())
    text = f"collective #{conflict.seq} of {facts.group(conflict.group)} is {', '.join(parts)}"
    claims = (record_claim((conflict.odd or (*calls,))[0], text),)
    at_one_line = len({(call.site.file, call.site.line) for call in calls.values() if call.site}) < 2
    return replace(conflict, calls=calls, claims=claims, of="sizes" if sizes_differ and at_one_line else "")


def _by_stacks(facts: CaseFacts, ranks: Sequence[int]) -> Conflict:
    waits, ops = {rank: facts.waiting[rank] for rank in ranks}, dict[int, str]()
    for rank, wait in waits.items():
        ops[rank] = next((op for op in ops.values() if same_op(op, wait.op)), wait.op)
    ops_differ = len({*ops.values()}) > 1
    lines = {rank: (wait.frame.file, wait.frame.line) if wait.frame else ("", 0) for rank, wait in waits.items()}
    calls = {rank: Call(words, *call_site(facts, rank)) for rank, words in wait_words(facts, ranks).items()}
    doubt = Doubt.STACKS_ALONE if ops_differ else Doubt.LINES_ALONE
    return Conflict(calls, *outvoted(sides_of(ops if ops_differ else lines)), (doubt,))


def call_site(facts: CaseFacts, rank: int, recorded: tuple[Frame, ...] = ()) -> tuple[Frame | None, fr.Stack]:
    state = facts.ranks[rank]
    view = state.view if state.wait is None or state.wait.thread is None else None
    frames = recorded or (view.frames if view else ())
    site = fr.stack_of(state.evidence, frames).user_frame or (state.wait.frame if state.wait else None)
    return site, fr.stack_of(state.evidence, frames[frames.index(site) :] if site in frames else ())


# --- sides under one number -------------------------------------------------------------------------------------------

_NEXT_CALLS = 3  # calls compared after the one that doesn't fit


def sides_without_majority(facts: CaseFacts, conflict: Conflict) -> list[tuple[int, ...]] | None:
    """Returns three or more sides, none of which is a majority.

    None for two sides: then both are named.
    """
    if conflict.tie and len(conflict.sides) < 3:
        return None
    split = [
        tuple(side)
        for ranks in conflict.sides.values()
        for members in _by_place(facts, conflict, ranks)
        for side in _by_next_calls(facts, conflict, members)
    ]
    return None if len(split) < 3 or vote(dict(enumerate(split)))[1] else sorted(split)


def _by_place(facts: CaseFacts, conflict: Conflict, ranks: Sequence[int]) -> list[list[int]]:
    """Groups ranks by the place of the same call; a rank without a known place joins the largest group.

    Places that met under one number before count as the same: by design, ranks call from either.
    """
    stacks = {rank: _frames_of_call(facts, conflict, rank) for rank in ranks}
    places = sides_of(
        {rank: tuple((frame.file, frame.line) for frame in stack) for rank, stack in stacks.items() if stack}
    )
    sides: list[list[int]] = []
    for side in sorted(places.values(), key=len, reverse=True):
        met = [members for members in sides if _met_before(facts, conflict, members[0], side[0])]
        if not met and len(side) == 1 and op_name(conflict.entries[side[0]]) in ROOTED:
            met = sides
        met[0].extend(side) if met else sides.append(side)
    first, *minor_sides = sides or [[]]
    return [[*first, *(rank for rank, stack in stacks.items() if not stack)], *minor_sides]


def _frames_of_call(facts: CaseFacts, conflict: Conflict, rank: int) -> tuple[Frame, ...]:
    # With a device's queue, the main thread runs ahead and waits at any result.
    entry, wait = conflict.entries[rank], facts.waiting.get(rank)
    is_there = wait is not None and entry.started is None and (wait.group, wait.seq) == (conflict.group, conflict.seq)
    shown = facts.ranks[rank].user_stack if is_there else ()
    return facts.alignment.stack(rank, entry).user_frames or shown or entry.frames


def _met_before(facts: CaseFacts, conflict: Conflict, rank: int, other: int) -> bool:
    """Returns whether both made these calls under one number before they last called from the same place."""
    histories = facts.histories.in_group(conflict.group).histories
    if rank not in histories or other not in histories:
        return False
    own_column, peer_column = histories[rank].column, histories[other].column
    wanted = own_column.at(conflict.seq), peer_column.at(conflict.seq)
    if wanted[0] == wanted[1]:  # only their stacks differ
        return False
    numbers = range(max(own_column.numbers[0], peer_column.numbers[0]), conflict.seq)
    met = next((number for number in numbers if (own_column.at(number), peer_column.at(number)) == wanted), None)
    return met is not None and any(
        own_column.at(number) == peer_column.at(number) for number in range(met, conflict.seq)
    )


def _by_next_calls(facts: CaseFacts, conflict: Conflict, ranks: Sequence[int]) -> list[list[int]]:
    """Groups ranks by their next calls; a rank without one joins the largest group, or none if there is no largest."""
    for number in range(conflict.seq + 1, conflict.seq + 1 + _NEXT_CALLS):
        made = {rank: facts.alignment.entry(rank, conflict.group, number) for rank in ranks}
        calls = {rank: signature(entry) for rank, entry in made.items() if entry is not None}
        sides: list[list[int]] = []
        for rank, call in calls.items():
            side_alike = next((side for side in sides if fits(calls[side[0]], call)), None)
            side_alike.append(rank) if side_alike is not None else sides.append([rank])
        if len(sides) > 1:
            silent = [rank for rank in ranks if rank not in calls]
            _, majority = vote(dict(enumerate(sides)))
            if majority:
                max(sides, key=len).extend(silent)
            elif silent:
                sides.append(silent)
            return sides
    return [list(ranks)]
