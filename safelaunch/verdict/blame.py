"""Culprits, their conditions, and the claims that support a finding about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from safelaunch.model import Claim, Culprit, Frame
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt, levels_of
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.phrases import capital, ranks_wait, summary_of
from safelaunch.verdict.rank_state import CaseFacts, RankFacts


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


def waiting_culprits(facts: CaseFacts, ranks: Iterable[int]) -> tuple[Culprit, ...]:
    """Returns culprits whose reason is only what they wait in."""
    waits = {
        rank: f"{ranks_wait(facts, [rank])} in {facts.waiting[rank].words}"
        if rank in facts.waiting
        else f"rank {rank} met no peer"
        for rank in ranks
    }
    return tuple(waiting_culprit(facts.ranks[rank], f"{capital(does)}.") for rank, does in waits.items())


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
