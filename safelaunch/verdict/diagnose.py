"""From evidence to a verdict. Pure.

Each rule either reaches a finding or says why not; the first finding wins, and what was ruled out on the way is kept.
:data:`~safelaunch.verdict.rules.RULES` lists them in order. ``EXPLANATIONS`` then annotate a finding: why the rank is
there, what it printed, where its memory went, whose it is, what was seen before. To the verdict itself, hardware is
added that may be broken, and how often it was blamed: ``with_gpus``, ``with_repeats``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from safelaunch.model import Evidence, Verdict, format_ranks
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.advice import advise
from safelaunch.verdict.alignment import out_of_sight
from safelaunch.verdict.causes import BY_ITSELF
from safelaunch.verdict.doubts import Doubt, confidence_of, those
from safelaunch.verdict.exits import GONE_CAUSES, was_a_hang, with_gathered_errors
from safelaunch.verdict.explanations import EXPLANATIONS
from safelaunch.verdict.findings import Finding, annotated
from safelaunch.verdict.groups import with_group_names
from safelaunch.verdict.hardware import with_gpus, with_repeats
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.nccl_witness import nccl_claims, nccl_rules_out
from safelaunch.verdict.phrases import (
    ranks_word,
)
from safelaunch.verdict.proof import Examined, examine
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rhythm import has_no_steps, with_the_time_without_a_step
from safelaunch.verdict.rules import KINDS
from safelaunch.verdict.rules_wrong_results import WRONG_RESULTS
from safelaunch.verdict.steps_made import with_loops_left
from safelaunch.verdict.unnamed import without_invented_ranks, without_labels
from safelaunch.verdict.versions import version_claims
from safelaunch.verdict.waits import Case

SCHEMA = 1
_MOST_CLAIMS = 24


def diagnose(evidence: Evidence, read_source: ReadSource | None = None) -> Verdict:
    """The verdict over one job's evidence; never raises on evidence that is merely incomplete.

    ``read_source`` gives the text of a source file, or None. It is asked only where ranks wait in different places
    of one function, to tell a loop that one of them has left from a collective that only some of them call.
    """
    evidence = with_gathered_errors(evidence)
    if evidence.outcome == "crash" and was_a_hang(evidence.ranks):
        evidence = msgspec.structs.replace(evidence, outcome="hang")
    case = Case.of(evidence, read_source)
    finding, ruled_out = _conclude(case)
    for explanations in EXPLANATIONS:
        finding = with_loops_left(case, finding)
        finding = annotated(finding, [note for explanation in explanations for note in explanation(case, finding)])
    finding = with_the_time_without_a_step(case, with_group_names(case, finding))
    if evidence.labels and (verdict_on_ranks := _of_known_ranks(evidence, finding, read_source)) is not None:
        return verdict_on_ranks
    verdict = with_gpus(_verdict(case, finding, ruled_out), evidence)
    verdict = without_invented_ranks(case, finding, verdict) if evidence.labels else verdict
    return with_repeats(verdict, evidence).on_record(evidence)


def _of_known_ranks(evidence: Evidence, finding: Finding, read_source: ReadSource | None) -> Verdict | None:
    """The verdict on the ranks that are known as such, if it blames the same: then the others have no part in it."""
    at_fault = {culprit.rank for culprit in finding.culprits}
    if not at_fault or not at_fault.isdisjoint(evidence.labels):
        return None
    verdict = diagnose(without_labels(evidence), read_source)
    same = (verdict.cause, {culprit.rank for culprit in verdict.culprits}) == (finding.cause, at_fault)
    return verdict if same else None


def _conclude(case: Case) -> tuple[Finding, list[str]]:
    """The first finding, and what was ruled out before it."""
    ruled_out: list[str] = []
    for kind in KINDS:
        ruling = kind.ask(case)
        if isinstance(ruling, Finding):
            return ruling, ruled_out
        if ruling:
            ruled_out.append(ruling)
    raise AssertionError("the last kind concludes in any case")


def _verdict(case: Case, finding: Finding, ruled_out: list[str]) -> Verdict:
    evidence = case.evidence
    named = {c.rank for c in finding.culprits}
    victims = [r for r in case.ranks if r not in named and (r in finding.victims or _is_victim(case, r))]
    if finding.cause in ("slow-not-stuck", *WRONG_RESULTS):
        victims = []
    # None of a job that was seen to work, or of which something was not seen.
    examined = examine(case) if evidence.answer in (None, "dead", "unknown") else Examined()
    proof = examined.proof if evidence.answer != "unknown" else ()
    may_go_on = evidence.outcome in ("hang", "suspect") and evidence.answer not in (None, "dead")
    may_go_on |= has_no_steps(evidence) and finding.cause != "slow-not-stuck" and not proof
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
    doubts = (*finding.doubts, *those(doubtful))
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
        missing=(*_missing(case, named), *_lost(case, finding)),
        suggestions=suggestions,
        nodes=finding.nodes if finding.nodes or len(evidence.nodes) > 1 else msgspec.UNSET,
        doubts=tuple(dict.fromkeys(doubt.why for doubt in doubts)),
        next=step,
        proof=proof,
    )


def _is_corroborated(facts: CaseFacts, named: Collection[int]) -> bool:
    """Lines of two kinds tell it of each: what it raised, how its launcher saw it end, what a peer of its reports."""
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
    """In a crash the launcher ends everybody who did not fail, whatever they were about when they were looked at."""
    condition = facts.ranks[rank].condition
    if facts.evidence.outcome == "crash":
        return condition is None or condition.cause not in GONE_CAUSES
    return condition is None


def _missing(facts: CaseFacts, named: Collection[int]) -> Iterator[str]:
    """What was not seen, rank by rank: the verdict is only as good as that."""
    if facts.unseen:
        yield f"ranks not seen: {format_ranks(set(facts.unseen))}"
    if facts.evidence.printed is not None:
        if not {*facts.evidence.printed}.issuperset(named):
            yield "whose lines these are: no prefix and no launcher gives a rank"
        return
    if has_no_steps(facts.evidence):
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
    """Fields → ranks whose records hold in them what no torch writes."""
    records = {rank: state.evidence.flight_record for rank, state in facts.ranks.items()}
    return sides_of({rank: record.damaged for rank, record in records.items() if record is not None and record.damaged})


def _lost(facts: CaseFacts, finding: Finding, limit: int = 3) -> Iterator[str]:
    """Where ranks did not meet, or met and stand still: what may have parted them before the ring buffers begin."""
    causes = ("collective-mismatch", "group-order", "p2p-cycle", "no-rank-stands-out")
    if finding.cause not in causes or facts.evidence.printed is not None:
        return
    groups = {wait.group for wait in facts.waiting.values() if wait.group is not None}
    lost = out_of_sight(facts.alignment, sorted(groups))
    for group, first in list(lost.items())[:limit]:
        yield f"calls before #{first} of group {group!r}: the Flight Recorder no longer holds them"
    late = [rank for rank in facts.alignment.records if not facts.alignment.is_whole(rank)]
    if late and not lost:
        yield f"the first calls of {ranks_word(late)}: the Flight Recorder no longer holds them"
