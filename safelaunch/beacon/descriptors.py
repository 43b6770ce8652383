"""A script that closes every descriptor, as daemons do, spares the worker server's socket, and the locks of its GPUs.

The server's C++ threads use the socket by its number, which may be a connection of the script's own by then: both would
read from it, and at the rank's exit the process would abort.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_spared: dict[int, int] = {}  # descriptor → inode
_owner = 0
_real_close = os.close
_real_closerange = os.closerange


def sparing(make: Callable[[], T]) -> T:
    """Calls ``make``; the sockets that are open after it and were not before are spared from now on."""
    before = _sockets()
    made = make()
    _spared.update(_sockets().items() - before.items())
    _guard()
    return made


def spare(descriptor: int) -> None:
    """The script cannot close ``descriptor`` from now on, not knowing that it is there."""
    _spared[descriptor] = os.fstat(descriptor).st_ino
    _guard()


def _guard() -> None:
    global _owner, _real_close, _real_closerange
    _owner = os.getpid()
    if os.close is not _close:
        _real_close, os.close = os.close, _close
        _real_closerange, os.closerange = os.closerange, _closerange


def detach() -> None:
    """In a forked child, which may close what it likes: the server is its parent's."""
    _spared.clear()
    if os.close is _close:
        os.close = _real_close
    if os.closerange is _closerange:
        os.closerange = _real_closerange


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            info = os.fstat(int(name))
        except OSError:
            continue  # that of the listing itself
        if stat.S_ISSOCK(info.st_mode):
            found[int(name)] = info.st_ino
    return found


def _is_spared(descriptor: object) -> bool:
    """Whether it is still the server's: somebody may have closed it by other means, and the number be his own."""
    if not isinstance(descriptor, int) or os.getpid() != _owner:
        return False
    inode = _spared.get(descriptor)
    if inode is None:
        return False
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _close(fd: int) -> None:
    if not _is_spared(fd):
        _real_close(fd)


def _closerange(fd_low: int, fd_high: int, /) -> None:
    for descriptor in sorted(_spared):
        if fd_low <= descriptor < fd_high and _is_spared(descriptor):
            _real_closerange(fd_low, descriptor)
            fd_low = descriptor + 1
    _real_closerange(fd_low, fd_high)
