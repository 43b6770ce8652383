"""Draws ranks and nodes of runs as cells, and the screen of ``status --watch``: from runs to lines of a given size.

The screen is small, so equal ranks share a line, and conspicuous ones come first. If there are several runs, each has
two lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from safelaunch.cli.table import TextTable
from safelaunch.model import EarlyLook, duration, format_ranks, rank_words
from safelaunch.model.words import rate, since
from safelaunch.stacks.frames import place
from safelaunch.supervise.control.discover import Run
from safelaunch.supervise.control.protocol import NodeStatus, RankStatus, RunStatus
from safelaunch.supervise.watch.quiet import is_quiet
from safelaunch.system.console import wrapped
from safelaunch.system.printable import clean

COLUMNS = ("rank", "pid", "state", "step", "rate", "age", "phase", "note", "signals")
NODE_COLUMNS = ("node", "ranks", "step", "state", "doing", "note")
# Pages are read one after the other, so ranks that meet in every step can seem to differ by one.
BEHIND_STEPS = 2
# Share of the threshold up to which a step isn't late: every job has pauses.
LATE = 0.5

Mood = Literal["good", "behind", "late", "quiet"]
CellStyle = Literal["plain", "bold", "dim", "warn", "alarm", "title", "good"]

SPARK_CELLS, SPARK_CELL_S = 24, 5.0
MANY_RANKS = 8  # equal ranks share a line, from here on
LEAST_ROWS = 4
_LONGEST_RANKS, _LEAST_DOING = 24, 24
_COLUMNS = ("ranks", "state", "step", "rate", "age", "rss", "gpu", "doing")
_RIGHT = frozenset({"step", "rate", "age", "rss", "gpu"})
_LESS_WANTED = ("rss", "state", "rate", "gpu")
# rich's names
_RICH = {"plain": "", "bold": "bold", "dim": "dim", "warn": "bold yellow", "alarm": "bold red", "title": "bold cyan"}
_STYLES: dict[Mood, CellStyle] = {"good": "plain", "behind": "warn", "late": "alarm", "quiet": "dim"}
_STATES = {
    "watching": ("watching", "good"),
    "confirming": ("hang suspected: looking closer", "alarm"),
    "undecided": ("no step, but something is computing, writing or serving", "warn"),
    "hung": ("hung", "alarm"),
}


@dataclass(frozen=True, slots=True)
class StatusRow:
    cells: tuple[str, ...]
    mood: Mood
    note: str = ""  # why it is conspicuous


def rows(status: RunStatus) -> tuple[StatusRow, ...]:
    furthest = max((rank.step for rank in status.ranks if rank.step is not None), default=None)
    return tuple(_row(rank, furthest, status.threshold_s) for rank in sorted(status.ranks, key=lambda item: item.rank))


def node_cells(node: NodeStatus) -> tuple[str, ...]:
    return (
        clean(node.host),
        clean(node.ranks) or "-",
        "-" if node.step is None else str(node.step),
        clean(node.state),
        clean(node.doing) if node.state == "heard" else "-",
        ", ".join(_about(node)) or "-",
    )


def _about(node: NodeStatus) -> list[str]:
    words = [word for word, holds in (("this node", node.here), ("leads", node.leads)) if holds]
    return [*words, *([clean(node.trouble)] if node.trouble else [])]


def _row(rank: RankStatus, furthest: int | None, threshold_s: float) -> StatusRow:
    mood, note = _judge(rank, furthest, threshold_s)
    cells = (
        str(rank.rank),
        str(rank.pid),
        clean(rank.state),
        "-" if rank.step is None else str(rank.step),
        "-" if rank.steps_per_s is None else rate(rank.steps_per_s),
        "-" if rank.age_s is None else since(rank.age_s),
        clean(rank.phase) or "-",
        ", ".join(part for part in (clean(rank.doing), note) if part) or "-",
        clean(rank.signals) or "-",
    )
    return StatusRow(cells, mood, note)


def _judge(rank: RankStatus, furthest: int | None, threshold_s: float) -> tuple[Mood, str]:
    """Returns a rank's lag in steps, or its quiet time as a share of the threshold, in words."""
    if rank.age_s is None or rank.state in ("exited", "paused"):
        return "quiet", ""
    behind = (furthest or 0) - (rank.step or 0) if rank.step is not None else 0
    spent = rank.age_s / threshold_s if threshold_s > 0 else 0.0
    notes = [f"{behind} steps behind"] if behind >= BEHIND_STEPS else []
    if spent >= LATE:
        notes.append(f"{spent:.0%} of the threshold")
    mood: Mood = "late" if spent >= LATE else "behind" if notes else "good"
    return mood, ", ".join(notes)


def told(status: RunStatus) -> str:
    words = _STATES[status.watch][0] if status.watch in _STATES else clean(status.watch)
    words = f"{'undecided: ' if status.watch == 'undecided' else ''}{words}{_standing(status)}"
    slow = stragglers(status.ranks)
    if not slow:
        return words
    names = ", ".join(str(rank) for rank in slow[:8]) + (", ..." if len(slow) > 8 else "")
    return f"{words}; behind the others: rank {names}"


def stepping(status: RunStatus) -> list[RankStatus]:
    return [
        rank for rank in status.ranks if rank.step is not None and rank.state != "exited" and rank.age_s is not None
    ]


def standing_s(status: RunStatus) -> float:
    """Returns the seconds since the newest step of any rank; 0 if that is usual, or was announced."""
    quiet_s = min((rank.age_s for rank in stepping(status) if rank.age_s is not None), default=0.0)
    announced = any(rank.state == "paused" or rank.phase for rank in status.ranks)
    return quiet_s if not announced and is_quiet(quiet_s, status.usual_step_s) else 0.0


def _standing(status: RunStatus) -> str:
    # A job can stall before the threshold.
    quiet_s = standing_s(status) if status.watch == "watching" else 0.0
    return f"; no step for {since(quiet_s)} (usual {status.usual_step_s:.2g} s)" if quiet_s else ""


def stragglers(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """Returns the ranks that completed fewer steps than the furthest one."""
    steps = {rank.rank: rank.step for rank in ranks if rank.step is not None and rank.state != "exited"}
    furthest = max(steps.values(), default=0)
    return tuple(sorted(rank for rank, step in steps.items() if furthest - step >= BEHIND_STEPS))


# --- the screen -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StatusLine:
    text: str
    style: CellStyle = "plain"


@dataclass(frozen=True, slots=True)
class Glyphs:
    bars: str = "▁▂▃▄▅▆▇█"  # from no step to the highest rate
    cut: str = "…"
    dot: str = "·"


ASCII = Glyphs("_.:-=+*#", "~", "-")


def screen(
    runs: Sequence[Run], now_unix_s: float, width: int, height: int, glyphs: Glyphs = Glyphs()
) -> list[StatusLine]:
    clock = time.strftime("%H:%M:%S", time.localtime(now_unix_s))
    room = max(1, height - 1)
    if not runs:
        body = [StatusLine("you have no runs on this node", "dim")]
    elif len(runs) == 1:
        body = _whole_run(runs[0], now_unix_s, width, room, glyphs)
    else:
        body = _several(runs, width, room, glyphs)
    lines = [*body[:room], StatusLine(f"{clock}  Ctrl-C quit", "dim")]
    return [StatusLine(fit(line.text, width, glyphs), line.style) for line in lines[:height]]


def drawn(lines: Sequence[StatusLine], encoding: str) -> Any:
    from rich.console import Group
    from rich.text import Text

    encoded = [(line.text.encode(encoding, "replace").decode(encoding), _RICH.get(line.style, "")) for line in lines]
    return Group(*(Text(text, style, no_wrap=True, overflow="crop") for text, style in encoded))


def fit(text: str, width: int, glyphs: Glyphs) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + glyphs.cut


# --- several runs -----------------------------------------------------------------------------------------------------


def _several(runs: Sequence[Run], width: int, room: int, glyphs: Glyphs) -> list[StatusLine]:
    """Returns two lines per run; if these don't fit, one line per run, or some runs only. Conspicuous runs first."""
    short = [_short(run, width, glyphs) for run in runs]
    if sum(map(len, short)) <= room:
        return [line for lines in short for line in lines]
    firsts = [lines[0] for lines in short]
    if len(firsts) <= room:
        return firsts
    shown = sorted(firsts, key=lambda line: line.style == "title")[: room - 1]
    return [*shown, StatusLine(f"and {len(firsts) - len(shown)} more runs: see safelaunch status --watch RUN", "dim")]


def _short(run: Run, width: int, glyphs: Glyphs) -> list[StatusLine]:
    if run.status is None:
        return [StatusLine(f"{run.id}  {clean(run.problem)}", "warn")]
    return [title(run.status, 0.0, width, glyphs, short=True), *_progress(run.status, width, glyphs)[1:2]]


# --- one run ----------------------------------------------------------------------------------------------------------


def _whole_run(run: Run, now_unix_s: float, width: int, room: int, glyphs: Glyphs) -> list[StatusLine]:
    status = run.status
    if status is None:
        return [StatusLine(f"{run.id}  {clean(run.problem)}", "warn")]
    head = [title(status, now_unix_s, width, glyphs), *_progress(status, width, glyphs)]
    head += _words(status, width)
    notes = [
        line for wrong_result in status.wrong_results for line in _wrapped(f"wrong result: {wrong_result.words}", width)
    ]
    notes += [StatusLine(f"  note: {clean(note)}", "warn") for note in status.notes]
    notes += (
        [StatusLine(f"  the state of the other nodes is unknown: {clean(status.alone)}", "warn")]
        if status.alone
        else []
    )
    about_nodes = _nodes(status.nodes, width, max(3, room // 3), glyphs) if len(status.nodes) > 1 else []
    left = room - len(head) - len(about_nodes)
    notes = notes[: max(0, left - LEAST_ROWS)]
    left -= len(notes)
    return [*head, *notes, *_ranks(status, width, left, glyphs), *about_nodes]


def title(status: RunStatus, now_unix_s: float, width: int, glyphs: Glyphs, *, short: bool = False) -> StatusLine:
    """Returns the title line: ``r2402  pretrain  watching · 64 ranks · up 2h05m · pid 2402``."""
    there = len(status.ranks)
    words, style = _STATES.get(status.watch, (clean(status.watch), "warn"))
    standing = standing_s(status)
    if standing and status.watch == "watching":
        words, style = f"no step for {since(standing)}", "warn"
    slow = stragglers(status.ranks)
    if slow and style == "good":
        words, style = f"watching; behind the others: {rank_words(slow)}", "warn"
    count = str(there) if there == status.world_size else f"{there} of {status.world_size}"
    parts = [words, f"{count} rank{'s' * (count != '1')}"]
    steps = [rank.step or 0 for rank in stepping(status)]
    if short and steps:
        parts += [f"step {min(steps):,}", *([pace] if (pace := _pace(status)) != "-" else [])]
    if not short:
        parts += [f"attempt {status.attempt}"] * bool(status.attempt)
        parts += [f"up {since(max(0.0, now_unix_s - status.started_unix_s))}", f"pid {status.supervisor_pid}"]
    name = f"{status.run}  {clean(status.name)}  "
    kept = parts
    while len(kept) > 1 and len(name) + len(f" {glyphs.dot} ".join(kept)) > width - 2:
        kept = kept[:-1]
    return StatusLine(name + f" {glyphs.dot} ".join(kept), "title" if style == "good" else style)  # type: ignore[arg-type]


def _progress(status: RunStatus, width: int, glyphs: Glyphs) -> list[StatusLine]:
    """Returns a line with step, rate and past rates, and a line that compares the quiet time with its limits."""
    steps = [rank.step or 0 for rank in stepping(status)]
    if not steps:
        what = "no rank has started yet" if not status.ranks else "no step yet"
        return [
            StatusLine(f"  {what}; suspected after {status.threshold_s:g} s ({clean(status.threshold_why)})", "dim")
        ]
    standing = standing_s(status)
    bars = spark(course(status.history), glyphs) if width >= 60 else ""
    first = f"  step {min(steps):,}  {_pace(status)}  {bars}".rstrip()
    quiet, usual = min(rank.age_s or 0.0 for rank in stepping(status)), status.usual_step_s
    times = f", {quiet / usual:,.0f} x usual ({_seconds(usual)})" if standing else ""
    usually = f"; usual {_seconds(usual)}" if usual and not standing else ""
    progress = f"quiet for {_seconds(quiet)}{times}" if standing else f"last step {_seconds(quiet)} ago{usually}"
    second = f"  {progress}; suspected after {status.threshold_s:g} s"
    if len(second) + len(clean(status.threshold_why)) + 3 <= width:
        second += f" ({clean(status.threshold_why)})"
    return [StatusLine(first, "alarm" if standing else "bold"), StatusLine(second, "alarm" if standing else "dim")]


def _pace(status: RunStatus) -> str:
    # The slowest rank's, unless it dates from before the freeze.
    rates = [rank.steps_per_s for rank in stepping(status) if rank.steps_per_s is not None]
    return "0/s" if standing_s(status) else rate(min(rates)) if rates else "-"


def _seconds(value: float) -> str:
    # ``2 ms``, ``0.05 s``, ``13 s``, ``3m12s``
    return duration(value) if value < 60 else since(value)


def course(history: Sequence[tuple[float, int]]) -> list[float | None]:
    """Returns the steps per second in equal parts of two minutes; None for parts before the first known step."""
    points = sorted((-ago_s, step) for ago_s, step in history)
    if not points:
        return []
    points.append((0.0, points[-1][1]))
    edges = [-SPARK_CELL_S * (SPARK_CELLS - number) for number in range(SPARK_CELLS + 1)]
    steps = [_step_at(points, edge) for edge in edges]
    return [
        None if before is None or after is None else max(0.0, (after - before) / SPARK_CELL_S)
        for before, after in pairwise(steps)
    ]


def _step_at(points: Sequence[tuple[float, int]], at_s: float) -> float | None:
    if at_s < points[0][0]:
        return None
    for (begin_s, first), (end_s, last) in pairwise(points):
        if at_s <= end_s:
            part = (at_s - begin_s) / (end_s - begin_s) if end_s > begin_s else 1.0
            return first + part * (last - first)
    return float(points[-1][1])


def spark(rates: Sequence[float | None], glyphs: Glyphs) -> str:
    """Draws one bar per rate: full for the highest, the lowest bar for zero, and blank for an unknown rate."""
    most = max((rate for rate in rates if rate), default=0.0)
    top = len(glyphs.bars) - 1
    bars = [
        " " if rate is None else glyphs.bars[0 if not rate or not most else max(1, round(top * rate / most))]
        for rate in rates
    ]
    return "".join(bars).lstrip()


def _wrapped(text: str, width: int, style: CellStyle = "warn", first: str = "  ") -> list[StatusLine]:
    lines = wrapped(clean(text), max(20, width - 4))
    return [StatusLine(f"{first if not number else '    '}{line}", style) for number, line in enumerate(lines[:3])]


def _words(status: RunStatus, width: int) -> list[StatusLine]:
    look = lasting(status.early)
    return _wrapped(look.words, width, "warn" if look.movement == "still" else "dim", "    ") if look else []


def lasting(early: Sequence[EarlyLook]) -> EarlyLook | None:
    """Returns the newest early look if the job hasn't progressed since, else None."""
    return early[-1] if early and not early[-1].lasted_s else None


# --- its ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AlikeRanks:
    ranks: tuple[RankStatus, ...]
    row: StatusRow
    doing: str

    @property
    def stands_out(self) -> bool:
        return self.row.mood in ("behind", "late") or bool(self.doing)


def _ranks(status: RunStatus, width: int, room: int, glyphs: Glyphs) -> list[StatusLine]:
    if not status.ranks or room < 2:
        return []
    groups = _groups(status, fold=len(status.ranks) > min(MANY_RANKS, room - 1))
    shown = groups
    if len(groups) > room - 1:
        shown = sorted(groups, key=lambda group: not group.stands_out)[: max(0, room - 2)]
    cells = [_cells(group_shown, status.usual_step_s, glyphs) for group_shown in shown]
    table = TextTable(_COLUMNS, cells, _RIGHT, less_wanted=_LESS_WANTED)
    if all(row[_COLUMNS.index("gpu")] == "-" for row in cells):
        table = table.without("gpu")
    lines = table.fitted(width - 2, _LEAST_DOING).lines(indent="  ")
    styled = [StatusLine(lines[0], "dim")]
    styled += [
        StatusLine(text, _STYLES[group_shown.row.mood]) for text, group_shown in zip(lines[1:], shown, strict=True)
    ]
    hidden = sum(len(group.ranks) for group in groups) - sum(len(group_shown.ranks) for group_shown in shown)
    return [*styled, *([StatusLine(f"  and {hidden} more ranks", "dim")] if hidden else [])]


def _groups(status: RunStatus, *, fold: bool) -> list[_AlikeRanks]:
    """Groups equal ranks, in order. A difference of one step doesn't count: such ranks can still be in lockstep."""
    look = lasting(status.early)
    places = (
        {position.rank: place(position.frame) for position in look.places if position.frame is not None}
        if look is not None
        else {}
    )
    ordered = sorted(status.ranks, key=lambda rank: rank.rank)
    furthest = max((rank.step for rank in ordered if rank.step is not None), default=0)
    groups: dict[object, list[tuple[RankStatus, StatusRow, str]]] = {}
    for rank_status, row in zip(ordered, rows(status), strict=True):
        doing = clean(rank_status.doing) or clean(places.get(rank_status.rank, "")) or clean(rank_status.phase)
        behind = furthest - rank_status.step if rank_status.step is not None else None
        near = None if behind is None else max(0, behind - BEHIND_STEPS + 1)
        key = (rank_status.state, doing, row.mood, near) if fold else rank_status.rank
        groups.setdefault(key, []).append((rank_status, row, doing))
    return [_AlikeRanks(tuple(rank for rank, _, _ in of), of[0][1], of[0][2]) for of in groups.values()]


def _cells(group: _AlikeRanks, usual_s: float, glyphs: Glyphs) -> tuple[str, ...]:
    ranks = group.ranks
    steps = [rank.step for rank in ranks if rank.step is not None]
    rates = [rank.steps_per_s for rank in ranks if rank.steps_per_s is not None]
    ages = [rank.age_s for rank in ranks if rank.age_s is not None]
    memory, of_gpus = max(rank.rss_bytes for rank in ranks), max(rank.gpu_bytes for rank in ranks)
    times = max(ages) / usual_s if ages and usual_s and steps else 0.0
    age = since(max(ages)) if ages else "-"
    age += f" ({times:,.0f} x)" if times and is_quiet(max(ages), usual_s) else ""
    doing = ", ".join(part for part in (group.doing, group.row.note) if part)
    return (
        fit(format_ranks(tuple(rank.rank for rank in ranks)), _LONGEST_RANKS, glyphs),
        group.row.cells[2],
        f"{min(steps):,}" if steps else "-",
        rate(min(rates)) if rates else "-",
        age,
        size(memory) if memory else "-",
        size(of_gpus) if of_gpus else "-",
        doing or "-",
    )


def size(value: int) -> str:
    mib = value / (1 << 20)
    return f"{mib:.0f}M" if mib < 1000 else f"{mib / 1024:.1f}G" if mib < 102_400 else f"{mib / 1024:.0f}G"


# --- its nodes --------------------------------------------------------------------------------------------------------


def _nodes(node_states: Sequence[NodeStatus], width: int, room: int, glyphs: Glyphs) -> list[StatusLine]:
    """Returns a line for each conspicuous node, and one line for all other nodes."""
    strange = [
        node for node in node_states if node.state != "heard" or node.trouble or node.doing not in ("watching", "")
    ]
    if len(node_states) + 1 <= room:
        strange = list(node_states)
    shown = strange[: max(0, room - 2)]
    lines = []
    for node in shown:
        words = "  ".join(cell for cell in node_cells(node) if cell != "-")
        lines.append(StatusLine(f"  {words}", "plain" if node.state == "heard" else "warn"))
    rest = len(node_states) - len(shown)
    if rest:
        steps = [node.step for node in node_states if node.step is not None and node not in shown]
        behind = f", step {min(steps):,}" if steps else ""
        lines.append(StatusLine(f"  {rest} {'more ' if shown else ''}node{'s' * (rest != 1)}{behind}", "dim"))
    return [StatusLine(f"  {len(node_states)} nodes", "dim"), *lines] if lines else []
