"""A small private file of this user that several processes read and change, in a directory that others may write to.

It holds a bounded number of entries, oldest first. A change is a locked read, and a write that replaces the file as a
whole: readers see the old file or the new one. What is not a regular file of this user is neither read nor replaced.
Calls may block on a dead network disk, so callers give them a deadline.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
T = TypeVar("T")


class NotOurs(OSError):
    """What has the file's name must not be read or replaced."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPERM, why)


class _Damaged(Exception):
    """The file does not hold what we write."""


@dataclass(frozen=True)
class PrivateFile(Generic[T]):
    """``decode`` raises ValueError for what ``encode`` does not write, and NotOurs for what is to stay as it is."""

    path: Path
    decode: Callable[[bytes], tuple[T, ...]]
    encode: Callable[[tuple[T, ...]], bytes]
    most_entries: int = 256
    most_bytes: int = 1 << 20
    lock_patience_s: float = 2.0

    def read(self) -> tuple[T, ...]:
        """The entries; none if the file is missing or damaged. Raises OSError."""
        try:
            return self._read()
        except (FileNotFoundError, _Damaged):
            return ()

    def update(self, change: Callable[[tuple[T, ...]], tuple[T, ...]]) -> bool:
        """Replaces the entries by what ``change`` makes of them, the oldest dropped where they are too many.

        Returns False if the file was damaged, so that ``change`` got none. Raises OSError: the file is as it was.
        """
        with self._locked():
            whole = True
            before: tuple[T, ...] = ()
            try:
                before = self._read()
            except FileNotFoundError:
                pass
            except _Damaged:
                whole = False
            after = change(before)
            if after != before or not whole:
                self._replace(self._bounded(after))
            return whole

    def _read(self) -> tuple[T, ...]:
        fd = os.open(self.path, os.O_RDONLY | _FLAGS)
        with open(fd, "rb") as file:
            _check_ours(fd)
            data = file.read(self.most_bytes + 1)
        if len(data) > self.most_bytes:
            raise _Damaged
        try:
            return self.decode(data)
        except (ValueError, RecursionError) as error:
            raise _Damaged from error

    def _bounded(self, entries: tuple[T, ...]) -> bytes:
        newest = entries[-self.most_entries :]
        data = self.encode(newest)
        while len(data) > self.most_bytes and newest:
            newest = newest[len(newest) // 2 + 1 :]
            data = self.encode(newest)
        return data

    def _replace(self, data: bytes) -> None:
        partial = self.path.with_name(f"{self.path.name}.partial")
        with suppress(FileNotFoundError):
            partial.unlink()  # a process was killed while it wrote
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o600)
                file.write(data)
            partial.replace(self.path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock file beside it, on disks that have locks. Raises OSError if others hold it for too long."""
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            _check_ours(fd)
            deadline = time.monotonic() + self.lock_patience_s
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another safelaunch holds its lock")
                time.sleep(0.01)
            yield
        finally:
            os.close(fd)


def _check_ours(fd: int) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink > 1:
        raise NotOurs("it is not a file of this user")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
