"""One rank's line in ``safelaunch status``: its cells, and whether it stands out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.supervise.control.protocol import NodeStatus, RankStatus, RunStatus
from safelaunch.supervise.watch.quiet import is_quiet
from safelaunch.system.printable import clean

COLUMNS = ("rank", "pid", "state", "step", "rate", "age", "phase", "note", "signals")
NODE_COLUMNS = ("node", "ranks", "step", "state", "doing", "note")
# Ranks that meet in every step differ by at most one, because their pages are read one after the other.
BEHIND_STEPS = 2
# As a share of the threshold. Below this, an old step is normal: every job has pauses.
LATE = 0.5

Mood = Literal["good", "behind", "late", "quiet"]

_WATCH = {
    "watching": "watching",
    "confirming": "hang suspected: looking closer",
    "undecided": "undecided: no step, but something is computing, writing or serving",
    "hung": "hung",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one rank, in the order of ``COLUMNS``, and whether it stands out; ``note``: by what."""

    cells: tuple[str, ...]
    mood: Mood
    note: str = ""


def rows(status: RunStatus) -> tuple[Row, ...]:
    """One row for each rank of this node."""
    furthest = max((rank.step for rank in status.ranks if rank.step is not None), default=None)
    return tuple(_row(rank, furthest, status.threshold_s) for rank in sorted(status.ranks, key=lambda item: item.rank))


def nodes(status: RunStatus) -> tuple[tuple[str, ...], ...]:
    """The cells of each node of a job of several, below ``NODE_COLUMNS``."""
    return tuple(node_cells(node) for node in status.nodes)


def node_cells(node: NodeStatus) -> tuple[str, ...]:
    """The same of one node."""
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


def _row(rank: RankStatus, furthest: int | None, threshold_s: float) -> Row:
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
    return Row(cells, mood, note)


def _judge(rank: RankStatus, furthest: int | None, threshold_s: float) -> tuple[Mood, str]:
    """How far this rank is behind the furthest one, or the share of the threshold that passed without a step."""
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
    """The watch's state in words, whether no rank makes a step, and which ranks are behind."""
    words = _WATCH.get(status.watch, clean(status.watch)) + _standing(status)
    slow = stragglers(status.ranks)
    if not slow:
        return words
    names = ", ".join(str(rank) for rank in slow[:8]) + (", ..." if len(slow) > 8 else "")
    return f"{words}; behind the others: rank {names}"


def stepping(status: RunStatus) -> list[RankStatus]:
    """The ranks that make steps."""
    return [one for one in status.ranks if one.step is not None and one.state != "exited" and one.age_s is not None]


def standing_s(status: RunStatus) -> float:
    """Seconds since the newest step of any rank, if that is far longer than usual and no rank announced it; else 0."""
    quiet_s = min((one.age_s for one in stepping(status) if one.age_s is not None), default=0.0)
    announced = any(one.state == "paused" or one.phase for one in status.ranks)
    return quiet_s if not announced and is_quiet(quiet_s, status.usual_step_s) else 0.0


def _standing(status: RunStatus) -> str:
    """A job that is merely watched may still stand: its threshold is not over yet."""
    quiet_s = standing_s(status) if status.watch == "watching" else 0.0
    return f"; no step for {since(quiet_s)} (usual {status.usual_step_s:.2g} s)" if quiet_s else ""


def stragglers(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """Ranks that are steps behind the furthest one."""
    steps = {rank.rank: rank.step for rank in ranks if rank.step is not None and rank.state != "exited"}
    furthest = max(steps.values(), default=0)
    return tuple(sorted(rank for rank, step in steps.items() if furthest - step >= BEHIND_STEPS))


def rate(steps_per_s: float) -> str:
    """``12.3/s``; slow jobs by the minute or the hour."""
    if steps_per_s <= 0:
        return "0/s"
    units = {"s": 1, "min": 60, "h": 3600}
    unit = next((name for name, seconds in units.items() if steps_per_s * seconds >= 1), "h")
    value = steps_per_s * units[unit]
    return f"{value:.0f}/{unit}" if value >= 100 else f"{value:.3g}/{unit}"


def since(seconds: float) -> str:
    """``0.3s``, ``42s``, ``3m12s``, ``2h05m``, ``3d04h``."""
    whole = int(seconds)
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
