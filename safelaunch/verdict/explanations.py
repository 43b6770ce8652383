"""Why a rank is behind its peers, or has gone another way: its exceptions, its own words, the group that it called in.

``except Exception: continue`` around a training step leaves out the step's collectives: the rank goes on, one call
behind, and the job stops at some later, innocent line. What the other rules find then is true, and this says why.
The same holds for ``if not torch.isfinite(loss): print("skipping batch"); continue``: what the rank alone has printed,
and the source of the line that prints it, tell where it left its peers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from safelaunch.model import CaughtException, Claim, Frame
from safelaunch.stacks import frames as fr
from safelaunch.stacks.parting import Left, left_by
from safelaunch.stacks.tracebacks import lines_of
from safelaunch.verdict.causes import BROKEN_OFF, DRAWN, FAILURES, LEFT_OUT, UNUSUAL_GROUP, WRONG_GROUP, Advice
from safelaunch.verdict.collectives import Mismatch
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.exits import one_line
from safelaunch.verdict.findings import (
    Annotation,
    Finding,
    Ruling,
    capital,
    condition_claims,
    conditions,
    ranks_word,
    waiting_culprit,
    waits_words,
)
from safelaunch.verdict.rank_state import CaseFacts, user_stack_of
from safelaunch.verdict.waits import Case, Waiters

# Findings that say who is behind or went another way, and not why.
_EXPLAINED = frozenset({"collective-mismatch", "missing-from-collective", "uneven-batches", "rank-exited"})
_MOST_LOOKED_AT = 4  # ranks at fault, and peers, whose functions are read for what they print


@dataclass(frozen=True)
class _LeftOut:
    """Why a rank left out calls that its peers made: ``reason``, a sentence; ``frame``, where; ``claim``, its evidence.

    ``sure``: the records show that the ranks parted there; else they only agree with it. ``what``: in short.
    """

    reason: str
    frame: Frame
    claim: Claim
    sure: bool
    what: str


def _explained(
    finding: Finding, found: Mapping[int, _LeftOut], cause: str, words: str, what: str, advice: frozenset[Advice]
) -> Annotation:
    """What these ranks did themselves as the cause, and no others at fault."""
    culprits = (culprit for culprit in finding.culprits if culprit.rank in found)
    return Annotation(
        words,
        tuple(one.claim for one in found.values()),
        those({Doubt.SEVERAL_PLACES_FIT: not all(one.sure for one in found.values())}),
        tuple(
            structs.replace(culprit, frame=found[culprit.rank].frame, reason=found[culprit.rank].reason)
            for culprit in culprits
        ),
        advice,
        cause=cause,
        explains=True,
        ruled_out=(f"{finding.cause} alone: {what} says why",),
    )


def caught_exception(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The exception as the cause, where one explains the finding.

    It has to lie between the last call that the rank made as its peers did and the first that it did not, or where a
    few calls more would make its record that of its peers to the end: not just somewhere before. Peers that caught the
    same one in the same place went on alike, so there it explains nothing. Where nobody is in the minority (one rank
    against one), the exception tells which side it was.
    """
    if finding.cause not in _EXPLAINED or not any(f.evidence.caught for f in facts.ranks.values()):
        return
    mismatch = facts.histories.first_mismatch
    fits = {c.rank: fit for c in finding.culprits if (fit := _fit(facts, c.rank, mismatch)) is not None}
    if not fits or (not finding.doubts and len(fits) < len(finding.culprits)):
        return
    types = " and ".join(sorted({fit.what for fit in fits.values()}))
    words = (
        f"{capital(ranks_word(fits))} raised {types} and continued, skipping the collectives that their peers called."
    )
    words = next(iter(fits.values())).reason if len(fits) == 1 else words
    yield _explained(finding, fits, "swallowed-exception", words, "the exception", frozenset())


def skipped_batch(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """What the ranks at fault alone have printed as they left out calls that their peers made, as the cause.

    Of the records only a call too many contradicts that; where they show a call left out, they agree with it. Who has
    left the loop by that (``break``, ``return``) has left it, whatever it printed.
    """
    said = (
        _said(facts, [culprit.rank for culprit in finding.culprits])
        if finding.cause in _EXPLAINED - {"rank-exited"}
        else {}
    )
    if not said or (not finding.doubts and len(said) < len(finding.culprits)):
        return
    shifts = [*facts.histories.shifts_in(facts.alignment.groups())]
    if any(shift.kind == "extra" and said.keys() & set(shift.ranks) for shift in shifts):
        return
    shown = all(any(rank in shift.ranks for shift in shifts) for rank in said)
    told = {rank: _as_printed(rank, *one, sure=shown) for rank, one in said.items()}
    words = " ".join(one.reason for one in told.values())
    if not all(left.swallows or left.goes == "continue" for left, _ in said.values()):
        yield Annotation(words, context=tuple(one.claim for one in told.values()), advice=frozenset({BROKEN_OFF}))
        return
    swallows = any(left.swallows for left, _ in said.values())
    cause, advice = (
        ("swallowed-exception", frozenset[Advice]()) if swallows else ("collective-mismatch", DRAWN | {LEFT_OUT})
    )
    yield _explained(finding, told, cause, words, "what the rank printed", advice)


def _said(facts: CaseFacts, named: Sequence[int]) -> dict[int, tuple[Left, str]]:
    """Rank → the newest of its lines that no peer has printed, and the statement behind which it left out calls."""
    printed = {rank: lines for rank in named if (lines := lines_of(facts.ranks[rank].evidence.log_tail))}
    others = [rank for rank in facts.ranks if rank not in named]
    some = [*list(printed)[:_MOST_LOOKED_AT], *others[:_MOST_LOOKED_AT]] if printed else []
    called = {(frame.file, frame.line): frame for rank in some for frame in _lines_called_from(facts, rank)}
    every = left_by(called.values(), facts.read_source)
    ways = [left for left in every if left.parts and any(left.leaves_out(frame) for frame in called.values())]
    found: dict[int, tuple[Left, str]] = {}
    for rank, lines in printed.items() if ways else ():
        peers = [facts.ranks[one].evidence.log_tail for one in others or named if one != rank]
        matches = ((left, line) for line in reversed(lines) for left in ways if left.has_printed(line))
        own = next((one for one in matches if not any(one[0].is_in(text) for text in peers)), None)
        if own is not None:
            found[rank] = own
    return found


def _lines_called_from(facts: CaseFacts, rank: int) -> Iterator[Frame]:
    """The user's frames where the rank is, and of the calls on its record."""
    yield from user_stack_of(facts.ranks[rank].evidence)
    for kind in facts.alignment.ring(rank).used().values():
        yield from facts.alignment.stack(rank, kind).user_frames


def _as_printed(rank: int, left: Left, line: str, *, sure: bool) -> _LeftOut:
    text = one_line(line.strip(), 100)
    words = f"Rank {rank} printed {text!r} at {fr.place(left.frame)}, in `{left.after}`, and continued with {left.goes}"
    words += ", skipping the collectives that its peers called there"
    return _LeftOut(f"{words}.", left.frame, Claim(words, f"ranks/{rank}/log_tail.txt"), sure, text)


def _as_caught(rank: int, one: CaughtException, group: str, number: int, later: bool, *, sure: bool) -> _LeftOut:
    """``number``: of ``group``, what the rank called next, or would have, if not ``later``."""
    reason = f"Rank {rank} raised {one.type} at {fr.place(one.raised)} and continued at {fr.place(one.caught)}"
    reason += ", skipping the collectives that its peers called there."
    then = f" and before its #{number}" if later else "; it called no other since"
    text = f"{one.type} at {fr.place(one.raised)}, after #{number - 1} of group {group!r}{then}"
    return _LeftOut(reason, one.raised, Claim(text, f"ranks/{rank}/caught.json"), sure, one.type)


def _next_call(facts: CaseFacts, rank: int, group: str, time_unix_s: float) -> tuple[int, bool] | None:
    """The number in ``group`` that the rank's next call after that time has, or would have; and whether it was made.

    None for what is older than the record, or without a record.
    """
    window = facts.alignment.window(rank, group)
    if window is None:
        return None
    at = bisect_right(window.positions, time_unix_s * 1e9, key=lambda position: window.entries.created_ns[position])
    if at == 0 and window.numbers[0] > 1:
        return None
    later = at < len(window.positions)
    return (window.numbers[at] if later else window.numbers[-1] + 1), later


def _parted_at(facts: CaseFacts, rank: int, group: str, mismatch: Mismatch | None) -> tuple[int, bool]:
    """The first number of ``group`` that ``rank`` did not call as its peers did; and whether the histories show it.

    Where they do not, they may agree with several places.
    """
    shift = facts.histories.shift_in(group)
    if shift is not None and (rank in shift.ranks) == (shift.kind == "missing"):
        return shift.number, True
    if mismatch is not None and mismatch.group == group and rank in mismatch.odd:
        return mismatch.seq, shift is not None
    window = facts.alignment.window(rank, group)
    return window.numbers[-1] + 1 if window else 0, shift is not None


def _fit(facts: CaseFacts, rank: int, mismatch: Mismatch | None) -> _LeftOut | None:
    """The newest exception of ``rank`` at the point where it parted from its peers."""
    parted = {group: _parted_at(facts, rank, group, mismatch) for group in facts.alignment.groups()}
    tried: dict[tuple[str, int], bool] = {}
    for exception in reversed(facts.ranks[rank].evidence.caught):
        for group, (parted_at, shown) in parted.items():
            place = _next_call(facts, rank, group, exception.time_unix_s)
            if place is None:
                continue
            number, later = place
            sure = number == parted_at
            key = (group, number)
            if not sure and key not in tried:  # many exceptions may lie between the same two calls
                # Where all steps are alike the records do not show the place, but they may agree with this one.
                aligned = facts.histories.in_group(group)
                tried[key] = later and not shown and aligned.may_have_left_out(rank, number)
            if (sure or tried[key]) and not _peers_did_too(facts, rank, group, number, exception):
                return _as_caught(rank, exception, group, number, later, sure=sure and later)
    return None


def _peers_did_too(facts: CaseFacts, rank: int, group: str, number: int, exception: CaughtException) -> bool:
    others = ((peer, other) for peer, one in facts.ranks.items() if peer != rank for other in one.evidence.caught)
    same = (one for one in others if (one[1].type, one[1].raised) == (exception.type, exception.raised))
    calls = (_next_call(facts, peer, group, other.time_unix_s) for peer, other in same)
    return any(call is not None and call[0] == number for call in calls)


# --- a wrong group ----------------------------------------------------------------------------------------------------

# torch warns of a collective on a group that the rank is not in, does nothing, and lets it go on. That is harmless
# where every member calls as well. Where a group waits for a member that was such an outsider of another one, it has
# taken the wrong group: what other rules find then (ranks that entered groups in different orders) follows. Without a
# warning, a habit tells: the newest call from a line is in another group than all before.

_ENOUGH = 2  # earlier calls that make a habit
_OF_A_GROUP = frozenset({"group-order", "missing-from-collective", "collective-mismatch"})


def wrong_group(case: Case, finding: Finding) -> Iterator[Annotation]:
    """The ranks that took a wrong group as those at fault, where their own group waits for them."""
    found = _outsiders(case) if finding.cause in _OF_A_GROUP else {}
    if not found or not found.keys() <= {culprit.rank for culprit in finding.culprits}:
        return
    they, their, groups = ("it is", "its", "group") if len(found) == 1 else ("they are", "their", "groups")
    ops = "/".join(sorted({one.wait.op for one in found.values()}))
    waits = waits_words(case, sorted({rank for one in found.values() for rank in one.ranks}))
    text = f"{capital(ranks_word(found))} called {ops} on a group that {they} not in"
    yield Annotation(
        f"{text}, where torch only warns and goes on, while {waits} in {their} own {groups}.",
        tuple(
            Claim(f"rank {rank}: torch warns: {_warning(one, rank)}", f"ranks/{rank}/log_tail.txt")
            for rank, one in found.items()
        ),
        finding.doubts,
        tuple(waiting_culprit(case.ranks[rank], _called(rank, one), one.wait.frame) for rank, one in found.items()),
        finding.advice | {WRONG_GROUP},
        cause="missing-from-collective",
        explains=True,
        supersedes=True,
        ruled_out=(f"{finding.cause} alone: a call on a wrong group says why",),
    )


def another_group(case: Case, finding: Finding) -> Iterator[Annotation]:
    """The ranks that have left their habit as those at fault, where they are no majority of those that wait."""
    meets_none = finding.cause == "collective-mismatch" and UNUSUAL_GROUP not in finding.advice
    named = [culprit.rank for culprit in finding.culprits if culprit.rank in case.waiting] if meets_none else []
    # By the call that it waits in, else by the one at which it diverged.
    diverged = {rank: stack[0] for rank, stack in finding.calls.items() if stack}
    astray = {rank: text for rank in named if (text := unusual(case, rank) or unusual(case, rank, diverged.get(rank)))}
    if not astray or 2 * len(astray) > len(case.waiting):
        return
    others = tuple(doubt for doubt in finding.doubts if doubt not in (Doubt.NO_MAJORITY, Doubt.EITHER_SIDE))
    first, *more = astray
    text = f"{astray[first]}{f' The same holds for {ranks_word(more)}.' if more else ''}"
    waits = waits_words(case, case.waiting.keys() - astray.keys())
    yield Annotation(
        f"{text} {capital(waits)}.",
        tuple(map(habit_claim, astray)),
        (*others, Doubt.HABIT_ALONE),
        tuple(waiting_culprit(case.ranks[rank], text) for rank, text in astray.items()),
        frozenset({UNUSUAL_GROUP}),
        explains=True,
        supersedes=True,
    )


def _outsiders(case: Case) -> dict[int, Waiters]:
    """Rank → those that wait for it in its group, while it has called the same on a group which it is not in."""
    found = {
        rank: one
        for one in case.waits.classes.values()
        for rank in one.blockers & case.ranks.keys()
        if one.wait.kind == "collective" and _warning(one, rank) in case.ranks[rank].evidence.log_tail
    }
    return dict(sorted(found.items()))


def _warning(one: Waiters, rank: int) -> str:
    return f"Running {one.wait.op} on global rank {rank} which does not belong to the given group"


def _called(rank: int, one: Waiters) -> str:
    return f"Rank {rank} called {one.wait.op} on a group that it is not in, where torch only warns and goes on."


def unusual_group(facts: CaseFacts) -> Ruling:
    """Ranks have ended, and a survivor's last call is in a different group from all its earlier ones on that code path.

    Nobody meets it there, so its connections break once its peers end: that they end is no uneven loop.
    """
    ended = conditions(facts, "uneven-batches")
    if not ended or conditions(facts, *FAILURES):
        return ""
    told = {rank: text for rank in facts.ranks if rank not in ended and (text := unusual(facts, rank))}
    if not told:
        return ""
    return Finding(
        "missing-from-collective",
        (Doubt.HABIT_ALONE,),
        f"{' '.join(told.values())} {capital(ranks_word(ended))} ended without such a call.",
        tuple(waiting_culprit(facts.ranks[rank], text) for rank, text in told.items()),
        (*map(habit_claim, told), *condition_claims(ended)),
        ruled_out=(f"{ranks_word(ended)} left a loop too early: nobody meets that call in any case",),
        advice=frozenset({UNUSUAL_GROUP}),
    )


def habit_claim(rank: int) -> Claim:
    return record_claim(rank, f"rank {rank}: its calls from that line, and their groups")


def unusual(facts: CaseFacts, rank: int, site: Frame | None = None) -> str:
    """Returns how a rank's present call differs from its earlier ones, as a sentence.

    Example: ``Rank 2 made its 5 earlier calls at train.py:8 in group '1': in group '4' it may be in the wrong one.``

    Of its calls from ``site``, else from where it waits. A call whose connection broke counts as completed: it is the
    newest one from the line of the exception.
    """
    wait = facts.waiting.get(rank)
    frame = site or (wait.frame if wait is not None else None)
    if wait is None or frame is None:
        return ""
    calls = [(facts.alignment.stack(rank, one), one.group) for one in facts.alignment.ring(rank)]
    at = fr.spot(frame)
    ways = [(stack.user_frames, group) for stack, group in calls]
    there = [(way, group) for way, group in ways if way and fr.spot(way[0]) == at]
    way, now = there[-1] if there else ((), "")
    earlier = [group for frames, group in there[:-1] if frames == way]
    left = len(earlier) >= _ENOUGH and len(set(earlier)) == 1 and now not in earlier
    if not left or (site is None and wait.group not in (None, now)):
        return ""
    return (
        f"Rank {rank} made its {len(earlier)} earlier calls at {fr.place(frame)} in group '{earlier[0]}':"
        f" with group '{now}' it may have taken the wrong one."
    )
