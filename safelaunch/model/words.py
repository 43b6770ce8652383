"""Formats ranks, durations, rates and sizes, and parses ranks."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RANKS = 65_536


def format_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks as sorted ranges: ``{0, 1, 2, 5}`` → ``"0-2,5"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def rank_words(ranks: Iterable[int] | str) -> str:
    """Returns ``rank 3`` or ``ranks 0,7,9 and 96 more``, from numbers or the result of ``format_ranks``."""
    text = ranks if isinstance(ranks, str) else format_ranks(ranks)
    parts = text.split(",")
    if len(parts) > _MOST_RANGES:
        try:
            left = f"{len(ranks_in(','.join(parts[_SHOWN_RANGES:])))} more"
        except ValueError:  # another text
            left = "others"
        text = f"{','.join(parts[:_SHOWN_RANGES])} and {left}"
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


_MOST_RANGES, _SHOWN_RANGES = 16, 8  # in a sentence


def ranks_in(text: str) -> tuple[int, ...]:
    """Parses rank ranges, e.g. ``0-3,5``. Raises ValueError for other texts."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no rank, and no range of ranks")
        begin, end = int(first), int(last) if dash else int(first)
        if not begin <= end < MOST_RANKS:
            raise ValueError(f"{part!r} is no range of ranks")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def duration(seconds: float) -> str:
    """Formats seconds as ``2 ms``, ``0.05 s``, ``1.2 s``, ``70 s``."""
    if seconds < 0.01:
        return f"{max(1.0, 1000 * seconds):.0f} ms"
    return f"{round(seconds, 2):.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


def rate(steps_per_s: float) -> str:
    """Formats a rate as ``12.3/s``; for slow jobs, per minute or per hour."""
    if steps_per_s <= 0:
        return "0/s"
    units = {"s": 1, "min": 60, "h": 3600}
    unit = next((name for name, seconds in units.items() if steps_per_s * seconds >= 1), "h")
    value = steps_per_s * units[unit]
    return f"{value:.0f}/{unit}" if value >= 100 else f"{value:.3g}/{unit}"


def since(seconds: float) -> str:
    """Formats seconds as ``0.3s``, ``42s``, ``3m12s``, ``2h05m``, ``3d04h``."""
    whole = int(seconds)
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(number: float) -> str:
    """Formats bytes as ``1.5 GiB``, ``512 MiB``."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
