"""Holds a job's GPU leases in each rank, so that the GPUs stay leased while any rank lives, even without a supervisor.

The lock lasts as long as the process and the children that it forks (DataLoader workers), which hold GPU memory as
well. Programs that the process executes do not inherit it.
"""

from __future__ import annotations

import os

_held: list[int] = []
_TRIES = 50


def hold(paths: str) -> None:
    """Locks a byte of each file in ``paths`` (joined by ``os.pathsep``) until this process ends. Best effort."""
    for path in filter(None, paths.split(os.pathsep)):
        fd = _open(path)
        if fd >= 0:
            _held.append(fd)
    if _held:
        from . import descriptors

        for fd in _held:
            descriptors.protect(fd)


def _open(path: str) -> int:
    """Opens ``path`` and locks a random byte of it. Returns the descriptor that holds the lock, or -1.

    The lock is an exclusive lock of the open file description, which takes write permission (see ``leases.lease``).
    Each rank locks a different byte, so all of them can hold the file.
    """
    import fcntl
    import stat
    import struct

    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        for _ in range(_TRIES):
            byte = int.from_bytes(os.urandom(5), "little")
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
                return fd
            except OSError:
                continue  # another rank holds this byte
    os.close(fd)
    return -1
