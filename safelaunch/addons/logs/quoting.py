"""Removes the quoting of a pasted text: the blanks and marks (``> ``, ``| ``) that all of its lines begin with."""

from __future__ import annotations

from collections.abc import Iterable

_MARKS = " \t>|"


def common_quote(lines: Iterable[str]) -> str:
    """The marks with which all of these lines begin, but for those that hold nothing else."""
    filled = [line for line in lines if line.strip(_MARKS + "\r\n")]
    first, last = min(filled, default=""), max(filled, default="")
    marks = len(first) - len(first.lstrip(_MARKS))
    return next((first[:end] for end in range(marks, 0, -1) if last.startswith(first[:end])), "")


def without_quote(line: str, quote: str) -> str:
    """The line without the marks. A line that ends within them is empty."""
    if line.startswith(quote):
        return line[len(quote) :]
    return line if line.strip(_MARKS + "\r\n") else ""
