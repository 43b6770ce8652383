"""Collectives in which ranks pass different things: those with a root, and all_to_all."""

from __future__ import annotations

from collections.abc import Iterable

from safelaunch.model import Collective
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import elements, op_name


def roots(alignment: Alignment, group: str, seq: int) -> tuple[int, ...]:
    """The ranks that act as root of a gather or scatter.

    Only the root says where the parts are to go, or come from. That of a broadcast or reduce is not recorded.
    """
    entries = {rank: alignment.entry(rank, group, seq) for rank in sorted(alignment.members(group)[0])}
    return tuple(rank for rank, entry in entries.items() if entry is not None and is_root(entry))


def is_root(entry: Collective) -> bool:
    sizes = {"gather": entry.output_sizes, "scatter": entry.input_sizes}.get(op_name(entry), ())
    return (elements(sizes) or 0) > 0


def unequal_exchange(alignment: Alignment, group: str, seq: int) -> tuple[int, int] | None:
    """``(elements sent, elements expected)`` in an all_to_all of all members, where these differ.

    Sizes differ from rank to rank by design, and what goes to whom is not recorded: nobody in particular is wrong.
    """
    members, known = alignment.members(group)
    entries = [alignment.entry(rank, group, seq) for rank in members]
    if not known or any(entry is None or not op_name(entry).startswith("all_to_all") for entry in entries):
        return None
    there = [entry for entry in entries if entry is not None]
    sent = _sum(elements(entry.input_sizes) for entry in there)
    expected = _sum(elements(entry.output_sizes) for entry in there)
    return (sent, expected) if sent is not None and expected is not None and sent != expected else None


def _sum(numbers: Iterable[int | None]) -> int | None:
    found = list(numbers)
    return None if None in found else sum(number for number in found if number is not None)
