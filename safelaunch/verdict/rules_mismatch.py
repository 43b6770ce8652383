"""Rules for ranks that don't meet: same group and number, but different operations, sizes, types or lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from safelaunch.model import Claim, Culprit, Frame
from safelaunch.stacks import frames as fr
from safelaunch.stacks.diverging_loops import loop_left, loop_returned_from
from safelaunch.stacks.failures import Fingerprint, fingerprints
from safelaunch.stacks.guards import SourceLoop, loops_at
from safelaunch.stacks.ways_out import ways_around
from safelaunch.verdict.blame import wait_claims, waiting_culprit
from safelaunch.verdict.c10d import ROOTED, describe, fits, number_of, op_name, same_op, signature
from safelaunch.verdict.call_history import UNKNOWN
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.divergence import AlignedHistories
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import DOUBTS_OF_VOTE, Deviation, Finding, LeftLoop, Ruling, Vote
from safelaunch.verdict.guarding import branches
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.mismatch import Mismatch, mismatch_at
from safelaunch.verdict.own_words import is_interrupted, is_outside_normal_flow
from safelaunch.verdict.phrases import (
    apart,
    by_place,
    capital,
    ranks_do,
    ranks_wait,
    ranks_word,
    wait_words,
)
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rules_history import of_role, shifted
from safelaunch.verdict.suggestions import BROKEN_OFF, LEFT_OUT, UNUSED_PARAMETERS, Advice
from safelaunch.verdict.waits import Case


@dataclass(frozen=True)
class CallSite:
    """A rank's call: ``site`` is the user's frame of the call, ``stack`` the frames from it outwards."""

    words: str
    site: Frame | None
    stack: tuple[Frame, ...]


@dataclass(frozen=True)
class ExpectedMatch:
    """Ranks that should have met, by the call that each is in."""

    odd: tuple[int, ...]  # ranks outside the majority; all of them if there is none
    vote: Vote
    calls: Mapping[int, CallSite]
    shown_by: Literal["records", "stacks", "lines"] = "records"
    claims: tuple[Claim, ...] = ()
    number: tuple[str, int] = ("", 0)  # group and number of the call, if a record shows them
    of: Deviation | LeftLoop = ""

    @property
    def majority(self) -> bool:
        return self.vote != "tie"

    @property
    def words(self) -> dict[int, str]:
        return {rank: call.words for rank, call in self.calls.items()}

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        shown = doubts_if({Doubt.STACKS_ALONE: self.shown_by == "stacks", Doubt.LINES_ALONE: self.shown_by == "lines"})
        return (*shown, *(self.of.doubts if isinstance(self.of, LeftLoop) else ()), *DOUBTS_OF_VOTE[self.vote])


def compared_by_torch(case: Case) -> Ruling:
    """torch compared the ranks' calls before they started, and ended the job: the minority is at fault.

    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does that. Each rank raises an error with its own call and a different one.
    """
    calls_compared = _compared(case)
    by_call = sides_of(dict(sorted(calls_compared.items())))
    if len(by_call) < 2:
        return ""
    shifts = case.histories.shifts(case.alignment.groups())
    earlier = next((shift for shift in shifts if shift.sure), None)
    if earlier is not None:
        return shifted(case, earlier)
    odd, majority = vote(by_call)
    examined = [rank for rank in calls_compared if rank in case.ranks]
    blamed = [rank for rank in odd if rank in case.ranks] if majority or len(examined) == len(calls_compared) else []
    sites = {rank: _user_stack(case, rank)[0] for rank in examined}
    words = {rank: f"{call.words}{fr.at(sites.get(rank))}" for rank, call in calls_compared.items()}
    odd_first = sorted(words, key=lambda rank: (rank not in odd, rank))
    places = by_place({rank: words[rank] for rank in odd_first})
    text = " while ".join(f"{ranks_do(ranks, 'called', 'called')} {call}" for call, ranks in places)
    claims = (Claim(f"rank {r}: torch's own check found a mismatch", f"ranks/{r}/exception.json") for r in examined)
    decided: Vote = "" if majority else "tie"
    return Finding(
        "collective-mismatch",
        (*DOUBTS_OF_VOTE[decided], *doubts_if({Doubt.UNSEEN_RANKS: len(examined) < len(calls_compared)})),
        f"{capital(text)}: torch compared these calls, and they do not match.",
        tuple(
            waiting_culprit(case.ranks[r], f"Rank {r} called {words[r]}, its peers did not.", sites[r]) for r in blamed
        ),
        tuple(claims)[:4] + wait_claims(case, examined),
        calls={rank: case.ranks[rank].user_stack for rank in examined},
        of="sizes" if len({call.op for call in by_call}) == 1 else "",
        vote=decided,
    )


def _compared(case: Case) -> dict[int, Fingerprint]:
    """Returns each rank's call as torch compared it.

    Errors number ranks within their group. Each starts with its own call and quotes another, whose error might be
    missing.
    """
    raised = {rank: state.evidence.exception for rank, state in case.ranks.items()}
    calls_by_rank = {rank: fingerprints(error.message) for rank, error in raised.items() if error is not None}
    own = {next(iter(calls)): rank for rank, calls in calls_by_rank.items() if calls}
    alike = all(number == rank for number, rank in own.items())
    expected = {own.get(n, n if alike else -1): call for calls in calls_by_rank.values() for n, call in calls.items()}
    return {rank: call for rank, call in expected.items() if rank >= 0}


def mismatch(case: Case) -> Ruling:
    """The members of one group make different calls at the same sequence number: the minority is at fault.

    The Flight Recorder decides at the lowest pending number, counting also ranks that are past it. Without it, the
    functions and lines of the stacks are compared, with less confidence. If all ranks have arrived, they might have met
    in different operations before: a backend pairs by number, not by kind, and might let a wrong pair pass, which
    exchanges garbage and leaves the ranks one operation apart.
    """
    if not case.waits.cycle:
        return _mispaired(case)
    waiting = [waiters.wait for waiters in case.waits.cycle]
    numbered = [w for w in waiting if w.kind == "collective" and w.seq is not None]
    if numbered:
        lowest = min(numbered, key=lambda w: w.seq or 0)
        mismatch_found = mismatch_at(case.alignment, str(lowest.group), lowest.seq or 0)
        if mismatch_found is not None:
            role = None if mismatch_found.majority else case.histories.left_role(mismatch_found.odd)
            own = role.there[role.ranks[0]] if role is not None else None
            if (
                role is not None
                and own is not None
                and (own.group, number_of(own)) == (mismatch_found.group, mismatch_found.seq)
            ):
                return of_role(case, role)  # the same role in another replica makes the same calls
            return of_record(case, mismatch_found)
    meeting = _by_stacks(case, case.waits.ranks_in_cycle)
    if any(w.kind == "p2p" and w.seq is not None for w in waiting):  # by design, only some ranks send
        meeting = replace(meeting, odd=tuple(sorted(meeting.calls)), vote="tie")
    return _finding(case, meeting)


def _mispaired(case: Case) -> Ruling:
    mismatch = case.histories.first_mismatch
    if mismatch is None:
        return "all ranks recorded the same operations under the same numbers" if case.alignment.records else ""
    return "" if case.alignment.members(mismatch.group)[0] & case.unseen else of_record(case, mismatch)


def of_record(facts: CaseFacts, mismatch: Mismatch) -> Finding:
    """Returns the finding for a recorded mismatch, or for its origin if it began earlier."""
    meeting = _recorded(facts, mismatch)
    shift = facts.histories.in_group(mismatch.group).shift
    if shift is not None and (shift.number < mismatch.seq or (shift.number == mismatch.seq and not mismatch.majority)):
        return shifted(facts, shift, meeting.words, meeting.claims)
    sides = sides_without_majority(facts, mismatch)
    return _finding(facts, meeting) if sides is None else _without_majority(facts, mismatch, meeting, sides)


_MOST_SIDES = 4


def _without_majority(
    facts: CaseFacts, mismatch: Mismatch, meeting: ExpectedMatch, sides: Sequence[Sequence[int]]
) -> Finding:
    clauses = [f"{ranks_word(side)} {_calls_of(facts, mismatch, meeting, side)}" for side in sides[:_MOST_SIDES]]
    clauses += [f"{len(sides) - _MOST_SIDES} more ways"] if len(sides) > _MOST_SIDES else []
    text = f"From collective #{mismatch.seq} of group {mismatch.group!r} on, the ranks go {len(sides)} different ways"
    return Finding(
        "collective-mismatch",
        (Doubt.OWN_WAYS,),
        f"{text}, without a majority: {'; '.join(clauses)}.",
        claims=meeting.claims + wait_claims(facts, meeting.words),
    )


def _calls_of(facts: CaseFacts, mismatch: Mismatch, meeting: ExpectedMatch, side: Sequence[int]) -> str:
    rank = max(side, key=lambda member: (facts.alignment.last(member, mismatch.group), -member))
    later = (facts.alignment.entry(rank, mismatch.group, mismatch.seq + number) for number in range(1, _NEXT_CALLS + 1))
    names = [op_name(entry) for entry in later if entry is not None]
    return meeting.calls[rank].words + (f", then {', '.join(names)}" if names else "")


def _recorded(facts: CaseFacts, mismatch: Mismatch) -> ExpectedMatch:
    sizes_differ = len({key[0] for key in mismatch.classes}) == 1
    names: dict[int, str] = {}
    sites: dict[int, CallSite] = {}
    for rank, entry in mismatch.entries.items():
        names[rank] = name = describe(entry) if sizes_differ else op_name(entry)
        site, stack = _user_stack(facts, rank, entry.frames)
        numbered = f"{op_name(entry)} #{entry.seq}{name.removeprefix(op_name(entry))}"
        sites[rank] = CallSite(f"{name} at {fr.place(site)}" if site else numbered, site, stack)
    parts = (f"{names[members[0]]} on {ranks_word(members)}" for members in mismatch.classes.values())
    text = f"collective #{mismatch.seq} of group {mismatch.group!r} is {', '.join(parts)}"
    claims = (record_claim((mismatch.odd or (*sites,))[0], text),)
    at_one_line = len({(call.site.file, call.site.line) for call in sites.values() if call.site}) < 2
    return ExpectedMatch(
        mismatch.odd,
        "" if mismatch.majority else "tie",
        sites,
        claims=claims,
        number=(mismatch.group, mismatch.seq),
        of="sizes" if sizes_differ and at_one_line else "",
    )


def _by_stacks(facts: CaseFacts, ranks: list[int]) -> ExpectedMatch:
    waits, ops = {rank: facts.waiting[rank] for rank in ranks}, dict[int, str]()
    for rank, wait in waits.items():
        ops[rank] = next((op for op in ops.values() if same_op(op, wait.op)), wait.op)
    ops_differ = len({*ops.values()}) > 1
    lines = {rank: (wait.frame.file, wait.frame.line) if wait.frame else ("", 0) for rank, wait in waits.items()}
    odd, majority = vote(sides_of(ops)) if ops_differ else vote(sides_of(lines))
    sites = {rank: CallSite(words, *_user_stack(facts, rank)) for rank, words in wait_words(facts, ranks).items()}
    return ExpectedMatch(odd, "" if majority else "tie", sites, "stacks" if ops_differ else "lines")


def _user_stack(
    facts: CaseFacts, rank: int, recorded: tuple[Frame, ...] = ()
) -> tuple[Frame | None, tuple[Frame, ...]]:
    state = facts.ranks[rank]
    view = state.view if state.wait is None or state.wait.thread is None else None
    frames = recorded or (view.frames if view else ())
    site = fr.stack_of(state.evidence, frames).user_frame or (state.wait.frame if state.wait else None)
    return site, frames[frames.index(site) :] if site in frames else ()


def by_the_source(facts: CaseFacts, meeting: ExpectedMatch) -> tuple[ExpectedMatch, LeftLoop | None]:
    """Revises which ranks are odd by the source, and returns the loop that some have left.

    Odd is a call outside the program's normal flow, past the loop that others are in, or under a condition on the
    rank.
    """
    aside = _outside_normal_flow(facts, meeting)
    left_loop = _find_left_loop(facts, meeting) if not aside else None
    guarded = _odd_by_guard(facts, meeting) if not aside else None
    if left_loop is not None and guarded is not None and guarded.odd == left_loop.behind:
        left_loop = None  # a rank past the loop would not come to that call in any round
    if left_loop is not None:
        meeting = _by_loop(meeting, left_loop)
    if guarded is not None and not meeting.majority:
        meeting = guarded
    if aside:  # a rank that handles an exception might have made the call that half of the ranks should have made
        open_still = 2 * len(aside) == len(meeting.calls) and not all(is_interrupted(facts, rank) for rank in aside)
        meeting = replace(meeting, odd=aside, vote="open" if open_still else "")
    elif left_loop is None and guarded is None and len(meeting.odd) == 1 and len(meeting.calls) == 3:
        meeting = replace(meeting, vote="two to one")
    return meeting, left_loop


def _by_loop(meeting: ExpectedMatch, left: LeftLoop) -> ExpectedMatch:
    # If the sides are equal, the ranks that left the loop had fewer batches; otherwise the minority had more, or fewer.
    # If another loop encloses both, earlier rounds decide: if each had as many calls, ``behind`` skipped the call that
    # ends the loop; if that is unknown, either side might be odd, and the majority counts.
    meeting = replace(meeting, shown_by="stacks" if meeting.shown_by == "lines" else meeting.shown_by, of=left)
    if left.sure or left.by_habit:
        minority = left.behind if left.by_habit or len(left.behind) < len(left.ahead) else left.ahead
        return replace(meeting, odd=minority, vote="")
    return meeting


def _finding(facts: CaseFacts, meeting: ExpectedMatch) -> Finding:
    words = meeting.words
    meeting, left_loop = by_the_source(facts, meeting)
    odd_first = sorted(words, key=lambda rank: (rank not in meeting.odd, rank))
    text = capital(apart(facts, {rank: words[rank] for rank in odd_first}))
    text += f"; {left_loop.says}" if left_loop is not None else _odd_by_steps(facts, meeting)
    tail = "" if meeting.majority else " With no majority, either side might be at fault."
    return Finding(
        left_loop.cause
        if left_loop is not None and (left_loop.sure or meeting.odd == left_loop.ahead)
        else "collective-mismatch",
        meeting.doubts,
        f"{text}.{tail}",
        tuple(_culprit(facts, meeting, rank, left_loop) for rank in meeting.odd),
        meeting.claims + wait_claims(facts, words),
        _other_end(facts, meeting),
        advice=_advice(meeting, left_loop) if left_loop is not None else frozenset(),
        calls=_user_frames(facts, meeting),
        of=meeting.of,
        vote=meeting.vote,
    )


def _outside_normal_flow(facts: CaseFacts, meeting: ExpectedMatch) -> tuple[int, ...]:
    aside = [rank for rank in meeting.words if is_outside_normal_flow(facts, rank)]
    sides = [ranks for _, ranks in by_place(meeting.words)]
    return tuple(sorted(aside)) if aside in sides and 2 * len(aside) <= len(meeting.words) else ()


def _odd_by_steps(facts: CaseFacts, meeting: ExpectedMatch) -> str:
    """Returns words if the odd ranks made more steps with fewer calls; a single step might be the same round."""
    peers = [rank for rank in meeting.calls if rank not in meeting.odd]
    if not meeting.number[0] or not meeting.majority:
        return ""
    more, fewer = _more_steps(facts, meeting.odd, peers), _more_steps(facts, peers, meeting.odd)
    ranks_have = ranks_do(meeting.odd, "has", "have")
    if more > 1:
        return f"; {ranks_have} made {more} more steps with as many calls: some steps there make fewer"
    return (
        f"; {ranks_have} made {fewer} fewer steps with as many calls: some steps there make more" if fewer > 1 else ""
    )


def _odd_by_guard(facts: CaseFacts, meeting: ExpectedMatch) -> ExpectedMatch | None:
    """Returns the match with one side odd: a condition on the rank excludes all others from its call."""
    telling = [
        branch for branch in branches(facts, _user_frames(facts, meeting), frozenset(meeting.odd)) if branch.kept
    ]
    sides = {branch.ranks: branch.kept for branch in telling if {*branch.ranks, *branch.kept} == meeting.calls.keys()}
    if len(sides) != 1 or len({branch.ranks for branch in telling}) != 1:
        return None
    return replace(meeting, odd=next(iter(sides)), vote="open")


def _user_frames(facts: CaseFacts, meeting: ExpectedMatch) -> dict[int, tuple[Frame, ...]]:
    return {r: fr.stack_of(facts.ranks[r].evidence, call.stack).user_frames for r, call in meeting.calls.items()}


def _advice(meeting: ExpectedMatch, left: LeftLoop) -> frozenset[Advice]:
    if left.cut_short or (left.of_a_step and meeting.odd == left.ahead):
        return frozenset({LEFT_OUT})
    skips = {LEFT_OUT, UNUSED_PARAMETERS} if left.more_steps else {LEFT_OUT}
    return by_a_break(left) | (skips if left.skips else set())


def by_a_break(left: LeftLoop | None) -> frozenset[Advice]:
    return frozenset({BROKEN_OFF}) if left is not None and left.loop.breaks else frozenset()


def _other_end(facts: CaseFacts, meeting: ExpectedMatch) -> tuple[str, ...]:
    alone = [rank for rank in meeting.odd if rank in facts.waiting and facts.waiting[rank].kind == "p2p"]
    if not alone or not meeting.majority:
        return ()
    return (f"a peer that skipped the other end of what {ranks_wait(facts, alone)} in: runner-up",)


_CALLS_PER_STEP = 1.5  # calls per step


def _culprit(facts: CaseFacts, meeting: ExpectedMatch, rank: int, left: LeftLoop | None) -> Culprit:
    culprit_there = waiting_culprit(facts.ranks[rank], _reason(facts, meeting, rank, left), meeting.calls[rank].site)
    if left is None or rank not in left.ahead:
        return culprit_there
    inside = left.loop.inside
    return structs.replace(culprit_there, left=Frame(inside.file, left.loop.line, inside.function))


def _reason(facts: CaseFacts, meeting: ExpectedMatch, rank: int, left: LeftLoop | None) -> str:
    waits = "waited" if rank in facts.gone else "waits"
    where, loop = meeting.calls[rank].words, f"the loop at {left.loop.place}" if left is not None else ""
    if left is not None and rank in left.ahead:
        return f"Rank {rank} has left {loop} that its peers are still in, and {waits} in {where}."
    if left is not None and left.sure:
        return f"Rank {rank} is still in {loop}, which its peers have left, and {waits} in {where}."
    return f"Rank {rank} {waits} in {where}, its peers {'did' if waits == 'waited' else 'do'} not."


def _find_left_loop(facts: CaseFacts, meeting: ExpectedMatch) -> LeftLoop | None:
    sides = by_place(meeting.words)
    if len(sides) != 2:
        return None
    (_, first), (_, second) = sides
    users = _user_frames(facts, meeting)
    for ahead, behind in ((first, second), (second, first)):
        first_ahead, other = ahead[0], behind[0]
        stack, read_source = meeting.calls[other].stack, facts.read_source
        loop = loop_left(meeting.calls[first_ahead].stack, stack, read_source)
        in_callee = loop_returned_from(users[first_ahead], users[other], read_source) if loop is None else None
        loop = loop or in_callee
        if loop is not None:
            group, number = meeting.number
            if group and _were_past_it(facts, group, number, (first_ahead, other), loop):
                return None
            aligned = facts.histories.in_group(group) if group else AlignedHistories({})
            times = len(aligned.times_called(other, number))
            often = times > _CALLS_PER_STEP * max(facts.ranks[other].step or times, 1) and _is_innermost(
                facts, loop, stack
            )
            more = _more_steps(facts, ahead, behind)
            if in_callee is not None and (often or more > 1):
                return None
            made = aligned.round_before(first_ahead, number) if in_callee is None else ""  # rounds around the call
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


def _more_steps(facts: CaseFacts, ranks: Sequence[int], peers: Sequence[int]) -> int:
    steps = {rank: step for rank in (*ranks, *peers) if (step := facts.ranks[rank].step) is not None}
    if not ranks or not peers or len(steps) < len(ranks) + len(peers):
        return 0
    return max(min(steps[rank] for rank in ranks) - max(steps[rank] for rank in peers), 0)


def _were_past_it(facts: CaseFacts, group: str, number: int, ends: tuple[int, int], loop: SourceLoop) -> bool:
    """Returns whether both last made the same call after ``loop``: then only the second has begun a new round."""
    aligned = facts.histories.in_group(group)
    made = [aligned.histories[rank].at(number - 1) if rank in aligned.histories else UNKNOWN for rank in ends]
    if UNKNOWN in made or made[0] != made[1]:
        return False
    entries = [facts.alignment.entry(ends[1], group, n) for n in (number - 1, number)]
    was, now = (facts.alignment.stack(ends[1], entry).user_frames if entry is not None else () for entry in entries)
    return loop_left(was, now, facts.read_source) == loop


# --- sides under one number -------------------------------------------------------------------------------------------

_NEXT_CALLS = 3  # calls compared after the one that doesn't fit


def sides_without_majority(facts: CaseFacts, mismatch: Mismatch) -> list[tuple[int, ...]] | None:
    """Returns three or more sides, none of which is a majority.

    None for two sides: then both are named.
    """
    if not mismatch.majority and len(mismatch.classes) < 3:
        return None
    split = [
        tuple(side)
        for ranks in mismatch.classes.values()
        for members in _by_place(facts, mismatch, ranks)
        for side in _by_next_calls(facts, mismatch, members)
    ]
    voters = sum(map(len, split))
    if len(split) < 3 or any(2 * len(side) > voters for side in split):
        return None
    return sorted(split)


def _by_place(facts: CaseFacts, mismatch: Mismatch, ranks: Sequence[int]) -> list[list[int]]:
    """Groups ranks by the place of the same call; a rank without a known place joins the largest group.

    Places that met under one number before count as the same: by design, ranks call from either.
    """
    stacks = {rank: _frames_of_call(facts, mismatch, rank) for rank in ranks}
    places = sides_of(
        {rank: tuple((frame.file, frame.line) for frame in stack) for rank, stack in stacks.items() if stack}
    )
    sides: list[list[int]] = []
    for side in sorted(places.values(), key=len, reverse=True):
        side_met = next(
            (side_members for side_members in sides if _met_before(facts, mismatch, side_members[0], side[0])), None
        )
        if side_met is not None or (sides and len(side) == 1 and op_name(mismatch.entries[side[0]]) in ROOTED):
            (side_met or sides[0]).extend(side)
        else:
            sides.append(side)
    first, *minor_sides = sides or [[]]
    return [[*first, *(rank for rank, stack in stacks.items() if not stack)], *minor_sides]


def _frames_of_call(facts: CaseFacts, mismatch: Mismatch, rank: int) -> tuple[Frame, ...]:
    # With a device's queue, the main thread runs ahead and waits at any result.
    entry, wait = mismatch.entries[rank], facts.waiting.get(rank)
    is_there = wait is not None and entry.started is None and (wait.group, wait.seq) == (mismatch.group, mismatch.seq)
    shown = facts.ranks[rank].user_stack if is_there else ()
    return facts.alignment.stack(rank, entry).user_frames or shown or entry.frames


def _met_before(facts: CaseFacts, mismatch: Mismatch, rank: int, other: int) -> bool:
    """Returns whether both made these calls under one number before they last called from the same place."""
    histories = facts.histories.in_group(mismatch.group).histories
    if rank not in histories or other not in histories:
        return False
    own_column, peer_column = histories[rank].column, histories[other].column
    wanted = own_column.at(mismatch.seq), peer_column.at(mismatch.seq)
    if wanted[0] == wanted[1]:  # only their stacks differ
        return False
    numbers = range(max(own_column.numbers[0], peer_column.numbers[0]), mismatch.seq)
    met = next((number for number in numbers if (own_column.at(number), peer_column.at(number)) == wanted), None)
    return met is not None and any(
        own_column.at(number) == peer_column.at(number) for number in range(met, mismatch.seq)
    )


def _by_next_calls(facts: CaseFacts, mismatch: Mismatch, ranks: Sequence[int]) -> list[list[int]]:
    """Groups ranks by their next calls; a rank without one joins the largest group, or none if there is no largest."""
    for number in range(mismatch.seq + 1, mismatch.seq + 1 + _NEXT_CALLS):
        made = {rank: facts.alignment.entry(rank, mismatch.group, number) for rank in ranks}
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
