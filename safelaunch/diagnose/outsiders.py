"""Ranks that called a collective on a group that they are not in: torch warns, does nothing, and lets them go on.

That is harmless where every member calls as well. Where a group waits for a member that was such an outsider of another
one, it has taken the wrong group: what other rules find then (ranks that entered groups in different orders) follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from safelaunch.diagnose.findings import Finding, capital, ranks_word, waiting_culprit, waits_words
from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import Claim, Culprit, Frame

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


def with_wrong_group(facts: Facts, finding: Finding) -> Finding:
    """The finding with the ranks that took a wrong group as its culprits, where their own group waits for them."""
    if finding.cause not in _EXPLAINED:
        return finding
    found = _outsiders(facts)
    if not found or not {one.rank for one in found} <= {one.rank for one in finding.culprits}:
        return finding
    claims = (Claim(f"rank {one.rank}: torch warns: {one.warning}", f"ranks/{one.rank}/log_tail.txt") for one in found)
    return replace(
        finding,
        cause="missing-from-collective",
        summary=_summary(facts, found),
        culprits=tuple(_culprit(facts, one) for one in found),
        claims=(*claims, *finding.claims),
        ruled_out=(*finding.ruled_out, f"{finding.cause} alone: a call on a wrong group says why"),
        signs=finding.signs | {"wrong-group"},
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


def _summary(facts: Facts, found: Sequence[_Outsider]) -> str:
    they, their, groups = ("it is", "its", "group") if len(found) == 1 else ("they are", "their", "groups")
    ops = "/".join(sorted({one.op for one in found}))
    waits = waits_words(facts, sorted({rank for one in found for rank in one.waiters}))
    text = f"{capital(ranks_word(one.rank for one in found))} called {ops} on a group that {they} not in"
    return f"{text}, where torch only warns and goes on, while {waits} in {their} own {groups}."
