"""Parses README and docs for the tests: the fenced blocks of each page, and how the tests use a block.

- A block with a title (```` ```python title="train.py" ````) is a file that the page's commands use.
- The tests run every ```` ```bash ```` block, in the page's order, in one directory per page. It must exit with 0, or
  with N if the comment ``<!-- exit N -->`` is directly above it. With ``<!-- needs MODULE -->`` (also ``exit N, needs
  MODULE``) they run it only if the module is installed.
- ```` ```console ```` shows commands that the tests cannot run, with ``<!-- not run: WHY -->`` directly above it.
- ```` ```text ```` is output. With ``<!-- verdict -->`` directly above it, it holds the summary of the newest bundle's
  verdict; with ``<!-- printed -->``, the commands above it printed each of its lines. ``...`` stands for anything.
- Other languages without a title are fragments. Python, YAML and ``sh`` (a script that the page does not run) must
  parse.

Three comments control the tests:

- ``<!-- setup`` on its own line begins hidden commands, up to ``-->``.
- ``<!-- continues: PAGE -->`` starts in a copy of PAGE's directory, as PAGE's commands left it.
- ``<!-- node: gpus -->`` runs the page on a simulated node of eight GPUs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]}

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)(?: +title=\"(?P<title>[^\"]+)\")?(?P<rest>.*)")
_COMMENT = re.compile(r"<!-- (?P<text>.*) -->")
SETUP = "setup"


@dataclass(frozen=True)
class Block:
    """One fenced block. ``comment``: the text of the HTML comment directly above it; ``rest``: unknown words."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    comment: str = ""
    rest: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def exit_code(self) -> int:
        """The expected exit code of its last command."""
        found = re.match(r"exit (\d+)", self.comment)
        return int(found[1]) if found else 0

    @property
    def needs(self) -> str:
        """The module without which its commands cannot run, or an empty string."""
        found = re.search(r"\bneeds (\w+)$", self.comment)
        return found[1] if found and self.language == "bash" else ""


def blocks(page: str, text: str | None = None) -> Iterator[Block]:
    """Returns the fenced and the hidden blocks of a page, in order."""
    lines = (PAGES[page].read_text() if text is None else text).splitlines()
    number = 0
    while number < len(lines):
        begin, line = number, lines[number]
        number += 1
        if line == f"<!-- {SETUP}":
            number = lines.index("-->", begin)
            yield Block(page, begin + 1, SETUP, "\n".join(lines[begin + 1 : number]))
        elif (fence := _FENCE.fullmatch(line)) is not None:
            end = next((n for n in range(number, len(lines)) if lines[n] == f"{fence['indent']}```"), len(lines))
            above = _COMMENT.fullmatch(lines[begin - 1].strip()) if begin else None
            yield Block(
                page,
                begin + 1,
                fence["language"],
                "\n".join(text.removeprefix(fence["indent"]) for text in lines[number:end]),
                fence["title"] or "",
                above["text"] if above else "",
                fence["rest"],
            )
            number = end + 1


def directive(page: str, name: str) -> str:
    """Returns the value of ``<!-- name: value -->`` on its own line, or an empty string."""
    found = re.search(rf"^<!-- {name}: (.+) -->$", PAGES[page].read_text(), re.MULTILINE)
    return found[1] if found else ""


def prose(page: Path) -> str:
    """Returns a page's text without its fenced blocks and comments, line by line."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def links(page: Path) -> list[tuple[Path, str]]:
    """Returns the file and the anchor that each link to this repository names."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [(Path(os.path.normpath(page.parent / path)) if path else page, anchor) for path, _, anchor in parts]


def github_anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives a page's headings. A repeated heading gets a number."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        copies = (f"{anchor}-{number}" for number in itertools.count(1))
        found.add(anchor if anchor not in found else next(copy for copy in copies if copy not in found))
    return found


def table(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table below ``heading``, without its header."""
    below = PAGES[page].read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    first = next(number for number, line in enumerate(below) if line.startswith("|"))
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), below[first + 2 :]))
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in rows
    ]
