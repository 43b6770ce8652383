"""Reads the user's source, for reports and for rules that need the loop around a line.

Paths come from the job, or from a stranger's bundle, and may name anything: only regular files named ``*.py`` are read,
also behind a link. The file may be on a disk that does not answer: each read has a deadline, and a path that
missed it is not retried.
"""

from __future__ import annotations

import os
import stat

from safelaunch.capture.result import within
from safelaunch.errors import CaptureError

DEADLINE_S = 1.0
MOST_BYTES = 4 << 20
_dead: set[str] = set()


def text(path: str) -> str | None:
    """The file's text, at most 4 MB of it, or None if it can't be read within a second."""
    if path in _dead:
        return None
    try:
        return within(DEADLINE_S, path, lambda: _read(path))
    except CaptureError:
        _dead.add(path)
        return None


def line(path: str, number: int) -> str | None:
    """Line ``number`` (from 1) of a file, or None. It may contain a key that is hard-coded in the program."""
    content = text(path)
    lines = content.splitlines() if content is not None else []
    return lines[number - 1] if 0 < number <= len(lines) else None


def text_for_stranger(path: str) -> str | None:
    """As ``text``, for evidence from elsewhere: a relative path meant another directory than the reader's."""
    return text(path) if path.startswith("/") else None


def line_for_stranger(path: str, number: int) -> str | None:
    """As ``line``, for evidence from elsewhere."""
    return line(path, number) if path.startswith("/") else None


def _read(path: str) -> str | None:
    try:
        if not (path.endswith(".py") and os.path.realpath(path).endswith(".py")):
            return None
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
