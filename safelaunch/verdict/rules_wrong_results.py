"""Wrong results that a monitor of the live job found."""

from __future__ import annotations

from collections.abc import Sequence

from safelaunch.model import WRONG_RESULTS_FILE, Claim, Culprit, WrongResult, format_ranks
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.phrases import (
    capital,
)
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import ALL_APART, APART_AT_FIRST, APART_LATER, ONE_APART, Advice

WRONG_RESULTS = ("replicas-diverged", "non-finite-gradient", "loss-diverged")


def wrong_results(facts: CaseFacts) -> Ruling:
    """A live job computes wrong results: replicas that differ, gradients or a loss that went wrong.

    The first one by step is the finding: what was wrong later may follow from it.
    """
    found = sorted(facts.evidence.wrong_results, key=lambda one: one.step)
    if not found:
        return ""
    first = found[0]
    named = _named(facts, first)
    doubtful = {
        Doubt.NO_MAJORITY: first.kind == "replicas-diverged" and not named,
        Doubt.ORIGIN_UNKNOWN: first.kind == "non-finite-gradient" and not named,
        Doubt.UNSEEN_RANKS: bool(facts.unseen),
    }
    return Finding(
        first.cause,
        those(doubtful),
        f"{capital(first.words)}.",
        tuple(_culprit(facts, rank, first) for rank in named),
        (*_detail(first), *(Claim(one.words, WRONG_RESULTS_FILE) for one in found[1:])),
        advice=_advice(first, named),
    )


_PAIR = 2  # of two ranks, each differs from the other whatever happened


def _advice(one: WrongResult, named: Sequence[int]) -> frozenset[Advice]:
    if one.kind != "replicas-diverged":
        return frozenset()
    advice = {APART_LATER if one.since_step else APART_AT_FIRST}
    if len(one.sides) > _PAIR and all(len(side) == 1 for side in one.sides):
        advice.add(ALL_APART)
    return frozenset(advice | {ONE_APART} if len(named) == 1 and one.since_step else advice)


def _detail(one: WrongResult) -> tuple[Claim, ...]:
    """What was computed."""
    if one.kind == "loss":
        return (Claim(one.words, WRONG_RESULTS_FILE),)
    share = f"{one.count} of {one.total} tensors"
    right = "all replicas were equal" if one.sides else "all were finite"
    words = f"at step {one.since_step}, the check before: {right}"
    before = (Claim(words, WRONG_RESULTS_FILE),) if one.since_step else ()
    if one.sides:
        apart = " | ".join(format_ranks(side) for side in one.sides)
        return (Claim(f"at step {one.step}: different bits on ranks {apart}, in {share}", WRONG_RESULTS_FILE), *before)
    return (Claim(f"at step {one.step}: an infinity or a NaN in the gradients of {share}", WRONG_RESULTS_FILE), *before)


def _named(facts: CaseFacts, one: WrongResult) -> tuple[int, ...]:
    """The ranks that are off, of those that were seen.

    Nobody where that is said of all of them, as of gradients that were averaged already.
    """
    return tuple(rank for rank in one.ranks if rank in facts.ranks) if set(one.ranks) < set(facts.world) else ()


def _culprit(facts: CaseFacts, rank: int, one: WrongResult) -> Culprit:
    """Without a frame: where the rank is now is not where it went wrong."""
    seen = facts.ranks[rank].evidence
    return Culprit(rank, seen.host, seen.pid, "main", None, one.step, f"{_reason(rank, one)}.")


def _reason(rank: int, one: WrongResult) -> str:
    since = f"at step {one.step}"
    if one.kind == "replicas-diverged":
        if one.since_step and one.since_step + 1 < one.step:
            since = f"between steps {one.since_step} and {one.step}"
        return f"Rank {rank} diverged from the other replicas {since}, first in {one.parameter}"
    if one.kind == "loss":
        return f"The loss of rank {rank} diverged {since}"
    return f"The gradients of rank {rank} are not finite {since}, first that of {one.parameter}"
