"""``safelaunch doctor``: checks whether safelaunch can watch jobs here, and shows the fix for what fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from safelaunch import __version__
from safelaunch.cli.health import RESULTS, Check, Result, examine, worst
from safelaunch.cli.parsing import Parser
from safelaunch.system.console import display, show, show_json, wrapped
from safelaunch.system.printable import clean

_LEAST_DETAIL = 30
_COLOURS = {"ok": "32", "warning": "33", "failed": "31"}


def main(argv: list[str]) -> int:
    """Prints every check; returns 0 if none failed, else 1."""
    words = parser().parse_args(argv)
    checks = examine(dict(os.environ), os.getuid(), Path.cwd())
    if words.json:
        show_json(msgspec.to_builtins(document(checks)))
    else:
        shown = display(1, os.environ)
        show(text(checks, width=min(120, shown.width), colour=shown.color), color=shown.color)
    return 1 if worst(checks) == "failed" else 0


def parser() -> Parser:
    """The command line of ``safelaunch doctor``."""
    found = Parser(
        "doctor",
        description="Checks whether safelaunch can watch jobs on this node and in this environment, and shows the fix "
        "for each check that fails. Run it where the jobs run, as the user who runs them.",
    )
    found.add_argument("--json", action="store_true", help="print one JSON document")
    return found


class Document(msgspec.Struct, frozen=True):
    """The --json document. ``result``: the worst of the checks'. ``user``: the uid for whom they hold."""

    schema: Literal[1]
    safelaunch: str
    host: str
    user: int
    result: Result
    checks: list[Check]


def document(checks: tuple[Check, ...]) -> Document:
    """The --json document."""
    return Document(1, __version__, socket.gethostname(), os.getuid(), worst(checks), list(checks))


def text(checks: Sequence[Check], *, width: int, colour: bool) -> str:
    """One line for each check with its fix below, and a summary. On a narrow terminal, details stand below names."""
    column = max((len(check.name) for check in checks), default=0)
    indent = 9 + column + 2 if width >= 9 + column + 2 + _LEAST_DETAIL else 11
    lines: list[str] = []
    for check in checks:
        head = f"{check.result:<7}  {check.name:<{column}}  "
        first, *more = wrapped(clean(check.detail), width, " " * indent, " " * indent) or [""]
        first = head + first[indent:] if indent == len(head) else f"{head.rstrip()}\n{first}"
        lines += [f"\x1b[{_COLOURS[check.result]}m{first[:7]}\x1b[0m{first[7:]}" if colour else first, *more]
        if check.fix and check.result != "ok":
            fix, *rest = check.fix.splitlines()
            lines += wrapped(fix, width, " " * 9 + "-> ", " " * 12)
            lines += [part for line in rest for part in wrapped(line, width, " " * 12, " " * 12)]
    counts = [f"{sum(check.result == result for check in checks)} {result}" for result in RESULTS]
    return "\n".join([*lines, "", f"{len(checks)} checks: {', '.join(counts)}"])
