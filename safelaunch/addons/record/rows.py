"""Builds the rows of a recording's tables: lines by their share of the time, and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safelaunch.addons.record.comparison import StepTimeChange
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import (
    KINDS,
    CodeLocation,
    RankTime,
    frame_of,
    mean,
    place_share,
)
from safelaunch.addons.record.slowness import Slowness
from safelaunch.model import Frame, format_ranks

MOST_ROWS = 60


@dataclass(frozen=True)
class RecordingReport:
    recording: Recording
    slowness: Slowness
    compared: StepTimeChange | None = None
    earlier: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """further facts for the page"""


def places(times: Sequence[RankTime], *, waits: bool) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    """Returns lines by their mean share of the time, largest first, each with the ranks that were seen there."""
    every = {place for time in times for place in time.places if place.waits == waits}
    rows = [row for location in every for row in (_by_function if waits else _by_line)(times, location)]
    return sorted((row for row in rows if row[1] >= 0.005), key=lambda row: (-row[1], row[0].function))


def _by_function(
    times: Sequence[RankTime], location: CodeLocation
) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    ranks = format_ranks([time.rank for time in times if time.places.get(location, 0.0) > 0])
    return [(location, place_share(times, location), frame_of(times, location), ranks)]


def _by_line(times: Sequence[RankTime], location: CodeLocation) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    """Returns a function's lines. Their shares exclude waits: some samples of a backward pass can be waits."""
    rank_lines = [time.lines.get(location, {}) for time in times]
    lines = {
        line: mean([shares.get(line, 0.0) for shares in rank_lines])
        for line in {line for shares in rank_lines for line in shares}
    }
    if not location.file or not any(lines.values()):
        return _by_function(times, location)
    part = place_share(times, location) / sum(lines.values())
    ranks = {
        line: format_ranks([t.rank for t, shares in zip(times, rank_lines, strict=True) if line in shares])
        for line in lines
    }
    return [
        (location, share * part, Frame(location.file, line, location.function), ranks[line])
        for line, share in lines.items()
    ]


def rank_rows(times: Sequence[RankTime]) -> list[list[RankTime]]:
    """Returns the rows of the table of ranks: one rank each if there are few, else ranks with similar shares."""
    if len(times) <= MOST_ROWS:
        return [[time] for time in times]
    rows: dict[tuple[int, ...], list[RankTime]] = {}
    for rank_time in times:
        key = tuple(round(rank_time.kinds.get(kind, 0.0) / 0.1) for kind in KINDS)
        rows.setdefault((*key, round(rank_time.waits / 0.1)), []).append(rank_time)
    return list(rows.values())


def activity_name(location: CodeLocation) -> str:
    if location.kind == "backward" and location.waits:
        return "waiting in backward"
    return location.what if location.waits and location.what else location.kind
