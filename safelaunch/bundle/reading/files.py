"""Reads untrusted files within limits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from safelaunch.system.errors import SafelaunchError

STDIN = Path("/dev/stdin")
MAX_FILE_BYTES = 256 << 20
OUTSIDE = "it is a link that leads out of the directory"
LINK = "it is a link, and safelaunch follows no links here"


class Unreadable(SafelaunchError):
    """Raised because a file can't be used as what it should be.

    The message doesn't contain the path; ``fix`` contains no NUL.
    """


def read_limited(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Returns the contents of a regular file. Raises Unreadable if it is another kind of file, or too large.

    The last part of the path can't be a link; ``within`` checks the directories.
    """
    try:
        mode = path.lstat().st_mode  # merely opening a device can have effects
        if not stat.S_ISREG(mode):
            raise Unreadable(LINK if stat.S_ISLNK(mode) else "it is not a regular file")
        # Opening a FIFO must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if status.st_size > limit_bytes:
                raise Unreadable(f"it is too large: {status.st_size} bytes, and the limit is {limit_bytes}")
            return file.read(status.st_size)  # read(limit) would allocate that much memory
    except OSError as error:
        raise cannot_be_read(error) from error


def cannot_be_read(error: OSError) -> Unreadable:
    return Unreadable(f"it cannot be read: {error.strerror or error}")


def within(root: Path, path: Path) -> Path:
    """Resolves links in ``path``. Raises Unreadable if they lead outside ``root``, or OSError.

    ``root`` itself must contain no links.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise Unreadable(OUTSIDE)
    return real
