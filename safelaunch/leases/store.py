"""The leases of a node: kernel locks on files in one directory that all its users share.

An exclusive lock on a file of the holder's user, ``<thing>.<uid>``, holds a thing (a GPU by its UUID,
``port-20000``). The supervisor has that lock, and its guardian shares it. The beacons of the ranks each lock a byte of
``<thing>.<uid>.ranks``. A thing is free when none of its files is locked, whoever owns them. So the death of the
supervisor does not free a GPU that ranks still use, and once all of them are gone, the kernel has freed it. Nothing is
ever cleaned up: a file without a lock means nothing.

Whoever takes a thing locks his own file first, and then looks for the files of others. If two do so at once, at least
one sees the other and lets go. Safety rests on that alone. The gate, a lock on the directory itself that is held for a
fraction of a millisecond, makes such collisions rare. Any user can keep the gate shut, so after a second we continue
without it.

The contents of the files are for people. Anything in the directory may be hostile, so unexpected files are skipped,
with one message. Another user can still lease what he does not use, put himself first in the queue, and remove files
if the directory is his own. A directory that root creates at boot prevents the last.
"""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safelaunch.leases.holder import MOST_BYTES, LeaseHolder, decode, of_words
from safelaunch.leases.lease import (
    RANKS,
    Lease,
    base_of,
    is_locked,
    owner_of,
    read_small,
    take_own,
    try_lock,
)
from safelaunch.system import files, procstat
from safelaunch.system.console import say
from safelaunch.system.errors import StoreError

if TYPE_CHECKING:
    from safelaunch.leases.format import SaidTicket

# --- The queue: one locked file for each process that waits, in order of arrival --------------------------------------


PREFIX = "ticket."
MOST_EACH = 64  # tickets of one user in the queue
_NAME = re.compile(r"ticket\.[0-9]{20}\.[0-9]{1,10}", re.ASCII)
_MOST_BYTES = 65536

Odd = Callable[[str, str], None]  # the name of a file, and what is wrong with it


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


def draw(candidates: Sequence[str], count: int, about: LeaseHolder, directory: int) -> Ticket:
    """Draws a ticket behind all others. CLOCK_MONOTONIC orders them; a reboot restarts the clock and the queue."""
    name = f"{PREFIX}{time.monotonic_ns():020d}.{os.getpid()}"
    unfinished = f".{name}"  # until it is locked: an unlocked ticket counts as given up
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, 0o600, dir_fd=directory)
    try_lock(fd)
    try:
        os.pwrite(fd, about.encode(candidates=list(candidates), count=count), 0)
    except OSError:
        pass  # a full disk: the ticket then blocks nobody
    os.fchmod(fd, 0o644)
    os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    return Ticket(name, fd)


def before(
    ticket: Ticket | None, candidates: Sequence[str], names: Iterable[str], directory: int, odd: Odd
) -> tuple[dict[str, LeaseHolder], LeaseHolder | None]:
    """Those who came before ``ticket`` (None: before now): who waits exclusively for which of ``candidates``.

    And one who waits for some of many and may need any that becomes free, so later ones wait behind him. ``odd`` is
    called for unexpected files.
    """
    wanted = set(candidates)
    promised: dict[str, LeaseHolder] = {}
    for name, holder, words in _waiters(names, directory, odd):
        if ticket is not None and name >= ticket.name:
            break
        shared = wanted.intersection(words.candidates)
        if shared and words.count < len(set(words.candidates)):
            return promised, holder
        for key in shared:
            promised.setdefault(key, holder)
    return promised, None


def _waiters(names: Iterable[str], directory: int, odd: Odd) -> Iterator[tuple[str, LeaseHolder, SaidTicket]]:
    """Those who wait, in queue order, with what their tickets say."""
    seen: Counter[int] = Counter()
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        owner = owner_of(name, directory)
        seen[owner] += 1
        if not _NAME.fullmatch(name):
            odd(name, "not a ticket's name")
        elif seen[owner] > MOST_EACH:
            odd(name, f"user {owner} has more than {MOST_EACH} tickets")
        elif not is_locked(name, directory):
            _remove(name, directory)
        elif (found := _read(name, directory)) is None:
            odd(name, "it does not say who waits for what")
        elif not _is_stopped(found[0]):
            yield name, *found


def _read(name: str, directory: int) -> tuple[LeaseHolder, SaidTicket] | None:
    from safelaunch.leases.format import SaidTicket, read

    data, uid = read_small(name, directory, _MOST_BYTES)
    words = read(data, SaidTicket)
    return (of_words(words, uid, "waiter"), words) if words else None


def _is_stopped(waiter: LeaseHolder) -> bool:
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


DIRECTORY = "/tmp/safelaunch-leases"
VARIABLE = "SAFELAUNCH_LEASE_DIR"
GATE_DEADLINE_S = 1.0
SHUT_S = 60.0  # pause before waiting again at a gate that somebody keeps shut
_TRIES = 20  # to take what somebody else takes at the same moment
_SHARED = 0o1777

Pick = Callable[[Mapping[str, LeaseHolder]], Sequence[str] | None]


@dataclass(frozen=True)
class LeaseAttempt:
    """The result of one attempt.

    With ``lease`` None, ``held`` says who holds which candidate or waits for exactly that one (``Holder.by``), and
    ``ahead`` who is ahead of us in the queue for any of them.
    """

    lease: Lease | None
    held: Mapping[str, LeaseHolder] = field(default_factory=dict)
    ahead: LeaseHolder | None = None


class LeaseStore:
    """The lease directory. Every method raises StoreError if it is unusable."""

    def __init__(self, directory: str = DIRECTORY, say: Callable[[str], None] = say) -> None:
        self.directory = os.path.realpath(directory) if directory != DIRECTORY else directory
        self._say = say
        self._said: set[str] = set()
        self._shut_until_s = float("-inf")

    def attempt(
        self, candidates: Sequence[str], pick: Pick, about: LeaseHolder, ticket: Ticket | None = None
    ) -> LeaseAttempt:
        """Leases what ``pick`` chooses among ``candidates``, all or nothing, if it is our turn.

        ``pick`` gets the holders of the candidates, and returns None if too few are left. It runs behind the gate and
        must be quick. Without a ticket, everybody who waits comes first.
        """
        for _ in range(_TRIES):
            with self._gate() as directory:
                found = self._attempt(candidates, pick, about, ticket, directory)
            if found is not None:
                return found
            time.sleep(random.uniform(0.001, 0.02))
        return LeaseAttempt(None, self.look(candidates))

    def _attempt(
        self, candidates: Sequence[str], pick: Pick, about: LeaseHolder, ticket: Ticket | None, directory: int
    ) -> LeaseAttempt | None:
        """One attempt; None if somebody took the same thing at the same moment."""
        names = os.listdir(directory)
        held = _held(candidates, names, directory)
        promised, blocking = before(ticket, candidates, names, directory, self._odd)
        held = {**promised, **held}
        chosen = None if blocking is not None else pick(held)
        if chosen is None:
            return LeaseAttempt(None, held, blocking)
        lease = self._take(chosen, directory)
        if lease is None:
            return None
        lease.tell(about)
        if ticket is not None:
            ticket.tear(directory)
        return LeaseAttempt(lease, held)

    def look(self, keys: Iterable[str]) -> dict[str, LeaseHolder]:
        """The holders of ``keys``. Creates nothing."""
        if not os.path.isdir(self.directory):
            return {}
        with self._gate() as directory:
            return _held(keys, os.listdir(directory), directory)

    def waiting(self) -> list[LeaseHolder]:
        """Those who wait, in queue order. Creates nothing."""
        if not os.path.isdir(self.directory):
            return []
        with self._gate() as directory:
            return [holder for _, holder, _ in _waiters(os.listdir(directory), directory, self._odd)]

    def queue(self, candidates: Sequence[str], count: int, about: LeaseHolder) -> Ticket:
        """Joins the queue for ``count`` of ``candidates``."""
        with self._gate() as directory:
            return draw(candidates, count, about, directory)

    def leave(self, ticket: Ticket) -> None:
        """Leaves the queue, even if the directory is no longer usable."""
        try:
            directory = _open_directory(self.directory)
        except StoreError:
            ticket.tear(-1)
            return
        ticket.tear(directory)
        os.close(directory)

    def _take(self, keys: Sequence[str], directory: int) -> Lease | None:
        """Locks our files for ``keys``; releases them and returns None if others have locked theirs."""
        lease = Lease({})
        own: list[str] = []
        try:
            for key in keys:
                lease.locks[key], name = take_own(base_of(key), directory)
                own += [name, name + RANKS]
            others = set(os.listdir(directory)) - set(own)
            taken = not _held(keys, others, directory)
        except OSError as error:
            lease.release()
            raise _unusable(self.directory, error) from error
        if not taken:
            lease.release()
            return None
        lease.rank_files = tuple(f"{self.directory}/{name}" for name in own if name.endswith(RANKS))
        return lease

    def _odd(self, name: str, why: str) -> None:
        """Prints one message for all unexpected files: another user could create thousands."""
        shown = "".join(char if char.isprintable() else "?" for char in name[:80])
        self._once("odd", f"ignoring files that do not belong in {self.directory}, such as {shown} ({why})")

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)

    @contextmanager
    def _gate(self) -> Iterator[int]:
        """The directory's descriptor, locked unless somebody keeps the gate shut. Ctrl-Z takes effect afterwards, so
        that nobody waits for a stopped process.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
        try:
            directory = self._enter()
            try:
                yield directory
            except OSError as error:
                raise _unusable(self.directory, error) from error
            finally:
                os.close(directory)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _enter(self) -> int:
        while True:
            directory = _open_directory(self.directory)
            try:
                self._wait_for_our_turn(directory)
                if _is_still(directory, self.directory):
                    return directory
            except BaseException:
                os.close(directory)
                raise
            os.close(directory)  # it was removed while we waited: locks in it mean nothing

    def _wait_for_our_turn(self, directory: int) -> None:
        """For the lock of the directory itself, which any user can take, and keep."""
        deadline = time.monotonic() + GATE_DEADLINE_S
        pause_s = 0.0002
        while not files.try_lock(directory):
            now = time.monotonic()
            if now < self._shut_until_s:
                return
            if now > deadline:
                self._shut_until_s = now + SHUT_S
                place = self.directory
                self._once("shut", f"a process keeps {place} locked (fuser {place} shows it); continuing without it")
                return
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, 0.005)


def store_of(environ: Mapping[str, str]) -> LeaseStore:
    """The node's lease directory, or the one that the environment names."""
    return LeaseStore(environ.get(VARIABLE) or DIRECTORY)


def _held(keys: Iterable[str], names: Iterable[str], directory: int) -> dict[str, LeaseHolder]:
    files_of: dict[str, list[str]] = {}
    for name in names:
        files_of.setdefault(name.partition(".")[0], []).append(name)
    held = {}
    for key in keys:
        # Supervisors' files first: if one is alive, its ranks don't matter.
        for name in sorted(files_of.get(base_of(key), ()), key=lambda name: name.endswith(RANKS)):
            if is_locked(name, directory):
                held[key] = _holder(name, directory)
                break
    return held


def _holder(name: str, directory: int) -> LeaseHolder:
    """The holder of a locked file: its owner, described by the supervisor's file if he owns that too."""
    by = "ranks" if name.endswith(RANKS) else "supervisor"
    uid = owner_of(name, directory)
    data, writer = read_small(name.removesuffix(RANKS), directory, MOST_BYTES)
    return decode(data if writer == uid else b"", uid, by)


# --- the directory ----------------------------------------------------------------------------------------------------


def _open_directory(path: str) -> int:
    try:
        with suppress(FileNotFoundError):
            return _open_checked(path)
        with suppress(FileExistsError):  # somebody was faster
            os.mkdir(path, _SHARED)
            os.chmod(path, _SHARED)  # the umask
        return _open_checked(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _open_checked(path: str) -> int:
    """Opens the directory. Raises PermissionError if other users than its owner or root could remove our files."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    while True:
        info = os.fstat(directory)
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.getuid() or (mode & stat.S_ISVTX and mode & 0o002):
            return directory
        if time.time() - info.st_ctime > 0.5:
            os.close(directory)
            raise PermissionError(1, f"users cannot share it safely: user {info.st_uid} owns it, with mode {mode:o}")
        time.sleep(0.01)  # its creator may be about to set its mode


def _is_still(directory: int, path: str) -> bool:
    try:
        there, here = os.stat(path), os.fstat(directory)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _unusable(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"no leases can be taken in {path}: {error.strerror or error}.",
        f"Create a directory that all users share (mkdir -m 1777 {path}), or set {VARIABLE} to another one.",
    )
