"""The queue of those who wait: a locked file each, in the order of their arrival. Who is killed has left the queue.

All of this is done behind the store's gate. Order among waiters is a courtesy that they do each other; what is free is
decided by locks alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from safelaunch import procstat
from safelaunch.leases import files
from safelaunch.leases.holder import Holder, decode

PREFIX = "ticket."
_MOST_BYTES = 65536


@dataclass(slots=True)
class Ticket:
    """A place in the queue: the file's name, which sorts by arrival, and its locked descriptor; -1 when left."""

    name: str
    descriptor: int

    def tear(self, directory: int) -> None:
        """Leaves the queue, if that has not been done."""
        if self.descriptor >= 0:
            _remove(self.name, directory)
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True, slots=True)
class Ahead:
    """Those who came first. ``promised``: things that one of them waits for, these and no others.

    ``blocking``: one who waits for some of many, and may need any that becomes free: who comes later waits behind him.
    """

    promised: Mapping[str, Holder]
    blocking: Holder | None = None


def draw(candidates: Sequence[str], count: int, about: Holder, directory: int) -> Ticket:
    """A ticket behind all others. CLOCK_MONOTONIC orders them; after a reboot it starts anew, and so does the queue."""
    name = f"{PREFIX}{time.monotonic_ns():020d}.{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=directory)
    os.fchmod(fd, 0o644)
    files.try_lock(fd)
    document = {**json.loads(about.encode()), "candidates": list(candidates), "count": count}
    try:
        os.pwrite(fd, json.dumps(document).encode(), 0)
    except OSError:
        pass  # a full disk: then it stands in everybody's way, which is the safe side
    return Ticket(name, fd)


def before(ticket: Ticket | None, candidates: Sequence[str], names: Iterable[str], directory: int) -> Ahead:
    """Who came before ``ticket`` (None: before now) and waits for some of ``candidates``."""
    wanted = set(candidates)
    promised: dict[str, Holder] = {}
    for name in _ordered(names):
        if ticket is not None and name >= ticket.name:
            break
        found = _living(name, directory)
        if found is None:
            continue
        holder, waits_for, count = found
        if waits_for is None or (waits_for & wanted and count < len(waits_for)):
            return Ahead(promised, holder)
        for key in waits_for & wanted:
            promised.setdefault(key, holder)
    return Ahead(promised)


def all_living(names: Iterable[str], directory: int) -> list[Holder]:
    """Everybody in the queue."""
    return [found[0] for name in _ordered(names) if (found := _living(name, directory)) is not None]


def _ordered(names: Iterable[str]) -> Iterator[str]:
    return iter(sorted(name for name in names if name.startswith(PREFIX)))


def _living(name: str, directory: int) -> tuple[Holder, set[str] | None, int] | None:
    """Who waits with this ticket, for how many of what (None: not known). None when he has gone, or is stopped.

    A waiter that somebody has stopped (Ctrl-Z) would hold everybody up; it has its place again when it goes on.
    """
    if not files.is_locked(name, directory):
        _remove(name, directory)
        return None
    pid = name.rpartition(".")[2]
    found = procstat.read(int(pid)) if pid.isdigit() else None
    if found is not None and found.state in "Tt":
        return None
    data, uid = files.read_small(name, directory, _MOST_BYTES)
    holder = decode(data, uid, "waiter")
    try:
        document = json.loads(data)
        return holder, {str(key) for key in document["candidates"]}, int(document["count"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return holder, None, 0


def _remove(name: str, directory: int) -> None:
    """Ours, or our user's who was killed; those of others the sticky bit keeps, and they do no harm."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return
