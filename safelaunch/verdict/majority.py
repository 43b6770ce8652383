"""Ranks by what they did, and the majority among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")


def sides_of(what: Mapping[int, K]) -> dict[K, list[int]]:
    """The ranks by what each of them has called, or is in; in the order of their first ones."""
    found: dict[K, list[int]] = {}
    for rank, one in what.items():
        found.setdefault(one, []).append(rank)
    return found


def vote(classes: Mapping[Any, Iterable[int]]) -> tuple[tuple[int, ...], bool]:
    """``(ranks outside the strict majority, there is one)``; with no strict majority, everybody is at odds."""
    counts = {key: tuple(ranks) for key, ranks in classes.items()}
    total = sum(map(len, counts.values()))
    most = max(counts, key=lambda key: len(counts[key]))
    if 2 * len(counts[most]) > total:
        return tuple(sorted(r for key, ranks in counts.items() if key != most for r in ranks)), True
    return tuple(sorted(r for ranks in counts.values() for r in ranks)), False
