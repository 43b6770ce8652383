"""Copies the tables of figures.json into README.md and docs/, between their markers.

    <!-- figures: zoo, soak -->         # one table of these checks, with the commit and date of each
    <!-- /figures -->

A table of checks that nobody has recorded yet stays as somebody wrote it, and has to say so in its last line:
``*Noted by hand, DATE.*``

python -m scripts.build.figures            # writes the tables
python -m scripts.build.figures --check    # exit code 1 if a document differs from figures.json, or lacks a figure
python -m scripts.build.figures --fresh    # also exit code 1 if a figure is older than the current commit
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.build import checks
from scripts.build.checks import CHECKS, FIGURES, ROOT, CheckError, Record

BEGIN = re.compile(r"^<!-- figures: *(?P<names>[^>]*?) *-->$")
END = "<!-- /figures -->"
BY_HAND = re.compile(r"^\*Noted by hand, \d{4}-\d\d-\d\d\.\*$")


@dataclass
class Rendered:
    """A document with its figures. ``problems``: what is wrong with it, with line numbers."""

    text: str
    names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is out of date")
    parser.add_argument("--fresh", action="store_true", help="also fail if a figure is of an older commit")
    words = parser.parse_args()
    try:
        records = checks.load(FIGURES)
        problems = update(documents(ROOT), records, write=not (words.check or words.fresh))
        problems += outdated(records) if words.fresh else []
    except CheckError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def documents(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def update(paths: Sequence[Path], records: Mapping[str, Record], *, write: bool) -> list[str]:
    """Renders each document. Returns the problems and, if ``write`` is off, the documents that would change."""
    problems = []
    for path in paths:
        before = path.read_text()
        after = render(before, records)
        problems += [f"{path.name}:{problem}" for problem in after.problems]
        if before == after.text:
            continue
        if write:
            path.write_text(after.text)
        else:
            problems.append(f"{path.name}: its figures are not those of {FIGURES.name}; run scripts/build/figures.py")
    return problems


def render(text: str, records: Mapping[str, Record]) -> Rendered:
    """Replaces each block of ``text``. A block without figures stays as it is, and is a problem unless it says so."""
    done, kept, begun = Rendered(""), [], 0
    names: list[str] = []
    block: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = BEGIN.match(line)
        if found and begun:
            done.problems.append(f"{begun}: the marker has no {END}")
        if found:
            kept += block
            names, begun, block = re.split(r"[,\s]+", found["names"]), number, []
            kept.append(line)
        elif line == END and begun:
            missing = [f"{begun}: {reason}" for name in names if (reason := _missing(name, records))]
            unknown = any(name not in CHECKS for name in names)
            done.problems += missing if unknown or not any(map(BY_HAND.match, block)) else []
            done.names += names
            kept += [*(block if missing else table(names, records)), line]
            begun, block = 0, []
        elif line == END:
            done.problems.append(f"{number}: {END} without a beginning")
            kept.append(line)
        else:
            (block if begun else kept).append(line)
    if begun:
        done.problems.append(f"{begun}: the marker has no {END}")
        kept += block
    done.text = "\n".join(kept) + ("\n" if text.endswith("\n") else "")
    return done


def _missing(name: str, records: Mapping[str, Record]) -> str:
    if name not in CHECKS:
        return f"no such check: {name or 'none is named'}; there are {', '.join(CHECKS)}"
    if name not in records or not records[name].rows:
        return f"{FIGURES.name} has no figures for {name}; run scripts/build/verify.py --only {name}"
    return ""


def table(names: Sequence[str], records: Mapping[str, Record]) -> list[str]:
    """Returns one table per head, followed by a line for each run: commit, date, machine."""
    lines: list[str] = []
    for head, mine in _by_head(names, records).items():
        rows = [row for name in mine for row in records[name].rows]
        lines += ["", _row(head), "|" + "---|" * len(head), *map(_row, rows)]
    runs: dict[str, list[str]] = {}
    for name in names:
        one = records[name]
        failed = "" if one.passed else f", failed ({one.exit})"
        runs.setdefault(f"{one.date}, commit {one.commit}, on {one.machine}{failed}", []).append(name)
    return [*lines, "", *(f"*{', '.join(mine)}: {run}.*" for run, mine in runs.items()), ""]


def _by_head(names: Sequence[str], records: Mapping[str, Record]) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found.setdefault(records[name].head, []).append(name)
    return found


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def outdated(records: Mapping[str, Record]) -> list[str]:
    """Returns the figures in the documents that are not of the current commit."""
    shown = {name for path in documents(ROOT) for name in render(path.read_text(), records).names if name in records}
    now = {name: checks.commit_of(CHECKS[name]) for name in shown}
    return [f"{name}: its figures are of {records[name].commit}, not {now[name]}; run scripts/build/verify.py"
            for name in sorted(shown) if records[name].commit != now[name]]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
