"""File locks between ranks: who waits in flock() or fcntl() for a file that a rank has locked waits for that rank.

The kernel says who holds a lock (``/proc/locks``), so this is no inference: a rank that enters a barrier with the lock
held, while its peers wait for the lock to get there, is in a circle with them.
"""

from __future__ import annotations

from dataclasses import replace

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.facts import Facts
from safelaunch.diagnose.findings import (
    Finding,
    Ruling,
    condition_claims,
    culprit,
    lower,
    ranks_word,
    small,
    summary_of,
    wait_claims,
    waiting_culprit,
)
from safelaunch.diagnose.waits import Waits
from safelaunch.model import Culprit


def file_locks(facts: Facts, waits: Waits) -> Ruling:
    """A rank holds the lock that others wait for: it waits for them in turn, or what it does itself is the cause.

    Only where nobody else is waited for who does something of his own: then that comes first.
    """
    held_by = _holders(facts)
    if not held_by:
        return ""
    circle = _circle(held_by)
    holders = circle or sorted(set(held_by.values()) - held_by.keys())
    blocking = frozenset(b for found in waits.blockers.values() for b in found) - waits.waiting
    if blocking - held_by.keys() - set(holders) or not (circle or len(holders) == 1):
        return ""
    if circle:
        return _deadlock(facts, {rank: held_by[rank] for rank in circle}, ())
    holder = holders[0]
    mine = {rank: by for rank, by in held_by.items() if _end(held_by, rank) == holder}
    own = facts.ranks[holder].condition
    if own is not None:
        return _held_by_one(facts, mine, holder, own)
    waited_for = {b for key, members in waits.ranks.items() if holder in members for b in waits.blockers[key]}
    return _deadlock(facts, mine, (holder,)) if waited_for & mine.keys() else ""


def _holders(facts: Facts) -> dict[int, int]:
    """rank → the other rank, on the same host, whose process (or child of it) holds the lock that it waits for."""
    owners = {(one.evidence.host, pid): rank for rank, one in facts.ranks.items() for pid in _pids(facts, rank)}
    found = {}
    for rank, one in facts.ranks.items():
        pid = one.condition.locked_by if one.condition is not None else None
        holder = owners.get((one.evidence.host, pid)) if pid is not None else None
        if holder is not None and holder != rank:
            found[rank] = holder
    return found


def _pids(facts: Facts, rank: int) -> set[int]:
    one = facts.ranks[rank].evidence
    return {one.pid, *(child.pid for child in one.children if child.pid is not None)}


def _end(held_by: dict[int, int], rank: int) -> int:
    while rank in held_by:
        rank = held_by[rank]
    return rank


def _circle(held_by: dict[int, int]) -> list[int]:
    """Ranks that wait for each other's locks, if there are such."""
    for start in held_by:
        path = [start]
        while (following := held_by.get(path[-1])) is not None:
            if following in path:
                return sorted(path[path.index(following) :])
            path.append(following)
    return []


def _deadlock(facts: Facts, held_by: dict[int, int], holders: tuple[int, ...]) -> Finding:
    """``holders`` wait for their peers in a collective, the others for the lock."""
    named = {rank: _told(facts, rank, by) for rank, by in held_by.items()}
    text = summary_of(named, facts, holders)
    who = small(ranks_word(held_by))
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
        lower("high") if facts.unseen else "high",
        f"{text} None of them can go on.",
        tuple(culprits),
        condition_claims(named) + wait_claims(facts, holders),
    )


def _held_by_one(facts: Facts, held_by: dict[int, int], holder: int, own: Condition) -> Finding:
    who = small(ranks_word(held_by))
    verb = "waits" if len(held_by) == 1 else "wait"
    named = {holder: replace(own, reason=f"{own.reason}, with a file locked that {who} {verb} for")}
    told = {rank: _told(facts, rank, by) for rank, by in held_by.items()}
    waiters = [rank for rank, one in facts.ranks.items() if one.wait is not None]
    return Finding(
        own.cause,
        lower(own.confidence) if facts.unseen else own.confidence,
        summary_of(named, facts, waiters),
        (culprit(facts.ranks[holder], named[holder]),),
        condition_claims(named) + condition_claims(told) + wait_claims(facts, waiters),
        held_up=tuple(held_by),
    )


def _told(facts: Facts, rank: int, by: int) -> Condition:
    """Of a rank that waits for a lock: which rank has it."""
    condition = facts.ranks[rank].condition
    assert condition is not None
    return replace(condition, reason=f"waits for a file lock at {fr.place(condition.frame)} that rank {by} holds")
