"""How ranks, durations and sizes are written for people, and ranks read back."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RANKS = 65_536


def format_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks as sorted ranges: ``{0, 1, 2, 5}`` → ``"0-2,5"``; empty → ``""``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def rank_words(ranks: Iterable[int] | str) -> str:
    """``rank 3``, ``ranks 0-2,5``. ``ranks``: numbers, or what ``format_ranks`` has made of them."""
    text = ranks if isinstance(ranks, str) else format_ranks(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def ranks_in(text: str) -> tuple[int, ...]:
    """``0-3,5`` as numbers; empty for an empty text. Raises ValueError for anything else."""
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
    """``2 ms``, ``0.05 s``, ``1.2 s``, ``70 s``."""
    if seconds < 0.01:
        return f"{max(1.0, 1000 * seconds):.0f} ms"
    return f"{round(seconds, 2):.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


def size(number: float) -> str:
    """Bytes as ``1.5 GiB``, ``512 MiB``."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
