"""``compare_verdicts.py``: differences that count as decisions, and its corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from safelaunch.model import Evidence
from safelaunch.verdict.diagnose import diagnose
from scripts.research import compare_verdicts, verdict_corpus
from tests.support.evidence import job, waiting

KEY = ("synthetic", "0001: skip, 2x1x1, plain", 1)
CULPRIT = {"rank": 1, "process": "main", "frame": {"file": "/t.py", "line": 4, "function": "f"}, "reason": "It sleeps."}
VERDICT: dict[str, Any] = {
    "outcome": "hang", "cause": "busy-loop", "confidence": "high", "summary": "Rank 1 spins.", "culprits": [CULPRIT],
    "victims": "0", "suggestions": ["Look at it."], "proof": [{"who": "rank 0"}],
    "names of suggestions": ["LOOK"], "names of doubts": ["MAY_BE_SLOW"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "fields"),
    [
        ({"confidence": "low", "summary": "Rank 1 may spin."}, "decision", {"confidence": ("high", "low")}),
        ({"culprits": [{**CULPRIT, "frame": None}]}, "decision",
         {"culprits": (["rank 1 main /t.py:4"], ["rank 1 main no line"])}),
        ({"summary": "It spins."}, "summary", {"summary": ("Rank 1 spins.", "It spins.")}),
        ({"suggestions": ["Look there."]}, "text", {"suggestions": (["Look at it."], ["Look there."])}),
        ({"names of suggestions": []}, "decision", {"suggestions": (["LOOK"], [])}),
        ({"names of doubts": []}, "decision", {"doubts": (["MAY_BE_SLOW"], [])}),
        ({"proof": []}, "decision", {"proof": (["rank 0"], [])}),
    ],
)  # fmt: skip
def test_verdict_difference_has_gravest_level(changed: dict[str, Any], level: str, fields: dict[str, Any]) -> None:
    difference = compare_verdicts.difference(KEY, {"verdict": VERDICT}, {"verdict": {**VERDICT, **changed}})
    assert difference is not None
    assert (difference.level, difference.fields) == (level, fields)


@pytest.mark.parametrize(
    "other", [{"raised": "KeyError: 3"}, {"verdict": VERDICT, "exit": 1}, {"verdict": VERDICT, "lost": True}]
)
def test_failed_or_lossy_verdict_is_decision_difference(other: dict[str, Any]) -> None:
    difference = compare_verdicts.difference(KEY, {"verdict": VERDICT}, other)
    assert difference is not None and difference.level == "decision"


def test_tally_counts_cases_missing_in_other_version() -> None:
    other = (KEY[0], "another", 2)
    tallies, differences = compare_verdicts.compare({KEY: {"verdict": VERDICT}, other: {"verdict": VERDICT}},
                                                    {KEY: {"verdict": VERDICT}})  # fmt: skip
    assert (tallies["synthetic"].compared, tallies["synthetic"].same) == (2, 1)
    assert [difference.name for difference in differences] == ["another"]


def test_evidence_from_corpus_gives_same_verdict(tmp_path: Path) -> None:
    evidence = job(waiting(0), waiting(1, op="all_gather"), waiting(2))
    verdict_corpus.write(tmp_path, verdict_corpus.Case("a test", evidence))
    verdict_corpus.write(tmp_path, verdict_corpus.Case("another of the same evidence", evidence))
    (path,) = tmp_path.iterdir()
    case = msgspec.msgpack.decode(path.read_bytes(), type=verdict_corpus.Case)
    verdict = msgspec.to_builtins(diagnose(evidence))
    outcome = verdict_corpus.verdict_on(case, diagnose, Evidence)["verdict"]
    assert {key: outcome[key] for key in verdict} == verdict
    assert len(outcome["names of suggestions"]) == len(verdict["suggestions"])


def test_doubts_and_suggestions_have_names() -> None:
    verdict = msgspec.to_builtins(diagnose(job(waiting(0), waiting(1, op="all_gather"))))
    assert verdict["doubts"] and verdict["suggestions"]
    named = verdict_corpus.with_names(verdict)
    for name in (*named["names of doubts"], *named["names of suggestions"]):
        assert len(name.split()) <= 2


def test_unknown_evidence_field_is_reported_as_lost() -> None:
    plain = msgspec.to_builtins(job(waiting(0), waiting(1)))
    plain["ranks"][0]["renamed"] = 7
    assert verdict_corpus.verdict_on(verdict_corpus.Case("", plain), diagnose, Evidence)["lost"] is True


def test_corpus_is_reproducible_by_seed() -> None:
    first, again = (list(verdict_corpus.synthetic_jobs(6, seed)) for seed in (3, 3))
    assert [name for name, *_ in first] == [name for name, *_ in again]
    assert [msgspec.json.encode(evidence) for *_, evidence in first] == [
        msgspec.json.encode(evidence) for *_, evidence in again
    ]
    assert [name for name, *_ in verdict_corpus.synthetic_jobs(6, 4)] != [name for name, *_ in first]
