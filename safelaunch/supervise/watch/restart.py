"""Decides whether a restart is worthwhile: a failure that recurred at the same step and place will recur again."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.model import Evidence, Verdict


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Facts about an attempt's end that can be compared. They leave out ranks, because a restart can renumber them."""

    outcome: str
    cause: str
    step: int | None
    """lowest step of the culprits"""
    places: frozenset[tuple[str, int]]
    """file and line of each culprit"""


def failure_of(verdict: Verdict, steps: tuple[int, ...]) -> AttemptFailure:
    """Returns the failure in a verdict. ``steps`` is used if no culprit has a step."""
    named = [culprit.step for culprit in verdict.culprits if culprit.step is not None]
    frames = [culprit.frame for culprit in verdict.culprits if culprit.frame is not None]
    return AttemptFailure(
        outcome=verdict.outcome,
        cause=verdict.cause,
        step=min(named or steps, default=None),
        places=frozenset((frame.file, frame.line) for frame in frames),
    )


@dataclass(frozen=True, slots=True)
class FailureKey:
    """Facts by which a failure is recognized in other attempts, at any step."""

    outcome: str
    cause: str
    culprits: frozenset[tuple[str, str, str, str, int]]
    """host, GPU, process, file and line of each culprit"""
    raised: frozenset[str]
    """types of the culprits' exceptions"""


def failure_key(verdict: Verdict, evidence: Evidence) -> FailureKey | None:
    """Returns the failure's key; None if its source line is unknown.

    Two failures without a line might have different causes.
    """
    if not verdict.culprits or any(culprit.frame is None for culprit in verdict.culprits):
        return None
    culprits = frozenset(
        (
            culprit.host,
            str(culprit.gpu or ""),
            culprit.process.partition(" (")[0],
            culprit.frame.file,
            culprit.frame.line,
        )
        for culprit in verdict.culprits
        if culprit.frame is not None
    )
    named = {culprit.rank for culprit in verdict.culprits}
    raised = frozenset(
        rank.exception.type for rank in evidence.ranks if rank.exception is not None and rank.rank in named
    )
    return FailureKey(verdict.outcome, verdict.cause, culprits, raised)


def why_give_up(earlier: tuple[AttemptFailure, ...], new: AttemptFailure) -> str:
    """Returns why another attempt isn't worthwhile, or "" if it is."""
    if not earlier or earlier[-1] != new:
        return ""
    step = f"step {new.step}" if new.step is not None else "before the first step"
    lines = ", ".join(f"{file}:{line}" for file, line in sorted(new.places)) or "no particular line"
    return f"the same {new.outcome} came back ({new.cause}, {step}, {lines})"
