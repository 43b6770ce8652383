"""Processes of which nothing gives the rank: the verdict names them, and gives no rank to any."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch.model import (
    Evidence,
    Frame,
    ProcessEvidence,
    RankEvidence,
    RankException,
    RankExit,
    StackSample,
    Thread,
    Verdict,
)
from safelaunch.report import page, screen
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import SCRIPT, at, in_c10d, in_loader, in_user

WAITS = in_c10d("all_reduce", 9)
LOADS = in_loader(30)


def pasted(labels: Mapping[int, str], *stacks: tuple[Frame, ...], guessed: bool = True) -> Evidence:
    """Saved stacks, the first of number 0."""
    ranks = [
        RankEvidence(
            rank=number,
            host="",
            pid=700 + number,
            beacon=False,
            main=ProcessEvidence(
                "main", stacks=(StackSample(0, 0.0, "a saved stack", (Thread(frames, "MainThread"),)),)
            ),
        )
        for number, frames in enumerate(stacks)
    ]
    return Evidence("hang", len(ranks), tuple(ranks), labels=dict(labels), world_guessed=guessed)


def failed(number: int, message: str) -> RankEvidence:
    raised = RankException("ValueError", message, 0.0, (at(12), at(100, "<module>")))
    return RankEvidence(rank=number, host="", pid=0, exception=raised, beacon=False)


def processes(*numbers: int) -> dict[int, str]:
    return {number: f"process {700 + number}" for number in numbers}


def at_fault(verdict: Verdict) -> list[str]:
    return [one.label for one in verdict.processes_at_fault]


def words_of(verdict: Verdict) -> str:
    """Everything that a reader sees."""
    document = msgspec.to_builtins(verdict)
    return json.dumps(document) + screen.screen(verdict, bundle_path="a.txt", width=400)


ALL = processes(0, 1, 2, 3)


def test_process_of_unknown_rank_is_named_by_pid() -> None:
    verdict = diagnose(pasted(ALL, WAITS, WAITS, WAITS, LOADS))
    assert (verdict.cause, verdict.confidence, verdict.culprits) == ("data-loading", "medium", ())
    assert at_fault(verdict) == ["process 703"]
    assert verdict.summary.startswith("Process 703 waits for its DataLoader at train.py:30")
    assert ", while 3 of 4 processes wait in all_reduce at train.py:9" in verdict.summary
    assert verdict.summary.endswith(" Nothing gives its rank.")
    assert not re.search(r"ranks? \d", words_of(verdict))
    assert "process 703 at " in screen.screen(verdict, bundle_path="a.txt")


@pytest.mark.parametrize(
    ("stacks", "says"),
    [
        ((WAITS,), "Process 700 waits in all_reduce at train.py:9 (train). It is the only process here"),
        ((in_user(7),), "It is the only process here, so it cannot be compared with its peers."),
        ((WAITS, WAITS), "whether there are others is not known"),
    ],
)
def test_identical_stacks_blame_no_process(stacks: tuple[tuple[Frame, ...], ...], says: str) -> None:
    evidence = pasted(processes(*range(len(stacks))), *stacks)
    for one in (evidence, replace(evidence, labels={})):
        verdict = diagnose(one)
        assert (verdict.cause, verdict.culprits, at_fault(verdict)) == ("no-rank-stands-out", (), [])
        assert "suspect the transport" not in words_of(verdict)
        assert "safelaunch dump --all" in verdict.suggestions[0]
    assert says in diagnose(evidence).summary


def test_single_stack_is_compared_with_no_other() -> None:
    verdict = diagnose(pasted({}, WAITS))
    assert "No other rank was seen" in verdict.summary
    assert (verdict.confidence, verdict.processes) == ("low", msgspec.UNSET)


def test_known_ranks_keep_their_numbers() -> None:
    verdict = diagnose(pasted({3: "worker-a"}, WAITS, WAITS, WAITS, LOADS))
    assert (verdict.victims, at_fault(verdict)) == ("0-2", ["worker-a"])
    assert verdict.summary.startswith("worker-a waits for its DataLoader") and "ranks 0-2 wait in" in verdict.summary
    verdict = diagnose(pasted({0: "worker-a"}, WAITS, WAITS, WAITS, LOADS, guessed=False))
    assert [one.rank for one in verdict.culprits] == [3]
    assert at_fault(verdict) == []
    assert "rank 0" not in words_of(verdict)


def test_failed_process_is_named_by_its_log_label() -> None:
    evidence = Evidence("crash", 1, (failed(0, "bad"),), labels={0: "worker-2"}, printed=(), world_guessed=True)
    verdict = diagnose(evidence)
    assert (verdict.cause, at_fault(verdict)) == ("rank-exception", ["worker-2"])
    assert verdict.summary == "worker-2 raised ValueError: bad at train.py:12 (train). Nothing gives its rank."
    ended = RankEvidence(rank=0, host="", pid=7, exit=RankExit(-9, 0.0), beacon=False)
    verdict = diagnose(replace(evidence, ranks=(ended,), labels={0: "(Worker pid=7)"}))
    assert verdict.cause == "rank-killed"
    assert verdict.summary.startswith("(Worker pid=7) ")


def test_uninvolved_process_does_not_change_the_verdict() -> None:
    ranks = (failed(0, "bad"), RankEvidence(rank=1, host="", pid=0, beacon=False))
    evidence = Evidence("crash", 1, ranks[:1], printed=(0,), world_guessed=True)
    verdict = diagnose(replace(evidence, world_size=2, ranks=ranks, labels={1: "worker-2"}))
    assert verdict == diagnose(evidence)


def test_page_shows_process_labels() -> None:
    evidence = pasted(ALL, WAITS, WAITS, WAITS, LOADS)
    data = page.content(diagnose(evidence), evidence)
    assert data["labels"] == {str(number): label for number, label in ALL.items()}
    assert [row["r"] for row in data["rows"] if row["c"]] == ["3"]
    assert not any(name == "world size" for name, _ in data["head"]["facts"])
    assert "labels" not in page.content(diagnose(replace(evidence, labels={})), replace(evidence, labels={}))
    assert SCRIPT in json.dumps(data)
