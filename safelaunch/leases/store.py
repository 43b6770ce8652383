"""The leases of a node: kernel locks on files in one directory that all its users share.

A thing (a GPU by its UUID, ``port-20000``) is held by an exclusive flock on a file that belongs to the holder's user,
``<thing>.<uid>``. The supervisor has that lock, and its guardian shares it; the beacons of the ranks have a shared one
on ``<thing>.<uid>.ranks``. A thing is free when no file of it, anybody's, is locked: the death of the supervisor does
not free a GPU that ranks still use, and when all of them are gone, by whatever, the kernel has freed it. Nothing is
ever cleaned up: a file without a lock means nothing.

Every decision is made behind the gate, a lock on the directory itself that is held for a fraction of a millisecond; so
what one sees there stays true until one has taken it. What the files say is for people.
"""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from safelaunch.errors import StoreError
from safelaunch.leases import files, tickets
from safelaunch.leases.holder import MOST_BYTES, Holder, decode
from safelaunch.leases.lease import RANKS, Lease, base_of
from safelaunch.leases.tickets import Ticket

DIRECTORY = "/tmp/safelaunch-leases"
VARIABLE = "SAFELAUNCH_LEASE_DIR"
GATE_DEADLINE_S = 10.0
_SHARED = 0o1777

Pick = Callable[[Mapping[str, Holder]], Sequence[str] | None]


@dataclass(frozen=True)
class Attempt:
    """What came of trying to take something.

    ``lease`` None: ``held`` says who holds what of the candidates, or waits for this very thing (``Holder.by``), and
    ``ahead`` who came first and waits for any of them.
    """

    lease: Lease | None
    held: Mapping[str, Holder] = field(default_factory=dict)
    ahead: Holder | None = None


class Store:
    """The lease directory. Raises StoreError where it cannot serve."""

    def __init__(self, directory: str = DIRECTORY) -> None:
        self.directory = os.path.realpath(directory) if directory != DIRECTORY else directory

    def attempt(self, candidates: Sequence[str], pick: Pick, about: Holder, ticket: Ticket | None = None) -> Attempt:
        """Takes what ``pick`` chooses among ``candidates``, all of it or nothing, if it is our turn.

        ``pick`` is given who holds what of the candidates, and returns None when that does not leave enough; it is
        called behind the gate and must be quick. Without a ticket one comes after everybody who waits.
        """
        with self._gate() as directory:
            names = os.listdir(directory)
            held = _held(candidates, names, directory)
            ahead = tickets.before(ticket, candidates, names, directory)
            held = {**ahead.promised, **held}
            chosen = None if ahead.blocking is not None else pick(held)
            if chosen is None:
                return Attempt(None, held, ahead.blocking)
            lease = self._take(chosen, directory, about)
            if ticket is not None:
                ticket.tear(directory)
            return Attempt(lease, held)

    def look(self, keys: Iterable[str]) -> dict[str, Holder]:
        """Who holds what of ``keys``. Creates nothing."""
        if not os.path.isdir(self.directory):
            return {}
        with self._gate() as directory:
            return _held(keys, os.listdir(directory), directory)

    def waiting(self) -> list[Holder]:
        """Those who wait, in their order. Creates nothing."""
        if not os.path.isdir(self.directory):
            return []
        with self._gate() as directory:
            return tickets.all_living(os.listdir(directory), directory)

    def queue(self, candidates: Sequence[str], count: int, about: Holder) -> Ticket:
        """A place in the queue of those who wait, for ``count`` of ``candidates``."""
        with self._gate() as directory:
            return tickets.draw(candidates, count, about, directory)

    def leave(self, ticket: Ticket) -> None:
        """Gives a place in the queue up."""
        with self._gate() as directory:
            ticket.tear(directory)

    def _take(self, keys: Sequence[str], directory: int, about: Holder) -> Lease:
        lease = Lease({})
        paths = []
        try:
            for key in keys:
                fd, name = files.open_own(base_of(key), directory)
                if not files.try_lock(fd):  # cannot be: it was free, and the gate is ours
                    os.close(fd)
                    raise OSError(f"{name} was locked by somebody who does not keep to the gate")
                lease.locks[key] = fd
                ranks, ranks_name = files.open_own(base_of(key), directory, RANKS)
                os.close(ranks)
                paths.append(f"{self.directory}/{ranks_name}")
        except OSError as error:
            lease.release()
            raise _unusable(self.directory, error) from error
        lease.rank_files = tuple(paths)
        lease.tell(about)
        return lease

    @contextmanager
    def _gate(self) -> Iterator[int]:
        """The directory's descriptor, locked. Ctrl-Z waits until we are through: others would wait for us meanwhile."""
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
        deadline = time.monotonic() + GATE_DEADLINE_S
        pause_s = 0.0002
        while True:
            directory = _open_directory(self.directory)
            try:
                while not files.try_lock(directory):
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"the leases of this node ({self.directory}) have been locked for {GATE_DEADLINE_S:g} s.",
                            f"See who does not let go: fuser -v {self.directory}",
                        )
                    time.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, 0.005)
                if _is_still(directory, self.directory):
                    return directory
            except BaseException:
                os.close(directory)
                raise
            os.close(directory)  # it was removed while we waited: what is locked in it is nobody's concern


def store_of(environ: Mapping[str, str]) -> Store:
    """The node's store, or the one that the environment names."""
    return Store(environ.get(VARIABLE) or DIRECTORY)


def _held(keys: Iterable[str], names: Iterable[str], directory: int) -> dict[str, Holder]:
    files_of: dict[str, list[str]] = {}
    for name in names:
        files_of.setdefault(name.partition(".")[0], []).append(name)
    held = {}
    for key in keys:
        for name in files_of.get(base_of(key), ()):
            if files.is_locked(name, directory):
                by = "ranks" if name.endswith(RANKS) else "supervisor"
                data, _ = files.read_small(name.removesuffix(RANKS), directory, MOST_BYTES)
                _, uid = files.read_small(name, directory, 0)
                if key not in held or by == "supervisor":
                    held[key] = decode(data, uid, by)
    return held


# --- the directory ----------------------------------------------------------------------------------------------------


def _open_directory(path: str) -> int:
    try:
        return _open_checked(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        try:
            os.mkdir(path, _SHARED)
        except FileExistsError:
            pass  # somebody was faster
        else:
            os.chmod(path, _SHARED)  # the umask
        return _open_checked(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _open_checked(path: str) -> int:
    """The directory, if those who could take our files out of it are to be trusted: its owner, who made it, or root."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    deadline = time.monotonic() + 0.5
    while True:
        info = os.fstat(directory)
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.getuid() or (mode & stat.S_ISVTX and mode & 0o002):
            return directory
        if time.monotonic() > deadline:
            os.close(directory)
            raise PermissionError(1, f"mode {mode:o} of user {info.st_uid}: other users cannot share it safely")
        time.sleep(0.01)  # its maker may be about to give it its mode


def _is_still(directory: int, path: str) -> bool:
    try:
        there, here = os.stat(path), os.fstat(directory)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _unusable(path: str, error: OSError) -> StoreError:
    return StoreError(
        f"no leases can be taken in {path}: {error.strerror or error}.",
        f"It has to be a directory that all users share (mkdir -m 1777 {path}); {VARIABLE} names another one.",
    )
