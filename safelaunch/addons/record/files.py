"""Renders the files of a recording's folder."""

from __future__ import annotations

import msgspec

from safelaunch.addons.record.page import content, script
from safelaunch.addons.record.rows import RecordingReport
from safelaunch.addons.record.screen import markdown
from safelaunch.addons.record.speedscope import speedscope
from safelaunch.report import SPEEDSCOPE, template
from safelaunch.report.exports import as_json


def files_of(recorded: RecordingReport) -> dict[str, str]:
    """Returns the contents of the files by name."""
    return {
        "record.html": template.render(content(recorded), script()),
        "report.md": markdown(recorded),
        SPEEDSCOPE: as_json(speedscope(recorded.recording)),
        "recording.json": msgspec.json.encode(recorded.recording).decode(),
    }
