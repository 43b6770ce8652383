"""The evidence found at a path, and bounded reads of untrusted files."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.model import Evidence
from safelaunch.system.errors import SafelaunchError

MAX_FILE_BYTES = 256 << 20
OUTSIDE = "it is a link that leads out of the directory"
LINK = "it is a link, and safelaunch follows no links here"


class Unreadable(SafelaunchError):
    """A file that is not what it should be. The message says what is wrong, without the path."""


@dataclass(frozen=True)
class Found:
    """The evidence at a path. ``what``: its kind in words (``a bundle``); ``problems``: unreadable files, with reasons.

    ``files``: the file in a claim (``ranks/3/flight_recorder.json``) → the real file, if that is another one.
    ``bundles``: the directories of the bundles that it was read from. ``taken``: of a bundle, from the last progress to
    when it was written, in Unix seconds; zeros where that is not known. ``source``: what the verdict read of the user's
    files, by their paths; None where that is not kept.
    """

    what: str
    evidence: Evidence
    problems: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    bundles: tuple[Path, ...] = ()
    taken: tuple[float, float] = (0.0, 0.0)
    source: Mapping[str, str] | None = None

    def read_source(self, path: str) -> str | None:
        """The text of a source file for the verdict: as it was then, otherwise what has that path here and now."""
        if self.source is not None:
            return self.source.get(path) or None
        from safelaunch.capture import user_source

        return user_source.text_for_stranger(path)


def read_limited(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file. Raises Unreadable for anything else, and for a file that is too large.

    The last part of the path must not be a link; ``within`` checks the directories.
    """
    try:
        mode = path.lstat().st_mode  # opening a device may already do something
        if not stat.S_ISREG(mode):
            raise Unreadable(LINK if stat.S_ISLNK(mode) else "it is not a regular file")
        # A FIFO in the folder must not block us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if status.st_size > limit_bytes:
                raise Unreadable(f"it is too large: {status.st_size} bytes, and the limit is {limit_bytes}")
            return file.read(status.st_size)  # not the limit: read allocates that much memory at once
    except OSError as error:
        raise cannot_be_read(error) from error


def cannot_be_read(error: OSError) -> Unreadable:
    """``error`` in words."""
    return Unreadable(f"it cannot be read: {error.strerror or error}")


def within(root: Path, path: Path) -> Path:
    """``path`` with its links resolved. Raises Unreadable if they lead out of ``root``, and OSError.

    ``root`` is the user's path, with its own links resolved.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise Unreadable(OUTSIDE)
    return real
