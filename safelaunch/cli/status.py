"""``safelaunch status [RUN]``: shows this user's runs on this node, and their ranks; --watch refreshes it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from safelaunch.bundle.copier import BUNDLE
from safelaunch.model.words import since
from safelaunch.report.about import in_status
from safelaunch.supervise.control.discover import Run, describe, look, our_roots, select
from safelaunch.supervise.control.protocol import RunStatus
from safelaunch.system.console import display, redact, say, show, show_json, wrapped
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import UsageError
from safelaunch.system.printable import clean

from .parsing import Parser
from .status_screen import ASCII, COLUMNS, NODE_COLUMNS, Glyphs, StatusLine, drawn, node_cells, rows, screen, told
from .table import ENDLESS, TextTable

REFRESH_S = 1.0
PLAIN_REFRESH_S = 5.0
MOST_READ = 64  # bundles read to find an ended run's
LARGEST_VERDICT = 4 << 20
NONE_LIVE = "you have no runs on this node"
_RIGHT = frozenset({"rank", "pid", "step", "rate", "age"})
NOTE_WIDTH = 28  # longer notes continue on the next line
_LESS_WANTED = ("signals", "phase", "state", "pid")


def main(argv: list[str]) -> int:
    """Prints the runs; returns 0 even if there are none, and 2 if RUN doesn't exist."""
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
    on = display(1, os.environ)
    show(text(runs, time.time(), on.width if on.terminal else None))
    return 0


def parser() -> Parser:
    command_line = Parser(
        "status",
        description="Shows your runs on this node: each rank's step, rate, age of its last step and phase, and when "
        "safelaunch would suspect a hang.",
    )
    command_line.add_argument(
        "run", nargs="?", metavar="RUN", help="only this run: run id (r4711), name, or supervisor's pid"
    )
    command_line.add_argument("--watch", action="store_true", help="show a live screen")
    command_line.add_argument("--json", action="store_true", help="print one JSON document: a list of runs")
    return command_line


def choose(runs: Sequence[Run], word: str | None) -> tuple[Run, ...]:
    """Returns the runs that ``word`` names, or all of them; prints a note if a name matches several.

    Raises UsageError if none matches.
    """
    chosen = select(runs, word)
    if word is not None and not chosen:
        raise UsageError(f"status: no run is called {word!r}.", describe(runs))
    if word is not None and len(chosen) > 1:
        say(f"{len(chosen)} runs are called {word!r}: {', '.join(run.id for run in chosen)}")
    return chosen


class AnsweringRun(RunStatus, frozen=True, kw_only=True):
    """A run that answered, for --json."""

    directory: str
    alive: bool
    problem: str


class SilentRun(msgspec.Struct, frozen=True):
    """A run that didn't answer, for --json."""

    run: str
    supervisor_pid: int | None
    directory: str
    alive: bool
    problem: str  # why it has no answer


def document(run: Run) -> dict[str, Any]:
    """Returns a run for --json: the supervisor's answer, if any, and ``directory``, ``alive`` and ``problem``."""
    directory = os.fspath(run.directory)
    answer: AnsweringRun | SilentRun = SilentRun(run.id, run.pid, directory, run.alive, run.problem)
    if run.status is not None:
        fields = msgspec.structs.asdict(run.status)
        answer = AnsweringRun(**fields, directory=directory, alive=run.alive, problem=run.problem)
    document: dict[str, Any] = msgspec.to_builtins(answer)
    return document


# --- plain text -------------------------------------------------------------------------------------------------------


def text(runs: Sequence[Run], now_unix_s: float, width: int | None = None) -> str:
    """Returns all runs as aligned lines. If ``width`` is given, lines break only between words."""
    return "\n\n".join("\n".join(_lines(run, now_unix_s, width)) for run in runs)


def _lines(run: Run, now_unix_s: float, width: int | None) -> list[str]:
    if run.status is None:
        return _broken([f"{run.id}  {clean(run.problem)}"], width)
    lines = _broken([headline(run.status, now_unix_s), *(f"  {line}" for line in details(run.status))], width)
    table = TextTable(COLUMNS, [row.cells for row in rows(run.status)], _RIGHT, less_wanted=_LESS_WANTED)
    if not table.rows:
        lines.append("  no rank has started yet")
    elif width is None or "signals" in table.fitted(width - 2).columns:
        lines += table.fitted(width - 2 if width else ENDLESS).lines(indent="  ")
    else:  # a note continues in its column, which must be the last one
        lines += table.without("signals").fitted(width - 2, NOTE_WIDTH).lines(width, "  ")
    if run.status.nodes:
        lines += ["", *TextTable(NODE_COLUMNS, [*map(node_cells, run.status.nodes)], _RIGHT).lines(indent="  ")]
    return lines


def _broken(lines: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return [*lines]
    return [part for line in lines for part in wrapped(line, width, others="    ")]


def headline(status: RunStatus, now_unix_s: float) -> str:
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
    """Returns a run's details: command, directory, the time until it is suspected of hanging, and early looks."""
    early = status.early
    return [
        f"{clean(shlex.join(status.command))}  (in {clean(status.cwd)})",
        f"suspects a hang after {status.threshold_s:g} s without a step ({clean(status.threshold_why)})",
        *(f"note: {clean(note)}" for note in status.notes),
        *(
            f"{time.strftime('%H:%M:%S', time.localtime(early_look.unix_s))} {clean(in_status(early_look))}"
            for early_look in early[-3:]
        ),
        *(f"wrong result: {clean(wrong_result.words)}" for wrong_result in status.wrong_results),
        *([f"the state of the other nodes is unknown: {clean(status.alone)}"] if status.alone else []),
    ]


# --- watching ---------------------------------------------------------------------------------------------------------


def _watch(word: str | None) -> int:
    """Shows the runs until Ctrl-C. If ``word`` names a run, stops when it has ended, and prints how."""
    seen = {run.id: run for run in choose(look(our_roots()), word)}

    def again() -> tuple[Run, ...]:
        runs = select(look(our_roots()), word)
        seen.update({run.id: run for run in runs if run.status is not None})
        return runs

    usable = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    try:
        code = _watch_terminal(again, word) if usable else _watch_plain(again, word)
    except KeyboardInterrupt:
        return 0
    for run in seen.values():
        for line in ending(run):
            say(line)
    return code


class _RunVerdict(msgspec.Struct):
    outcome: str = ""
    cause: str = ""
    summary: str = ""
    run: str = ""
    time: str = ""


def ending(run: Run) -> list[str]:
    """Returns the outcome, cause and bundle of the newest incident of a run that has ended."""
    status = run.status
    if status is None:
        return [f"{run.id} has ended"]
    head = f"{status.run} ({clean(status.name)}) has ended"
    bundle = _newest_bundle(status)
    if bundle is None:
        return [f"{head}; it left no bundle of a hang or crash"]
    path, verdict = bundle
    outcome = "a bundle of a possible hang" if verdict.outcome == "suspect" else verdict.outcome
    return [
        f"{head}: {clean(outcome)}, {clean(verdict.cause)}",
        clean(verdict.summary),
        f"bundle: {clean(os.fspath(path))}",
    ]


def _newest_bundle(status: RunStatus) -> tuple[Path, _RunVerdict] | None:
    """Returns a run's newest bundle, except those that users requested."""
    begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.started_unix_s))
    directory = Path(status.bundle_dir or "/nowhere")
    try:
        names = [(match["time"], match[0]) for path in directory.iterdir() if (match := BUNDLE.fullmatch(path.name))]
    except OSError:
        return None
    for _, name in sorted(names, reverse=True)[:MOST_READ]:
        verdict = _read(directory / name / "verdict.json")
        if verdict is not None and verdict.run == status.name and verdict.outcome != "dump" and verdict.time >= begun:
            return directory / name, verdict
    return None


def _read(path: Path) -> _RunVerdict | None:
    from safelaunch.bundle.reading.files import Unreadable, read_limited

    try:
        return from_json(read_limited(path, LARGEST_VERDICT), _RunVerdict)
    except (Unreadable, OSError, msgspec.DecodeError, RecursionError):
        return None


def _watch_plain(again: Callable[[], tuple[Run, ...]], word: str | None) -> int:
    while True:
        runs = again()
        show("\n".join([time.strftime("%H:%M:%S"), text(runs, time.time()) if runs else NONE_LIVE, ""]))
        if word is not None and not runs:
            return 0
        time.sleep(PLAIN_REFRESH_S)


def _watch_terminal(again: Callable[[], tuple[Run, ...]], word: str | None) -> int:
    """Shows the runs on the terminal's alternate screen; restores the normal screen even after a signal."""
    from rich.live import Live

    encoding = sys.stdout.encoding or "ascii"
    glyphs = Glyphs() if "utf" in encoding.lower() else ASCII
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with Live(screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while (runs := again()) or word is None:
            lines = screen(runs, time.time(), *live.console.size, glyphs)
            live.update(drawn([StatusLine(redact(line.text), line.style) for line in lines], encoding), refresh=True)
            time.sleep(REFRESH_S)
    return 0


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
