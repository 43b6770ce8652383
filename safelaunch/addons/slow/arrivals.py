"""Finds the ranks that the others wait for, by the times at which each rank enters its collectives and transfers.

All ranks of a synchronous job step at the pace of the slowest, so step counts don't reveal a straggler. But its peers
wait for it in some call, and it waits for none of them. Being last isn't enough: in a pipeline, a stage that waits for
another is also last in its own data-parallel group. So each rank's waits in all of its groups are added up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from safelaunch.capture.flight_recorder import TRANSFER

LEAST_CALLS = 20
LEAST_WINDOW_S = 5.0
LATE, LATE_IN_SLICE = 0.10, 0.05  # shares of time: how much more the others wait
SLICES = 8  # of the window; a late rank is late in each
APART = 0.5  # gap between the waits of both sets of ranks, as a share of their difference
TOGETHER = 0.5  # largest share of that difference that late ranks wait for each other

CallKey = tuple[str, int]
"""group and number; of a transfer, ``group sender->receiver`` and its place among the rank's recorded ones"""
CallArrivals = Mapping[int, Mapping[CallKey, int]]
"""rank → call → CLOCK_REALTIME in nanoseconds"""
_EntryTimes = Mapping[int, int]  # rank → when it entered


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, or several that are late together, such as a stage of a pipeline."""

    ranks: tuple[int, ...]
    waited: float
    """share of the time that the other ranks wait more than these"""

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None


def find_straggler(arrivals: CallArrivals) -> Straggler | None:
    """Returns the ranks that wait clearly less than the others, at most half of all.

    None if all wait about equally, if the late rank changes, or if what a late rank waits for can't be seen.
    """
    transfers, unmatched = _transfers(arrivals)
    calls = _collectives(arrivals) + transfers
    times = {rank: [call for call in calls if rank in call] for rank in {rank for call in calls for rank in call}}
    if not times:
        return None
    begin = max(min(call[rank] for call in own) for rank, own in times.items())
    end = min(max(max(call.values()) for call in own) for own in times.values())
    edges = _edges(calls, begin, end)
    if not edges:
        return None
    waits = {rank: _waits(rank, own, edges) for rank, own in times.items()}
    late = _latest({rank: _mean(shares) for rank, shares in waits.items()})
    if not late or late & unmatched:
        return None
    usual = [_mean([shares[at] for rank, shares in waits.items() if rank not in late]) for at in range(SLICES)]
    if any(usual[at] - waits[rank][at] < LATE_IN_SLICE for rank in late for at in range(SLICES)):
        return None
    waited = _mean(usual) - _mean([_mean(waits[rank]) for rank in late])
    among = [call for call in calls if late.issuperset(call)]
    for_each_other = _mean([_mean(_waits(rank, [c for c in among if rank in c], edges)) for rank in late])
    return Straggler(tuple(sorted(late)), waited) if for_each_other <= TOGETHER * waited else None


def _latest(waits: Mapping[int, float]) -> set[int]:
    """Returns the ranks below the widest gap between the shares of waiting; none if it doesn't set them apart."""
    order = sorted(waits, key=lambda rank: (waits[rank], rank))
    values = [waits[rank] for rank in order]
    gap, cut = max(((values[cut] - values[cut - 1], cut) for cut in range(1, len(order) // 2 + 1)), default=(0.0, 0))
    if cut == 0 or gap <= 0:
        return set()
    difference = _mean(values[cut:]) - _mean(values[:cut])
    return set(order[:cut]) if difference >= LATE and gap >= APART * difference else set()


def _edges(calls: Iterable[_EntryTimes], begin: int, end: int) -> list[int]:
    # Slices have equally many calls, so a single long step is in one of them.
    ends = sorted(at for call in calls if begin < (at := max(call.values())) < end)
    if len(ends) < LEAST_CALLS or end - begin < LEAST_WINDOW_S * 1e9:
        return []
    return [begin, *(ends[len(ends) * cut // SLICES] for cut in range(1, SLICES)), end]


def _waits(rank: int, calls: Iterable[_EntryTimes], edges: Sequence[int]) -> list[float]:
    """Returns the share of each slice in which the rank had entered a call and another hadn't."""
    waits, until = [0.0] * SLICES, edges[0]
    for enters, last in sorted((call[rank], max(call.values())) for call in calls):
        start = max(enters, until)  # calls of a backward pass overlap
        for at in range(bisect_right(edges, start) - 1, SLICES):
            if last <= edges[at]:
                break
            waits[at] += max(0, min(last, edges[at + 1]) - max(start, edges[at]))
        until = max(until, last)
    return [wait / max(1, after - before) for wait, (before, after) in zip(waits, pairwise(edges), strict=True)]


def _collectives(arrivals: CallArrivals) -> list[_EntryTimes]:
    """Returns the collectives that all ranks of their group have entered."""
    calls: dict[CallKey, dict[int, int]] = {}
    members: dict[str, set[int]] = {}
    for rank, entries in arrivals.items():
        for key, at in entries.items():
            if TRANSFER not in key[0]:
                calls.setdefault(key, {})[rank] = at
                members.setdefault(key[0], set()).add(rank)
    return [call for (group, _), call in calls.items() if 1 < len(call) == len(members[group])]


def _transfers(arrivals: CallArrivals) -> tuple[list[_EntryTimes], set[int]]:
    """Returns the sends with their receives, and the ranks with transfers whose other end can't be found."""
    ends: dict[str, set[int]] = {}
    for rank, entries in arrivals.items():
        for name, _ in entries:
            if TRANSFER in name:
                ends.setdefault(name, set()).add(rank)
    calls: list[_EntryTimes] = []
    unmatched: set[int] = set()
    for name, ranks in ends.items():
        shared = set.intersection(*({key for key in arrivals[rank] if TRANSFER not in key[0]} for rank in ranks))
        sides = {rank: _places(arrivals[rank], name, shared) for rank in ranks}
        if len(sides) != 2 or not _are_alike(*sides.values()):
            unmatched |= ranks
            continue
        first, second = sides
        both = sides[first].keys() & sides[second].keys()
        calls += [{rank: side[place] for rank, side in sides.items()} for place in both]
    return calls, unmatched


_Places = Mapping[tuple[CallKey, int], int]


def _places(entries: Mapping[CallKey, int], name: str, shared: Collection[CallKey]) -> _Places:
    """Numbers the transfers from the last collective that both ends have made: their rings begin at different ones."""
    places: dict[tuple[CallKey, int], int] = {}
    last, count = None, 0
    for key, at in sorted(entries.items(), key=lambda entry: entry[1]):
        if key in shared:
            last, count = key, 0
        elif key[0] == name and last is not None:
            places[last, count] = at
            count += 1
    return places


def _are_alike(one: _Places, other: _Places) -> bool:
    # After the newest collective, one end can be further than the other.
    counts, others = Counter(last for last, _ in one), Counter(last for last, _ in other)
    newest = max(one, key=lambda place: one[place], default=None)
    differing = {last for last in counts | others if counts[last] != others[last]}
    return newest is not None and differing <= {newest[0]}


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)
