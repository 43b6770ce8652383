"""Leases in hand: what holds them, how to free them, and how to pass them to another process.

A lock belongs to the open file, not to a process: whoever has its descriptor holds it. So a lease that is handed over
to a child is held at every moment, by the parent, by both, then by the child. It ends when all of them are dead.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.leases import files
from safelaunch.leases.holder import MAGIC, Holder, since_now

HANDED_OVER = "SAFELAUNCH_HELD"
RANKS = files.RANKS
_OTHER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass
class Lease:
    """Things held until ``release``, or until this process and all that share the locks are gone.

    ``locks``: thing → descriptor of the locked file. ``rank_files``: paths of the files that the ranks' beacons lock.
    ``sockets``: port → descriptor of the socket that reserves it from programs that take no leases.
    """

    locks: dict[str, int]
    rank_files: tuple[str, ...] = ()
    sockets: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.locks)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locks, for the guardian and others that keep holding if this process is killed."""
        return tuple(self.locks.values())

    def add(self, other: Lease) -> None:
        """Takes over everything that ``other`` holds; afterwards ``other`` is empty."""
        self.locks.update(other.locks)
        self.sockets.update(other.sockets)
        self.rank_files += other.rank_files
        other.locks, other.sockets, other.rank_files = {}, {}, ()

    def release(self) -> None:
        """Frees everything at once, even if a process that the job left behind has inherited a descriptor."""
        self._close_sockets()
        while self.locks:
            _, fd = self.locks.popitem()
            files.unlock(fd)

    def forget(self) -> None:
        """Closes our descriptors; a child that received them keeps holding."""
        self._close_sockets()
        while self.locks:
            _, fd = self.locks.popitem()
            os.close(fd)

    def _close_sockets(self) -> None:
        while self.sockets:
            _, fd = self.sockets.popitem()
            os.close(fd)

    def hand_over(self) -> tuple[dict[str, str], tuple[int, ...]]:
        """Variables and descriptors (``pass_fds``) that make a child safelaunch the holder.

        Call ``forget`` after starting it, not ``release``.
        """
        given = [*self.locks.items(), *self.sockets.items()]
        return {HANDED_OVER: ",".join(f"{fd}:{key}" for key, fd in given)}, tuple(fd for _, fd in given)

    def tell(self, about: Holder) -> None:
        """Writes the holder's description into the lock files, for people to read."""
        data = since_now(about).encode()
        for fd in self.descriptors:
            files.write_small(fd, data, MAGIC)

    def touch(self) -> None:
        """Touches the files: cleaners of /tmp remove files that nobody touched for days."""
        for fd in self.descriptors:
            try:
                os.utime(fd)
            except OSError:
                continue


def inherited(environ: Mapping[str, str], directory: str) -> Lease | None:
    """The lease that our parent handed over (``Lease.hand_over``); None if there is none, or if it does not hold.

    Only the descriptors count, not the variables: each must be the file of that thing, and locked by nobody but us.
    """
    lease = Lease({})
    paths = []
    for item in filter(None, environ.get(HANDED_OVER, "").split(",")):
        number, _, key = item.partition(":")
        fd = int(number) if re.fullmatch(r"[0-9]{1,9}", number) else -1
        if key in lease.locks and _is_socket(fd):
            lease.sockets[key] = fd
        else:
            name = _name_of(fd, key, directory)
            if name is None or not _holds(fd):
                lease.forget()
                return None
            lease.locks[key] = fd
            paths.append(f"{directory}/{name}{RANKS}")
        os.set_inheritable(fd, False)
    lease.rank_files = tuple(paths)
    return lease if lease.locks else None


def _holds(fd: int) -> bool:
    """Whether the lock belongs to this descriptor."""
    try:
        return files.try_lock(fd)
    except OSError:
        return False  # not open for writing: it never locked anything


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _name_of(fd: int, key: str, directory: str) -> str | None:
    """The name of the open file ``fd`` if it is our file for ``key`` in the lease directory, else None."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        info = os.fstat(fd)
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    name = os.path.basename(path)
    ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()
    same = (info.st_dev, info.st_ino) == (there.st_dev, there.st_ino)
    right = os.path.dirname(path) == os.path.realpath(directory) and name.partition(".")[0] == base_of(key)
    return name if ours and same and right and not name.endswith(RANKS) else None


def base_of(key: str) -> str:
    """A thing's file name without the user. MIG UUIDs of older drivers contain slashes, so they are replaced."""
    return _OTHER.sub("_", key)
