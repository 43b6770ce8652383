"""Remembers in the bundle directory who was blamed: one small private file per user.

It is a convenience: a disk that does not answer, a damaged file, or one that somebody else put there costs the memory,
never a bundle. Every call may block on a dead network disk, so callers give it a deadline (``within``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from safelaunch.model.blamed import Incident
from safelaunch.system.task import Task

MOST_INCIDENTS = 256
MOST_BYTES = 1 << 20
LONGEST_S = 30 * 86_400.0  # what was blamed a month ago may have been repaired
LOCK_PATIENCE_S = 2.0
DEADLINE_S = 3.0
SCHEMA = 1
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_T = TypeVar("_T")


class _File(msgspec.Struct, frozen=True):
    schema: int = SCHEMA
    incidents: tuple[Incident, ...] = ()


class _Foreign(Exception):
    """Something at the file's name is not ours to read or replace."""


def path_in(directory: Path) -> Path:
    """Hidden, so that nothing takes it for a bundle; with the user's number, as people share a directory."""
    return directory / f".safelaunch-blamed-{os.geteuid()}.json"


def within(work: Callable[[], _T], otherwise: _T, deadline_s: float = DEADLINE_S) -> _T:
    """What ``work`` returns; ``otherwise``, while it goes on in its thread, if the disk does not answer in time."""
    task = Task("who was blamed", work)
    task.wait(deadline_s)
    try:
        return task.result() if task.done else otherwise
    except Exception:  # noqa: BLE001 - whatever it is, it costs the memory alone
        return otherwise


def read(directory: Path, now_unix_s: float) -> tuple[Incident, ...]:
    """The incidents of the last month, the oldest first; none if there is no file, or none that can be read."""
    try:
        found = _read(path_in(directory))
    except (OSError, _Foreign):
        return ()
    return tuple(one for one in found if now_unix_s - one.unix_s < LONGEST_S)


def add(directory: Path, incident: Incident, now_unix_s: float) -> str:
    """Adds an incident, once whichever node of the job is first; returns why it could not, or an empty string."""
    path = path_in(directory)
    try:
        with _locked(path.with_suffix(".lock")):
            try:
                known = tuple(one for one in _read(path) if now_unix_s - one.unix_s < LONGEST_S)
            except FileNotFoundError:
                known = ()
            if all(one.id != incident.id for one in known):
                _write(path, (*known, incident))
    except _Foreign as error:
        return f"{path}: {error}"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _read(path: Path) -> tuple[Incident, ...]:
    """Raises OSError, and _Foreign for what is not ours. A damaged file holds nothing."""
    fd = os.open(path, os.O_RDONLY | _FLAGS)
    with open(fd, "rb") as file:
        _check_ours(fd)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        return ()
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if found.schema != SCHEMA:
        raise _Foreign("a newer safelaunch wrote it")
    return found.incidents


def _check_ours(fd: int) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink > 1:
        raise _Foreign("it is not a file of this user")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock, on disks that have locks. Raises OSError if others hold it for too long."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    try:
        _check_ours(fd)
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another safelaunch holds its lock")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _write(path: Path, incidents: tuple[Incident, ...]) -> None:
    newest = incidents[-MOST_INCIDENTS:]
    data = msgspec.json.encode(_File(incidents=newest))
    while len(data) > MOST_BYTES and newest:
        newest = newest[len(newest) // 2 + 1 :]
        data = msgspec.json.encode(_File(incidents=newest))
    partial = path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns()}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(msgspec.json.format(data, indent=1) + b"\n")
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
