"""Files in a directory that every user may write to: opened so that nobody can lead us elsewhere, or make us wait."""

from __future__ import annotations

import fcntl
import os
import stat

# A planted link is not followed, a planted FIFO does not block the open.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_MOST_NAMES = 100


def open_to_probe(name: str, directory: int) -> int | None:
    """A descriptor of a regular file, anybody's; None for everything else. Read-only is enough for flock."""
    try:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=directory)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def open_own(base: str, directory: int, suffix: str = "") -> tuple[int, str]:
    """A file of our own, ``base`` with this user's number; made if need be. Returns its descriptor and its name.

    Only a file's owner can remove it from a sticky directory, so a lock on a file of our own cannot be taken from under
    us. Somebody may have put something of his own at that name: then it is the next one. Raises OSError.
    """
    uid = os.getuid()
    for number in range(_MOST_NAMES):
        name = f"{base}.{uid}{f'-{number}' if number else ''}{suffix}"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644, dir_fd=directory)
        except (FileExistsError, IsADirectoryError, PermissionError):
            if not _exists(name, directory):
                raise  # the directory itself does not let us
            continue
        except OSError:
            if not _is_planted(name, directory):
                raise
            continue
        if _is_ours(fd, uid):
            return fd, name
        os.close(fd)
    raise FileExistsError(f"{_MOST_NAMES} names like {base}.{uid} are taken by other users' files")


def _is_ours(fd: int, uid: int) -> bool:
    """A regular file of this user, and no second name of one that lies elsewhere. Others must be able to probe it."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != uid or info.st_nlink != 1:
        return False
    if stat.S_IMODE(info.st_mode) != 0o644:  # the umask
        os.fchmod(fd, 0o644)
    return True


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _is_planted(name: str, directory: int) -> bool:
    """A link, a socket, a device: what is no regular file."""
    try:
        return not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def try_lock(fd: int) -> bool:
    """An exclusive flock, if it is to be had at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Gives the lock up for everybody who shares this open file, children that inherited it included, and closes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def is_locked(name: str, directory: int) -> bool:
    """Whether somebody holds a lock on the file. Takes it for a moment: to be asked behind the gate only."""
    fd = open_to_probe(name, directory)
    if fd is None:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def read_small(name: str, directory: int, limit: int = 4096) -> tuple[bytes, int]:
    """At most ``limit`` bytes of a regular file, and its owner's number; ``(b"", -1)`` where that cannot be had."""
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
        return  # a full disk: the lock holds all the same
