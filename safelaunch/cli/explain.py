"""``safelaunch explain CAUSE``: shows what a cause means, how safelaunch recognizes it, an example, and the fix."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator

from safelaunch.cli.parsing import Parser
from safelaunch.settings.options import entries
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.console import WIDTH, display, show, wrapped
from safelaunch.system.errors import UsageError
from safelaunch.verdict.causes import CAUSES

_EXAMPLE = "```text\n"
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
_EMPHASIS = re.compile(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])")


def main(argv: list[str]) -> int:
    """Prints the list of causes, or explains one; returns 0. Raises UsageError for an unknown cause."""
    name = parser().parse_args(argv).cause
    width = min(WIDTH, display(1, os.environ).width)
    if name is None:
        show(listed(width))
        return 0
    if name not in CAUSES:
        fix = "To list the causes: safelaunch explain"
        raise UsageError(f"explain: there is no cause {name!r}{did_you_mean(name, CAUSES)}", fix)
    show(explained(name, width))
    return 0


def parser() -> Parser:
    command_line = Parser(
        "explain",
        description="Explains a cause that a verdict names: what it means, how safelaunch knows, an example, and what "
        "to do. Without CAUSE, it lists all causes.",
    )
    command_line.add_argument("cause", nargs="?", metavar="CAUSE", help="the cause, such as collective-mismatch")
    return command_line


def listed(width: int) -> str:
    rows = ((name, re.split(r"(?<=\.)\s", _meaning(name)[0], maxsplit=1)[0]) for name in CAUSES)
    return f"{entries(rows, width, 27)}\n\nTo explain one: safelaunch explain CAUSE"


def explained(name: str, width: int) -> str:
    cause = CAUSES[name]
    example = " ".join(_parts(name)[1].split())
    lines = [name, *_lines(_meaning(name), width)]
    for title, texts in (
        ("How safelaunch knows:", [cause.evidence]),
        ("Example:", [example]),
        ("Not to be confused with:", ["\n".join(f"- {other}: {text}" for other, text in cause.unlike)]),
        ("What to do (a verdict lists what fits its case):", ["\n".join(f"- {text}" for text in cause.all_advice())]),
    ):
        lines += ["", title, *_lines(texts, width)] if any(texts) else []
    return "\n".join(lines)


def _meaning(name: str) -> list[str]:
    lines = []
    for paragraph in _parts(name)[0].strip().split("\n\n"):
        text = re.sub(r"\s*\n\s*(?!- )", " ", paragraph)
        lines.append(_EMPHASIS.sub(r"\1", _LINK.sub(r"\1", text)))
    return lines


def _parts(name: str) -> tuple[str, str]:
    meaning, _, example = (inspect.getdoc(CAUSES[name]) or "").partition(_EXAMPLE)
    return meaning, example.partition("```")[0]


def _lines(paragraphs: list[str], width: int) -> Iterator[str]:
    for number, paragraph in enumerate(paragraphs):
        if number:
            yield ""
        for line in paragraph.split("\n"):
            yield from wrapped(line, width, "  ", "    " if line.startswith("- ") else "  ")
