"""A rank's share in the leases of its job: as long as one rank lives, its GPUs are not free, supervisor or not.

The lock goes with the process, and with the children that it forks (DataLoader workers), which keep the GPU's memory
as well; a program that it executes does not have it.
"""

from __future__ import annotations

import os

_held: list[int] = []
_TRIES = 50


def hold(paths: str) -> None:
    """Locks the files ``paths`` (joined by ``os.pathsep``), shared, until this process ends. Best effort."""
    for path in filter(None, paths.split(os.pathsep)):
        fd = _open(path)
        if fd >= 0:
            _held.append(fd)
    if _held:
        from . import descriptors

        for fd in _held:
            descriptors.spare(fd)


def _open(path: str) -> int:
    """A descriptor that holds a shared lock on ``path``, or -1."""
    import fcntl
    import stat
    from time import sleep

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        # Whoever asks what is free locks each file for a moment. Not to wait for ever: he may be stopped right there.
        for _ in range(_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return fd
            except OSError:
                sleep(0.002)
    os.close(fd)
    return -1
