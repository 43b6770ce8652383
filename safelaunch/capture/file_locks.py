"""Finds locks on files, and the processes that hold them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.model import FileLock
from safelaunch.system import procstat
from safelaunch.system.files import text_of

CALLS = ("flock", "fcntl")
_MAX_BYTES = 4096
_MAX_NAME = 60


@dataclass(frozen=True)
class LockRow:
    """A line of ``/proc/locks``."""

    pid: int
    place: tuple[int, int, int]  # the file's (major, minor, inode)
    exclusive: bool
    of_file: bool = False  # belongs to an open file (flock), and so to every process that has it open


def holders(pid: int, fd: int) -> tuple[int, ...]:
    """Returns the holders of the lock that ``pid`` is waiting for on descriptor ``fd``; empty if unknown.

    The process that took the lock comes first, if it still has it. Processes that inherited the open file follow,
    because each can release the lock. A holder might be ``pid`` itself, if it opened the file twice. Can block on a
    dead file system, so call it with a deadline.
    """
    try:
        place = _place(Path(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return ()
    lock = _blocking_lock(text_of("/proc/locks"), pid, place)
    if lock is None:
        return ()
    taker = () if _has(lock.pid, lock) is False else (lock.pid,)
    if not lock.of_file:
        return taker
    other_pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - as everywhere in /proc
    return (*taker, *(other for other in other_pids if other not in (pid, lock.pid) and _has(other, lock)))


def _blocking_lock(table: str, pid: int, place: tuple[int, int, int]) -> LockRow | None:
    """Returns the lock that ``pid`` is waiting for; None if its holder is unknown.

    The table lists a lock above its waiters.

    Several processes can hold locks on the same file, each on its own range of bytes.
    """
    above = ""
    for line in table.splitlines():
        number, arrow, rest = line.partition("->")
        if not arrow:
            above = line
        elif any((waiter.pid, waiter.place) == (pid, place) for waiter in parse(f"{number} {rest}")):
            return next(parse(above), None)
    return None


def _has(pid: int, lock: LockRow) -> bool | None:
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")  # noqa: PTH208
    except OSError:
        return None
    texts = (text_of(f"/proc/{pid}/fdinfo/{name}") for name in names)
    return any(lock in _locks_in(text) for text in texts)


def _locks_in(fdinfo: str) -> Iterator[LockRow]:
    return parse(fdinfo.replace("lock:", ""))


def lock_table() -> tuple[LockRow, ...]:
    """Returns all locks of the node. Call it rarely: during the read, no process can take or release a lock."""
    return tuple(parse(text_of("/proc/locks")))


def locks_of(pid: int, *, of_others: bool, table: Sequence[LockRow] | None = None) -> tuple[FileLock, ...]:
    """Returns the exclusive locks on files that ``pid`` has open.

    Leaves out locks that ``pid`` shares with its parent through an inherited file. Can block like :func:`holders`, but
    only on locked files. ``of_others`` includes other processes' locks; ``table`` has the node's locks, if already
    read.
    """
    rows = lock_table() if table is None else table
    wanted = {row for row in rows if row.exclusive and (of_others or row.pid == pid)}
    inodes = {row.place[2] for row in wanted}
    names: dict[LockRow, str] = {}
    shared: set[LockRow] = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir() if inodes else ():
        try:
            text = path.read_text()
            inode = re.search(r"^ino:\s*(\d+)$", text, re.MULTILINE)  # Linux 5.14 and newer
            if inode is None or int(inode[1]) not in inodes:
                continue
            link = Path(f"/proc/{pid}/fd/{path.name}")
            name, place = str(link.readlink()), _place(link)
        except OSError:
            continue  # it was closed
        names |= {row: name for row in wanted if row.place == place}
        shared |= {row for row in _locks_in(text) if row.pid != pid}
    return tuple(
        FileLock(name, row.pid, program(row.pid) if row.pid != pid else "")
        for row, name in names.items()
        if row not in shared
    )


def lock_on(pid: int, path: str) -> FileLock | None:
    """Returns another process's exclusive lock on file ``path``, as ``pid`` sees that path; None if unknown.

    Can block like :func:`holders`.
    """
    try:
        place = _place(Path(f"/proc/{pid}/cwd", path))
    except (OSError, ValueError):
        return None
    rows = (row for row in lock_table() if row.exclusive and row.pid != pid)
    lock = next((row for row in rows if row.place == place), None)
    return FileLock(path, lock.pid, program(lock.pid)) if lock is not None else None


def program(pid: int) -> str:
    """Describes a process by its program and start, e.g. `` (python tokenize.py, since 2026-03-01 14:02:11 UTC)``.

    Empty if unknown. Leaves out arguments, because they might contain secrets.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:_MAX_BYTES].decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    names = [Path(word).name[:_MAX_NAME] for word in (words[0], script) if word]
    return f" ({' '.join(names)}{_since(pid)})" if names else ""


def _since(pid: int) -> str:
    stat = procstat.read(pid)
    boot = re.search(r"^btime (\d+)$", text_of("/proc/stat"), re.MULTILINE)
    if stat is None or boot is None:
        return ""
    begun = time.gmtime(int(boot[1]) + stat.start_ticks // os.sysconf("SC_CLK_TCK"))
    return time.strftime(", since %Y-%m-%d %H:%M:%S UTC", begun)


def parse(text: str) -> Iterator[LockRow]:
    """Yields the rows of ``/proc/locks``, e.g. ``1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF``.

    Skips waiters, which have ``->`` after the number, and holders in other containers, which have no pid here.
    """
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        major, _, rest = fields[5].partition(":")
        minor, _, inode = rest.partition(":")
        try:
            place = (int(major, 16), int(minor, 16), int(inode))
            row = LockRow(int(fields[4]), place, fields[3] == "WRITE", fields[1] == "FLOCK")
        except ValueError:
            continue  # another kernel's format
        if row.pid > 0:
            yield row


def _place(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
