"""Lines of the user's source, for reports and for rules that look at the loop a line stands in.

The file may lie on a disk that does not answer: each read has a deadline, and a path that missed it is not tried again.
"""

from __future__ import annotations

from safelaunch.bundle import report
from safelaunch.capture.redact import redact_text
from safelaunch.capture.result import within
from safelaunch.errors import CaptureError

DEADLINE_S = 1.0
_dead: set[str] = set()


def text(path: str) -> str | None:
    """The file's text, or None when it cannot be read in a second."""
    if path in _dead:
        return None
    try:
        return within(DEADLINE_S, path, lambda: report.source_text(path))
    except CaptureError:
        _dead.add(path)
        return None


def line(path: str, number: int) -> str | None:
    """Line ``number`` (from 1) of a file, or None. A key that somebody wrote into the program stays there."""
    content = text(path)
    lines = content.splitlines() if content is not None else []
    return redact_text(lines[number - 1]) if 0 < number <= len(lines) else None
