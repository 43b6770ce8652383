"""File locks between ranks: who waits in flock() or fcntl() for a file that a rank has locked waits for that rank.

The kernel says who holds a lock (``/proc/locks``), so this is no inference: a rank that enters a barrier with the lock
held, while its peers wait for the lock to get there, is in a circle with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.doubts import Doubt, those
from safelaunch.diagnose.findings import (
    Finding,
    Ruling,
    condition_claims,
    culprit,
    ranks_word,
    summary_of,
    wait_claims,
    waiting_culprit,
)
from safelaunch.diagnose.rank_state import Facts
from safelaunch.diagnose.waits import Case, Holder
from safelaunch.model import Culprit
from safelaunch.reading import frames as fr


def file_locks(case: Case) -> Ruling:
    """A rank holds the lock that others wait for: it waits for them in turn, or what it does itself is the cause.

    Only where nobody else is waited for who does something of his own: then that comes first.
    """
    if not case.waits.held_by:
        return ""
    # Circles of calls alone say nothing here: whoever is in one waits for no file.
    ends = [sink for sink in case.waits.graph.sinks if not all(node in case.waits.ranks for node in sink)]
    if len(ends) != 1:
        return ""
    (end,) = ends
    mine = {rank: holder for rank, holder in case.waits.held_by.items() if case.waits.graph.leads_to(rank, end)}
    if len(end) == 1:
        holder = next((holder for holder in mine.values() if holder.node in end), None)
        return _held_by_one(case, mine, holder) if holder is not None else ""
    in_files = {rank: holder for rank, holder in mine.items() if rank in end}
    others = {holder.rank for holder in in_files.values()} - in_files.keys()
    return _deadlock(case, mine if others else in_files, tuple(sorted(others)))


def _deadlock(facts: Facts, held_by: Mapping[int, Holder], holders: tuple[int, ...]) -> Finding:
    """``holders`` wait for their peers in a collective, the others for the lock."""
    named = {rank: _told(facts, rank, by) for rank, by in held_by.items()}
    text = summary_of(named, facts, holders)
    who = ranks_word(held_by)
    culprits: list[Culprit] = [culprit(facts.ranks[rank], condition) for rank, condition in named.items()]
    for rank in holders:
        wait = facts.ranks[rank].wait
        words = wait.words if wait is not None else ""
        culprits.append(
            waiting_culprit(
                facts.ranks[rank], f"Rank {rank} holds the lock that {who} would need, and waits in {words}."
            )
        )
    return Finding(
        "lock-deadlock",
        _doubts(facts, named.values()),
        f"{text} None of them can go on.",
        tuple(culprits),
        condition_claims(named) + wait_claims(facts, holders),
    )


def _held_by_one(facts: Facts, held_by: Mapping[int, Holder], holder: Holder) -> Ruling:
    own = holder.condition
    if own is None:
        return ""
    who = ranks_word(held_by)
    verb = "waits" if len(held_by) == 1 else "wait"
    named = {holder.rank: replace(own, reason=f"{own.reason}, with a file locked that {who} {verb} for")}
    told = {rank: _told(facts, rank, by) for rank, by in held_by.items()}
    waiters = [rank for rank, one in facts.ranks.items() if one.wait is not None]
    return Finding(
        own.cause,
        _doubts(facts, (own, *told.values())),
        summary_of(named, facts, waiters),
        (culprit(facts.ranks[holder.rank], named[holder.rank]),),
        condition_claims(named) + condition_claims(told) + wait_claims(facts, waiters),
        held_up=tuple(held_by),
    )


def _doubts(facts: Facts, conditions: Iterable[Condition]) -> tuple[Doubt, ...]:
    """No surer than it is of any of them what it waits for."""
    own = dict.fromkeys(doubt for condition in conditions for doubt in condition.doubts)
    return (*own, *those({Doubt.UNSEEN_RANKS: bool(facts.unseen)}))


def _told(facts: Facts, rank: int, by: Holder) -> Condition:
    """Of a rank that waits for a lock: which rank has it."""
    condition = facts.ranks[rank].condition
    assert condition is not None
    return replace(condition, reason=f"waits for a file lock at {fr.place(condition.frame)} that rank {by.rank} holds")
