"""Who holds the lock that a blocked flock() or fcntl() waits for: ``/proc/locks`` (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path

CALLS = ("flock", "fcntl")


def holder(pid: int, fd: int) -> int | None:
    """The process that holds a lock on what ``pid``'s descriptor ``fd`` points at, other than itself; None if unknown.

    May block on a file system that does not answer: to be called under a deadline.
    """
    try:
        status = Path(f"/proc/{pid}/fd/{fd}").stat()
        lines = Path("/proc/locks").read_text()
    except OSError:
        return None
    return parse(lines, os.major(status.st_dev), os.minor(status.st_dev), status.st_ino, pid)


def parse(text: str, major: int, minor: int, inode: int, waiter: int) -> int | None:
    """``1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF``; those who wait have ``->`` behind the number."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        pid, place = fields[4], fields[5]
        try:
            found = [int(place.split(":")[0], 16), int(place.split(":")[1], 16), int(place.split(":")[2])]
            number = int(pid)
        except (ValueError, IndexError):
            continue  # a line of another kernel
        if found == [major, minor, inode] and number > 0 and number != waiter:
            return number
    return None
