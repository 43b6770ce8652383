"""Defines the JSON document that describes a recording."""

from __future__ import annotations

import msgspec

from safelaunch.addons.record.rows import (
    RecordingReport,
)
from safelaunch.addons.record.slowness import TimeFinding


class RankDocument(msgspec.Struct, frozen=True):
    """Shares of a rank's time (0 to 1) spent waiting for peers, holding the GIL, and in each kind of activity."""

    rank: int
    waits: float
    gil: float
    steps: int | None
    shares: dict[str, float]


class RecordDocument(msgspec.Struct, frozen=True):
    """Document for --json: the verdict, its evidence, and the path of the folder with all samples."""

    run: str
    name: str
    folder: str
    summary: str
    findings: list[TimeFinding]
    ranks: list[RankDocument]
    missing: list[str]
    compared: str


def document(recorded: RecordingReport, run: str, folder: str) -> RecordDocument:
    """Returns the --json document of a recording of ``run`` whose files are in ``folder``."""
    slowness, compared = recorded.slowness, recorded.compared
    ranks = [
        RankDocument(
            time.rank,
            round(time.waits, 4),
            round(time.gil, 4),
            time.steps,
            {kind: round(share, 4) for kind, share in time.kinds.items()},
        )
        for time in slowness.times
    ]
    text = compared.text if compared is not None else ""
    name = recorded.recording.name
    return RecordDocument(
        run, name, folder, slowness.headline, list(slowness.findings), ranks, list(slowness.missing), text
    )
