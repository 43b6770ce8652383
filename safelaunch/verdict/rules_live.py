"""A live job: the wrong results that a monitor found; whether it moves, and how long it has made no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from safelaunch.model import WRONG_RESULTS_FILE, Claim, Culprit, Evidence, Progress, WrongResult, duration, format_ranks
from safelaunch.verdict.causes import ALL_APART, APART_AT_FIRST, APART_LATER, ONE_APART, Advice
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.findings import (
    Finding,
    Ruling,
    by_place,
    capital,
    condition_claims,
    conditions,
    each_of,
    ranks_do,
    ranks_word,
    waits_words,
)
from safelaunch.verdict.rank_state import CaseFacts

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


def slow_not_stuck(facts: CaseFacts) -> Ruling:
    """The job is still making progress: a dump of it names no rank.

    Steps or collectives advanced between two looks, or the last ones are no more than a few usual steps ago. Only for
    ``dump``: in a hang the watchdog has confirmed that nothing moves, and a crash is not a matter of speed.
    """
    steps = [f"rank {r.rank} at step {r.step}" for r in facts.ranks.values() if r.step is not None]
    where = f" ({', '.join(steps[:4])})" if steps else ""
    claims = tuple(
        Claim(f"rank {r.rank} is at step {r.step}", f"{r.folder}/progress.json")
        for r in list(facts.ranks.values())[:4]
        if r.step is not None
    )
    silent = _silent_s(facts.evidence)
    if not silent:
        text = f"The job is making progress{where}; nothing is stuck."
        return Finding("slow-not-stuck", (), text, claims=claims)
    own = {rank: one for rank, one in conditions(facts).items() if rank in silent}
    does = [f"{each_of(ranks)} {reason}" for reason, ranks in by_place({r: c.reason for r, c in own.items()})[:2]]
    does += [waits] if (waits := waits_words(facts, silent)) else []
    least = duration(min(silent.values()))
    text = f"The job is making progress{where}, but {ranks_do(silent, 'has', 'have')} made no step for {least}"
    text += f": {'; '.join(does)}." if does else "."
    return Finding("slow-not-stuck", (Doubt.ONE_LOOK,), text, claims=(*condition_claims(own), *claims))


# --- how long a job has made no step ----------------------------------------------------------------------------------

FEW = 5  # usual steps
LEAST_S = 5.0  # a step of milliseconds may wait for a disk once


@dataclass(frozen=True)
class Rhythm:
    """The seconds of a usual step, and of the longest one that was seen; 0 where that is not known."""

    usual_s: float
    longest_s: float

    @property
    def words(self) -> str:
        longest = f", longest {duration(self.longest_s)}" if self.longest_s > FEW * self.usual_s else ""
        return f" (usual {duration(self.usual_s)}{longest})" if self.usual_s else ""


def is_stalled(evidence: Evidence) -> bool:
    """Whether a job that somebody looks at has gone without a sign of progress for longer than a few usual steps.

    A pause or a phase that the script has announced is its own affair; nor does it count in a look that was
    requested for something found: the job may have made its last step by then.
    """
    pages = [rank.progress for rank in evidence.ranks if rank.progress is not None]
    if evidence.outcome != "dump" or evidence.for_finding or any(page.paused or page.phase for page in pages):
        return False
    return evidence.stall_s > max(LEAST_S, FEW * rhythm_of(evidence).usual_s)


def printed_fewer_steps(facts: CaseFacts) -> Ruling:
    """All that is known of a job is its output, and most of its ranks printed a later step than the others."""
    steps = {rank: one.step for rank, one in facts.ranks.items() if one.evidence.progress is not None}
    if facts.evidence.printed is None or not steps:
        return ""
    last = max(step or 0 for step in steps.values())
    behind = {rank: step for rank, step in steps.items() if step != last}
    if not behind or 2 * len(behind) >= len(steps):
        return ""
    ahead = [rank for rank in steps if rank not in behind]
    parts = [
        f"{ranks_word(ranks)} printed {f'{step} as the last step' if step is not None else 'no step'}"
        for step, ranks in by_place(behind)
    ]
    culprits = tuple(
        Culprit(rank, facts.ranks[rank].evidence.host, 0, "main", None, step, f"Rank {rank} printed fewer steps.")
        for rank, step in behind.items()
    )
    claims = (
        Claim(f"rank {rank}: the last step that it printed is {step}", f"ranks/{rank}/log_tail.txt")
        for rank, step in list(steps.items())[:8]
        if step is not None
    )
    text = f"{capital(' and '.join(parts))}, while {ranks_word(ahead)} printed {last} and may wait for it."
    return Finding(
        "missing-from-collective", (Doubt.PRINTED_STEPS,), text, culprits, tuple(claims), victims=tuple(ahead)
    )


def has_no_steps(evidence: Evidence) -> bool:
    """Whether this is a look at a job that safelaunch did not start: no rank has a beacon, which counts steps."""
    seen = [rank for rank in evidence.ranks if rank.main is not None]
    return evidence.outcome == "dump" and bool(seen) and not any(rank.beacon for rank in evidence.ranks)


def _silent_s(evidence: Evidence) -> dict[int, float]:
    """The ranks without a step for longer than a few usual ones while another rank of their node has stepped: for how
    long. A pause or a phase that the script has announced is its own affair.
    """
    pages = {rank.rank: (rank.host, page) for rank in evidence.ranks if (page := rank.progress) is not None}
    newest: dict[str, int] = {}
    for host, page in pages.values():
        newest[host] = max(newest.get(host, 0), page.last_step_ns)
    late = {
        rank: (newest[host] - page.last_step_ns) / 1e9
        for rank, (host, page) in pages.items()
        if page.step is not None and page.state != "exited" and not (page.paused or page.phase)
    }
    return {rank: by for rank, by in late.items() if by > max(LEAST_S, FEW * _rhythm(pages[rank][1]).usual_s)}


def rhythm_of(evidence: Evidence) -> Rhythm:
    """Of the slowest rank."""
    found = [_rhythm(rank.progress) for rank in evidence.ranks if rank.progress is not None]
    return max(found, key=lambda one: one.usual_s, default=Rhythm(0.0, 0.0))


def _rhythm(page: Progress) -> Rhythm:
    marks = [(at_ns / 1e9, step) for at_ns, step in page.history]
    pairs = pairwise(marks)
    taken = sorted((after[0] - before[0]) / (after[1] - before[1]) for before, after in pairs if after[1] > before[1])
    if taken:
        return Rhythm(taken[len(taken) // 2], taken[-1])
    steps = max(page.optimizer_steps, default=0)
    return Rhythm(max(0.0, page.mean_step_s(steps)) if steps > 1 else 0.0, 0.0)


def with_the_time_without_a_step(facts: CaseFacts, finding: Finding) -> Finding:
    """Of a job that stands while somebody computes: since when, and that one look cannot tell slow from endless."""
    evidence = facts.evidence
    if not (evidence.moving and is_stalled(evidence)):
        return finding
    stood = duration(evidence.stall_s)
    if has_no_steps(evidence):
        since = f"Not all ranks have moved within {stood}"
    elif any(rank.step is not None for rank in facts.ranks.values()):
        since = f"No step for {stood}"
    else:
        since = f"No step yet, {stood} on"
    text = f"{since}{rhythm_of(evidence).words}: {finding.summary[:1].lower()}{finding.summary[1:]}"
    if "slow or endless" not in text:
        text = f"{text.removesuffix('.')}: slow or endless, a dump cannot tell."
    return replace(finding, summary=capital(text), doubts=(*finding.doubts, Doubt.ONE_LOOK))
