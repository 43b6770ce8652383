"""What a path turned out to hold."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.errors import SafelaunchError
from safelaunch.model import Evidence

MAX_FILE_BYTES = 256 << 20


class Unreadable(SafelaunchError):
    """A file that is not what it should be; the message says what is wrong, without the path."""


@dataclass(frozen=True)
class Found:
    """``what``: in words (``a bundle``). ``problems``: files that gave nothing, each with the reason.

    ``files``: where a claim points at (``ranks/3/flight_recorder.json``) → the file that it stands for, where that is
    another one.
    """

    what: str
    evidence: Evidence
    problems: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def read_limited(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file. Raises Unreadable for anything else, and for one that is too large."""
    try:
        # A FIFO in the folder must not keep us waiting, whoever put it there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a file")
            if status.st_size > limit_bytes:
                raise Unreadable(f"it has {status.st_size} bytes, more than {limit_bytes}")
            return file.read(limit_bytes)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
