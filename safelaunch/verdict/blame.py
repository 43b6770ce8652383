"""Culprits, their conditions, and the claims that support a finding about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from safelaunch.model import Claim, Culprit, Frame
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.conflict import Call, Conflict
from safelaunch.verdict.doubts import Doubt, levels_of
from safelaunch.verdict.findings import Finding, LeftLoop
from safelaunch.verdict.phrases import apart, capital, ranks_wait, summary_of, wait_verb
from safelaunch.verdict.rank_state import CaseFacts, RankFacts
from safelaunch.verdict.suggestions import Advice


def most_doubtful(conditions: Iterable[Condition]) -> tuple[Doubt, ...]:
    """Returns the doubts of the least certain condition."""
    return max((condition.doubts for condition in conditions), key=levels_of)


def culprit(facts: RankFacts, condition: Condition) -> Culprit:
    return Culprit(
        rank=facts.rank,
        host=facts.evidence.host,
        pid=condition.pid or facts.evidence.pid,
        process=condition.process,
        frame=condition.frame or (facts.frame if condition.process == "main" else None),
        step=facts.step,
        reason=f"Rank {facts.rank} {condition.reason}.",
    )


def waiting_culprit(facts: RankFacts, reason: str, site: Frame | None = None) -> Culprit:
    """Returns a culprit that waits for peers itself; ``site`` replaces the line of its wait."""
    frame = site or (facts.wait.frame if facts.wait else facts.frame)
    return Culprit(facts.rank, facts.evidence.host, facts.evidence.pid, "main", frame, facts.step, reason)


def waits_in(facts: CaseFacts, rank: int) -> str:
    """``waits in all_reduce at train.py:9``."""
    return f"{wait_verb(facts, rank)} in {facts.waiting[rank].words}" if rank in facts.waiting else "met no peer"


def waiting_culprits(facts: CaseFacts, ranks: Iterable[int]) -> tuple[Culprit, ...]:
    """Returns culprits whose reason is only what they wait in."""
    return tuple(waiting_culprit(facts.ranks[rank], f"Rank {rank} {waits_in(facts, rank)}.") for rank in ranks)


def wait_claims(facts: CaseFacts, ranks: Iterable[int], limit: int = 4) -> tuple[Claim, ...]:
    """Returns claims for each place in which peers wait, with the first rank there as the example."""
    first = {facts.waiting[rank].words: rank for rank in sorted(ranks, reverse=True) if rank in facts.waiting}
    return tuple(
        Claim(f"rank {rank}: {claim.claim}", claim.file)
        for rank in sorted(first.values())[:limit]
        for claim in facts.waiting[rank].claims[:2]
    )


def condition_claims(named: Mapping[int, Condition]) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"rank {rank}: {claim.claim}", claim.file)
        for rank, condition in list(named.items())[:8]
        for claim in condition.claims[:6]
    )


def conditions(facts: CaseFacts, *causes: str) -> dict[int, Condition]:
    """Returns the conditions of ranks that wait for no peer, or only the ones with these causes."""
    own = {rank: state.condition for rank, state in facts.ranks.items()}
    return {rank: c for rank, c in own.items() if c is not None and (not causes or c.cause in causes)}


def blame(
    facts: CaseFacts,
    cause: str,
    doubts: tuple[Doubt, ...],
    named: Mapping[int, Condition],
    waiters: Iterable[int] | None = None,
    *,
    summary: str = "",
    claims: tuple[Claim, ...] = (),
    ruled_out: Sequence[str] = (),
) -> Finding:
    """Returns a finding that blames ``named`` for their conditions, while ``waiters`` (default: all others) wait."""
    waiters = sorted(facts.waiting.keys() - named.keys() if waiters is None else waiters)
    return Finding(
        cause,
        doubts,
        summary or summary_of(named, facts, waiters),
        tuple(culprit(facts.ranks[rank], condition) for rank, condition in named.items()),
        condition_claims(named) + claims + wait_claims(facts, waiters),
        tuple(ruled_out),
    )


def blame_calls(facts: CaseFacts, conflict: Conflict, summary: str = "") -> Finding:
    """Returns a finding that blames the odd ranks of a conflict for their calls.

    Args:
        summary: Replaces the words of the calls and the note.
    """
    calls = conflict.calls
    in_order = (*conflict.odd, *sorted(calls.keys() - {*conflict.odd}))
    note = f"; {conflict.note}" if conflict.note else ""
    tail = " With no majority, either side might be at fault." if conflict.tie else ""
    of_loop = conflict.of.doubts if isinstance(conflict.of, LeftLoop) else ()
    blamed = () if summary or conflict.tie else conflict.odd
    alone = [rank for rank in blamed if rank in facts.waiting and facts.waiting[rank].kind == "p2p"]
    return Finding(
        conflict.cause,
        (*conflict.doubts, *of_loop),
        summary or f"{capital(apart(facts, {rank: calls[rank].words for rank in in_order}))}{note}.{tail}",
        tuple(_odd_culprit(facts, rank, calls[rank]) for rank in conflict.odd),
        conflict.claims + wait_claims(facts, calls),
        (f"a peer that skipped the other end of what {ranks_wait(facts, alone)} in: runner-up",) if alone else (),
        calls=conflict.user_stacks if any(call.words for call in calls.values()) else {},
        advice=conflict.advice,
        of=conflict.of,
        vote=conflict.vote,
    )


def _odd_culprit(facts: CaseFacts, rank: int, call: Call) -> Culprit:
    waits = f"{wait_verb(facts, rank)} in {call.words}, its peers {'did' if rank in facts.gone else 'do'} not"
    culprit = waiting_culprit(facts.ranks[rank], f"Rank {rank} {call.does or waits}.", call.site)
    return structs.replace(culprit, left=call.left)


def blame_either_end(facts: CaseFacts, ranks: Iterable[int], summary: str, *advice: Advice) -> Finding:
    """Returns a finding that blames both ends of a send and its receive."""
    calls = {rank: Call(does=waits_in(facts, rank)) for rank in ranks}
    return blame_calls(facts, Conflict(calls, (*calls,), "open", advice=frozenset(advice)), summary)
