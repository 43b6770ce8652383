"""Rules for a live job: it makes progress, or a monitor found that it computes wrong results."""

from __future__ import annotations

from collections.abc import Sequence

from safelaunch.model import WRONG_RESULTS_FILE, Claim, Culprit, WrongResult, duration, format_ranks
from safelaunch.verdict.blame import condition_claims, conditions
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.phrases import by_place, capital, each_of, ranks_do, waits_words
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rhythm import silent_s
from safelaunch.verdict.suggestions import ALL_APART, APART_AT_FIRST, APART_LATER, ONE_APART, Advice


def slow_not_stuck(facts: CaseFacts) -> Ruling:
    """The job is making progress, so a dump names no rank.

    Steps or collectives advanced between two looks, or the last ones are no more than a few usual steps ago. Applies
    only to ``dump``: in a hang, the watchdog has confirmed that nothing moves.
    """
    steps = [f"rank {r.rank} at step {r.step}" for r in facts.ranks.values() if r.step is not None]
    where = f" ({', '.join(steps[:4])})" if steps else ""
    claims = tuple(
        Claim(f"rank {r.rank} is at step {r.step}", f"{r.folder}/progress.json")
        for r in list(facts.ranks.values())[:4]
        if r.step is not None
    )
    silent = silent_s(facts.evidence)
    if not silent:
        text = f"The job is making progress{where}; nothing is stuck."
        return Finding("slow-not-stuck", (), text, claims=claims)
    own = {rank: condition for rank, condition in conditions(facts).items() if rank in silent}
    does = [f"{each_of(ranks)} {reason}" for reason, ranks in by_place({r: c.reason for r, c in own.items()})[:2]]
    does += [waits] if (waits := waits_words(facts, silent)) else []
    least = duration(min(silent.values()))
    text = f"The job is making progress{where}, but {ranks_do(silent, 'has', 'have')} made no step for {least}"
    text += f": {'; '.join(does)}." if does else "."
    return Finding("slow-not-stuck", (Doubt.ONE_LOOK,), text, claims=(*condition_claims(own), *claims))


# --- wrong results ----------------------------------------------------------------------------------------------------

WRONG_RESULTS = ("replicas-diverged", "non-finite-gradient", "loss-diverged")


def wrong_results(facts: CaseFacts) -> Ruling:
    """A live job computes wrong results: replicas that differ, gradients or a loss that went wrong.

    The earliest by step is the finding, as later ones might follow from it.
    """
    results = sorted(facts.evidence.wrong_results, key=lambda result: result.step)
    if not results:
        return ""
    first = results[0]
    named = _named(facts, first)
    doubtful = {
        Doubt.NO_MAJORITY: first.kind == "replicas-diverged" and not named,
        Doubt.ORIGIN_UNKNOWN: first.kind == "non-finite-gradient" and not named,
        Doubt.UNSEEN_RANKS: bool(facts.unseen),
    }
    return Finding(
        first.cause,
        doubts_if(doubtful),
        f"{capital(first.words)}.",
        tuple(_culprit(facts, rank, first) for rank in named),
        (*_detail(first), *(Claim(result.words, WRONG_RESULTS_FILE) for result in results[1:])),
        advice=_advice(first, named),
    )


_PAIR = 2  # two ranks always differ from each other, so this says nothing


def _advice(result: WrongResult, named: Sequence[int]) -> frozenset[Advice]:
    if result.kind != "replicas-diverged":
        return frozenset()
    advice = {APART_LATER if result.since_step else APART_AT_FIRST}
    if len(result.sides) > _PAIR and all(len(side) == 1 for side in result.sides):
        advice.add(ALL_APART)
    return frozenset(advice | {ONE_APART} if len(named) == 1 and result.since_step else advice)


def _detail(result: WrongResult) -> tuple[Claim, ...]:
    if result.kind == "loss":
        return (Claim(result.words, WRONG_RESULTS_FILE),)
    share = f"{result.count} of {result.total} tensors"
    right = "all replicas were equal" if result.sides else "all were finite"
    words = f"at step {result.since_step}, the check before: {right}"
    before = (Claim(words, WRONG_RESULTS_FILE),) if result.since_step else ()
    if result.sides:
        apart = " | ".join(format_ranks(side) for side in result.sides)
        return (
            Claim(f"at step {result.step}: different bits on ranks {apart}, in {share}", WRONG_RESULTS_FILE),
            *before,
        )
    return (
        Claim(f"at step {result.step}: an infinity or a NaN in the gradients of {share}", WRONG_RESULTS_FILE),
        *before,
    )


def _named(facts: CaseFacts, result: WrongResult) -> tuple[int, ...]:
    return tuple(rank for rank in result.ranks if rank in facts.ranks) if set(result.ranks) < set(facts.world) else ()


def _culprit(facts: CaseFacts, rank: int, result: WrongResult) -> Culprit:
    rank_evidence = facts.ranks[rank].evidence
    return Culprit(rank, rank_evidence.host, rank_evidence.pid, "main", None, result.step, f"{_reason(rank, result)}.")


def _reason(rank: int, result: WrongResult) -> str:
    since = f"at step {result.step}"
    if result.kind == "replicas-diverged":
        if result.since_step and result.since_step + 1 < result.step:
            since = f"between steps {result.since_step} and {result.step}"
        return f"Rank {rank} diverged from the other replicas {since}, first in {result.parameter}"
    if result.kind == "loss":
        return f"The loss of rank {rank} diverged {since}"
    return f"The gradients of rank {rank} are not finite {since}, first in {result.parameter}"
