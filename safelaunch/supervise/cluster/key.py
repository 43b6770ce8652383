"""The secret that a job's supervisors share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SHORTEST_KEY, LONGEST_KEY = 16, 4096  # bytes


class BadKeyFile(ValueError):
    """Raised for a file without a key. The message is a clause."""


def read_key(path: Path) -> bytes:
    """Returns the file's contents, stripped. Raises BadKeyFile."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadKeyFile("it is not a file")
            key = file.read(LONGEST_KEY + 1).strip()
    except OSError as error:
        raise BadKeyFile(error.strerror or str(error)) from error
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise BadKeyFile(f"a key has {SHORTEST_KEY} to {LONGEST_KEY} bytes")
    return key
