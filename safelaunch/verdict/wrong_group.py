"""Calls in a wrong process group, known from torch's warning or from a rank's habit."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Claim, Frame
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import conditions, waiting_culprit
from safelaunch.verdict.conditions import record_claim
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Annotation, Finding, Reason
from safelaunch.verdict.phrases import capital, ranks_word, waits_words
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import WRONG_GROUP
from safelaunch.verdict.waits import Case, Waiters

# torch warns about a collective on a group that the rank isn't in, and skips it. That is harmless if every member calls
# too. If a group waits for a member that called on a foreign group, that member took the wrong one.


def wrong_group(case: Case, finding: Finding) -> Iterator[Annotation]:
    """Blames ranks that called in a wrong group, which torch's warning shows, or else their habit."""
    note = _warned(case, finding) or _left_usual_group(case, finding)
    yield from [note] if note is not None else []


def _warned(case: Case, finding: Finding) -> Annotation | None:
    """Blames ranks that called on a foreign group while their own group waits for them."""
    outsiders = _waiters_for_outsiders(case)
    if not outsiders or not outsiders.keys() <= {culprit.rank for culprit in finding.culprits}:
        return None
    they, their, groups = ("it is", "its", "group") if len(outsiders) == 1 else ("they are", "their", "groups")
    ops = "/".join(sorted({waiters.wait.op for waiters in outsiders.values()}))
    waits = waits_words(case, sorted({rank for waiters in outsiders.values() for rank in waiters.ranks}))
    text = f"{capital(ranks_word(outsiders))} called {ops} on a group that {they} not in"
    return Annotation(
        f"{text}, which torch skips with a warning, while {waits} in {their} own {groups}.",
        tuple(
            Claim(f"rank {rank}: torch warns: {_warning(waiters, rank)}", f"ranks/{rank}/log_tail.txt")
            for rank, waiters in outsiders.items()
        ),
        finding.all_doubts,
        tuple(
            waiting_culprit(case.ranks[rank], _reason(rank, waiters), waiters.wait.frame)
            for rank, waiters in outsiders.items()
        ),
        finding.advice | {WRONG_GROUP},
        cause="missing-from-collective",
        explains=Reason.WARNED,
        supersedes=True,
        ruled_out=(f"{finding.cause} alone: a call on a wrong group says why",),
    )


def _left_usual_group(case: Case, finding: Finding) -> Annotation | None:
    """Blames ranks, if they are no majority, whose call is in a different group from all earlier ones at that place.

    No peer meets it there, so its connections break once they end: their end is no sign of an uneven loop.
    """
    crash = case.evidence.outcome == "crash"
    ended = conditions(case, "uneven-batches") if finding.cause == "uneven-batches" else {}
    named = {culprit.rank for culprit in finding.culprits}
    if finding.cause != "collective-mismatch" and not (crash and finding.cause == "uneven-batches"):
        return None
    # From the line where it waits, else from the line where it diverged.
    diverged = {rank: stack[0] for rank, stack in finding.calls.items() if stack}
    asked = [rank for rank in case.waiting if rank in named or finding.cause != "collective-mismatch"]
    astray = {
        rank: text for rank in asked if (text := _unusual(case, rank) or _unusual(case, rank, diverged.get(rank)))
    }
    if not astray or 2 * len(astray) > len(case.ranks):
        return None
    first, *more = astray
    text = f"{astray[first]}{f' The same holds for {ranks_word(more)}.' if more else ''}"
    waits = (
        f"{ranks_word(ended)} ended without such a call" if ended else waits_words(case, case.waiting.keys() - astray)
    )
    doubts = () if ended else (doubt for doubt in finding.doubts if doubt is not Doubt.ABORTED_CALL_LOST)
    return Annotation(
        text if crash and not ended else f"{text} {capital(waits)}.",
        tuple(record_claim(rank, f"rank {rank}: its calls from that line, and their groups") for rank in astray),
        (*doubts, Doubt.HABIT_ALONE),
        tuple(waiting_culprit(case.ranks[rank], text) for rank, text in astray.items()),
        cause="missing-from-collective" if ended else "collective-mismatch",
        of="usual group",
        explains=Reason.HABIT,
        supersedes=bool(ended) or not crash,
        ruled_out=(f"{ranks_word(ended)} left a loop too early: no peer meets that call in any case",) if ended else (),
    )


def _waiters_for_outsiders(case: Case) -> dict[int, Waiters]:
    outsiders = {
        rank: waiters
        for waiters in case.waits.classes.values()
        for rank in waiters.blockers & case.ranks.keys()
        if waiters.wait.kind == "collective" and _warning(waiters, rank) in case.ranks[rank].evidence.log_tail
    }
    return dict(sorted(outsiders.items()))


def _warning(waiters: Waiters, rank: int) -> str:
    return f"Running {waiters.wait.op} on global rank {rank} which does not belong to the given group"


def _reason(rank: int, waiters: Waiters) -> str:
    return f"Rank {rank} called {waiters.wait.op} on a group that it is not in, which torch skips with a warning."


def _unusual(facts: CaseFacts, rank: int, site: Frame | None = None) -> str:
    """Returns how a rank's present call differs from its earlier ones, as a sentence.

    Compares calls from ``site``, by default from where the rank waits. A call whose connection broke is the newest one
    from the line of the exception.

    Example: ``Rank 2 made its 5 earlier calls at train.py:8 in group '1': with group '4' it might have taken the wrong
    one.``
    """
    wait = facts.waiting.get(rank)
    frame = site or (wait.frame if wait is not None else None)
    if wait is None or frame is None:
        return ""
    left = facts.histories.left_group(rank, frame)
    now = left.there[rank].group if left is not None else ""
    if left is None or (site is None and wait.group not in (None, now)):
        return ""
    return (
        f"Rank {rank} made its {left.matched} earlier calls at {fr.place(frame)} in {facts.group(left.expected.group)}:"
        f" with {facts.group(now)} it might have taken the wrong one."
    )
