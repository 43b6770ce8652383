"""Collectives in which ranks pass different things: collectives with a root, and all_to_all."""

from __future__ import annotations

from collections.abc import Iterable

from safelaunch.model import Collective
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import elements, op_name


def roots(alignment: Alignment, group: str, seq: int) -> tuple[int, ...]:
    """Returns the ranks that act as root of a gather or scatter.

    Only a root lists the parts. The root of a broadcast or reduce isn't recorded.
    """
    entries = {rank: alignment.entry(rank, group, seq) for rank in sorted(alignment.members(group)[0])}
    return tuple(rank for rank, entry in entries.items() if entry is not None and is_root(entry))


def is_root(entry: Collective) -> bool:
    sizes = {"gather": entry.output_sizes, "scatter": entry.input_sizes}.get(op_name(entry), ())
    return (elements(sizes) or 0) > 0


def unequal_exchange(alignment: Alignment, group: str, seq: int) -> tuple[int, int] | None:
    """Returns the elements sent and the elements expected in an all_to_all of all members, if they differ.

    Sizes differ between ranks by design, and the record doesn't show what goes where, so no rank can be blamed.
    """
    members, are_known = alignment.members(group)
    entries = [alignment.entry(rank, group, seq) for rank in members]
    if not are_known or any(entry is None or not op_name(entry).startswith("all_to_all") for entry in entries):
        return None
    present = [entry for entry in entries if entry is not None]
    sent = _sum(elements(entry.input_sizes) for entry in present)
    expected = _sum(elements(entry.output_sizes) for entry in present)
    return (sent, expected) if sent is not None and expected is not None and sent != expected else None


def _sum(numbers: Iterable[int | None]) -> int | None:
    values = list(numbers)
    return None if None in values else sum(number for number in values if number is not None)
