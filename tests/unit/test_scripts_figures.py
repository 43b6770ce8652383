"""``scripts/build/figures.py``: the tables between the markers of a document, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.build import figures
from scripts.build.checks import Record

ZOO = Record("abc123", "2026-11-20", "2 cores", 60.0, 0, "5 of 5", ("", "seen"), (("the zoo", "5 of 5 | right"),))
SOAK = Record(
    "def456", "2026-11-21", "2 cores", 60.0, 0, "all", ("", "seen"), (("healthy", "none"), ("frozen", "none"))
)
LAUNCH = Record("abc123", "2026-11-20", "2 cores", 60.0, 0, "", ("", "measured", "aim"), (("wall", "1.01", "≤ 1.05"),))
RECORDS = {"zoo": ZOO, "soak": SOAK, "launch": LAUNCH}


def document(*names: str, between: str = "") -> str:
    return f"# Title\n\n<!-- figures: {', '.join(names)} -->\n{between}<!-- /figures -->\n\nThe end.\n"


def test_a_table_with_its_commit_and_date() -> None:
    done = figures.render(document("zoo"), RECORDS)
    assert done.problems == []
    assert (
        done.text
        == """\
# Title

<!-- figures: zoo -->

|  | seen |
|---|---|
| the zoo | 5 of 5 \\| right |

*zoo: 2026-11-20, commit abc123, on 2 cores.*

<!-- /figures -->

The end.
"""
    )


def test_several_checks_share_a_table_and_each_run_is_told() -> None:
    text = figures.render(document("zoo", "soak", between="old\n"), RECORDS).text
    assert text.count("|---|") == 1 and "old" not in text
    assert "*zoo: 2026-11-20, commit abc123, on 2 cores.*\n*soak: 2026-11-21, commit def456, on 2 cores.*" in text
    same = figures.render(document("zoo", "launch"), RECORDS).text
    assert same.count("\n|---|") == 2, "tables with other columns stand apart"
    assert "*zoo, launch: 2026-11-20, commit abc123, on 2 cores.*" in same


def test_a_table_that_nobody_has_recorded_says_so() -> None:
    text = document("faults", between="| a | b |\n\n*Noted by hand, 2026-11-20.*\n\n")
    done = figures.render(text, RECORDS)
    assert (done.text, done.problems) == (text, [])
    assert figures.render(text.replace("faults", "speed"), RECORDS).problems != [], "no such check"
    assert "Noted by hand" not in figures.render(text.replace("faults", "zoo"), RECORDS).text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (document("faults"), "3: figures.json has no figures for faults; run scripts/build/verify.py --only faults"),
        (document("speed"), "3: no such check: speed"),
        (document(""), "3: no such check: none is named"),
        ("<!-- figures: zoo -->\nrest\n", "1: the marker has no <!-- /figures -->"),
        ("<!-- figures: zoo -->\nrest\n" + document("soak"), "1: the marker has no <!-- /figures -->"),
        ("\n<!-- /figures -->\n", "2: <!-- /figures --> without a beginning"),
    ],
)
def test_what_is_wrong_with_markers(text: str, problem: str) -> None:
    (told,) = figures.render(text, RECORDS).problems
    assert told.startswith(problem)


def test_check_fails_where_a_document_differs_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.md"
    path.write_text(document("zoo", between="| the zoo | 6 of 5 |\n"))
    before = path.read_text()
    (problem,) = figures.update([path], RECORDS, write=False)
    assert problem == "costs.md: its figures are not those of figures.json; run scripts/build/figures.py"
    assert path.read_text() == before
    assert figures.update([path], RECORDS, write=True) == []
    assert figures.update([path], RECORDS, write=False) == []
