"""Writes a set of ranks as a short Python expression."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def condition(ranks: frozenset[int], world: int) -> str:
    absent = frozenset(range(world)) - ranks
    if len(absent) == 1 and len(ranks) > 2:
        return f"rank != {min(absent)}"
    ordered = sorted(ranks)
    first, last = ordered[0], ordered[-1]
    if len(ordered) == 1:
        return f"rank == {first}"
    if len(ordered) == last - first + 1 and len(ordered) > 2:
        return (
            f"rank <= {last}"
            if first == 0
            else f"rank >= {first}"
            if last == world - 1
            else f"{first} <= rank <= {last}"
        )
    return f"rank in {_range(ordered) or '(' + ', '.join(map(str, ordered)) + ')'}"


def _range(ordered: Sequence[int]) -> str:
    if len(ordered) < 4:
        return ""
    step = ordered[1] - ordered[0]
    if any(after - before != step for before, after in pairwise(ordered)):
        return ""
    end = ordered[-1] + step
    return f"range({ordered[0]}, {end}{f', {step}' if step > 1 else ''})"


def _ranks(ranks: Sequence[int]) -> str:
    spaced = _range(ranks)
    return f"list({spaced})" if spaced else f"[{', '.join(map(str, ranks))}]"


def _lists(groups: Sequence[tuple[int, ...]]) -> str:
    return f"[{', '.join(map(_ranks, groups))}]"
