"""The leases of a node: kernel locks on files in one directory that all of its users share.

To hold a GPU (named by its UUID) or a port (``port-20000``), a supervisor locks its user's file ``<name>.<uid>``; its
guardian shares the lock. Each rank's beacon locks one byte of ``<name>.<uid>.ranks``. The GPU or port is free if no
user's file for it is locked. So if a supervisor dies, a GPU stays leased while ranks use it, and the kernel frees it
when they end. A file without a lock means nothing, so files needn't be cleaned up.

A process first locks its own file, then looks for other users' locks. If two processes do so at once, at least one sees
the other's lock and releases its own. Correctness depends on nothing else. The gate, a lock on the directory for a
fraction of a millisecond, only makes such collisions rare. Because any user can hold that lock, a process continues
without it after a second.

Files in the directory might be hostile: unexpected ones are skipped, with one message. Another user can still lease
GPUs that it doesn't use, or be first in the queue. If that user created the directory, it can also remove files; to
prevent that, root can create the directory at boot.
"""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safelaunch.leases.holder import MOST_BYTES, LeaseHolder, decode
from safelaunch.leases.lease import (
    RANKS,
    Lease,
    base_of,
    is_locked,
    owner_of,
    read_small,
    take_own,
)
from safelaunch.leases.queue import Ticket, draw, waiters, waiters_before
from safelaunch.system import files
from safelaunch.system.console import say
from safelaunch.system.errors import StoreError

if TYPE_CHECKING:
    pass

DIRECTORY = "/tmp/safelaunch-leases"
VARIABLE = "SAFELAUNCH_LEASE_DIR"
GATE_DEADLINE_S = 1.0
SHUT_S = 60.0  # before the next wait at a shut gate
_TRIES = 20  # to take a thing that another process takes at the same moment
_SHARED = 0o1777

Pick = Callable[[Mapping[str, LeaseHolder]], Sequence[str] | None]


@dataclass(frozen=True)
class LeaseAttempt:
    lease: Lease | None
    # Without a lease: each candidate's holder, or the waiter for it (``LeaseHolder.by``) ...
    held: Mapping[str, LeaseHolder] = field(default_factory=dict)
    ahead: LeaseHolder | None = None  # ... and the first waiter for any of them


class LeaseStore:
    """A lease directory. Every method raises StoreError if the directory is unusable."""

    def __init__(self, directory: str = DIRECTORY, say: Callable[[str], None] = say) -> None:
        self.directory = os.path.realpath(directory) if directory != DIRECTORY else directory
        self._say = say
        self._said: set[str] = set()
        self._shut_until_s = float("-inf")

    def attempt(
        self, candidates: Sequence[str], pick: Pick, about: LeaseHolder, ticket: Ticket | None = None
    ) -> LeaseAttempt:
        """Leases the candidates that ``pick`` chooses, all or none, if it is our turn.

        Args:
            pick: Takes the candidates' holders, and returns the candidates to lease, or None if too few are free. It
                runs inside the gate, so it must be quick.
            ticket: Our place in the queue; without one, all waiters come first.
        """
        for _ in range(_TRIES):
            with self._gate() as directory:
                result = self._attempt(candidates, pick, about, ticket, directory)
            if result is not None:
                return result
            time.sleep(random.uniform(0.001, 0.02))
        return LeaseAttempt(None, self.look(candidates))

    def _attempt(
        self, candidates: Sequence[str], pick: Pick, about: LeaseHolder, ticket: Ticket | None, directory: int
    ) -> LeaseAttempt | None:
        """Makes one attempt; returns None if another process tried to lease the same GPU or port at the same moment."""
        names = os.listdir(directory)
        held = _held(candidates, names, directory)
        promised, blocking = waiters_before(ticket, candidates, names, directory, self._odd)
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
        """Returns the holders of all ``keys`` that are leased. Creates no files."""
        if not os.path.isdir(self.directory):
            return {}
        with self._gate() as directory:
            return _held(keys, os.listdir(directory), directory)

    def waiting(self) -> list[LeaseHolder]:
        """Returns the waiters in the order of the queue. Creates no files."""
        if not os.path.isdir(self.directory):
            return []
        with self._gate() as directory:
            return [holder for _, holder, _ in waiters(os.listdir(directory), directory, self._odd)]

    def queue(self, candidates: Sequence[str], count: int, about: LeaseHolder) -> Ticket:
        with self._gate() as directory:
            return draw(candidates, count, about, directory)

    def leave(self, ticket: Ticket) -> None:
        """Removes the ticket from the queue, even if the directory is unusable."""
        try:
            directory = _open_directory(self.directory)
        except StoreError:
            ticket.tear(-1)
            return
        ticket.tear(directory)
        os.close(directory)

    def _take(self, keys: Sequence[str], directory: int) -> Lease | None:
        """Locks our files for ``keys``. If another process holds any of them, releases all and returns None."""
        lease = Lease({})
        own: list[str] = []
        try:
            for key in keys:
                lease.locks[key], name = take_own(base_of(key), directory)
                own += [name, name + RANKS]
            strangers = set(os.listdir(directory)) - set(own)
            taken = not _held(keys, strangers, directory)
        except OSError as error:
            lease.release()
            raise _unusable(self.directory, error) from error
        if not taken:
            lease.release()
            return None
        lease.rank_files = tuple(f"{self.directory}/{name}" for name in own if name.endswith(RANKS))
        return lease

    def _odd(self, name: str, why: str) -> None:
        # Another user could create thousands of files: one message for all.
        shown = "".join(char if char.isprintable() else "?" for char in name[:80])
        self._once("odd", f"ignoring files that do not belong in {self.directory}, such as {shown} ({why})")

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)

    @contextmanager
    def _gate(self) -> Iterator[int]:
        """Yields the directory's descriptor, locked unless another process held the lock for too long.

        Ctrl-Z takes effect only afterwards, because other processes would have to wait for us.
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
            os.close(directory)  # it was removed, so locks in it mean nothing

    def _wait_for_our_turn(self, directory: int) -> None:
        """Waits for the directory's lock, but only for a limited time, because any user can hold it indefinitely."""
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
    return LeaseStore(environ.get(VARIABLE) or DIRECTORY)


def _held(keys: Iterable[str], names: Iterable[str], directory: int) -> dict[str, LeaseHolder]:
    files_of: dict[str, list[str]] = {}
    for name in names:
        files_of.setdefault(name.partition(".")[0], []).append(name)
    held = {}
    for key in keys:
        # A live supervisor's ranks don't matter.
        for name in sorted(files_of.get(base_of(key), ()), key=lambda name: name.endswith(RANKS)):
            if is_locked(name, directory):
                held[key] = _holder(name, directory)
                break
    return held


def _holder(name: str, directory: int) -> LeaseHolder:
    # The supervisor's file describes the holder only if its owner is the locked file's.
    by = "ranks" if name.endswith(RANKS) else "supervisor"
    uid = owner_of(name, directory)
    data, writer = read_small(name.removesuffix(RANKS), directory, MOST_BYTES)
    return decode(data if writer == uid else b"", uid, by)


# --- the directory ----------------------------------------------------------------------------------------------------


def _open_directory(path: str) -> int:
    try:
        with suppress(FileNotFoundError):
            return _open_checked(path)
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(path, _SHARED)
            os.chmod(path, _SHARED)  # despite the umask
        return _open_checked(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _open_checked(path: str) -> int:
    """Opens the directory. Raises PermissionError if users other than its owner and root could remove our files."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    while True:
        info = os.fstat(directory)
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.getuid() or (mode & stat.S_ISVTX and mode & 0o002):
            return directory
        if time.time() - info.st_ctime > 0.5:
            os.close(directory)
            raise PermissionError(1, f"users cannot share it safely: user {info.st_uid} owns it, with mode {mode:o}")
        time.sleep(0.01)  # its creator might be setting its mode


def _is_still(directory: int, path: str) -> bool:
    try:
        current, here = os.stat(path), os.fstat(directory)
    except OSError:
        return False
    return (current.st_dev, current.st_ino) == (here.st_dev, here.st_ino)


def _unusable(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"no leases can be taken in {path}: {error.strerror or error}.",
        f"Create a directory that all users share (mkdir -m 1777 {path}), or set {VARIABLE} to another one.",
    )
