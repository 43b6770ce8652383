"""Is it worth starting the ranks again? Pure: a failure that came back at the same step and place comes again."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.model import Evidence, Verdict


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """One attempt's end, as far as it can be compared: ranks may be renumbered, so they do not count.

    ``step``: the culprit's, the lowest where there are several; None where no step was marked.
    ``places``: file and line of each culprit's frame.
    """

    outcome: str
    cause: str
    step: int | None
    places: frozenset[tuple[str, int]]


def failure_of(verdict: Verdict, steps: tuple[int, ...]) -> AttemptFailure:
    """The failure that ``verdict`` describes; ``steps`` are the ranks', for a verdict that names nobody."""
    named = [culprit.step for culprit in verdict.culprits if culprit.step is not None]
    frames = [culprit.frame for culprit in verdict.culprits if culprit.frame is not None]
    return AttemptFailure(
        outcome=verdict.outcome,
        cause=verdict.cause,
        step=min(named or steps, default=None),
        places=frozenset((frame.file, frame.line) for frame in frames),
    )


@dataclass(frozen=True, slots=True)
class Kin:
    """What a failure has in common with that of an earlier attempt, which started from another step and message."""

    outcome: str
    cause: str
    culprits: frozenset[tuple[str, str, str, str, int]]
    """host, GPU, process, file and line of each"""
    raised: frozenset[str]
    """the types of all exceptions"""


def kin_of(verdict: Verdict, evidence: Evidence) -> Kin | None:
    """Returns None for a failure without a line: two of those might have nothing in common."""
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
    return Kin(verdict.outcome, verdict.cause, culprits, raised)


def why_give_up(earlier: tuple[AttemptFailure, ...], new: AttemptFailure) -> str:
    """Why another attempt is not worth it, or an empty string. The one before is what counts."""
    if not earlier or earlier[-1] != new:
        return ""
    step = f"step {new.step}" if new.step is not None else "before the first step"
    lines = ", ".join(f"{file}:{line}" for file, line in sorted(new.places)) or "no particular line"
    return f"the same {new.outcome} came back ({new.cause}, {step}, {lines})"
