"""Who holds a lock on a file: ``/proc/locks`` (proc(5))."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.model import FileLock
from safelaunch.system import procstat

CALLS = ("flock", "fcntl")
_MAX_BYTES = 4096
_MAX_NAME = 60


@dataclass(frozen=True)
class Held:
    """A line of ``/proc/locks``: ``place`` is (major, minor, inode) of the file."""

    pid: int
    place: tuple[int, int, int]
    exclusive: bool


def holder(pid: int, fd: int) -> int | None:
    """Another process that holds a lock on the file behind ``pid``'s descriptor ``fd``; None if unknown.

    The kernel names the process that has taken the lock; a child that inherits it may be the only one to have it now.
    May block on a file system that does not answer, so call it under a deadline.
    """
    try:
        place = _place(Path(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return None
    held = next((held for held in parse(_table()) if held.place == place and held.pid != pid), None)
    if held is None or _has(held.pid, held) is not False:
        return held.pid if held is not None else None
    others = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - as everywhere in /proc
    return next((other for other in others if other != pid and _has(other, held)), None)


def _has(pid: int, lock: Held) -> bool | None:
    """Whether a descriptor of the process has the lock; None if they cannot be read."""
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")  # noqa: PTH208
    except OSError:
        return None
    texts = (_text(Path(f"/proc/{pid}/fdinfo/{name}")) for name in names)
    return any(lock in _locks_in(text) for text in texts)


def _locks_in(fdinfo: str) -> Iterator[Held]:
    return parse(fdinfo.replace("lock:", ""))


def table() -> tuple[Held, ...]:
    """All locks of the node. While the kernel writes them down, nobody there gets or releases one: read it seldom."""
    return tuple(parse(_table()))


def locks_of(pid: int, *, of_others: bool, known: Sequence[Held] | None = None) -> tuple[FileLock, ...]:
    """The exclusive locks on files that ``pid`` has open: its own, with ``of_others`` those of other processes too.

    ``known``: the locks of the node, where they have been read.

    Not those that it shares: a child has its parent's file, and the lock on it. May block as :func:`holder` may, on a
    file that somebody has locked; the other files are not touched.
    """
    every = table() if known is None else known
    wanted = {held for held in every if held.exclusive and (of_others or held.pid == pid)}
    inodes = {held.place[2] for held in wanted}
    found: dict[Held, str] = {}
    shared: set[Held] = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir() if inodes else ():
        try:
            text = path.read_text()
            inode = re.search(r"^ino:\s*(\d+)$", text, re.MULTILINE)  # Linux 5.14 and newer
            if inode is None or int(inode[1]) not in inodes:
                continue
            link = Path(f"/proc/{pid}/fd/{path.name}")
            name, place = str(link.readlink()), _place(link)
        except OSError:
            continue  # closed meanwhile
        found |= {held: name for held in wanted if held.place == place}
        shared |= {held for held in _locks_in(text) if held.pid != pid}
    return tuple(
        FileLock(name, held.pid, program(held.pid) if held.pid != pid else "")
        for held, name in found.items()
        if held not in shared
    )


def lock_on(pid: int, path: str) -> FileLock | None:
    """The exclusive lock of another process on the file that ``pid`` calls ``path``; None if unknown.

    May block on a file system that does not answer, so call it under a deadline.
    """
    try:
        place = _place(Path(f"/proc/{pid}/cwd", path))
    except (OSError, ValueError):
        return None
    held = next((held for held in parse(_table()) if held.place == place and held.exclusive and held.pid != pid), None)
    return FileLock(path, held.pid, program(held.pid)) if held is not None else None


def program(pid: int) -> str:
    """`` (python tokenize.py, since 2026-03-01 14:02:11 UTC)``: what a process runs, and when it was started.

    Without arguments, which may hold secrets; empty if unknown.
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
    boot = re.search(r"^btime (\d+)$", _text(Path("/proc/stat")), re.MULTILINE)
    if stat is None or boot is None:
        return ""
    begun = time.gmtime(int(boot[1]) + stat.start_ticks // os.sysconf("SC_CLK_TCK"))
    return time.strftime(", since %Y-%m-%d %H:%M:%S UTC", begun)


def parse(text: str) -> Iterator[Held]:
    """``1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF``; those who wait have ``->`` behind the number, and are left
    out, as are those of another container, who have no number here."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        major, _, rest = fields[5].partition(":")
        minor, _, inode = rest.partition(":")
        try:
            held = Held(int(fields[4]), (int(major, 16), int(minor, 16), int(inode)), fields[3] == "WRITE")
        except ValueError:
            continue  # a line of another kernel
        if held.pid > 0:
            yield held


def _table() -> str:
    return _text(Path("/proc/locks"))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _place(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
