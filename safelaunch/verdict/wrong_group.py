"""Ranks that called a collective on a group that they are not in: torch warns, does nothing, and lets them go on.

That is harmless where every member calls as well. Where a group waits for a member that was such an outsider of another
one, it has taken the wrong group: what other rules find then (ranks that entered groups in different orders) follows.
Without a warning, a habit tells: the newest call from a line is in another group than all before.
"""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Claim, Culprit, Frame
from safelaunch.verdict.causes import FAILURES, UNUSUAL_GROUP, WRONG_GROUP
from safelaunch.verdict.doubts import Doubt
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
from safelaunch.verdict.rank_state import Facts
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.waits import Case, Waiters

_ENOUGH = 2  # earlier calls that make a habit
_EXPLAINED = frozenset({"group-order", "missing-from-collective", "collective-mismatch"})


def wrong_group(case: Case, finding: Finding) -> Iterator[Annotation]:
    """The ranks that took a wrong group as those at fault, where their own group waits for them."""
    found = _outsiders(case) if finding.cause in _EXPLAINED else {}
    if not found or not found.keys() <= {one.rank for one in finding.culprits}:
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
        tuple(_culprit(case, rank, one) for rank, one in found.items()),
        finding.advice | {WRONG_GROUP},
        cause="missing-from-collective",
        explains=True,
        supersedes=True,
        ruled_out=(f"{finding.cause} alone: a call on a wrong group says why",),
    )


def another_group(case: Case, finding: Finding) -> Iterator[Annotation]:
    """The ranks that have left their habit as those at fault, where they are no majority of those that wait."""
    waiting = [rank for rank, one in case.ranks.items() if one.wait is not None]
    meets_none = finding.cause == "collective-mismatch" and UNUSUAL_GROUP not in finding.advice
    named = [one.rank for one in finding.culprits if one.rank in waiting] if meets_none else []
    diverged = {rank: stack[0] for rank, stack in finding.calls.items() if stack}
    astray = {rank: text for rank in named if (text := _astray(case, rank, diverged.get(rank)))}
    if not astray or 2 * len(astray) > len(waiting):
        return
    others = tuple(one for one in finding.doubts if one not in (Doubt.NO_MAJORITY, Doubt.EITHER_SIDE))
    first, *more = astray
    text = f"{astray[first]}{f' The same holds for {ranks_word(more)}.' if more else ''}"
    waits = waits_words(case, [rank for rank in waiting if rank not in astray])
    yield Annotation(
        f"{text} {capital(waits)}.",
        tuple(Claim(f"rank {rank}: its calls from that line, and their groups", _record(str(rank))) for rank in astray),
        (*others, Doubt.HABIT_ALONE),
        tuple(waiting_culprit(case.ranks[rank], text) for rank, text in astray.items()),
        frozenset({UNUSUAL_GROUP}),
        explains=True,
        supersedes=True,
    )


def _astray(case: Case, rank: int, diverged: Frame | None) -> str:
    """By the call that it waits in, else by the one at which it diverged; each reads a whole record."""
    return unusual(case, rank) or (unusual(case, rank, diverged) if diverged is not None else "")


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


def _culprit(case: Case, rank: int, one: Waiters) -> Culprit:
    reason = f"Rank {rank} called {one.wait.op} on a group that it is not in, where torch only warns and goes on."
    return waiting_culprit(case.ranks[rank], reason, one.wait.frame)


def unusual_group(facts: Facts) -> Ruling:
    """Ranks have ended, and a survivor's last call is in another group than all its earlier ones on that way.

    Nobody meets it there, so its connections break once its peers end: that they end is no uneven loop.
    """
    ended = conditions(facts, "uneven-batches")
    if not ended or conditions(facts, *FAILURES):
        return ""
    told = {rank: text for rank in facts.ranks if rank not in ended and (text := unusual(facts, rank))}
    if not told:
        return ""
    claims = (Claim(f"rank {rank}: its calls from that line, and their groups", _record(str(rank))) for rank in told)
    return Finding(
        "missing-from-collective",
        (Doubt.HABIT_ALONE,),
        f"{' '.join(told.values())} {capital(ranks_word(ended))} ended without such a call.",
        tuple(waiting_culprit(facts.ranks[rank], text) for rank, text in told.items()),
        (*claims, *condition_claims(ended)),
        ruled_out=(f"{ranks_word(ended)} left a loop too early: nobody meets that call in any case",),
        advice=frozenset({UNUSUAL_GROUP}),
    )


def _record(rank: str) -> str:
    return f"ranks/{rank}/flight_recorder.json"


def unusual(facts: Facts, rank: int, site: Frame | None = None) -> str:
    """``Rank 2 made its 5 earlier calls at train.py:8 in group '1': in group '4' it may be in the wrong one.``

    Of its calls from ``site``, else from where it waits. A call whose connection broke counts as completed: it is the
    newest one from the line of the exception.
    """
    wait, record = facts.ranks[rank].wait, facts.alignment.records.get(rank)
    frame = site or (wait.frame if wait is not None else None)
    if wait is None or frame is None or record is None:
        return ""
    calls = [(facts.alignment.stack(rank, one), one.group) for one in record.entries]
    at = fr.spot(frame)
    there = [
        (stack.user_frames, group) for stack, group in calls if stack.user_frame and fr.spot(stack.user_frame) == at
    ]
    way, now = there[-1] if there else ((), "")
    earlier = [group for frames, group in there[:-1] if frames == way]
    if (
        len(earlier) < _ENOUGH
        or len(set(earlier)) != 1
        or now in earlier
        or (site is None and wait.group not in (None, now))
    ):
        return ""
    return (
        f"Rank {rank} made its {len(earlier)} earlier calls at {fr.place(frame)} in group '{earlier[0]}':"
        f" with group '{now}' it may have taken the wrong one."
    )
