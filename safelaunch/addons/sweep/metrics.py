"""Extracts metrics from a job's output, using patterns."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from safelaunch.addons.sweep.errors import SpecError
from safelaunch.addons.sweep.jobs import Metric
from safelaunch.system.time_limit import CPU, at_most

# Only the end of the output is searched; a metric's last value counts.
TAIL_BYTES = 32 << 20
LONGEST_LINE = 1 << 16
MOST_CPU_S = 2.0  # 32 MiB of lines without a match take about 1 s
_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_./-]*)")


def check_pattern(pattern: str) -> tuple[str, ...]:
    """Returns the metrics that ``pattern`` finds: its named groups, else its first word. Raises SpecError.

    ``val_loss=([0-9.]+)`` finds ``val_loss``; ``(?P<loss>\\S+) is the loss`` finds ``loss``.
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
    """Returns each metric's value in the first line that contains it; the last value in that line."""
    searches = [(re.compile(pattern), check_pattern(pattern)) for pattern in patterns]
    wanted = {name for _, names in searches for name in names}
    values: dict[str, Metric] = {}
    for line in lines:
        here: dict[str, Metric] = {}
        for compiled, names in searches:
            for match in compiled.finditer(line):
                groups = match.groupdict() or {names[0]: match[1]}
                here.update({name: value_of(text) for name, text in groups.items() if text is not None})
        values = {**here, **values}
        if len(values) == len(wanted):
            break
    return values


def from_log(
    path: Path,
    patterns: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Metric]:
    """Returns the last value of each metric near the end of a job's output; empty if the file is unreadable.

    Call it from the main thread. Matching a pattern such as ``(a+)+b`` might never end, so each pattern is limited to
    ``MOST_CPU_S``; a pattern that exceeds this is reported through ``say``.
    """
    if not patterns:
        return {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return {}
    data = data.replace(b"\r", b"\n")  # a progress bar separates its lines with carriage returns
    metrics: dict[str, Metric] = {}
    for pattern in patterns:
        try:
            with at_most(MOST_CPU_S, CPU):
                metrics.update(from_lines(_backwards(data), [pattern]))
        except TimeoutError:
            say(f"{path.parent.name}: no value for {pattern!r}: searching {path.name} takes too long")
    return metrics


def _backwards(data: bytes) -> Iterator[str]:
    end = len(data)
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        yield data[begin : min(end, begin + LONGEST_LINE)].decode("utf-8", "replace")
        end = begin - 1


def value_of(text: str) -> Metric:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
