"""Shows a recording on the screen and in ``report.md``."""

from __future__ import annotations

from safelaunch.addons.record.comparison import describe
from safelaunch.addons.record.rows import (
    MOST_ROWS,
    RecordingReport,
    activity_name,
    places,
    rank_rows,
)
from safelaunch.addons.record.shares import (
    KINDS,
    CodeLocation,
    mean,
    share_of,
)
from safelaunch.addons.record.slowness import Slowness, percent
from safelaunch.model import Frame, format_ranks
from safelaunch.stacks.frames import place
from safelaunch.system.console import cut, wrapped
from safelaunch.system.printable import clean

MOST_LINES = 8


def screen(recorded: RecordingReport, width: int) -> str:
    """Returns the verdict, ranks, lines of code and missing evidence, as text with at most ``width`` columns."""
    slowness, lines = recorded.slowness, list[str]()
    lines += wrapped(clean(slowness.headline), width)
    if slowness.findings and slowness.findings[0].advice:
        lines += wrapped(clean(slowness.findings[0].advice), width, "  ", "  ")
    for finding in slowness.findings[1:]:
        lines += wrapped(clean(f"also: {finding.text}"), width, "  ", "  ")
    if recorded.compared is not None:
        lines += wrapped(clean(f"against {recorded.earlier}: {recorded.compared.text}"), width)
        changed = [change for change in recorded.compared.changes if change.more][:MOST_LINES]
        lines += [
            cut(f"  {recorded.compared.signed(change.more):>10}  {describe(change)}", width) for change in changed
        ]
    if slowness.times:
        lines += ["", *_table(slowness, width)]
        for title, waits in (("waits by line", True), ("everything else by line", False)):
            rows = places(slowness.times, waits=waits)[:MOST_LINES]
            lines += [f"{title}:"] if rows else []
            lines += [
                cut(f"  {percent(share):>5}  {_at(location, frame)}", width) for location, share, frame, _ in rows
            ]
    for text in (*slowness.missing, *recorded.recording.notes):
        lines += wrapped(clean(f"not seen: {text}" if text in slowness.missing else text), width, "  ", "  ")
    return "\n".join(clean(line).rstrip() for line in lines)


def _at(location: CodeLocation, frame: Frame | None) -> str:
    return f"{activity_name(location)}{f' at {place(frame)}' if frame is not None else ''}"


def _table(slowness: Slowness, width: int) -> list[str]:
    times, members = slowness.times, rank_rows(slowness.times)
    kinds = [kind for kind in KINDS if any(time.kinds.get(kind, 0.0) >= 0.005 for time in times)]
    while True:
        rows = [["rank", "waits", *kinds]]
        for group in members:
            shares = [mean([rank_time.waits for rank_time in group]), *(share_of(group, kind) for kind in kinds)]
            rows.append([format_ranks([rank_time.rank for rank_time in group]), *map(percent, shares)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if not kinds or sum(widths) + 2 * len(widths) <= width:
            break
        kinds.remove(min(kinds, key=lambda kind: share_of(times, kind)))  # drops the smallest share first
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows[: MOST_ROWS + 1]]


def markdown(recorded: RecordingReport) -> str:
    title = f"# Where the time goes: {_safe(recorded.recording.name)}"
    body = screen(recorded, 120).replace("```", "'''")
    return f"{title}\n\n```\n{body}\n```\n"


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-. " else f"\\{c}" for c in clean(name))
