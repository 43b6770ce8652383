"""Holds a job's GPU leases in each rank, so that the GPUs stay leased while any rank lives, even without a supervisor.

The lock lasts as long as the process and the children that it forks (DataLoader workers), which hold GPU memory as
well. Programs that the process executes do not inherit it.
"""

from __future__ import annotations

import os
from time import monotonic, sleep

from . import layout

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


def exchange(run_dir: str, supervisor_pid: int) -> None:
    """Gives this rank other GPUs than those that were leased at the start, as the supervisor has written down.

    torchrun starts ranks anew at once after a crash, so wait for the verdict on it if that may bring an exchange.
    Nothing has asked CUDA for its devices yet.
    """
    deadline = monotonic() + layout.EXCHANGE_S
    pending, path = os.path.join(run_dir, layout.GPUS_PENDING), os.path.join(run_dir, layout.GPUS)
    while os.path.exists(pending) and monotonic() < deadline and os.path.exists(f"/proc/{supervisor_pid}"):
        sleep(0.02)
    if not os.path.exists(path):
        return
    with open(path, encoding="ascii") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    for old, new, lock in lines:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if old in visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(new if one == old else one for one in visible)
        hold(lock)


def _open(path: str) -> int:
    """Opens ``path`` and locks a random byte of it. Returns the descriptor that holds the lock, or -1.

    The lock is an exclusive lock of the open file description, which takes write permission (see ``leases.files``).
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
