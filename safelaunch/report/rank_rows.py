"""Builds a row for each rank with its step, state and activity; ranks that do the same share a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.report.tables import hosts_word
from safelaunch.verdict.rank_state import RankFacts

MOST_ROWS = 60  # beyond, ranks that differ only in their step share a row
_OF_ONE_RANK = re.compile(r"\b(pid|worker|process|thread) \d+|\b\d+(?:\.\d+)?(?= s\b)")


@dataclass(frozen=True)
class RankRow:
    rank: int
    host: str
    pid: int
    step: int | None
    state: str  # kernel's letter, and system call
    doing: str
    frame: Frame | None


@dataclass(frozen=True)
class Alike:
    """Ranks that do the same thing at the same line."""

    ranks: tuple[int, ...]
    culprit: bool
    first: RankRow
    step: str
    state: str
    doing: str
    hosts: str


def row_of(one: RankFacts) -> RankRow:
    doing = "ended by the launcher"
    if one.wait is not None:
        doing = f"{'waits' if one.evidence.exit is None else 'waited'} in {one.wait.words}"
    elif one.condition is not None:
        doing = one.condition.reason
    frame = one.frame or (one.condition.frame if one.condition else None)
    return RankRow(one.rank, one.evidence.host, one.evidence.pid, one.step, _state(one), doing, frame)


def alike(rows: Sequence[RankRow], culprits: Collection[int]) -> list[Alike]:
    """Groups rows by activity and line; also by step, if there are then still few groups."""
    folded: list[list[RankRow]] = []
    for by_step in (True, False):
        groups: dict[tuple[object, ...], list[RankRow]] = {}
        for row in rows:
            key = (row.rank in culprits, _masked(row.doing), row.frame, row.step if by_step else None)
            groups.setdefault(key, []).append(row)
        folded = list(groups.values())
        if len(folded) <= MOST_ROWS:
            break
    return [_alike(members, members[0].rank in culprits) for members in folded]


def _alike(rows: list[RankRow], culprit: bool) -> Alike:
    first = rows[0]
    steps = [row.step for row in rows if row.step is not None]
    doing = first.doing if all(row.doing == first.doing for row in rows) else _masked(first.doing)
    hosts = hosts_word(list(dict.fromkeys(row.host for row in rows if row.host)))
    return Alike(tuple(row.rank for row in rows), culprit, first, range_of(steps), _states(rows), doing, hosts)


def _masked(doing: str) -> str:
    return _OF_ONE_RANK.sub(lambda found: f"{found[1]} …" if found[1] else "…", doing)


def _states(rows: Sequence[RankRow]) -> str:
    # ``S futex``, or ``S futex (7), R (1)`` for several states
    counts = Counter(row.state for row in rows).most_common()
    if len(counts) == 1:
        return counts[0][0]
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    return ", ".join(f"{state} ({count})" for state, count in counts[:3]) + more


def range_of(steps: Collection[int]) -> str:
    if not steps:
        return ""
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def _state(one: RankFacts) -> str:
    if one.evidence.exit is not None:
        return f"exit {one.evidence.exit.returncode}"
    view = one.view
    if view is None or not view.process.states:
        return "not seen" if one.evidence.pid else ""  # a Flight Recorder dump lists no process
    return f"{view.process.states[-1].state} {view.wait.call or view.wait.kind}"
