"""Ranks grouped by what they did, and the majority among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")


def sides_of(what: Mapping[int, K]) -> dict[K, list[int]]:
    """Groups the ranks by value, in the order of their first ranks."""
    sides: dict[K, list[int]] = {}
    for rank, value in what.items():
        sides.setdefault(value, []).append(rank)
    return sides


def vote(classes: Mapping[Any, Iterable[int]]) -> tuple[tuple[int, ...], bool]:
    """Returns the ranks outside the strict majority (all ranks if there is none), and if there is one."""
    counts = {key: tuple(ranks) for key, ranks in classes.items()}
    total = sum(map(len, counts.values()))
    most = max(counts, key=lambda key: len(counts[key]))
    if 2 * len(counts[most]) > total:
        return tuple(sorted(r for key, ranks in counts.items() if key != most for r in ranks)), True
    return tuple(sorted(r for ranks in counts.values() for r in ranks)), False
