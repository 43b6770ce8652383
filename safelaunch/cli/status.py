"""``safelaunch status [RUN]``: every run of this user on this node, and its ranks; --watch refreshes it."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from safelaunch.job.paths import RunPaths
from safelaunch.report.early import in_status
from safelaunch.supervise.control.discover import Run, describe, look, our_roots, select
from safelaunch.supervise.control.protocol import DumpAnswer, Request, RunStatus, StacksAnswer, StackStatus, ask
from safelaunch.system.console import display, redact, say, show, show_json
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import SafelaunchError, UsageError
from safelaunch.system.printable import clean
from safelaunch.system.task import Task

from .dump import DUMP_DEADLINE_S
from .parsing import Parser
from .status_rows import COLUMNS, NODE_COLUMNS, nodes, rows, since, told
from .status_screen import ASCII, Glyphs, Line, Terminal, View, is_usable, screen
from .table import ENDLESS, Table

REFRESH_S = 1.0
PLAIN_REFRESH_S = 5.0
NONE_LIVE = "you have no runs on this node"
_RIGHT = frozenset({"rank", "pid", "step", "rate", "age"})
NOTE_WIDTH = 28  # beyond which it may go on in the next line
_LESS_WANTED = ("signals", "phase", "state", "pid")
STACKS_DEADLINE_S = 20.0


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
    on = display(1, os.environ)
    show(text(runs, time.time(), on.width if on.terminal else None))
    return 0


def parser() -> Parser:
    """The command line of ``safelaunch status``."""
    found = Parser(
        "status",
        description="Shows your runs on this node: each rank's step, rate, age of its last step and phase, and when "
        "safelaunch would suspect a hang.",
    )
    found.add_argument("run", nargs="?", metavar="RUN", help="only this run: run id (r4711), name, or supervisor's pid")
    found.add_argument("--watch", action="store_true", help="a screen to leave open: d dump, s stacks, q quit")
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


class AnsweringRun(RunStatus, frozen=True, kw_only=True):
    """A run for --json, as its supervisor describes it."""

    directory: str
    alive: bool
    problem: str


class SilentRun(msgspec.Struct, frozen=True):
    """A run for --json whose supervisor gave no answer. ``problem``: why; ``alive``: the supervisor is."""

    run: str
    supervisor_pid: int | None
    directory: str
    alive: bool
    problem: str


def document(run: Run) -> dict[str, Any]:
    """One run for --json: the supervisor's answer, if any, and always ``directory``, ``alive`` and ``problem``."""
    directory = os.fspath(run.found.directory)
    found: AnsweringRun | SilentRun = SilentRun(run.id, run.pid, directory, run.alive, run.problem)
    if run.status is not None:
        said = msgspec.structs.asdict(run.status)
        found = AnsweringRun(**said, directory=directory, alive=run.alive, problem=run.problem)
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document


# --- plain text -------------------------------------------------------------------------------------------------------


def text(runs: Sequence[Run], now_unix_s: float, width: int | None = None) -> str:
    """All runs as aligned lines, separated by empty lines; ``width``: of a terminal, on which no word is to break."""
    return "\n\n".join("\n".join(_lines(run, now_unix_s, width)) for run in runs)


def _lines(run: Run, now_unix_s: float, width: int | None) -> list[str]:
    if run.status is None:
        return _broken([f"{run.id}  {clean(run.problem)}"], width)
    lines = _broken([headline(run.status, now_unix_s), *(f"  {line}" for line in details(run.status))], width)
    table = Table(COLUMNS, [row.cells for row in rows(run.status)], _RIGHT, less_wanted=_LESS_WANTED)
    if not table.rows:
        lines.append("  no rank has started yet")
    elif width is None or "signals" in table.fitted(width - 2).columns:
        lines += table.fitted(width - 2 if width else ENDLESS).lines(indent="  ")
    else:  # a note goes on in its column, which is the last one then
        lines += table.without("signals").fitted(width - 2, NOTE_WIDTH).lines(width, "  ")
    if run.status.nodes:
        lines += ["", *Table(NODE_COLUMNS, nodes(run.status), _RIGHT).lines(indent="  ")]
    return lines


def _broken(lines: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return [*lines]
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    ]


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
        *(f"wrong result: {clean(one.words)}" for one in status.inconsistent),
        *([f"the state of the other nodes is unknown: {clean(status.alone)}"] if status.alone else []),
    ]


# --- watching ---------------------------------------------------------------------------------------------------------


def _watch(word: str | None) -> int:
    """Shows the runs until Ctrl-C, or until the requested run has ended."""
    choose(look(our_roots()), word)

    def again() -> tuple[Run, ...]:
        return select(look(our_roots()), word)

    try:
        return _watch_terminal(again, word) if is_usable() else _watch_plain(again, word)
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
    watching = Watching()
    ended = False
    glyphs = Glyphs() if "utf" in (sys.stdout.encoding or "").lower() else ASCII
    try:
        with Terminal() as terminal:
            while not ended:
                runs = again()
                ended = word is not None and not runs
                watching.saw(runs)
                due_s = time.monotonic() + REFRESH_S
                while not ended and (left_s := due_s - time.monotonic()) > 0:
                    width, height = terminal.size()
                    lines = screen(watching.view(time.time(), keys=terminal.has_keys), width, height, glyphs)
                    terminal.draw([Line(redact(line.text), line.style) for line in lines])
                    key = terminal.key(left_s)
                    if key == "q":
                        return 0
                    if key:
                        watching.on_key(key)
    finally:
        for message in (*watching.messages, *watching.unfinished):
            say(message)
    say(f"{word} has ended")
    return 0


class Watching:
    """What the keys have led to. Questions to a run are asked in threads: the screen goes on."""

    def __init__(self, ask: Callable[[Run, Request], bytes] | None = None) -> None:
        self._ask = ask or _ask
        self._runs: tuple[Run, ...] = ()
        self._selected = ""
        self._stacks: Task[tuple[StackStatus, ...]] | None = None
        self._dumps: dict[str, Task[str]] = {}
        self.messages: tuple[str, ...] = ()

    def saw(self, runs: tuple[Run, ...]) -> None:
        """Takes the runs as they are now, and what has come of the questions."""
        self._runs = runs
        if runs and self._selected not in [run.id for run in runs]:
            self._selected, self._stacks = runs[0].id, None
        for name, task in list(self._dumps.items()):
            if task.done:
                del self._dumps[name]
                self.messages = (*self.messages, _result_of(task, f"no bundle of {name}"))

    def view(self, now_unix_s: float, *, keys: bool) -> View:
        stacks: tuple[StackStatus, ...] | None = None
        if self._stacks is not None:
            stacks = ()
            if self._stacks.done:
                try:
                    stacks = self._stacks.result()
                except Exception as error:  # noqa: BLE001 - shown where the stacks would stand
                    stacks = (StackStatus("", missing=f"no stacks: {error}"),)
        waiting = tuple(f"taking a bundle of {name}, which continues ..." for name in self._dumps)
        return View(self._runs, now_unix_s, self._selected, (*self.messages, *waiting), stacks, keys)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """What goes on although nobody will see its result here."""
        return tuple(f"the bundle of {name} is still being written: see its bundle directory" for name in self._dumps)

    def on_key(self, key: str) -> None:
        run = next((run for run in self._runs if run.id == self._selected), None)
        if run is None:
            return
        if key in ("\t", "\x1b[B", "j"):
            self._select(1)
        elif key in ("\x1b[A", "\x1b[Z", "k"):
            self._select(-1)
        elif key == "d" and run.id not in self._dumps:
            self._dumps[run.id] = Task("dump", lambda: self._dump(run))
        elif key == "s":
            self._stacks = Task("stacks", lambda: self._look(run)) if self._stacks is None else None

    def _select(self, by: int) -> None:
        names = [run.id for run in self._runs]
        self._selected = names[(names.index(self._selected) + by) % len(names)]
        self._stacks = None

    def _dump(self, run: Run) -> str:
        answer = from_json(self._ask(run, Request("dump")), DumpAnswer)
        if not answer.bundle:
            return f"no bundle of {run.id}: {clean(answer.problem)}"
        return f"{clean(answer.summary)} bundle: {answer.bundle}"

    def _look(self, run: Run) -> tuple[StackStatus, ...]:
        answer = from_json(self._ask(run, Request("stacks")), StacksAnswer)
        if answer.problem:
            raise SafelaunchError(answer.problem)
        return tuple(answer.stacks)


def _ask(run: Run, request: Request) -> bytes:
    deadline_s = DUMP_DEADLINE_S if request.command == "dump" else STACKS_DEADLINE_S
    return ask(RunPaths(run.found.directory).control, request, deadline_s=deadline_s)


def _result_of(task: Task[str], otherwise: str) -> str:
    try:
        return task.result()
    except Exception as error:  # noqa: BLE001 - the screen goes on
        return f"{otherwise}: {clean(str(error))}"
