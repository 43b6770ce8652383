"""The screen of ``safelaunch status --watch``: a view in, lines of a given size out; and the terminal that shows them.

A screen is small and a job may be large: ranks that are alike share a line, those that stand out come first, and of
several runs the selected one gets the room.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Literal

from safelaunch.cli.status_rows import (
    BEHIND_STEPS,
    Mood,
    Row,
    node_cells,
    rate,
    rows,
    since,
    standing_s,
    stepping,
    stragglers,
)
from safelaunch.cli.table import Table
from safelaunch.model import EarlyLook, duration, format_ranks
from safelaunch.supervise.control.discover import Run
from safelaunch.supervise.control.protocol import NodeStatus, RankStatus, RunStatus, StackStatus
from safelaunch.supervise.watch.quiet import is_quiet
from safelaunch.system.printable import clean
from safelaunch.verdict.reading.frames import is_library, place

Style = Literal["plain", "bold", "dim", "warn", "alarm", "title", "good"]

SPARK_CELLS, SPARK_CELL_S = 24, 5.0
MANY_RANKS = 8  # from here on, ranks that are alike share a line
LEAST_ROWS = 4  # of the selected run's table
KEYS = (("d", "dump"), ("s", "stacks"), ("q", "quit"))
_LONGEST_RANKS, _LEAST_DOING = 24, 24  # columns of the terminal
_COLUMNS = ("ranks", "state", "step", "rate", "age", "rss", "gpu", "doing")
_RIGHT = frozenset({"step", "rate", "age", "rss", "gpu"})
_LESS_WANTED = ("rss", "state", "rate", "gpu")
_STYLES: dict[Mood, Style] = {"good": "plain", "behind": "warn", "late": "alarm", "quiet": "dim"}
_STATES = {
    "watching": ("watching", "good"),
    "confirming": ("hang suspected: looking closer", "alarm"),
    "undecided": ("no step, but something is computing, writing or serving", "warn"),
    "hung": ("hung", "alarm"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the screen."""

    text: str
    style: Style = "plain"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that the terminal's encoding has. ``bars``: from no step at all to the highest rate."""

    bars: str = "▁▂▃▄▅▆▇█"
    cut: str = "…"
    dot: str = "·"


ASCII = Glyphs("_.:-=+*#", "~", "-")


@dataclass(frozen=True, slots=True)
class View:
    """What the screen shows. ``selected``: a run's id; ``messages``: the newest of what the keys have led to.

    ``stacks``: of the selected run, shown instead of its ranks.
    """

    runs: tuple[Run, ...]
    now_unix_s: float
    selected: str = ""
    messages: tuple[str, ...] = ()
    stacks: tuple[StackStatus, ...] | None = None
    keys: bool = True


def screen(view: View, width: int, height: int, glyphs: Glyphs = Glyphs()) -> list[Line]:
    """At most ``height`` lines of at most ``width`` characters."""
    foot = _foot(view, width, glyphs)
    room = max(1, height - len(foot))
    if not view.runs:
        body = [Line("you have no runs on this node", "dim")]
    else:
        body = _runs(view, width, room, glyphs)
    lines = [*body[:room], *foot]
    return [Line(fit(line.text, width, glyphs), line.style) for line in lines[:height]]


def fit(text: str, width: int, glyphs: Glyphs) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + glyphs.cut


def _foot(view: View, width: int, glyphs: Glyphs) -> list[Line]:
    said = [Line(part, "bold") for text in view.messages[-2:] for part in _whole(clean(text), width)]
    keys = [f"{key} {'ranks' if key == 's' and view.stacks is not None else word}" for key, word in KEYS]
    keys += ["tab next run"] if len(view.runs) > 1 else []
    words = keys if view.keys else ["Ctrl-C quit"]
    clock = time.strftime("%H:%M:%S", time.localtime(view.now_unix_s))
    return [*said, Line("  ".join([clock, *words]), "dim")]


def _whole(text: str, width: int) -> list[str]:
    """A message in as many lines as it needs: a path in it can still be copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


# --- several runs -----------------------------------------------------------------------------------------------------


def _runs(view: View, width: int, room: int, glyphs: Glyphs) -> list[Line]:
    selected = next((run for run in view.runs if run.id == view.selected), view.runs[0])
    several = len(view.runs) > 1
    others = [run for run in view.runs if run is not selected]
    short = {run.id: _short(run, width, glyphs) for run in others}
    for most in (2, 1, 0):  # lines for each of the others
        kept = {name: lines[:most] for name, lines in short.items()}
        taken = sum(map(len, kept.values()))
        if taken + LEAST_ROWS + 6 <= room:
            break
    hidden = 0 if any(kept.values()) or not others else len(others)
    left = room - sum(map(len, kept.values())) - bool(hidden)
    whole = _whole_run(selected, view, width, left, glyphs)
    lines: list[Line] = []
    for run in view.runs:
        if run is selected:
            lines += [Line(f"> {whole[0].text}", whole[0].style), *whole[1:]] if several else whole
        else:
            mine = kept[run.id]
            lines += [Line(line.text if at else f"  {line.text}", line.style) for at, line in enumerate(mine)]
    if hidden:
        strange = sum(short[run.id][0].style != "title" for run in others)
        word = f", {strange} of which need{'s' * (strange == 1)} a look" if strange else ""
        lines.append(Line(f"  and {hidden} more run{'s' * (hidden != 1)}{word}: tab shows the next", "dim"))
    return lines


def _short(run: Run, width: int, glyphs: Glyphs) -> list[Line]:
    if run.status is None:
        return [Line(f"{run.id}  {clean(run.problem)}", "warn")]
    return [title(run.status, 0.0, width, glyphs, short=True), *_progress(run.status, width, glyphs)[1:2]]


# --- one run ----------------------------------------------------------------------------------------------------------


def _whole_run(run: Run, view: View, width: int, room: int, glyphs: Glyphs) -> list[Line]:
    status = run.status
    if status is None:
        return [Line(f"{run.id}  {clean(run.problem)}", "warn")]
    head = [title(status, view.now_unix_s, width, glyphs), *_progress(status, width, glyphs)]
    head += _words(status, width)
    notes = [line for one in status.inconsistent for line in _wrapped(f"wrong result: {one.words}", width)]
    notes += [Line(f"  note: {clean(note)}", "warn") for note in status.notes]
    notes += [Line(f"  the state of the other nodes is unknown: {clean(status.alone)}", "warn")] if status.alone else []
    about_nodes = _nodes(status.nodes, width, max(3, room // 3), glyphs) if len(status.nodes) > 1 else []
    left = room - len(head) - len(about_nodes)
    notes = notes[: max(0, left - LEAST_ROWS)]
    left -= len(notes)
    if view.stacks is not None:
        table = _stacks(view.stacks, width, left)
    else:
        table = _ranks(status, width, left, glyphs)
    return [*head, *notes, *table, *about_nodes]


def title(status: RunStatus, now_unix_s: float, width: int, glyphs: Glyphs, *, short: bool = False) -> Line:
    """``r2402  pretrain  watching · 64 ranks · up 2h05m · pid 2402``."""
    there = len(status.ranks)
    words, style = _STATES.get(status.watch, (clean(status.watch), "warn"))
    standing = standing_s(status)
    if standing and status.watch == "watching":
        words, style = f"no step for {since(standing)}", "warn"
    slow = stragglers(status.ranks)
    if slow and style == "good":
        words, style = f"watching; behind the others: {_ranks_word(slow)}", "warn"
    count = str(there) if there == status.world_size else f"{there} of {status.world_size}"
    parts = [words, f"{count} rank{'s' * (count != '1')}"]
    steps = [one.step or 0 for one in stepping(status)]
    if short and steps:
        parts += [f"step {min(steps):,}", *([pace] if (pace := _pace(status)) != "-" else [])]
    if not short:
        parts += [f"attempt {status.attempt}"] * bool(status.attempt)
        parts += [f"up {since(max(0.0, now_unix_s - status.started_unix_s))}", f"pid {status.supervisor_pid}"]
    name = f"{status.run}  {clean(status.name)}  "
    kept = parts
    while len(kept) > 1 and len(name) + len(f" {glyphs.dot} ".join(kept)) > width - 2:
        kept = kept[:-1]
    return Line(name + f" {glyphs.dot} ".join(kept), "title" if style == "good" else style)  # type: ignore[arg-type]


def _ranks_word(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(tuple(ranks))}"


def _progress(status: RunStatus, width: int, glyphs: Glyphs) -> list[Line]:
    """The step, the rate and its course; then how long it has been quiet, against what is usual and what is allowed."""
    steps = [one.step or 0 for one in stepping(status)]
    if not steps:
        what = "no rank has started yet" if not status.ranks else "no step yet"
        return [Line(f"  {what}; suspected after {status.threshold_s:g} s ({clean(status.threshold_why)})", "dim")]
    standing = standing_s(status)
    bars = spark(course(status.history), glyphs) if width >= 60 else ""
    first = f"  step {min(steps):,}  {_pace(status)}  {bars}".rstrip()
    quiet, usual = min(one.age_s or 0.0 for one in stepping(status)), status.usual_step_s
    times = f", {quiet / usual:,.0f} x usual ({_seconds(usual)})" if standing else ""
    usually = f"; usual {_seconds(usual)}" if usual and not standing else ""
    said = f"quiet for {_seconds(quiet)}{times}" if standing else f"last step {_seconds(quiet)} ago{usually}"
    second = f"  {said}; suspected after {status.threshold_s:g} s"
    if len(second) + len(clean(status.threshold_why)) + 3 <= width:
        second += f" ({clean(status.threshold_why)})"
    return [Line(first, "alarm" if standing else "bold"), Line(second, "alarm" if standing else "dim")]


def _pace(status: RunStatus) -> str:
    """The rate of the slowest rank. One that was measured before the job froze is none."""
    rates = [one.steps_per_s for one in stepping(status) if one.steps_per_s is not None]
    return "0/s" if standing_s(status) else rate(min(rates)) if rates else "-"


def _seconds(value: float) -> str:
    """``2 ms``, ``0.05 s``, ``13 s``, ``3m12s``."""
    return duration(value) if value < 60 else since(value)


def course(history: Sequence[tuple[float, int]]) -> list[float | None]:
    """Steps per second over the last two minutes, in equal parts; None before the first known step."""
    points = sorted((-ago_s, step) for ago_s, step in history)
    if not points:
        return []
    points.append((0.0, points[-1][1]))  # what is not known to have been made since, was not
    edges = [-SPARK_CELL_S * (SPARK_CELLS - number) for number in range(SPARK_CELLS + 1)]
    steps = [_step_at(points, edge) for edge in edges]
    return [
        None if before is None or after is None else max(0.0, (after - before) / SPARK_CELL_S)
        for before, after in pairwise(steps)
    ]


def _step_at(points: Sequence[tuple[float, int]], at_s: float) -> float | None:
    """Between two known steps, as if they had been made evenly; None before the first."""
    if at_s < points[0][0]:
        return None
    for (begin_s, first), (end_s, last) in pairwise(points):
        if at_s <= end_s:
            part = (at_s - begin_s) / (end_s - begin_s) if end_s > begin_s else 1.0
            return first + part * (last - first)
    return float(points[-1][1])


def spark(rates: Sequence[float | None], glyphs: Glyphs) -> str:
    """A bar for each rate, the highest one full; a blank where it is not known, the lowest bar for none at all."""
    most = max((one for one in rates if one), default=0.0)
    top = len(glyphs.bars) - 1
    bars = [
        " " if one is None else glyphs.bars[0 if not one or not most else max(1, round(top * one / most))]
        for one in rates
    ]
    return "".join(bars).lstrip()


def _wrapped(text: str, width: int, style: Style = "warn", first: str = "  ") -> list[Line]:
    """At most three lines, below a progress line."""
    lines = textwrap.wrap(clean(text), max(20, width - 4), break_on_hyphens=False, break_long_words=False)
    return [Line(f"{first if not number else '    '}{line}", style) for number, line in enumerate(lines[:3])]


def _words(status: RunStatus, width: int) -> list[Line]:
    """What an early look has found, while that lasts."""
    look = lasting(status.early)
    return _wrapped(look.words, width, "warn" if look.movement == "still" else "dim", "    ") if look else []


def lasting(early: Sequence[EarlyLook]) -> EarlyLook | None:
    """The newest early look, if what it saw is not over."""
    return early[-1] if early and not early[-1].lasted_s else None


# --- its ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that are alike."""

    ranks: tuple[RankStatus, ...]
    row: Row
    doing: str

    @property
    def stands_out(self) -> bool:
        return self.row.mood in ("behind", "late") or bool(self.doing)


def _ranks(status: RunStatus, width: int, room: int, glyphs: Glyphs) -> list[Line]:
    if not status.ranks or room < 2:
        return []
    groups = _groups(status, fold=len(status.ranks) > min(MANY_RANKS, room - 1))
    shown = groups
    if len(groups) > room - 1:
        shown = sorted(groups, key=lambda one: not one.stands_out)[: max(0, room - 2)]
    cells = [_cells(one, status.usual_step_s, glyphs) for one in shown]
    table = Table(_COLUMNS, cells, _RIGHT, less_wanted=_LESS_WANTED)
    if all(row[_COLUMNS.index("gpu")] == "-" for row in cells):
        table = table.without("gpu")
    lines = table.fitted(width - 2, _LEAST_DOING).lines(indent="  ")
    styled = [Line(lines[0], "dim")]
    styled += [Line(text, _STYLES[one.row.mood]) for text, one in zip(lines[1:], shown, strict=True)]
    hidden = sum(len(one.ranks) for one in groups) - sum(len(one.ranks) for one in shown)
    return [*styled, *([Line(f"  and {hidden} more ranks", "dim")] if hidden else [])]


def _groups(status: RunStatus, *, fold: bool) -> list[_Group]:
    """The ranks in their order. Ranks that meet in every step are a step apart when their pages are read."""
    look = lasting(status.early)
    places = {one.rank: place(one.frame) for one in look.places if one.frame is not None} if look is not None else {}
    ordered = sorted(status.ranks, key=lambda one: one.rank)
    furthest = max((one.step for one in ordered if one.step is not None), default=0)
    groups: dict[object, list[tuple[RankStatus, Row, str]]] = {}
    for one, row in zip(ordered, rows(status), strict=True):
        doing = clean(one.doing) or clean(places.get(one.rank, "")) or clean(one.phase)
        behind = furthest - one.step if one.step is not None else None
        near = None if behind is None else max(0, behind - BEHIND_STEPS + 1)
        key = (one.state, doing, row.mood, near) if fold else one.rank
        groups.setdefault(key, []).append((one, row, doing))
    return [_Group(tuple(rank for rank, _, _ in of), of[0][1], of[0][2]) for of in groups.values()]


def _cells(group: _Group, usual_s: float, glyphs: Glyphs) -> tuple[str, ...]:
    ranks = group.ranks
    steps = [one.step for one in ranks if one.step is not None]
    rates = [one.steps_per_s for one in ranks if one.steps_per_s is not None]
    ages = [one.age_s for one in ranks if one.age_s is not None]
    memory, of_gpus = max(one.rss_bytes for one in ranks), max(one.gpu_bytes for one in ranks)
    times = max(ages) / usual_s if ages and usual_s and steps else 0.0
    age = since(max(ages)) if ages else "-"
    age += f" ({times:,.0f} x)" if times and is_quiet(max(ages), usual_s) else ""
    doing = ", ".join(part for part in (group.doing, group.row.note) if part)
    return (
        fit(format_ranks(tuple(one.rank for one in ranks)), _LONGEST_RANKS, glyphs),
        group.row.cells[2],
        f"{min(steps):,}" if steps else "-",
        rate(min(rates)) if rates else "-",
        age,
        size(memory) if memory else "-",
        size(of_gpus) if of_gpus else "-",
        doing or "-",
    )


def size(value: int) -> str:
    """``812M``, ``3.1G``."""
    mib = value / (1 << 20)
    return f"{mib:.0f}M" if mib < 1000 else f"{mib / 1024:.1f}G" if mib < 102_400 else f"{mib / 1024:.0f}G"


# --- stacks, nodes ----------------------------------------------------------------------------------------------------


def _stacks(stacks: Sequence[StackStatus], width: int, room: int) -> list[Line]:
    """Each group's stack, the user's own frames bold. With many groups, each gets its innermost frames."""
    if room < 2:
        return []
    if not stacks:
        return [Line("  looking at the ranks ...", "dim")]
    each = max(1, room // len(stacks) - 1)
    lines: list[Line] = []
    for group in stacks:
        word = "rank" if group.ranks.isdigit() else "ranks"
        lines.append(Line(f"  {word} {group.ranks}{f': {clean(group.missing)}' if group.missing else ''}", "title"))
        frames = group.frames
        if len(frames) > each:  # the user's own code tells most
            own = [one for one in frames if not is_library(one.file)]
            frames = (*frames[: max(1, each // 3)], *(one for one in own if one not in frames[: max(1, each // 3)]))[
                :each
            ]
        for frame in frames:
            where = f"    {clean(frame.function)}  {clean(frame.file)}:{frame.line}"
            if len(where) > width:
                where = f"    {clean(place(frame))}"
            lines.append(Line(where, "dim" if is_library(frame.file) else "plain"))
    return lines[:room]


def _nodes(found: Sequence[NodeStatus], width: int, room: int, glyphs: Glyphs) -> list[Line]:
    """The nodes that are not as they should be, and a line for all others."""
    strange = [one for one in found if one.state != "heard" or one.trouble or one.doing not in ("watching", "")]
    if len(found) + 1 <= room:
        strange = list(found)
    shown = strange[: max(0, room - 2)]
    lines = []
    for one in shown:
        words = "  ".join(cell for cell in node_cells(one) if cell != "-")
        lines.append(Line(f"  {words}", "plain" if one.state == "heard" else "warn"))
    rest = len(found) - len(shown)
    if rest:
        steps = [one.step for one in found if one.step is not None and one not in shown]
        behind = f", step {min(steps):,}" if steps else ""
        lines.append(Line(f"  {rest} {'more ' if shown else ''}node{'s' * (rest != 1)}{behind}", "dim"))
    return [Line(f"  {len(found)} nodes", "dim"), *lines] if lines else []


# --- the terminal -----------------------------------------------------------------------------------------------------

# As rich names them; where colour is off, what is bold stays so.
_RICH = {"plain": "", "bold": "bold", "dim": "dim", "warn": "bold yellow", "alarm": "bold red", "title": "bold cyan"}
LONGEST_KEY = 8


def is_usable() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Terminal:
    """``with Terminal() as terminal: terminal.draw(lines); terminal.key(1.0)``. rich draws; keys are read here.

    Ctrl-C, SIGTERM and SIGHUP leave the block as exceptions; Ctrl-Z gives the screen back for as long as it lasts.
    """

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self.has_keys = sys.stdin.isatty()

    def __enter__(self) -> Terminal:
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        try:
            self._take()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        return self._live.console.size

    def draw(self, lines: Sequence[Line]) -> None:
        """Draws the whole screen."""
        from rich.console import Group
        from rich.text import Text

        encoding = sys.stdout.encoding or "ascii"
        known = [Line(line.text.encode(encoding, "replace").decode(encoding), line.style) for line in lines]
        shown = [Text(line.text, _RICH.get(line.style, ""), no_wrap=True, overflow="crop") for line in known]
        self._live.update(Group(*shown), refresh=True)

    def key(self, patience_s: float) -> str:
        """The next key, or an empty text after ``patience_s`` seconds. A key with an escape sequence gives that."""
        if not self.has_keys:
            time.sleep(patience_s)
            return ""
        if not _is_typed(patience_s):
            return ""
        data = os.read(sys.stdin.fileno(), 1)
        if not data:
            self.has_keys = False  # the other end is closed
        while data.startswith(b"\x1b") and len(data) < LONGEST_KEY and _is_typed(0.0):
            data += os.read(sys.stdin.fileno(), 1)
            if data[-1:].isalpha() or data[-1:] == b"~":
                break
        return data.decode("ascii", "replace")

    def _take(self) -> None:
        if self.has_keys:
            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())  # Ctrl-C and Ctrl-Z remain what they are
        self._live.start()

    def _give_back(self) -> None:
        try:
            self._live.stop()
            if self._before is not None:
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)  # type: ignore[arg-type]
        except (OSError, termios.error):
            pass  # the terminal is gone
        self._before = None

    def _end(self, signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: as if this program knew nothing of it, but with the terminal as it was."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._take()


def _is_typed(patience_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], patience_s)
    return bool(ready)
