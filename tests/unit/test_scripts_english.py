"""Phrases that the language check finds, and phrases that it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.build.english import Finding, check, findings_in, record  # type: ignore[import-not-found]
from tests.support.paths import ROOT

# phrase in a comment → patterns that it matches
COMMENTS = {
    "Ranks who wait for nobody.": ["who for a thing", "who for a thing"],
    "Users who read it, ``who``, whoami, and 'whose'.": [],
    "No one answers.": ["who for a thing"],
    "Empty where there is no log.": ["where for if"],
    "Two ranks, where one has ended.": ["where for if"],
    "Where torch is missing, it raises.": ["where for if"],
    "A place where ranks meet, or a line, where it waits.": [],
    "It may fail.": ["may"],
    "Since May 2026.": [],
    "It starts anew, meanwhile, for ever, and all alike.": ["alike", "anew", "for ever", "meanwhile"],
    "A group beside the other; besides, it works.": ["beside"],
    "The first call behind the loop.": ["behind"],
    "It leaves nothing behind. Rank 1 is behind its peers.": [],
    "A process of its own, that of rank 1 and those of others.": ["of its own", "that of", "those of"],
    "A rank is told of it; they can be told apart.": ["is told", "tells of"],
    "None has come; the default is None, and all others are none of them.": ["is none"],
    "If there are none, it ends.": [],
    "The job goes on; it goes on the screen.": ["goes on"],
    "It stands among them, and gets on.": ["gets on", "stands among"],
    "It waits in turns, again and again, by its own doing.": ["again and again", "in turns", "own doing"],
    "The ranks parted at call 40.": ["parted"],
    "Of a send, the other end. Of course, it waits.": ["fronted of"],
    "A pattern over two\n    # lines, that\n    # of a rank.": ["that of"],
    'It prints ``that of`` and "nobody".': [],
    "A person who may.  # english: ok": [],
}

# docstring of a function `f(rank, names)` → patterns that it matches
DOCSTRINGS = {
    "Returns the rank.": [],
    "Whether it waits.": ["docstring start"],
    "What it waits for.": ["docstring start"],
    "By default, all.": [],
    "Asleep for a moment.": ["docstring adjective"],
    "Called processes are read.": [],
    "Reads it. ``names``: of groups. ``other``: no argument.": ["undocumented Args"],
    "Reads it.\n\n    Args:\n        names: Names of groups.\n    ": [],
}

# source → patterns that it matches
SOURCES = {
    'X = "nobody has joined this job"': ["who for a thing"],
    'X = f"{X} was not over within {X} s"': ["not over"],
    'X = f"waits for {X}, that is --max-stall"': ["that is --option"],
    'X = "nobody"': [],
    'X = "the end of the pipe that {who} waits on"': [],
    'X = r"who (?:waits|has waited) for it"': [],
    'def _f():\n    """Returns it."""\n    return 1': ["private docstring"],
    'def f():\n    """Returns it."""\n    return 1': [],
    "def test_who_waits():\n    pass": ["who for a thing"],
    'class X:\n    x: int\n    """of the catalogue"""': ["docstring start"],
    'class X:\n    """A record. ``x``: its size."""\n    x: int': ["undocumented Args"],
}

# page → patterns that it matches
PAGES = {
    "Somebody waits.\n\n```\nnobody\n```\n\n`who` and [a page](that-of.md)": ["who for a thing"],
    "- It may fail.\n- Of two ranks, one.": ["fronted of"],
}


def patterns(file: str, text: str) -> list[str]:
    return sorted(finding.pattern for finding in findings_in(file, text))


@pytest.mark.parametrize("text", COMMENTS)
def test_comment_has_the_listed_findings(text: str) -> None:
    assert patterns("safelaunch/x.py", f"def f():\n    # {text}\n    return 1\n") == COMMENTS[text]


@pytest.mark.parametrize("text", DOCSTRINGS)
def test_sample_docstring_yields_its_expected_findings(text: str) -> None:
    assert patterns("safelaunch/x.py", f'def f(rank, names):\n    """{text}"""\n') == DOCSTRINGS[text]


@pytest.mark.parametrize("text", SOURCES)
def test_source_has_the_listed_findings(text: str) -> None:
    assert patterns("tests/unit/test_x.py", text + "\n") == SOURCES[text]


@pytest.mark.parametrize("text", PAGES)
def test_page_has_the_listed_findings(text: str) -> None:
    assert patterns("docs/x.md", text) == PAGES[text]


def test_finding_in_docstring_names_its_line() -> None:
    [finding] = findings_in("safelaunch/x.py", 'def f():\n    """Returns it.\n\n    Nobody\n    waits.\n    """\n')
    assert str(finding) == "safelaunch/x.py:4: who for a thing: Returns it. Nobody waits."


def test_finding_in_joined_string_names_its_line() -> None:
    [finding] = findings_in("safelaunch/x.py", 'X = (\n    "this job has ended, "\n    "and nobody waits"\n)\n')
    assert finding.line == 3


# --- counts that can only fall ----------------------------------------------------------------------------------------

FILE = "scripts/build/python_source.py"


def findings(*patterns: str, file: str = "a.py") -> list[Finding]:
    return [Finding(file, line, pattern, "") for line, pattern in enumerate(patterns, 1)]


def test_check_fails_on_a_file_that_gains_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "english.json"
    text = (ROOT / FILE).read_text()
    recorded.write_text(json.dumps({FILE: len(list(findings_in(FILE, text)))}))
    assert check(recorded, list(findings_in(FILE, text))) == 0
    assert check(recorded, list(findings_in(FILE, text + "# nobody\n"))) == 1
    assert f"{FILE}:{len(text.splitlines()) + 1}: who for a thing: nobody" in capsys.readouterr().err


def test_check_fails_on_a_new_file_with_a_finding(tmp_path: Path) -> None:
    recorded = tmp_path / "english.json"
    recorded.write_text("{}")
    assert check(recorded, findings("who for a thing")) == 1


def test_check_passes_a_count_that_fell_without_a_new_record(tmp_path: Path) -> None:
    recorded = tmp_path / "english.json"
    recorded.write_text('{"a.py": 2, "removed.py": 1}')
    assert check(recorded, findings("who for a thing")) == 0


def test_record_refuses_a_larger_sum(tmp_path: Path) -> None:
    recorded = tmp_path / "english.json"
    recorded.write_text('{"a.py": 1}')
    (tmp_path / "a.py").touch()
    assert record(tmp_path, recorded, [tmp_path / "a.py"], findings("who for a thing", "may")) == 1
    assert json.loads(recorded.read_text()) == {"a.py": 1}


def test_record_follows_a_file_that_moved(tmp_path: Path) -> None:
    recorded = tmp_path / "english.json"
    recorded.write_text('{"a.py": 1, "kept.py": 3}')
    (tmp_path / "kept.py").touch()
    assert record(tmp_path, recorded, [tmp_path / "b.py"], findings("who for a thing", file="b.py")) == 0
    assert json.loads(recorded.read_text()) == {"b.py": 1, "kept.py": 3}
