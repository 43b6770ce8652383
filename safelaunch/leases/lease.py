"""Leases in hand: what holds them, how they are freed, and how they pass to the process that is to go on holding.

A lock belongs to the open file, not to a process: whoever has its descriptor holds it. So what is handed over to a
child is held at every moment, by the parent, by both, by the child, and freed by the death of all of them.
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
RANKS = ".ranks"
_OTHER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass
class Lease:
    """Things that are held until ``release``, or until this process and all that share the locks are gone.

    ``locks``: thing → descriptor of the locked file. ``rank_files``: what the ranks' beacons lock, by path.
    ``sockets``: port → descriptor of the socket that keeps it from those who take no leases.
    """

    locks: dict[str, int]
    rank_files: tuple[str, ...] = ()
    sockets: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.locks)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For the guardian, and for whoever is to go on holding when this process is killed."""
        return tuple(self.locks.values())

    def add(self, other: Lease) -> None:
        """Takes over what ``other`` holds, which holds nothing from then on."""
        self.locks.update(other.locks)
        self.sockets.update(other.sockets)
        self.rank_files += other.rank_files
        other.locks, other.sockets, other.rank_files = {}, {}, ()

    def release(self) -> None:
        """Frees everything at once, also where a process that the job left behind has inherited a descriptor."""
        self._close_sockets()
        while self.locks:
            _, fd = self.locks.popitem()
            files.unlock(fd)

    def forget(self) -> None:
        """Closes our descriptors; a child that they were handed over to holds on."""
        self._close_sockets()
        while self.locks:
            _, fd = self.locks.popitem()
            os.close(fd)

    def _close_sockets(self) -> None:
        while self.sockets:
            _, fd = self.sockets.popitem()
            os.close(fd)

    def hand_over(self) -> tuple[dict[str, str], tuple[int, ...]]:
        """Variables and descriptors (``pass_fds``) that make a safelaunch started with them the holder.

        Call ``forget`` after it has been started, not ``release``.
        """
        given = [*self.locks.items(), *self.sockets.items()]
        return {HANDED_OVER: ",".join(f"{fd}:{key}" for key, fd in given)}, tuple(fd for _, fd in given)

    def tell(self, about: Holder) -> None:
        """Writes down who holds it now, for people to read."""
        data = since_now(about).encode()
        for fd in self.descriptors:
            files.write_small(fd, data, MAGIC)

    def touch(self) -> None:
        """Makes the files young: cleaners of /tmp remove what has not been touched for days."""
        for fd in self.descriptors:
            try:
                os.utime(fd)
            except OSError:
                continue


def inherited(environ: Mapping[str, str], directory: str) -> Lease | None:
    """What our parent has handed over to us (``Lease.hand_over``); None when nothing, or nothing that holds.

    The descriptors count, not the words: each must be the file of that thing, and locked by nobody but us.
    """
    lease = Lease({})
    paths = []
    for item in filter(None, environ.get(HANDED_OVER, "").split(",")):
        number, _, key = item.partition(":")
        fd = int(number) if number.isdigit() else -1
        if key in lease.locks and _is_socket(fd):
            lease.sockets[key] = fd
        else:
            name = _name_of(fd, key, directory)
            if name is None or not files.try_lock(fd):
                lease.forget()
                return None
            lease.locks[key] = fd
            paths.append(f"{directory}/{name}{RANKS}")
        os.set_inheritable(fd, False)
    lease.rank_files = tuple(paths)
    return lease if lease.locks else None


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _name_of(fd: int, key: str, directory: str) -> str | None:
    """The name of the open file ``fd`` if it is one of our files for ``key`` in the lease directory."""
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
    """A thing's file name without the user: MIG devices of older drivers have slashes in theirs."""
    return _OTHER.sub("_", key)
