"""Repeated runs of items as loops, and the programs of many ranks as one with branches. Pure, of any hashable items."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

T = TypeVar("T", bound=Hashable)
_LONGEST_ROUND = 512


@dataclass(frozen=True)
class Loop(Generic[T]):
    times: int
    body: tuple[Node[T], ...]


@dataclass(frozen=True)
class Branch(Generic[T]):
    """``sides``: what these ranks do; ``rest``: what all others do that come here, which may be nothing."""

    sides: tuple[tuple[frozenset[int], tuple[Node[T], ...]], ...]
    rest: tuple[Node[T], ...] = ()


Node = Union[T, Loop[T], Branch[T]]


def folded(items: Sequence[T]) -> tuple[Node[T], ...]:
    """The items, each run that repeats as a loop: at each place the round that covers most, the shortest of those."""
    numbers: dict[T, int] = {}
    return tuple(_folded(items, [numbers.setdefault(item, len(numbers)) for item in items]))


def _folded(items: Sequence[T], codes: Sequence[int]) -> list[Node[T]]:
    found: list[Node[T]] = []
    at = 0
    while at < len(items):
        period, times = _round_at(codes, at)
        if times < 2:
            found.append(items[at])
            at += 1
            continue
        body = _folded(items[at : at + period], codes[at : at + period])
        found.append(Loop(times, tuple(body)))
        at += period * times
    return found


def _round_at(codes: Sequence[int], at: int) -> tuple[int, int]:
    best, covered = (1, 1), 1
    for period in range(1, min(_LONGEST_ROUND, (len(codes) - at) // 2) + 1):
        if codes[at] != codes[at + period]:
            continue
        times = 1
        while codes[at + times * period : at + (times + 1) * period] == codes[at : at + period]:
            times += 1
        if times > 1 and times * period > covered:
            best, covered = (period, times), times * period
    return best


def merged(programs: Mapping[int, Sequence[T]]) -> tuple[Node[T], ...]:
    """One program that does on each rank what ``programs`` says: what all do alike first, then branches."""
    sides: dict[tuple[T, ...], list[int]] = {}
    for rank, items in programs.items():
        sides.setdefault(tuple(items), []).append(rank)
    return tuple(_merged(sides))


def _merged(sides: Mapping[tuple[T, ...], list[int]]) -> list[Node[T]]:
    if len(sides) == 1:
        return list(folded(next(iter(sides))))
    common = _common(list(sides))
    found = list(folded(next(iter(sides))[:common]))
    apart: dict[T | None, dict[tuple[T, ...], list[int]]] = {}
    for items, ranks in sides.items():
        rest = items[common:]
        apart.setdefault(rest[0] if rest else None, {})[rest] = ranks
    ways = [(frozenset(r for ranks in way.values() for r in ranks), tuple(_merged(way))) for way in apart.values()]
    ways.sort(key=lambda way: (len(way[0]), min(way[0])))
    rest = next((way for way in ways if not way[1]), ways[-1])
    return [*found, Branch(tuple(way for way in ways if way is not rest), rest[1])]


def _common(sides: Sequence[Sequence[T]]) -> int:
    """How many items they have in common at their begin."""
    first = min(sides, key=len)
    return next((at for at, item in enumerate(first) if any(side[at] != item for side in sides)), len(first))
