"""Holds the job's GPU leases, and protects descriptors from scripts that close all of them, as daemons do.

Each rank locks the leases, so that the GPUs stay leased while any rank is alive, even without a supervisor. The rank's
forked children (DataLoader workers) share the lock, because they also hold GPU memory; programs that it executes don't.

The worker server's C++ threads refer to their socket by descriptor number. If the script closed the socket, another
connection could get that number. Then both would read from it, and the process would abort at exit.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_TRIES = 50
_protected: dict[int, int] = {}  # descriptor → inode
_owner = 0
_real_close = os.close
_real_closerange = os.closerange


def protect_new_sockets(make: Callable[[], T]) -> T:
    """Protects the sockets that ``make`` opens, and returns its result."""
    before = _sockets()
    made = make()
    _protected.update(_sockets().items() - before.items())
    _install()
    return made


def hold(paths: str) -> None:
    """Locks a byte of each file in ``paths`` (joined by ``os.pathsep``) until this process ends.

    Skips a file if it can't be locked.
    """
    for path in filter(None, paths.split(os.pathsep)):
        fd = _locked(path)
        if fd >= 0:
            _protected[fd] = os.fstat(fd).st_ino
            _install()


def _install() -> None:
    global _owner, _real_close, _real_closerange
    _owner = os.getpid()
    if os.close is not _close:
        _real_close, os.close = os.close, _close
        _real_closerange, os.closerange = os.closerange, _closerange


def detach() -> None:
    """Removes the protection in a forked child, which can close all descriptors: the server belongs to its parent."""
    _protected.clear()
    if os.close is _close:
        os.close = _real_close
    if os.closerange is _closerange:
        os.closerange = _real_closerange


def _sockets() -> dict[int, int]:
    inodes = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            info = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        if stat.S_ISSOCK(info.st_mode):
            inodes[int(name)] = info.st_ino
    return inodes


def _is_protected(descriptor: object) -> bool:
    """Returns whether the descriptor still refers to the protected file.

    C code might have closed the file, and the script might have reused its number.
    """
    if not isinstance(descriptor, int) or os.getpid() != _owner:
        return False
    inode = _protected.get(descriptor)
    if inode is None:
        return False
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _close(fd: int) -> None:
    if not _is_protected(fd):
        _real_close(fd)


def _closerange(fd_low: int, fd_high: int, /) -> None:
    for descriptor in sorted(_protected):
        if fd_low <= descriptor < fd_high and _is_protected(descriptor):
            _real_closerange(fd_low, descriptor)
            fd_low = descriptor + 1
    _real_closerange(fd_low, fd_high)


def _locked(path: str) -> int:
    """Opens ``path`` and locks a random byte of it. Returns the descriptor that holds the lock, or -1.

    An exclusive lock on the open file description needs write permission (see ``leases.lease``). Each rank locks a
    different byte, so that all can hold the file.
    """
    import fcntl
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
