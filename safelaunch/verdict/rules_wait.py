"""Rules over the graph of waits: follow each wait to its end, or to a cycle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from safelaunch.model import Claim, Frame
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.blame import (
    blame,
    condition_claims,
    culprit,
    most_doubtful,
    wait_claims,
    waiting_culprit,
)
from safelaunch.verdict.c10d import call_words
from safelaunch.verdict.conditions import Condition, record_claim, thread_condition
from safelaunch.verdict.conflict import conflict_at
from safelaunch.verdict.doubts import Doubt, doubts_if, levels_of
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.graph import NodeKind
from safelaunch.verdict.own_words import ended_thread, log_claim
from safelaunch.verdict.phrases import (
    capital,
    ranks_wait,
    ranks_word,
    summary_of,
)
from safelaunch.verdict.suggestions import (
    LOCK,
    LOCKED_INIT,
    OWN_LOOP,
    Advice,
)
from safelaunch.verdict.waits import AwaitedHolder, Case

_UNEXPLAINED = Condition(
    "missing-from-collective",
    "did not take part, and was ended before anything was seen of it",
    None,
    doubts=(Doubt.STATE_UNKNOWN,),
)


def blocked_by(case: Case) -> Ruling:
    """Peers wait for a rank that waits for no other: its own state is the cause.

    Waits are followed to their end, so a rank that only waits in turn is no culprit. Ranks that block others in
    different ways are all named, under the most certain cause.
    """
    blocking = case.waits.blockers - case.waiting.keys()
    roots = sorted(blocking & frozenset(case.ranks))
    if case.unseen:
        surely = _awaited_in_collectives(case)
        roots = [r for r in roots if case.has_only_dump(r) or (r in surely and not case.may_wait_elsewhere(r))]
    if not roots:
        return "every rank that peers wait for waits for its peers too" if case.waits.classes and not blocking else ""
    named = {r: case.ranks[r].condition or _UNEXPLAINED for r in roots}
    named = dict(sorted(named.items(), key=lambda item: (levels_of(item[1].doubts), item[0])))
    cause = next(iter(named.values())).cause
    also, waiting = mismatch_in(case), [waiters.wait for waiters in case.waits.classes.values()]
    doubts = {
        Doubt.SEVERAL_CAUSES: len({c.cause for c in named.values()}) > 1,
        Doubt.UNSEEN_RANKS: bool(blocking - frozenset(case.ranks)),
        Doubt.STACKS_ALONE: len(roots) > 1 and any(w.kind == "collective" and w.seq is None for w in waiting),
        Doubt.MISMATCH_TOO: bool(also),
    }
    sure = (*most_doubtful(c for c in named.values() if c.cause == cause), *doubts_if(doubts))
    text = f"ranks also recorded {also}; the runner-up, as a rank that has not arrived explains the wait"
    claims, ruled = _not_entered(case, roots), [text] if also else []
    return blame(case, cause, sure, named, claims=claims, ruled_out=ruled)


def _awaited_in_collectives(case: Case) -> frozenset[int]:
    return frozenset(
        rank
        for waiters in case.waits.classes.values()
        if waiters.wait.group is not None and case.alignment.members(waiters.wait.group)[1]
        for rank in waiters.blockers
    )


def _not_entered(case: Case, roots: list[int], limit: int = 4) -> tuple[Claim, ...]:
    """Returns a claim for each call that the ranks haven't reached, starting with the one that most peers wait in."""
    claims = []
    for rank in roots[:limit]:
        waiting_for_it = [
            waiters
            for waiters in case.waits.classes.values()
            if rank in waiters.blockers and waiters.wait.seq is not None
        ]
        for blocked in sorted(waiting_for_it, key=lambda waiters: (-len(waiters.ranks), waiters.ranks))[:limit]:
            wait, who = blocked.wait, blocked.ranks
            text = f"{wait.op} #{wait.seq} of {case.group(wait.group)}, in which {ranks_wait(case, who)}"
            made = case.alignment.entry(rank, str(wait.group), wait.seq) if wait.seq is not None else None
            instead = f"made {call_words(made, case.group(made.group))} and so " if made is not None else ""
            claims.append(record_claim(who[0], f"rank {rank} {instead}has not come to {text}"))
    return tuple(claims)


def mismatch_in(case: Case) -> str:
    waits = [waiters.wait for waiters in case.waits.classes.values() if waiters.wait.kind == "collective"]
    calls = [(wait.group, wait.seq) for wait in waits if wait.group is not None and wait.seq is not None]
    conflict = next((found for call in calls if (found := conflict_at(case.alignment, *call)) is not None), None)
    return f"different operations as #{conflict.seq} of {case.group(conflict.group)}" if conflict is not None else ""


# --- waits between ranks outside c10d calls ---------------------------------------------------------------------------

# The kernel shows which process holds a lock (``/proc/locks``) or the other end of a connection, so these aren't
# inferred: a rank that enters a barrier while holding a lock that its peers need first is in a cycle with them. What a
# rank polls for is known only from the source, if a condition on the rank keeps one rank out of the loop.


def waits_outside_collectives(case: Case) -> Ruling:
    """A rank holds a lock that others wait for, or owes them a message or file: it waits in turn, or is at fault.

    Applies only if no other awaited rank is held up on its own, as that comes first.
    """
    if not case.waits.holders:
        return ""
    # Cycles of calls alone don't matter here: their ranks wait for no file.
    ends = [sink for sink in case.waits.graph.sinks if not all(node in case.waits.classes for node in sink)]
    if len(ends) != 1:
        return ""
    (end,) = ends
    holders = {rank: holder for rank, holder in case.waits.holders.items() if case.waits.graph.leads_to(rank, end)}
    if len(end) == 1:
        holder = next((holder for holder in holders.values() if case.waits.node_of(holder) in end), None)
        return _held_by_one(case, holders, holder) if holder is not None else ""
    ranks_in_cycle = {rank: holder for rank, holder in holders.items() if rank in end}
    kinds = {holder.kind for holder in ranks_in_cycle.values()}
    if "message" in kinds:
        by = next(holder for holder in ranks_in_cycle.values() if holder.kind == "message")
        if (served := _server_of(case, by.rank)) is not None:
            return _kept_from_serving(case, by.rank, served, holders)
    kind = next(kind for kind in _WHY if kind in kinds)
    locked = kind == "file" and any(holder.rank not in ranks_in_cycle for holder in ranks_in_cycle.values())
    waiting = holders if locked else {rank: holder for rank, holder in ranks_in_cycle.items() if holder.kind == kind}
    return _cycle_finding(case, kind, waiting, holders)


@dataclass(frozen=True)
class _BlockedServer:
    """The part of a rank that should answer others and can't."""

    words: str
    claim: Claim
    advice: frozenset[Advice] = frozenset()
    ended: bool = False  # its thread has ended
    ended_at: Frame | None = None  # where it raised; None if unknown
    doubts: tuple[Doubt, ...] = ()


def _server_of(case: Case, rank: int) -> _BlockedServer | None:
    """Returns a thread that waits for a lock or has ended, or the event loop on whose thread the rank waits."""
    view = case.ranks[rank].view
    if view is None:
        return None
    if calls.RUNS_LOOP.on(view.frames):
        text = "its event loop, which should answer, is blocked"
        claim = view.stack_claim(f"rank {rank}: its main thread waits inside a callback of its event loop")
        return _BlockedServer(text, claim, frozenset({OWN_LOOP}))
    for other in view.beside():
        own = thread_condition(other)
        if own.lock is not None and own.lock.on == "lock":
            text = f"its thread {other.name}, which should answer, {own.reason}"
            return _BlockedServer(text, other.stack_claim(f"rank {rank}: thread {other.name} {own.reason}"), LOCK)
    ended = ended_thread(view.rank)
    if ended is None or not ended.served or any(calls.SERVES.on(thread.frames) for thread in view.threads):
        return None
    claim = log_claim(view.rank, ended.words)
    return _BlockedServer(f"its {ended.words}", claim, ended=True, ended_at=ended.frame, doubts=(Doubt.STATE_INFERRED,))


def _kept_from_serving(case: Case, rank: int, server: _BlockedServer, waiting: Mapping[int, AwaitedHolder]) -> Finding:
    """Blames ``rank``: it waits for its peers, and they wait for an answer that it prevents."""
    own = {other: condition for other in waiting if (condition := case.ranks[other].condition) is not None}
    place = f"waits in {case.waiting[rank].words}" if rank in case.waiting else "waits"
    text = f"Rank {rank} {place}, and {server.words}."
    return Finding(
        "blocking-io" if server.ended else "lock-deadlock",
        (*server.doubts, *doubts_if({Doubt.UNSEEN_RANKS: bool(case.unseen)})),
        f"{text} {capital(ranks_wait(case, own))} for its answer.",
        (waiting_culprit(case.ranks[rank], text, server.ended_at),),
        (server.claim, *condition_claims(own), *wait_claims(case, [rank])),
        victims=tuple(own),
        advice=server.advice,
    )


_WHY: Mapping[NodeKind, str] = {
    "message": "at the other end of the connection that {who} {waits} on",
    "poll": "and might be the one that should create or remove what {who} {waits} for",
    "key": "and is the rank that should set the store key that {who} {waits} for",
    "file": "holding a file lock that {who} {waits} for",
}


def _why(kind: NodeKind, waiting: Collection[int]) -> str:
    return _WHY[kind].format(who=ranks_word(waiting), waits="waits" if len(waiting) == 1 else "wait")


def _cycle_finding(
    case: Case, kind: NodeKind, waiting: Mapping[int, AwaitedHolder], all_waiting: Iterable[int]
) -> Ruling:
    """Returns the finding for ranks that wait for ranks which wait for their peers in turn.

    The kind of wait decides which rank is named. File lock: its holder. Message: the waiter, whose line shows what is
    missing. Store key or poll: the rank that should create it, and the waiter if it is a single rank. Except for a
    lock, either side might be wrong.
    """
    own = {rank: _lock_wait(case, rank, by) for rank, by in waiting.items()}
    by = next(iter(waiting.values()))
    holders = sorted({wait.rank for wait in waiting.values()} - own.keys())
    makes, locked = kind in ("poll", "key"), kind == "file"
    if makes and (holders != [by.rank] or by.rank not in case.waiting):
        return ""
    aside = holders if locked else makes and len(own) > 1
    culprits = [] if aside else [culprit(case.ranks[rank], condition) for rank, condition in own.items()]
    for rank in holders if makes or locked else ():
        words = case.waiting[rank].words if rank in case.waiting else ""
        reason = f"Rank {rank} waits in {words}, {_why(kind, own)}."
        culprits.append(waiting_culprit(case.ranks[rank], reason, by.site if kind == "key" else None))
    doubts = doubts_if({Doubt.MAY_BE_OWED: not locked}) + _doubts(case, () if makes else own.values())
    text = summary_of(own, case, holders)
    text += f" {capital(by.words)}." if by.words else ""
    named, first = {culprit.rank for culprit in culprits}, next(iter(own.values()))
    in_init = any(rank in case.waiting and case.waiting[rank].kind == "init" for rank in holders)
    return Finding(
        "lock-deadlock" if locked else first.cause,
        doubts,
        text,
        tuple(culprits),
        condition_claims(own) + wait_claims(case, case.waiting),
        victims=tuple(rank for rank in all_waiting if rank not in named),
        advice=(frozenset({LOCKED_INIT}) if in_init else LOCK) if locked else first.advice,
    )


def _held_by_one(case: Case, held_by: Mapping[int, AwaitedHolder], holder: AwaitedHolder) -> Ruling:
    own = holder.condition
    if own is None:
        return ""
    named = {holder.rank: replace(own, reason=f"{own.reason}, {_why(holder.kind, held_by)}")}
    clauses = {rank: _lock_wait(case, rank, by) for rank, by in held_by.items()}
    text = summary_of(named, case, case.waiting)
    return Finding(
        own.cause,
        _doubts(case, (own, *clauses.values())),
        f"{text} {capital(holder.words)}." if holder.site is not None else text,
        (culprit(case.ranks[holder.rank], named[holder.rank]),),
        condition_claims(named) + condition_claims(clauses) + wait_claims(case, case.waiting),
        victims=tuple(held_by),
    )


def _doubts(case: Case, conditions: Iterable[Condition]) -> tuple[Doubt, ...]:
    own = dict.fromkeys(doubt for condition in conditions for doubt in condition.doubts)
    return (*own, *doubts_if({Doubt.UNSEEN_RANKS: bool(case.unseen)}))


def _lock_wait(case: Case, rank: int, by: AwaitedHolder) -> Condition:
    condition = case.ranks[rank].condition
    assert condition is not None
    if by.kind != "file":
        return condition
    return replace(condition, reason=f"waits for a file lock at {fr.place(condition.frame)} that rank {by.rank} holds")
