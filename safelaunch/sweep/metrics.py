"""Numbers that a job reports, found by a pattern in its output."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safelaunch.sweep.jobs import Job, Metric
from safelaunch.system.errors import SpecError
from safelaunch.system.task import CPU, at_most

# The part at the end of a job's output that is searched; the last value of a metric counts.
TAIL_BYTES = 32 << 20
LONGEST_LINE = 1 << 16
MOST_CPU_S = 2.0  # 32 MiB of lines without a match take about one
# What the metrics of running jobs may cost: the end of a few jobs' output at a time, each now and then.
LOOK_EVERY_S, LOOK_AT_ONCE, NEWEST_BYTES, LOOK_CPU_S = 5.0, 8, 64 << 10, 0.1

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_./-]*)")


def check_pattern(pattern: str) -> tuple[str, ...]:
    """The names of the metrics that ``pattern`` finds: its named groups, else the word that it begins with.

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
    """The value of each metric in the first of ``lines`` that has it; within a line, the last one counts."""
    searches = [(re.compile(pattern), check_pattern(pattern)) for pattern in patterns]
    wanted = {name for _, names in searches for name in names}
    found: dict[str, Metric] = {}
    for line in lines:
        here: dict[str, Metric] = {}
        for compiled, names in searches:
            for match in compiled.finditer(line):
                groups = match.groupdict() or {names[0]: match[1]}
                here.update({name: value_of(text) for name, text in groups.items() if text is not None})
        found = {**here, **found}
        if len(found) == len(wanted):
            break
    return found


def from_log(
    path: Path,
    patterns: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
    tail_bytes: int | None = None,
    most_cpu_s: float | None = None,
) -> dict[str, Metric]:
    """The last value of each metric near the end of a job's output; none from an unreadable file.

    A pattern may take for ever (``(a+)+b``), so each gets ``most_cpu_s`` (None: ``MOST_CPU_S``); then ``say`` gets a
    message. Call it from the main thread.
    """
    if not patterns:
        return {}
    tail_bytes = TAIL_BYTES if tail_bytes is None else tail_bytes
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            data = file.read(tail_bytes)
    except OSError:
        return {}
    data = data.replace(b"\r", b"\n")  # a progress bar separates its lines with carriage returns
    found: dict[str, Metric] = {}
    for pattern in patterns:
        try:
            with at_most(MOST_CPU_S if most_cpu_s is None else most_cpu_s, CPU):
                found.update(from_lines(_backwards(data), [pattern]))
        except TimeoutError:
            say(f"{path.parent.name}: no value for {pattern!r}: searching {path.name} takes too long")
    return found


class Newest:
    """The newest metrics of running jobs."""

    def __init__(self) -> None:
        self._looked_s: dict[str, float] = {}
        self._found: dict[str, dict[str, Metric]] = {}
        self._slow: set[str] = set()

    def look(self, logs: Mapping[Job, Path], now_s: float) -> None:
        """Reads the end of some of these logs."""
        due = {job: self._looked_s.setdefault(job.name, now_s) for job in logs if job.metrics}
        due = {job: at_s for job, at_s in due.items() if now_s - at_s >= LOOK_EVERY_S and job.name not in self._slow}
        for job in sorted(due, key=due.__getitem__)[:LOOK_AT_ONCE]:
            slow: list[str] = []
            found = from_log(logs[job], job.metrics, slow.append, NEWEST_BYTES, LOOK_CPU_S)
            self._looked_s[job.name] = now_s
            self._found[job.name] = {**self._found.get(job.name, {}), **found}
            if slow:
                self._slow.add(job.name)  # at its end, it gets the time that it takes

    def of(self, name: str) -> Mapping[str, Metric]:
        return self._found.get(name, {})


def _backwards(data: bytes) -> Iterator[str]:
    """Lines, the last one first, so that a pattern with a match does not search megabytes."""
    end = len(data)
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        yield data[begin : min(end, begin + LONGEST_LINE)].decode("utf-8", "replace")
        end = begin - 1


def value_of(text: str) -> Metric:
    """The text as a number if it is one. JSON has no infinities and no NaN, so these stay text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
