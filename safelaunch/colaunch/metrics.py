"""Numbers that a job reported: taken from its output by a pattern, or from a JSON file that it wrote."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from safelaunch.colaunch.jobs import Metric
from safelaunch.errors import SpecError

# What is looked through at the end of a job's output; a metric is wanted from the last time it was printed.
TAIL_BYTES = 32 << 20
LONGEST_LINE = 1 << 16
LARGEST_FILE = 1 << 20

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_./-]*)")


def check_pattern(pattern: str) -> tuple[str, ...]:
    """The names of the metrics that ``pattern`` finds: of its named groups, else the word that it begins with.

    ``val_loss=([0-9.]+)`` finds ``val_loss``; ``(?P<loss>\\S+) is the loss`` finds ``loss``. Raises SpecError.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SpecError(
            f"metric {pattern!r} is not a regular expression: {error}", "e.g. 'val_loss=([0-9.]+)'"
        ) from None
    if compiled.groupindex:
        return tuple(compiled.groupindex)
    word = _NAME.match(pattern)
    if compiled.groups != 1 or word is None:
        raise SpecError(
            f"metric {pattern!r} must begin with the metric's name and have one group for its value, or named groups",
            "e.g. 'val_loss=([0-9.]+)', or '(?P<val_loss>[0-9.]+) validation loss'",
        )
    return (word[1].rstrip(".-/"),)


def from_lines(lines: Iterable[str], patterns: Sequence[str]) -> dict[str, Metric]:
    """The last value of each metric in ``lines``."""
    searches = [(re.compile(pattern), check_pattern(pattern)) for pattern in patterns]
    found: dict[str, Metric] = {}
    for line in lines:
        for compiled, names in searches:
            for match in compiled.finditer(line):
                groups = match.groupdict() or {names[0]: match[1]}
                found.update({name: value_of(text) for name, text in groups.items() if text is not None})
    return found


def from_log(path: Path, patterns: Sequence[str]) -> dict[str, Metric]:
    """The last value of each metric near the end of a job's output; what cannot be read has none."""
    if not patterns:
        return {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return {}
    # A progress bar separates its lines by carriage returns.
    lines = data.replace(b"\r", b"\n").split(b"\n")
    return from_lines((line[:LONGEST_LINE].decode("utf-8", "replace") for line in lines), patterns)


def from_file(path: Path) -> dict[str, Metric]:
    """Numbers and texts at the top level of a JSON file; none where it is not there or not such a file."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(LARGEST_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    found: dict[str, Metric] = {}
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        found[name] = value_of(value) if isinstance(value, str) else _finite(float(value), str(value))
    return found


def stamp(path: Path) -> tuple[int, ...]:
    """What changes when the file is written; empty where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def value_of(text: str) -> Metric:
    """A number where it is one. JSON has no infinities and no NaN: these stay text."""
    try:
        return _finite(float(text), text)
    except ValueError:
        return text


def _finite(number: float, text: str) -> Metric:
    return number if math.isfinite(number) else text
