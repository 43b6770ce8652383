"""From evidence to a verdict, without side effects.

The rules of :data:`~safelaunch.verdict.rules.RULES` run in order until one returns a finding; ``EXPLANATIONS`` then
annotate it. ``with_gpus`` and ``with_repeats`` add hardware that might be broken, and how often it was blamed before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from safelaunch.model import Evidence, Verdict, format_ranks
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.advice import advise
from safelaunch.verdict.alignment import first_recorded_numbers
from safelaunch.verdict.causes import BY_ITSELF
from safelaunch.verdict.doubts import Doubt, confidence_of, doubts_if
from safelaunch.verdict.exceptions import with_gathered_errors
from safelaunch.verdict.exits import GONE_CAUSES, was_a_hang
from safelaunch.verdict.explanations import EXPLANATIONS
from safelaunch.verdict.findings import Finding, annotated
from safelaunch.verdict.hardware import with_gpus, with_repeats
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.nccl_witness import nccl_claims, nccl_rules_out
from safelaunch.verdict.phrases import (
    ranks_word,
)
from safelaunch.verdict.proof import ProofResult, examine
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rhythm import is_foreign_job, with_stall_duration
from safelaunch.verdict.rules import RULES
from safelaunch.verdict.rules_live import WRONG_RESULTS
from safelaunch.verdict.steps_made import with_loops_left
from safelaunch.verdict.unnamed import without_invented_ranks, without_labels
from safelaunch.verdict.versions import version_claims
from safelaunch.verdict.waits import Case

SCHEMA = 1
_MOST_CLAIMS = 24


def diagnose(evidence: Evidence, read_source: ReadSource | None = None) -> Verdict:
    """Returns the verdict on one job's evidence; never raises on incomplete evidence.

    Args:
        read_source: Returns the text of a source file, or None. Called only if ranks wait at different places of one
            function, to distinguish a loop that a rank has left from a collective that only some ranks call.
    """
    evidence = with_gathered_errors(evidence)
    if evidence.outcome == "crash" and was_a_hang(evidence.ranks):
        evidence = msgspec.structs.replace(evidence, outcome="hang")
    case = Case.of(evidence, read_source)
    finding, ruled_out = _conclude(case)
    for explanations in EXPLANATIONS:
        finding = with_loops_left(case, finding)
        finding = annotated(finding, [note for explanation in explanations for note in explanation.of(case, finding)])
    finding = with_stall_duration(case, finding)
    if evidence.labels and (verdict_on_ranks := _verdict_on_known_ranks(evidence, finding, read_source)) is not None:
        return verdict_on_ranks
    verdict = with_gpus(_verdict(case, finding, ruled_out), evidence)
    verdict = without_invented_ranks(case, finding, verdict) if evidence.labels else verdict
    return with_repeats(verdict, evidence).with_job(evidence)


def _verdict_on_known_ranks(evidence: Evidence, finding: Finding, read_source: ReadSource | None) -> Verdict | None:
    at_fault = {culprit.rank for culprit in finding.culprits}
    if not at_fault or not at_fault.isdisjoint(evidence.labels):
        return None
    verdict = diagnose(without_labels(evidence), read_source)
    same = (verdict.cause, {culprit.rank for culprit in verdict.culprits}) == (finding.cause, at_fault)
    return verdict if same else None


def _conclude(case: Case) -> tuple[Finding, list[str]]:
    ruled_out: list[str] = []
    for rule in RULES:
        ruling = rule.ask(case)
        if isinstance(ruling, Finding):
            return ruling, ruled_out
        if ruling:
            ruled_out.append(ruling)
    raise AssertionError("the last rule always concludes")


def _verdict(case: Case, finding: Finding, ruled_out: list[str]) -> Verdict:
    evidence = case.evidence
    named = {c.rank for c in finding.culprits}
    victims = [r for r in case.ranks if r not in named and (r in finding.victims or _is_victim(case, r))]
    if finding.cause in ("slow-not-stuck", *WRONG_RESULTS):
        victims = []
    # No proof for a job that was seen to work, or that wasn't seen completely.
    examined = examine(case) if evidence.answer in (None, "dead", "unknown") else ProofResult()
    proof = examined.proof if evidence.answer != "unknown" else ()
    may_go_on = evidence.outcome in ("hang", "suspect") and evidence.answer not in (None, "dead")
    may_go_on |= is_foreign_job(evidence) and finding.cause != "slow-not-stuck" and not proof
    doubtful = {
        Doubt.DAMAGED_RECORD: bool(_damaged(case)),
        Doubt.PRINTED_ALONE: evidence.printed is not None and not _is_corroborated(case, named),
        Doubt.MAY_BE_CAUGHT: evidence.may_be_caught,
        Doubt.NOT_PROVED: may_go_on,
        Doubt.RANK_UNKNOWN: not named.isdisjoint(evidence.labels),
        Doubt.MORE_NAMED: finding.cause not in BY_ITSELF
        and len(case.world) > 1
        and len(named) > len(case.world - named),
    }
    doubts = (*finding.doubts, *doubts_if(doubtful))
    suggestions, step = advise(case, finding)
    free = (examined.free,) if may_go_on and examined.free is not None else ()
    claims = (*finding.claims, *free, *nccl_claims(evidence), *version_claims(evidence))
    return Verdict(
        schema=SCHEMA,
        outcome=evidence.outcome,
        cause=finding.cause,
        confidence=confidence_of(doubts),
        summary=finding.summary,
        culprits=tuple(sorted(finding.culprits, key=lambda c: c.rank)),
        victims=format_ranks(victims),
        evidence=tuple(dict.fromkeys(claims))[:_MOST_CLAIMS],
        ruled_out=(*ruled_out, *finding.ruled_out, *nccl_rules_out(evidence)),
        missing=(*_missing_evidence(case, named), *_lost_calls(case, finding)),
        suggestions=suggestions,
        nodes=finding.nodes if finding.nodes or len(evidence.nodes) > 1 else msgspec.UNSET,
        doubts=tuple(dict.fromkeys(doubt.why for doubt in doubts)),
        next=step,
        proof=proof,
    )


def _is_corroborated(facts: CaseFacts, named: Collection[int]) -> bool:
    """Returns whether two kinds of lines agree on each named rank: its exception, its exit, or a peer's report."""
    waits = not facts.waiting.keys() <= set(named)
    kinds = [
        (rank_evidence.exception is not None)
        + (rank_evidence.exit is not None and rank_evidence.exit.before_close)
        + waits
        for rank in named
        if (rank_evidence := facts.ranks[rank].evidence).rank in (facts.evidence.printed or ())
    ]
    return len(kinds) == len(named) and min(kinds, default=0) > 1


def _is_victim(facts: CaseFacts, rank: int) -> bool:
    condition = facts.ranks[rank].condition
    if facts.evidence.outcome == "crash":
        return condition is None or condition.cause not in GONE_CAUSES
    return condition is None


def _missing_evidence(facts: CaseFacts, named: Collection[int]) -> Iterator[str]:
    if facts.unseen:
        yield f"ranks not seen: {format_ranks(set(facts.unseen))}"
    if facts.evidence.printed is not None:
        if not {*facts.evidence.printed}.issuperset(named):
            yield "whose lines these are: no prefix and no launcher gives a rank"
        return
    if is_foreign_job(facts.evidence):
        yield "steps: safelaunch did not start this job"
    alive = [f.evidence for f in facts.ranks.values() if f.evidence.exit is None]
    without_stack = [r.rank for r in alive if r.main is None or not r.main.stacks]
    if without_stack:
        yield f"no Python stack: {ranks_word(without_stack)}"
    without_record = [r.rank for r in alive if r.flight_record is None]
    if without_record:
        yield f"no Flight Recorder: {ranks_word(without_record)}"
    for fields, ranks in _damaged(facts).items():
        yield f"damaged in the Flight Recorder of {ranks_word(ranks)}: {', '.join(fields)}"


def _damaged(facts: CaseFacts) -> dict[tuple[str, ...], list[int]]:
    records = {rank: state.evidence.flight_record for rank, state in facts.ranks.items()}
    return sides_of({rank: record.damaged for rank, record in records.items() if record is not None and record.damaged})


def _lost_calls(facts: CaseFacts, finding: Finding, limit: int = 3) -> Iterator[str]:
    causes = ("collective-mismatch", "group-order", "p2p-cycle", "no-rank-stands-out")
    if finding.cause not in causes or facts.evidence.printed is not None:
        return
    groups = {wait.group for wait in facts.waiting.values() if wait.group is not None}
    lost = first_recorded_numbers(facts.alignment, sorted(groups))
    for group, first in list(lost.items())[:limit]:
        yield f"calls before #{first} of group {group!r}: the Flight Recorder no longer holds them"
    late = [rank for rank in facts.alignment.records if not facts.alignment.is_whole(rank)]
    if late and not lost:
        yield f"the first calls of {ranks_word(late)}: the Flight Recorder no longer holds them"
