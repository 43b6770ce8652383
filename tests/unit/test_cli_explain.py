"""``safelaunch explain``: the catalogue of causes in a terminal."""

from __future__ import annotations

import inspect
import re

import pytest

from safelaunch.cli import main
from safelaunch.cli.explain import explained, listed
from safelaunch.verdict.causes import CAUSES

LOOKALIKES = "Not to be confused with:"
TITLES = ["How safelaunch knows:", "Example:", LOOKALIKES, "What to do (a verdict lists what fits its case):"]


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("name", CAUSES)
def test_explain_text_has_meaning_evidence_example_and_advice(name: str, width: int) -> None:
    text = explained(name, width)
    lines = text.splitlines()
    cause = CAUSES[name]
    titles = [title for title in TITLES if title != LOOKALIKES or cause.unlike]
    assert lines[0] == name and [line for line in lines if line in TITLES] == titles
    meaning, evidence, example, *lookalikes, advice = re.split("|".join(map(re.escape, titles)), text)
    assert all(len(flat(part)) > 20 for part in (meaning, evidence, example, *lookalikes, advice))
    assert all(f"- {other}: {difference}" in flat(lookalikes[0]) for other, difference in cause.unlike)
    assert flat(CAUSES[name].evidence) == flat(evidence)
    assert flat(example) in flat(inspect.getdoc(CAUSES[name]) or "")
    assert all(f"- {item.shown}" in flat(advice) for item in CAUSES[name].advice)
    assert not re.search(r"```|\]\(", text), "markup that only a page shows"
    assert all(len(line) <= width for line in lines if " " in line.strip())


def test_explain_text_keeps_list_items() -> None:
    lines = explained("stuck-in-user-code", 100).splitlines()
    assert sum(line.startswith("  - A ") for line in lines) >= 3
    assert any(line.startswith("  - A subprocess that waits for its parent: it writes") for line in lines)


def test_explain_without_cause_lists_all_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{listed(100)}\n"
    rows = re.findall(r"^  ([a-z0-9-]+) +(\S[^\n]*(?:\n {8,}[^\n]+)*)$", shown, re.MULTILINE)
    assert [name for name, _ in rows] == list(CAUSES)
    assert all(meaning[0].isupper() and meaning.endswith(".") and ". " not in flat(meaning) for _, meaning in rows)
    assert shown.endswith("To explain one: safelaunch explain CAUSE\n")


def test_explain_prints_named_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "uneven-batches"]) == 0
    assert capsys.readouterr().out == f"{explained('uneven-batches', 100)}\n"


@pytest.mark.parametrize(
    ("name", "nearest"), [("colective-mismatch", "; did you mean 'collective-mismatch'?"), ("x", "")]
)
def test_explain_of_unknown_cause_names_nearest(name: str, nearest: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == (
        f"safelaunch: explain: there is no cause '{name}'{nearest}\n"
        "safelaunch:   To list the causes: safelaunch explain\n"
    )
