"""Files in a directory that every user may write to, opened so that nobody can redirect or block us.

An exclusive lock of an open file description (``F_OFD_SETLK``, fcntl(2)) holds a file. Unlike flock, it needs a
descriptor that may write, and only the owner may write our files, so nobody else can hold one in our name.
``F_OFD_GETLK`` asks whether somebody holds a file, without taking a lock. Like flock, the lock belongs to the open
file: children inherit it, and it ends with the last descriptor.

Another user can read the file, and so take a *shared* lock. That does not count as holding it, but it keeps the owner
from locking that file again. The owner then uses another name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

RANKS = ".ranks"
# The open does not follow a planted link, and does not block on a planted FIFO.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_MOST_NAMES = 100
_FORESEEN = 10
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def open_to_probe(name: str, directory: int) -> int | None:
    """A read-only descriptor of a regular file, whoever owns it; None for anything else. It is enough to ask."""
    try:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=directory)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def take_own(base: str, directory: int) -> tuple[int, str]:
    """Locks a file of our own, named ``base`` and this user's number; creates it, and the ranks' file beside it.

    Returns the locked descriptor and the name. Only its owner can remove a file from a sticky directory, so nobody
    else can remove ours. If the name is taken, by another user's file, a shared lock or another process of ours, it
    tries the next name. Raises OSError.
    """
    for number in range(_MOST_NAMES):
        # Somebody could take all predictable names in advance.
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
    """A locked descriptor of our file ``name``; None if something is in the way."""
    try:
        # Others must not open it before it is locked.
        fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=directory)
    except (FileExistsError, IsADirectoryError, PermissionError):
        if not _exists(name, directory):
            raise  # the directory itself denies it
        return None
    except OSError:
        if not _is_planted(name, directory):
            raise
        return None  # also another user's file that is running (ETXTBSY) or under a kernel lease (EAGAIN)
    try:
        if _is_ours(fd) and try_lock(fd):
            os.fchmod(fd, 0o644)  # others must be able to ask
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_ours(fd: int) -> bool:
    """Whether it is a regular file of this user, and no hard link to a file elsewhere."""
    info = os.fstat(fd)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and info.st_nlink == 1


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _is_planted(name: str, directory: int) -> bool:
    """Whether the name is a link, a socket, a device, or another user's file."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid()


def try_lock(fd: int) -> bool:
    """Takes an exclusive lock without waiting; returns whether it succeeded. ``fd`` must be open for writing."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Releases the lock for everybody who shares this open file, inheriting children included, and closes it."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
    finally:
        os.close(fd)


def is_locked(name: str, directory: int) -> bool:
    """Whether a process that may write the file holds it or a part of it. Takes no lock."""
    fd = open_to_probe(name, directory)
    if fd is None:
        return False
    try:
        return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK
    finally:
        os.close(fd)


def _lock(fd: int, command: int, kind: int) -> int:
    """Makes one lock call on the whole file; returns the type of lock in the kernel's answer."""
    try:
        answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, "this kernel cannot lock open files (F_OFD_SETLK, Linux 3.15)") from error
        raise
    return int(_FLOCK.unpack(answer)[0])


def try_gate(directory: int) -> bool:
    """Takes the lock of the directory itself without waiting. Any user can take it, and keep it."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pid_at_gate(directory: int) -> int | None:
    """The pid that holds the directory's lock, from /proc/locks; None if it is in another pid namespace."""
    info = os.fstat(directory)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    found = [words[4] for words in lines if len(words) > 5 and words[1] == "FLOCK" and words[5] == place]
    return int(found[0]) if found and found[0].isdigit() else None


def owner_of(name: str, directory: int) -> int:
    """The user id of a file's owner; -1 if the file is gone."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except OSError:
        return -1


def read_small(name: str, directory: int, limit: int = 4096) -> tuple[bytes, int]:
    """At most ``limit`` bytes of a regular file, and its owner's user id; ``(b"", -1)`` if it can't be read."""
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
    """Replaces the contents of one of our files; leaves one alone that does not begin with ``magic``. Best effort."""
    try:
        if os.pread(fd, len(magic), 0) in (b"", magic):
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
    except OSError:
        return  # a full disk; the lock still holds
