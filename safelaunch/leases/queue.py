"""Keeps a lease directory's queue: each waiting process has a locked file in it."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.leases.holder import LeaseHolder, of_record
from safelaunch.leases.lease import is_locked, owner_of, read_small, try_lock
from safelaunch.system import procstat

if TYPE_CHECKING:
    from safelaunch.leases.format import SaidTicket

PREFIX = "ticket."
MOST_EACH = 64  # per user
_NAME = re.compile(r"ticket\.[0-9]{20}\.[0-9]{1,10}", re.ASCII)
_MOST_BYTES = 65536

Odd = Callable[[str, str], None]  # takes the name of an unexpected file, and why


@dataclass(slots=True)
class Ticket:
    name: str  # sorts by arrival
    descriptor: int  # locked; -1 after leaving

    def tear(self, directory: int) -> None:
        """Leaves the queue. If the directory couldn't be opened (-1), only releases the lock."""
        if self.descriptor >= 0:
            if directory >= 0:
                _remove(self.name, directory)
            os.close(self.descriptor)
            self.descriptor = -1


def draw(candidates: Sequence[str], count: int, about: LeaseHolder, directory: int) -> Ticket:
    """Adds a ticket at the end of the queue. Tickets are ordered by CLOCK_MONOTONIC; a reboot resets both."""
    name = f"{PREFIX}{time.monotonic_ns():020d}.{os.getpid()}"
    unfinished = f".{name}"  # an unlocked ticket counts as given up
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, 0o600, dir_fd=directory)
    try_lock(fd)
    try:
        os.pwrite(fd, about.encode(candidates=list(candidates), count=count), 0)
    except OSError:
        pass  # a full disk; this ticket blocks no other
    os.fchmod(fd, 0o644)
    os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    return Ticket(name, fd)


def waiters_before(
    ticket: Ticket | None, candidates: Sequence[str], names: Iterable[str], directory: int, odd: Odd
) -> tuple[dict[str, LeaseHolder], LeaseHolder | None]:
    """Returns the waiters that joined before ``ticket``, or all if it is None.

    The first result maps each candidate to a waiter that needs exactly that one. The second is the first waiter that
    needs only some of its candidates, if any: it could use whichever becomes free, so all later waiters must wait.
    """
    wanted = set(candidates)
    promised: dict[str, LeaseHolder] = {}
    for name, holder, words in waiters(names, directory, odd):
        if ticket is not None and name >= ticket.name:
            break
        shared = wanted.intersection(words.candidates)
        if shared and words.count < len(set(words.candidates)):
            return promised, holder
        for key in shared:
            promised.setdefault(key, holder)
    return promised, None


def waiters(names: Iterable[str], directory: int, odd: Odd) -> Iterator[tuple[str, LeaseHolder, SaidTicket]]:
    """Yields file name, holder and ticket of each waiter, in the order of the queue."""
    tickets: Counter[int] = Counter()
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        owner = owner_of(name, directory)
        tickets[owner] += 1
        if not _NAME.fullmatch(name):
            odd(name, "not a ticket's name")
        elif tickets[owner] > MOST_EACH:
            odd(name, f"user {owner} has more than {MOST_EACH} tickets")
        elif not is_locked(name, directory):
            _remove(name, directory)
        elif (content := _read(name, directory)) is None:
            odd(name, "not a ticket's contents")
        elif not _is_stopped(content[0]):
            yield name, *content


def _read(name: str, directory: int) -> tuple[LeaseHolder, SaidTicket] | None:
    from safelaunch.leases.format import SaidTicket, read

    data, uid = read_small(name, directory, _MOST_BYTES)
    words = read(data, SaidTicket)
    return (of_record(words, uid, "waiter"), words) if words else None


def _is_stopped(waiter: LeaseHolder) -> bool:
    # A stopped waiter (Ctrl-Z) keeps its place, but must not block others. In another pid namespace, the pid would be
    # another process's.
    stat = procstat.read(waiter.pid) if waiter.pid else None
    return stat is not None and stat.start_ticks == waiter.start_ticks and stat.state in "Tt"


def _remove(name: str, directory: int) -> None:
    # Our own abandoned ticket. The sticky bit protects others' tickets, which do no harm.
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return
