"""``safelaunch status [RUN]``: every run of this user on this node, and its ranks; --watch refreshes it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from safelaunch.control.discover import Run, describe, look, our_roots, select
from safelaunch.control.protocol import RunStatus
from safelaunch.errors import UsageError
from safelaunch.report.early import in_status
from safelaunch.system.console import redact, say, show, show_json
from safelaunch.system.printable import clean

from .parsing import Parser
from .status_rows import COLUMNS, NODE_COLUMNS, Row, nodes, rows, since, told

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_S = 1.0
PLAIN_REFRESH_S = 5.0
NONE_LIVE = "you have no runs on this node"
_RIGHT = {"rank", "pid", "step", "rate", "age"}
_STYLES = {"good": "", "behind": "bold yellow", "late": "bold red", "quiet": "dim"}


def main(argv: list[str]) -> int:
    """Prints the runs; returns 0, even without runs, and 2 if RUN does not exist."""
    words = parser().parse_args(argv)
    if words.json and words.watch:
        raise UsageError("status: --json and --watch exclude each other.", "Leave one of them out.")
    if words.watch:
        return _watch(words.run)
    runs = choose(look(our_roots()), words.run)
    if words.json:
        show_json([document(run) for run in runs])
        return 0
    if not runs:
        say(NONE_LIVE)
        return 0
    show(text(runs, time.time()))
    return 0


def parser() -> Parser:
    """The command line of ``safelaunch status``."""
    found = Parser(
        "status",
        description="Shows your runs on this node: each rank's step, rate, age of its last step and phase, and when "
        "safelaunch would suspect a hang.",
    )
    found.add_argument("run", nargs="?", metavar="RUN", help="only this run: run id (r4711), name, or supervisor's pid")
    found.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    found.add_argument("--json", action="store_true", help="print one JSON document: a list of runs")
    return found


def choose(runs: Sequence[Run], word: str | None) -> tuple[Run, ...]:
    """The runs that ``word`` names; prints a note if several match. Raises UsageError if none does."""
    chosen = select(runs, word)
    if word is not None and not chosen:
        raise UsageError(f"status: no run is called {word!r}.", describe(runs))
    if word is not None and len(chosen) > 1:
        say(f"{len(chosen)} runs are called {word!r}: {', '.join(run.id for run in chosen)}")
    return chosen


def document(run: Run) -> dict[str, Any]:
    """One run for --json: the supervisor's answer, if any, and always ``directory``, ``alive`` and ``problem``."""
    said: dict[str, Any] = {"run": run.id, "supervisor_pid": run.pid}
    if run.status is not None:
        said = msgspec.to_builtins(run.status)
    return {**said, "directory": os.fspath(run.found.directory), "alive": run.alive, "problem": run.problem}


# --- plain text -------------------------------------------------------------------------------------------------------


def text(runs: Sequence[Run], now_unix_s: float) -> str:
    """All runs as aligned lines, separated by empty lines."""
    return "\n\n".join("\n".join(_lines(run, now_unix_s)) for run in runs)


def _lines(run: Run, now_unix_s: float) -> list[str]:
    if run.status is None:
        return [f"{run.id}  {clean(run.problem)}"]
    lines = [headline(run.status, now_unix_s), *(f"  {line}" for line in details(run.status))]
    table = rows(run.status)
    if not table:
        lines.append("  no rank has started yet")
    else:
        lines += _aligned(COLUMNS, [row.cells for row in table])
    if run.status.nodes:
        lines += ["", *_aligned(NODE_COLUMNS, nodes(run.status))]
    return lines


def _aligned(columns: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, *table]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = []
    for line in cells:
        parts = [
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        lines.append("  " + "  ".join(parts).rstrip())
    return lines


def headline(status: RunStatus, now_unix_s: float) -> str:
    """One line: the run and its state."""
    there = len(status.ranks)
    count = (
        f"{there} rank{'s' * (there != 1)}" if there == status.world_size else f"{there} of {status.world_size} ranks"
    )
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    up = since(max(0.0, now_unix_s - status.started_unix_s))
    return (
        f"{status.run}  {clean(status.name)}  {told(status)}  ({count}, up {up}{attempt}, pid {status.supervisor_pid})"
    )


def details(status: RunStatus) -> list[str]:
    """The command, its directory, when safelaunch would suspect a hang, and what it saw while the job was quiet."""
    early = status.early
    return [
        f"{clean(shlex.join(status.command))}  (in {clean(status.cwd)})",
        f"suspects a hang after {status.threshold_s:g} s without a step ({clean(status.threshold_why)})",
        *(f"note: {clean(note)}" for note in status.notes),
        *(f"{time.strftime('%H:%M:%S', time.localtime(one.unix_s))} {clean(in_status(one))}" for one in early[-3:]),
        *([f"the other nodes are not known: {clean(status.alone)}"] if status.alone else []),
    ]


# --- watching ---------------------------------------------------------------------------------------------------------


def _watch(word: str | None) -> int:
    """Shows the runs until Ctrl-C, or until the requested run has ended."""
    choose(look(our_roots()), word)

    def again() -> tuple[Run, ...]:
        return select(look(our_roots()), word)

    try:
        return _watch_terminal(again, word) if sys.stdout.isatty() else _watch_plain(again, word)
    except KeyboardInterrupt:
        return 0


def _watch_plain(again: Callable[[], tuple[Run, ...]], word: str | None) -> int:
    while True:
        runs = again()
        show("\n".join([time.strftime("%H:%M:%S"), text(runs, time.time()) if runs else NONE_LIVE, ""]))
        if word is not None and not runs:
            return 0
        time.sleep(PLAIN_REFRESH_S)


def _watch_terminal(again: Callable[[], tuple[Run, ...]], word: str | None) -> int:
    from rich.live import Live

    with Live(screen=False, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            runs = again()
            live.update(picture(runs, time.time()), refresh=True)
            if word is not None and not runs:
                return 0
            time.sleep(REFRESH_S)


def picture(runs: Sequence[Run], now_unix_s: float) -> Group:
    """All runs for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for run in runs:
        if run.status is None:
            parts += [Text(redact(f"{run.id}  {clean(run.problem)}"), style="yellow"), Text("")]
            continue
        moves = run.status.watch == "watching"
        parts.append(Text(redact(headline(run.status, now_unix_s)), style="bold" if moves else "bold yellow"))
        parts += [Text(redact(f"  {line}"), style="dim") for line in details(run.status)]
        parts += [_table(rows(run.status)), Text("")]
        if run.status.nodes:
            parts += [_node_table(nodes(run.status)), Text("")]
    return Group(*(parts or [Text(NONE_LIVE)]), Text(f"{time.strftime('%H:%M:%S')}  Ctrl-C to leave", style="dim"))


def _node_table(table: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=True, header_style="dim")
    for name in NODE_COLUMNS:
        shown.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name != "note", overflow="fold")
    for cells in table:
        shown.add_row(*(Text(redact(cell)) for cell in cells), style="" if cells[3] == "heard" else "bold yellow")
    return shown


def _table(table: Sequence[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=True, header_style="dim")
    for name in COLUMNS:
        last = name == COLUMNS[-1]
        shown.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=not last, overflow="fold")
    for row in table:
        shown.add_row(*(Text(redact(cell)) for cell in row.cells), style=_STYLES[row.mood])
    return shown
