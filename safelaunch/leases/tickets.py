"""The queue: one locked file for each process that waits, in order of arrival. A killed process has left the queue.

The order is a courtesy among those who wait; only locks decide what is free. So a ticket with unexpected contents is
skipped: nobody waits for a ticket that can't be understood.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.leases import files
from safelaunch.leases.holder import Holder, of_words
from safelaunch.system import procstat

PREFIX = "ticket."
MOST_EACH = 64  # tickets of one user in the queue
_NAME = re.compile(r"ticket\.[0-9]{20}\.[0-9]{1,10}", re.ASCII)
_MOST_BYTES = 65536

Odd = Callable[[str, str], None]  # the name of a file, and what is wrong with it


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A process in the queue, and for how many of which candidates it waits."""

    holder: Holder
    candidates: frozenset[str]
    count: int


@dataclass(slots=True)
class Ticket:
    """A place in the queue: the file's name, which sorts by arrival, and its locked descriptor; -1 after leaving."""

    name: str
    descriptor: int

    def tear(self, directory: int) -> None:
        """Leaves the queue, once. ``directory`` -1: it can't be opened, so only the lock is released."""
        if self.descriptor >= 0:
            if directory >= 0:
                _remove(self.name, directory)
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True, slots=True)
class Ahead:
    """Those ahead in the queue. ``promised``: things that one of them waits for exclusively.

    ``blocking``: one that waits for some of many and may need any that becomes free, so later ones wait behind it.
    """

    promised: Mapping[str, Holder]
    blocking: Holder | None = None


def draw(candidates: Sequence[str], count: int, about: Holder, directory: int) -> Ticket:
    """Draws a ticket behind all others. CLOCK_MONOTONIC orders them; a reboot restarts the clock and the queue."""
    name = f"{PREFIX}{time.monotonic_ns():020d}.{os.getpid()}"
    unfinished = f".{name}"  # until it is locked: an unlocked ticket counts as given up
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, 0o600, dir_fd=directory)
    files.try_lock(fd)
    try:
        os.pwrite(fd, about.encode(candidates=list(candidates), count=count), 0)
    except OSError:
        pass  # a full disk: the ticket then blocks nobody
    os.fchmod(fd, 0o644)
    os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    return Ticket(name, fd)


def before(ticket: Ticket | None, candidates: Sequence[str], names: Iterable[str], directory: int, odd: Odd) -> Ahead:
    """Those who came before ``ticket`` (None: before now) and wait for some of ``candidates``.

    ``odd`` is called for unexpected files.
    """
    wanted = set(candidates)
    promised: dict[str, Holder] = {}
    for name, waiter in _waiters(names, directory, odd):
        if ticket is not None and name >= ticket.name:
            break
        if waiter.candidates & wanted and waiter.count < len(waiter.candidates):
            return Ahead(promised, waiter.holder)
        for key in waiter.candidates & wanted:
            promised.setdefault(key, waiter.holder)
    return Ahead(promised)


def all_living(names: Iterable[str], directory: int, odd: Odd) -> list[Holder]:
    """Everybody in the queue."""
    return [waiter.holder for _, waiter in _waiters(names, directory, odd)]


def _waiters(names: Iterable[str], directory: int, odd: Odd) -> Iterator[tuple[str, _Waiter]]:
    """Those who wait, in queue order."""
    seen: Counter[int] = Counter()
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        owner = files.owner_of(name, directory)
        seen[owner] += 1
        if not _NAME.fullmatch(name):
            odd(name, "not a ticket's name")
        elif seen[owner] > MOST_EACH:
            odd(name, f"user {owner} has more than {MOST_EACH} tickets")
        elif not files.is_locked(name, directory):
            _remove(name, directory)
        elif (waiter := _read(name, directory)) is None:
            odd(name, "it does not say who waits for what")
        elif not _is_stopped(waiter.holder):
            yield name, waiter


def _read(name: str, directory: int) -> _Waiter | None:
    from safelaunch.leases.said import SaidTicket, read

    data, uid = files.read_small(name, directory, _MOST_BYTES)
    words = read(data, SaidTicket)
    return _Waiter(of_words(words, uid, "waiter"), frozenset(words.candidates), words.count) if words else None


def _is_stopped(waiter: Holder) -> bool:
    """Whether a waiter is stopped (Ctrl-Z): it would block everybody. It gets its place back when it continues.

    The pid alone does not identify it: in another pid namespace it is another process.
    """
    found = procstat.read(waiter.pid) if waiter.pid else None
    return found is not None and found.start_ticks == waiter.start_ticks and found.state in "Tt"


def _remove(name: str, directory: int) -> None:
    """Removes an abandoned ticket of our user; the sticky bit protects those of others, which do no harm."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return
