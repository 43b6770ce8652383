"""Finds the rank that arrives last at most collectives.

All ranks of a synchronous job step at the pace of the slowest rank, so step counts don't reveal a straggler. But a
straggler is usually the last to arrive at a collective, while its peers wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LEAST_COLLECTIVES = 20
LEAST_WINDOW_S = 5.0
LAST_SHARE = 0.8
WAITED_SHARE = 0.1

CollectiveArrivals = Mapping[int, Mapping[tuple[str, int], int]]
"""rank → (group, number) → CLOCK_REALTIME in nanoseconds"""


@dataclass(frozen=True)
class Straggler:
    rank: int
    last: float
    """share of ``collectives`` with the rank as the last"""
    waited: float
    """share of ``window_s`` when the median peer had arrived and the rank hadn't"""
    collectives: int
    window_s: float


def find_straggler(arrivals: CollectiveArrivals) -> Straggler | None:
    """Returns the straggler that costs its peers most; None if no rank is always late."""
    groups = {group for numbers in arrivals.values() for group, _ in numbers}
    stragglers = [straggler for group in sorted(groups) if (straggler := _in_group(arrivals, group)) is not None]
    return max(stragglers, key=lambda straggler: straggler.waited, default=None)


def _in_group(arrivals: CollectiveArrivals, group: str) -> Straggler | None:
    members = {
        rank: {number: at for (name, number), at in numbers.items() if name == group}
        for rank, numbers in arrivals.items()
    }
    members = {rank: numbers for rank, numbers in members.items() if numbers}
    common = sorted(set.intersection(*(set(numbers) for numbers in members.values()))) if len(members) > 1 else []
    if len(common) < LEAST_COLLECTIVES:
        return None
    late: dict[int, list[tuple[int, int]]] = {}
    for number in common:
        times = {rank: numbers[number] for rank, numbers in members.items()}
        last = max(times, key=lambda rank: times[rank])
        peers = [at for rank, at in times.items() if rank != last]
        late.setdefault(last, []).append((_median(peers), times[last]))
    begin = min(numbers[common[0]] for numbers in members.values())
    window = max(numbers[common[-1]] for numbers in members.values()) - begin
    if window < LEAST_WINDOW_S * 1e9:
        return None
    rank = max(late, key=lambda rank: len(late[rank]))
    share = len(late[rank]) / len(common)
    waited = _length_of_union(late[rank]) / window
    if share < LAST_SHARE or waited < WAITED_SHARE:
        return None
    return Straggler(rank, share, waited, len(common), window / 1e9)


def _length_of_union(spans: Iterable[tuple[int, int]]) -> int:
    # Collectives of a backward pass overlap: count their time once.
    total, end = 0, 0
    for begin, stop in sorted(spans):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _median(values: list[int]) -> int:
    # ``statistics`` would import ``fractions`` into this long-lived process.
    return sorted(values)[(len(values) - 1) // 2]
