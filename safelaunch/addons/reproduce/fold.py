"""Merges the programs of many ranks into one program with branches and loops. Items can be any hashable objects."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

Item = Hashable
RankSet = frozenset[int]
_LONGEST_ROUND = 512
_MOST_TO_ALIGN = 4000  # items of two programs


@dataclass(frozen=True)
class RankStep:
    item: Any
    ranks: RankSet
    beyond: RankSet = frozenset()  # ranks that never reach it, so including them makes no difference


@dataclass(frozen=True)
class RepeatedItems:
    times: int
    body: tuple[FoldNode, ...]


@dataclass(frozen=True)
class RankBranch:
    """A branch, with alternatives for different ranks."""

    sides: tuple[tuple[RankSet, tuple[FoldNode, ...]], ...]
    rest: tuple[FoldNode, ...] = ()  # alternative for all other ranks that reach this node; can be empty


FoldNode = RankStep | RepeatedItems | RankBranch


def merged(programs: Mapping[int, Sequence[Item]]) -> tuple[FoldNode, ...]:
    """Returns one program in which each rank executes its own program from ``programs``.

    A rank's last item never returns, so any items can follow it.
    """
    return tuple(_branched(_level(programs), frozenset(programs)))


def done(nodes: Sequence[FoldNode], rank: int) -> Iterator[RankStep]:
    for node in nodes:
        if isinstance(node, RankStep):
            yield node
        elif isinstance(node, RepeatedItems):
            for _ in range(node.times):
                yield from done(node.body, rank)
        else:
            yield from done(next((body for ranks, body in node.sides if rank in ranks), node.rest), rank)


def _level(programs: Mapping[int, Sequence[Item]]) -> list[RankStep | RepeatedItems]:
    steps = _with_the_stuck(_aligned(programs))
    numbers: dict[RankStep, int] = {}
    return _folded(steps, [numbers.setdefault(step, len(numbers)) for step in steps])


def _aligned(programs: Mapping[int, Sequence[Item]]) -> list[RankStep]:
    """Returns all items, each with the ranks that execute it, in an order that preserves the order of each rank."""
    sides: dict[tuple[Item, ...], list[int]] = {}
    for rank, items in programs.items():
        sides.setdefault(tuple(items), []).append(rank)
    common = _common(list(sides))
    steps: list[RankStep] = []
    for items, ranks in sorted(sides.items(), key=lambda side: (-len(side[1]), -len(side[0]), side[1])):
        steps = _with_side(steps, [RankStep(item, frozenset(ranks)) for item in items[common:]])
    shared = next(iter(sides), ())[:common]
    return [*(RankStep(item, frozenset(programs)) for item in shared), *steps]


def _common(sides: Sequence[Sequence[Item]]) -> int:
    first = min(sides, key=len, default=())
    return next((at for at, item in enumerate(first) if any(side[at] != item for side in sides)), len(first))


def _with_side(main: list[RankStep], side: list[RankStep]) -> list[RankStep]:
    if len(main) + len(side) > _MOST_TO_ALIGN:
        return [*main, *side]
    numbers: dict[Item, int] = {}
    codes, its = ([numbers.setdefault(step.item, len(numbers)) for step in steps] for steps in (main, side))
    both: list[RankStep] = []
    for kind, a, b, c, d in SequenceMatcher(None, codes, its, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs = zip(main[a:b], side[c:d], strict=True)
            both += [replace(step, ranks=step.ranks | other.ranks) for step, other in pairs]
        else:
            both += [*side[c:d], *main[a:b]]
    return both


def _with_the_stuck(steps: Sequence[RankStep]) -> list[RankStep]:
    last = {rank: at for at, step in enumerate(steps) for rank in step.ranks}
    return [
        replace(step, beyond=frozenset(rank for rank, its in last.items() if its < at)) for at, step in enumerate(steps)
    ]


def _folded(steps: Sequence[RankStep], codes: Sequence[int]) -> list[RankStep | RepeatedItems]:
    """Replaces repetitions by loops: at each position, by the loop that covers most items (of these, the shortest)."""
    nodes: list[RankStep | RepeatedItems] = []
    at = 0
    while at < len(steps):
        period, times = _round_at(codes, at)
        if times < 2:
            nodes.append(steps[at])
            at += 1
            continue
        body = _folded(steps[at : at + period], codes[at : at + period])
        nodes.append(RepeatedItems(times, tuple(body)))
        at += period * times
    return nodes


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


def _ranks_of(node: FoldNode) -> tuple[RankSet, RankSet] | None:
    """Returns the ranks that execute the node, and the ranks that never reach it; None if its parts differ."""
    if isinstance(node, RankStep):
        return node.ranks, node.beyond
    if isinstance(node, RankBranch):
        return None
    inside = {_ranks_of(child) for child in node.body}
    return inside.pop() if len(inside) == 1 else None


def _branched(level: Sequence[FoldNode], here: RankSet) -> Iterator[FoldNode]:
    """Yields the nodes, if necessary within branches, for the ranks that reach them (``here``)."""
    parts: list[tuple[RankSet, tuple[FoldNode, ...]]] = []
    for who, nodes in groupby(level, key=_ranks_of):
        ranks, beyond = who or (here, here)
        condition = here if ranks | beyond >= here else ranks & here
        inside = (
            replace(n, body=tuple(_branched(n.body, condition))) if isinstance(n, RepeatedItems) else n for n in nodes
        )
        parts.append((condition, tuple(inside)))
    at = 0
    while at < len(parts):
        ranks, body = parts[at]
        if ranks >= here:
            yield from body
            at += 1
            continue
        sides, covered = [(ranks, body)], ranks
        while at + len(sides) < len(parts) and not parts[at + len(sides)][0] & covered:
            sides.append(parts[at + len(sides)])
            covered |= sides[-1][0]
        at += len(sides)
        sides = [side for side in sides if side[0]]
        if covered >= here and len(sides) > 1:
            last = max(sides, key=lambda side: len(side[0]))
            yield RankBranch(tuple(side for side in sides if side is not last), last[1])
        elif sides:
            yield RankBranch(tuple(sides))
