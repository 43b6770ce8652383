"""Cuts the user's source down to the parts that a verdict reads."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.capture.user_source import text
from safelaunch.model import Evidence, Frame, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.stacks.guards import assignments_of_the_rank
from safelaunch.stacks.source import begin_of, end_of, tree_of
from safelaunch.system.redaction.redactor import Redactor


class Excerpts:
    """The source code that a verdict can read. The bundle keeps it, so that a second reading gives the same verdict.

    An excerpt keeps the statements that contain a line from the evidence, and those that assign the rank. All other
    lines are empty, and secrets are removed. ``read`` maps each requested path to its excerpt.
    """

    def __init__(self, evidence: Evidence, redactor: Redactor) -> None:
        self._evidence = evidence
        self._redactor = redactor
        self._lines: dict[str, set[int]] | None = None
        self.read: dict[str, str] = {}

    def text(self, path: str) -> str | None:
        if path not in self.read:
            if self._lines is None:  # most verdicts read nothing
                self._lines = _lines_of(self._evidence)
            kept = excerpt(text(path) or "", self._lines.get(path, set()))
            whole = self._redactor.job_text(kept)
            if whole.count("\n") != kept.count("\n"):  # a secret of several lines would move the lines after it
                whole = "\n".join(self._redactor.job_text(line) for line in kept.split("\n"))
            self.read[path] = whole
        return self.read[path] or None


def excerpt(source: str, lines: set[int]) -> str:
    """Empties all lines of ``source``, except in statements that contain one of ``lines`` or assign the rank."""
    tree = tree_of(source)
    kept: set[int] = set()
    asked = assignments_of_the_rank(tree) if lines else []
    for statement in tree.body:
        whole = range(begin_of(statement), end_of(statement) + 1)
        if lines.intersection(whole) or statement in asked:
            kept.update(whole)
    last = max(kept, default=0)
    split = source.split("\n")[:last]
    return "".join(f"{line if number in kept else ''}\n" for number, line in enumerate(split, 1))


def _lines_of(evidence: Evidence) -> dict[str, set[int]]:
    lines: dict[str, set[int]] = {}
    for rank in evidence.ranks:
        for frame in _frames_of(rank):
            lines.setdefault(frame.file, set()).add(frame.line)
    return lines


def _frames_of(rank: RankEvidence) -> Iterator[Frame]:
    for process in (rank.main, *rank.children):
        for sample in process.stacks if process is not None else ():
            for thread in sample.threads:
                yield from thread.frames
    if rank.flight_record is not None:
        entries = rank.flight_record.entries
        for kind in entries.used().values() if isinstance(entries, Entries) else entries:
            yield from kind.frames
    for record in (rank.exception, rank.fatal, rank.exit_call, *rank.gil.handling):
        yield from record.frames if record is not None else ()
    for exception in rank.caught:
        yield from (exception.raised, exception.caught)
