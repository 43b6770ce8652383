"""Leases: their locks, how to release them, and how to pass them to another process.

A lock belongs to an open file, so every process that has its descriptor holds it. While a lease is handed over, it is
always held: by the parent, by both, then by the child. It ends when all of its holders are dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from safelaunch.job.plan import HELD_LEASES
from safelaunch.leases.holder import MAGIC, LeaseHolder, since_now

# --- files in a directory that every user can write: other users must not redirect or block us ------------------------


RANKS = ".ranks"
# Don't follow a planted link, or block on a planted FIFO.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_MOST_NAMES = 100
_FORESEEN = 10
_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid


def open_to_probe(name: str, directory: int) -> int | None:
    """Opens a regular file read-only, to query its locks; returns the descriptor, or None if that is impossible."""
    try:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=directory)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def take_own(base: str, directory: int) -> tuple[int, str]:
    """Creates and locks a file named after ``base`` and our user id, and creates the ranks' file next to it.

    Returns the locked descriptor and the file's name. Tries other names if the first is unusable: another user created
    the file (and only its owner can remove it from a sticky directory), it has a shared lock, or another of our
    processes has locked it. Raises OSError.
    """
    for number in range(_MOST_NAMES):
        # Another user could take all predictable names.
        suffix = "" if not number else f"-{number}" if number < _FORESEEN else f"-{os.urandom(6).hex()}"
        name = f"{base}.{os.getuid()}{suffix}"
        fd = _lock_own(name, directory)
        if fd is None:
            continue
        ranks = _lock_own(name + RANKS, directory)
        if ranks is not None:
            unlock(ranks)
            return fd, name
        unlock(fd)
    raise FileExistsError(errno.EEXIST, f"other users have taken {_MOST_NAMES} names like {base}.{os.getuid()}")


def _lock_own(name: str, directory: int) -> int | None:
    """Locks our file ``name``; returns its descriptor, or None if another user owns it or another process locked it."""
    try:
        # Others must not open it before it is locked.
        fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=directory)
    except (FileExistsError, IsADirectoryError, PermissionError):
        if _status(name, directory) is None:
            raise  # the directory denies it
        return None
    except OSError:
        if not _is_planted(name, directory):
            raise
        return None  # or another user's file is running (ETXTBSY) or under a kernel lease (EAGAIN)
    try:
        if _is_ours(fd) and try_lock(fd):
            os.fchmod(fd, 0o644)  # others must be able to query it
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_ours(fd: int) -> bool:
    info = os.fstat(fd)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and info.st_nlink == 1


def _is_planted(name: str, directory: int) -> bool:
    info = _status(name, directory)
    return info is not None and (not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid())


def _status(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None


def try_lock(fd: int) -> bool:
    """Takes an exclusive lock if the file isn't locked; returns whether it did. ``fd`` must be open for writing."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Closes the file, and releases its lock for all processes that share it."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
    finally:
        os.close(fd)


def is_locked(name: str, directory: int) -> bool:
    """Returns whether a process has locked any part of the file for writing. Doesn't lock it."""
    fd = open_to_probe(name, directory)
    if fd is None:
        return False
    try:
        return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK
    finally:
        os.close(fd)


def _lock(fd: int, command: int, kind: int) -> int:
    """Calls ``fcntl`` for a lock on a whole file; returns the lock type that the kernel reports."""
    try:
        answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, "this kernel cannot lock open files (F_OFD_SETLK, Linux 3.15)") from error
        raise
    return int(_FLOCK.unpack(answer)[0])


def owner_of(name: str, directory: int) -> int:
    info = _status(name, directory)
    return info.st_uid if info is not None else -1


def read_small(name: str, directory: int, limit: int = 4096) -> tuple[bytes, int]:
    """Returns at most ``limit`` bytes of a regular file, and its owner's uid; ``(b"", -1)`` if it is unreadable."""
    fd = open_to_probe(name, directory)
    if fd is None:
        return b"", -1
    try:
        return os.pread(fd, limit, 0), os.fstat(fd).st_uid
    except OSError:
        return b"", -1
    finally:
        os.close(fd)


def write_small(fd: int, data: bytes, magic: bytes) -> None:
    """Replaces the content of our file, if the content begins with ``magic`` and the disk has room."""
    try:
        if os.pread(fd, len(magic), 0) in (b"", magic):
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
    except OSError:
        return  # the lock still holds


PORT = "port-"
_OTHER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass
class Lease:
    """GPUs and ports that are held until ``release``, or until all processes that share the locks are gone."""

    locks: dict[str, int]  # thing -> descriptor of the locked file
    rank_files: tuple[str, ...] = ()  # files for the ranks' beacons to lock
    sockets: dict[str, int] = field(default_factory=dict)  # port -> socket that keeps it

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.locks)

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(key.removeprefix(PORT)) for key in self.sockets)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the locks, to be shared with processes that outlive this one."""
        return tuple(self.locks.values())

    def add(self, other: Lease) -> None:
        """Moves everything that ``other`` holds into this lease."""
        self.locks.update(other.locks)
        self.sockets.update(other.sockets)
        self.rank_files += other.rank_files
        other.locks, other.sockets, other.rank_files = {}, {}, ()

    def release(self) -> None:
        """Releases everything at once, even if another process has inherited a descriptor."""
        self._let_go(unlock)

    def forget(self) -> None:
        """Closes our descriptors; a child that inherited them still holds everything."""
        self._let_go(os.close)

    def _let_go(self, end: Callable[[int], object]) -> None:
        while self.sockets:
            os.close(self.sockets.popitem()[1])
        while self.locks:
            end(self.locks.popitem()[1])

    def hand_over(self) -> tuple[dict[str, str], tuple[int, ...]]:
        """Returns variables and descriptors (``pass_fds``) that pass the lease to a safelaunch started as a child.

        Once the child has started, call ``forget`` instead of ``release``.
        """
        descriptors = [*self.locks.items(), *self.sockets.items()]
        return {HELD_LEASES: ",".join(f"{fd}:{key}" for key, fd in descriptors)}, tuple(fd for _, fd in descriptors)

    def tell(self, about: LeaseHolder) -> None:
        """Writes a description of the holder into the lock files."""
        data = since_now(about).encode()
        for fd in self.descriptors:
            write_small(fd, data, MAGIC)

    def touch(self) -> None:
        """Updates the files' times, so that cleaners of /tmp don't remove them."""
        for fd in self.descriptors:
            try:
                os.utime(fd)
            except OSError:
                continue


def inherited(environ: Mapping[str, str], directory: str) -> Lease | None:
    """Returns the lease that our parent handed over (``Lease.hand_over``); None if there is none, or it isn't valid.

    The variables alone prove nothing: each descriptor must belong to the right lock file, locked by us alone.
    """
    lease = Lease({})
    paths = []
    for item in filter(None, environ.get(HELD_LEASES, "").split(",")):
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
    try:
        return try_lock(fd)
    except OSError:
        return False  # not open for writing, so never locked


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _name_of(fd: int, key: str, directory: str) -> str | None:
    """Returns the name of the open file ``fd`` if it is our lock file for ``key``, else None."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        info = os.fstat(fd)
        current = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    name = os.path.basename(path)
    ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()
    same = (info.st_dev, info.st_ino) == (current.st_dev, current.st_ino)
    right = os.path.dirname(path) == os.path.realpath(directory) and name.partition(".")[0] == base_of(key)
    return name if ours and same and right and not name.endswith(RANKS) else None


def port_key(port: int) -> str:
    return f"{PORT}{port}"


def base_of(key: str) -> str:
    """Returns the part of a lock file's name that stands for ``key``; slashes in old MIG UUIDs become ``_``."""
    return _OTHER.sub("_", key)
