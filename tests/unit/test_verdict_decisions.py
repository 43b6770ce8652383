"""Recorded evidence, and the verdict on each case: who is at fault, how surely, and in which words.

``cases.jsonl.gz`` has the evidence, with the source files that a verdict may read; ``decisions.txt`` what was decided.
After a change that is meant to change verdicts, ``python tests/unit/test_verdict_decisions.py`` writes that again: read
its diff.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec

from safelaunch.model import Evidence, Verdict
from safelaunch.verdict.diagnose import diagnose

FOLDER = Path(__file__).resolve().parents[1] / "data" / "verdicts"
DECISIONS = FOLDER / "decisions.txt"


class Case(msgspec.Struct):
    """``name``: what it shows. ``sources``: path → text of the file, or None."""

    name: str
    evidence: Evidence
    sources: dict[str, str | None] = {}


def lines() -> list[bytes]:
    return gzip.decompress((FOLDER / "cases.jsonl.gz").read_bytes()).splitlines()


def cases() -> list[Case]:
    return [msgspec.json.decode(line, type=Case) for line in lines()]


def with_tuples(evidence: Evidence) -> Evidence:
    """As capture makes them: a list would make a record unhashable."""
    replace = msgspec.structs.replace
    records = [(one, one.flight_record) for one in evidence.ranks]
    ranks = (
        one if record is None else replace(one, flight_record=replace(record, entries=tuple(record.entries)))
        for one, record in records
    )
    return replace(evidence, ranks=tuple(ranks))


def in_words(verdict: Verdict) -> str:
    """Cause, confidence, the processes and lines at fault, the victims; then the summary."""
    places = (f"{one.rank} {one.process}:{one.frame.line if one.frame else '-'}" for one in verdict.culprits)
    proved = ", proved" if verdict.proof else ""
    who = f"{verdict.cause}, {verdict.confidence}{proved} [{'; '.join(places)}] victims {verdict.victims or 'none'}"
    return f"{who}\n    {verdict.summary}"


def decisions() -> str:
    told = (
        (one.name, diagnose(with_tuples(one.evidence), one.sources.get if one.sources else None)) for one in cases()
    )
    return "".join(f"{name}\n    {in_words(verdict)}\n" for name, verdict in told)


def test_every_case_is_decided_as_before() -> None:
    now, before = decisions().split("\n"), DECISIONS.read_text().split("\n")
    changed = [f"- {was}\n+ {is_now}" for was, is_now in zip(before, now, strict=False) if was != is_now]
    assert not changed, "\n".join(changed[:20])
    assert len(now) == len(before)


def test_no_evidence_is_lost() -> None:
    """A field that a record no longer has would be left out without a word."""
    for line, case in zip(lines(), cases(), strict=True):
        assert msgspec.json.decode(msgspec.json.encode(case.evidence)) == msgspec.json.decode(line)["evidence"], (
            case.name
        )


if __name__ == "__main__":
    DECISIONS.write_text(decisions())
