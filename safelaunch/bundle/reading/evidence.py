"""Describes evidence read from files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.model import Evidence, Outcome, RankEvidence, Verdict


@dataclass(frozen=True)
class ReportedError:
    """A line that reports an error, but isn't part of the evidence."""

    where: str  # file and line
    words: str  # place and line


@dataclass(frozen=True)
class EvidenceSource:
    what: str
    """kind of evidence, as text (``a bundle``)"""

    evidence: Evidence

    problems: tuple[str, ...] = ()
    """unreadable files, with reasons"""

    files: Mapping[str, str] = field(default_factory=dict)
    """real files for names in claims (``ranks/3/flight_recorder.json``), if they differ"""

    bundles: tuple[Path, ...] = ()
    """directories of the bundles that were read"""

    taken: tuple[float, float] = (0.0, 0.0)
    """Unix times of the last progress and of writing the bundle; zeros if unknown"""

    source: Mapping[str, str] | None = None
    """user's files that the earlier verdict read, by path; None if they weren't saved"""

    remarks: tuple[str, ...] = ()
    """facts that no rank is at fault for"""

    is_output: bool = True
    """some line looks like a job's output"""

    errors: tuple[ReportedError, ...] = ()
    """errors besides the evidence, most relevant first"""

    summary: tuple[str, ...] = ()
    """lines to print if nothing shows how the job ended"""

    is_quiet: bool = True
    """no error is reported"""

    stored: Verdict | None = None
    """verdict that isn't derived again, because its evidence isn't a job's"""

    launch: tuple[str, ...] = ()
    """command that runs the job under safelaunch, derived from a log"""

    def read_source(self, path: str) -> str | None:
        """Returns a source file as the earlier verdict saw it, or else its current contents."""
        if self.source is not None:
            return self.source.get(path) or None
        from safelaunch.capture import user_source

        return user_source.text_for_stranger(path)


def evidence_on(outcome: Outcome, ranks: Iterable[RankEvidence], world: int = 0) -> Evidence:
    """Returns the evidence on these ranks. The job has ``world`` ranks, or more if the ranks' numbers show it."""
    by_rank = {rank.rank: rank for rank in ranks}
    world = max([world, *(rank + 1 for rank in by_rank)])
    missing = tuple(rank for rank in range(world) if rank not in by_rank)
    return Evidence(outcome, world, tuple(by_rank[rank] for rank in sorted(by_rank)), missing)
