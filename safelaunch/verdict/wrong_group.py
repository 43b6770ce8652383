"""Ranks that called a collective on a group that they are not in: torch warns, does nothing, and lets them go on.

That is harmless where every member calls as well. Where a group waits for a member that was such an outsider of another
one, it has taken the wrong group: what other rules find then (ranks that entered groups in different orders) follows.
Without a warning, a habit tells: the newest call from a line is in another group than all before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

_ENOUGH = 2  # earlier calls that make a habit
_EXPLAINED = frozenset({"group-order", "missing-from-collective", "collective-mismatch"})
_WARNING = "Running {op} on global rank {rank} which does not belong to the given group"


@dataclass(frozen=True)
class _Outsider:
    """``rank`` has called ``op`` on a group that it is not in; in its own, ``waiters`` wait for it at ``frame``."""

    rank: int
    op: str
    waiters: tuple[int, ...]
    frame: Frame | None

    @property
    def warning(self) -> str:
        return _WARNING.format(op=self.op, rank=self.rank)


def wrong_group(facts: Facts, finding: Finding) -> Iterator[Annotation]:
    """The ranks that took a wrong group as those at fault, where their own group waits for them."""
    found = _outsiders(facts) if finding.cause in _EXPLAINED else []
    if not found or not {one.rank for one in found} <= {one.rank for one in finding.culprits}:
        return
    claims = (Claim(f"rank {one.rank}: torch warns: {one.warning}", f"ranks/{one.rank}/log_tail.txt") for one in found)
    yield Annotation(
        _sentence(facts, found),
        tuple(claims),
        finding.doubts,
        tuple(_culprit(facts, one) for one in found),
        finding.advice | {WRONG_GROUP},
        cause="missing-from-collective",
        explains=True,
        supersedes=True,
        ruled_out=(f"{finding.cause} alone: a call on a wrong group says why",),
    )


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


def unusual(facts: Facts, rank: int) -> str:
    """``Rank 2 made its 5 earlier calls at train.py:8 in group '1': in group '4' it may be in the wrong one.``

    A call whose connection broke counts as completed: it is the newest one from the line of the exception.
    """
    wait, record = facts.ranks[rank].wait, facts.alignment.records.get(rank)
    if wait is None or wait.frame is None or record is None:
        return ""
    calls = [(facts.alignment.stack(rank, one), one.group) for one in record.entries]
    there = [(stack.user_frames, group) for stack, group in calls if stack.user_frame == wait.frame]
    way, now = there[-1] if there else ((), "")
    earlier = [group for frames, group in there[:-1] if frames == way]
    if len(earlier) < _ENOUGH or len(set(earlier)) != 1 or now in earlier or wait.group not in (None, now):
        return ""
    return (
        f"Rank {rank} made its {len(earlier)} earlier calls at {fr.place(wait.frame)} in group '{earlier[0]}':"
        f" with group '{now}' it may have taken the wrong one."
    )


def _outsiders(facts: Facts) -> list[_Outsider]:
    """The members that a group waits for, and that have called the same operation on a group which they are not in."""
    waiting: dict[str, list[int]] = {}
    for rank, one in facts.ranks.items():
        if one.wait is not None and one.wait.kind == "collective" and one.wait.group is not None:
            waiting.setdefault(one.wait.group, []).append(rank)
    found = []
    for group, waiters in waiting.items():
        for rank in sorted((facts.alignment.members(group)[0] - set(waiters)) & set(facts.ranks)):
            wait = facts.ranks[waiters[0]].wait
            outsider = _Outsider(rank, wait.op if wait else "", tuple(waiters), wait.frame if wait else None)
            found += [outsider] if outsider.warning in facts.ranks[rank].evidence.log_tail else []
    return sorted(found, key=lambda outsider: outsider.rank)


def _culprit(facts: Facts, one: _Outsider) -> Culprit:
    reason = f"Rank {one.rank} called {one.op} on a group that it is not in, where torch only warns and goes on."
    return waiting_culprit(facts.ranks[one.rank], reason, one.frame)


def _sentence(facts: Facts, found: Sequence[_Outsider]) -> str:
    they, their, groups = ("it is", "its", "group") if len(found) == 1 else ("they are", "their", "groups")
    ops = "/".join(sorted({one.op for one in found}))
    waits = waits_words(facts, sorted({rank for one in found for rank in one.waiters}))
    text = f"{capital(ranks_word(one.rank for one in found))} called {ops} on a group that {they} not in"
    return f"{text}, where torch only warns and goes on, while {waits} in {their} own {groups}."
