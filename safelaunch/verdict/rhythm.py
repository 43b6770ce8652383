"""Usual duration of a step, and the time since a job made its last one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from safelaunch.model import Evidence, Progress, duration
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.phrases import (
    capital,
)
from safelaunch.verdict.rank_state import CaseFacts

STALL_STEPS = 5  # steps of usual length
MIN_STALL_S = 5.0  # covers a single disk wait if steps take milliseconds


@dataclass(frozen=True)
class Rhythm:
    """Seconds of a usual step and of the longest seen; 0 if unknown."""

    usual_s: float
    longest_s: float

    @property
    def words(self) -> str:
        longest = f", longest {duration(self.longest_s)}" if self.longest_s > STALL_STEPS * self.usual_s else ""
        return f" (usual {duration(self.usual_s)}{longest})" if self.usual_s else ""


def is_stalled(evidence: Evidence) -> bool:
    """Returns whether a dumped job has shown no progress for longer than a few usual steps.

    Announced pauses and phases don't count. Neither does a dump requested because of a finding: the job might have
    made its last step by then.
    """
    pages = [rank.progress for rank in evidence.ranks if rank.progress is not None]
    if evidence.outcome != "dump" or evidence.for_finding or any(page.paused or page.phase for page in pages):
        return False
    return evidence.stall_s > max(MIN_STALL_S, STALL_STEPS * rhythm_of(evidence).usual_s)


def is_foreign_job(evidence: Evidence) -> bool:
    """Returns whether safelaunch didn't start the dumped job: no rank has a beacon, which counts steps."""
    examined = [rank for rank in evidence.ranks if rank.main is not None]
    return evidence.outcome == "dump" and bool(examined) and not any(rank.beacon for rank in evidence.ranks)


def silent_s(evidence: Evidence) -> dict[int, float]:
    """Returns how long ranks made no step, if that exceeds a few usual steps and another rank of their node stepped.

    Announced pauses and phases don't count.
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
    return {
        rank: by for rank, by in late.items() if by > max(MIN_STALL_S, STALL_STEPS * _rhythm(pages[rank][1]).usual_s)
    }


def rhythm_of(evidence: Evidence) -> Rhythm:
    """Returns the rhythm of the slowest rank."""
    rhythms = [_rhythm(rank.progress) for rank in evidence.ranks if rank.progress is not None]
    return max(rhythms, key=lambda rhythm: rhythm.usual_s, default=Rhythm(0.0, 0.0))


def _rhythm(page: Progress) -> Rhythm:
    marks = [(at_ns / 1e9, step) for at_ns, step in page.history]
    pairs = pairwise(marks)
    taken = sorted((after[0] - before[0]) / (after[1] - before[1]) for before, after in pairs if after[1] > before[1])
    if taken:
        return Rhythm(taken[len(taken) // 2], taken[-1])
    steps = max(page.optimizer_steps, default=0)
    return Rhythm(max(0.0, page.mean_step_s(steps)) if steps > 1 else 0.0, 0.0)


def with_stall_duration(facts: CaseFacts, finding: Finding) -> Finding:
    """Adds the time without a step if the job stalls while a rank computes: one look can't tell slow from endless."""
    evidence = facts.evidence
    if not (evidence.moving and is_stalled(evidence)):
        return finding
    stood = duration(evidence.stall_s)
    if is_foreign_job(evidence):
        since = f"Not all ranks have moved within {stood}"
    elif any(rank.step is not None for rank in facts.ranks.values()):
        since = f"No step for {stood}"
    else:
        since = f"No step yet, {stood} on"
    text = f"{since}{rhythm_of(evidence).words}: {finding.summary[:1].lower()}{finding.summary[1:].removesuffix('.')}"
    text += ": slow or endless, a dump cannot tell."
    return replace(finding, summary=capital(text), doubts=(*finding.doubts, Doubt.ONE_LOOK))
