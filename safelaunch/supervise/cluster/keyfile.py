"""The job's key (``--cluster-key-file``): what the supervisors of all nodes know, and nobody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LEAST_BYTES, MOST_BYTES = 16, 4096


class BadKeyFile(ValueError):
    """Why the file holds no key: a clause."""


def read_key(path: Path) -> bytes:
    """The file's content, without white space at its ends. Raises BadKeyFile."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadKeyFile("it is not a file")
            key = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        raise BadKeyFile(error.strerror or str(error)) from error
    if not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise BadKeyFile(f"a key has {LEAST_BYTES} to {MOST_BYTES} bytes")
    return key
