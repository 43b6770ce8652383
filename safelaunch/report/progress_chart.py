"""Draws all ranks' steps over time: the rate before the stall, ranks that fell behind, and the stall."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from safelaunch.model import Evidence, RankEvidence, format_ranks

MOST_LINES = 24
MOST_POINTS = 160
_FEW = 3


def as_page(evidence: Evidence, culprits: Collection[int]) -> dict[str, Any] | None:
    """Returns one line for each set of ranks that stopped at the same step; None if no steps were recorded.

    Times are in seconds before the evidence was collected, by each host's own clock.
    """
    taken = _taken(evidence)
    stepping = {
        rank.rank: rank for rank in evidence.ranks if rank.progress is not None and rank.progress.step is not None
    }
    classes: dict[tuple[bool, int], list[RankEvidence]] = {}
    for rank, evidence_of_rank in stepping.items():
        assert evidence_of_rank.progress is not None
        classes.setdefault((rank in culprits, evidence_of_rank.progress.step or 0), []).append(evidence_of_rank)
    ordered = sorted(classes.items(), key=lambda item: (not item[0][0], item[0][1]))
    lines = [_line(members, culprit, taken) for (culprit, _), members in ordered[:MOST_LINES]]
    lines = [line for line in lines if line["p"]]
    if not lines:
        return None
    return {
        "lines": lines,
        "threshold_s": round(evidence.threshold_s, 3),
        "stall_s": round(evidence.stall_s, 3),
        "left_out": max(0, len(ordered) - MOST_LINES),
    }


def _taken(evidence: Evidence) -> Mapping[str, float]:
    """Returns host → time at which its ranks were last observed, by its own clock."""
    times: dict[str, float] = {}
    for rank in evidence.ranks:
        states = rank.main.states if rank.main is not None else ()
        last = max((state.at_s for state in states), default=0.0)
        newest = max(last, rank.progress.last_step_ns / 1e9 if rank.progress is not None else 0.0)
        times[rank.host] = max(times.get(rank.host, 0.0), newest)
    return times


def _line(members: list[RankEvidence], culprit: bool, taken: Mapping[str, float]) -> dict[str, Any]:
    """Returns the line of a set of ranks: the longest history of any of them."""
    longest = max(members, key=lambda rank: len(rank.progress.history) if rank.progress is not None else 0)
    progress = longest.progress
    assert progress is not None
    points = [(at / 1e9, step) for at, step in progress.history]
    if progress.first_step_ns and len(points) < _FEW:  # a fast job; in a long run, this point would squeeze the others
        points.append((progress.first_step_ns / 1e9, 1))
    if progress.last_step_ns and (not points or points[-1][1] != progress.step):
        points.append((progress.last_step_ns / 1e9, progress.step or 0))
    points = sorted(set(points))
    thinned = points[:: -(-len(points) // MOST_POINTS)] if points else []
    thinned += [points[-1]] if points and thinned[-1] != points[-1] else []
    end = taken.get(longest.host, 0.0)
    return {
        "r": format_ranks([rank.rank for rank in members]),
        "n": len(members),
        "c": int(culprit),
        "step": progress.step,
        "p": [[round(at - end, 3), step] for at, step in thinned],
        "rate": _rate(points),
    }


def _rate(points: list[tuple[float, int]]) -> float:
    later = points[len(points) // 2 :] if len(points) > 8 else points
    if len(later) < 2 or later[-1][0] <= later[0][0]:
        return 0.0
    return round((later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0]), 4)
