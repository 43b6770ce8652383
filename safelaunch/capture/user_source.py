"""Reads the user's source, for reports and for rules that need the code around a line.

Paths come from the job or a stranger's bundle and can name anything, so only regular files named ``*.py`` are read,
even if the path contains links. The disk might not respond, so reads have a deadline, and a path that missed it isn't
retried.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from safelaunch.capture.result import within
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of

DEADLINE_S = 1.0
MOST_BYTES = 4 << 20
SOURCE_FILE = "source.json"  # in a bundle: path → excerpt
_MOST_LINKS = 40
_dead: set[str] = set()
_root: list[int] = []  # an open directory that the paths are relative to


@contextmanager
def seen_by(pid: int) -> Iterator[None]:
    """Within this context, files are read as process ``pid`` sees them, which might be in a container."""
    try:
        if link_of(f"/proc/{pid}/ns/mnt") != link_of("/proc/self/ns/mnt"):
            _root.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        pass
    try:
        yield
    finally:
        _dead.clear()
        while _root:
            os.close(_root.pop())


def text(path: str) -> str | None:
    """Returns a file's text (up to 4 MB), or None if it can't be read within a second."""
    if path in _dead:
        return None
    try:
        return within(DEADLINE_S, path, lambda: _read(path))
    except CaptureError:
        _dead.add(path)
        return None


def line(path: str, number: int) -> str | None:
    """Returns line ``number`` (from 1) of a file, or None. The line might contain a hard-coded key."""
    content = text(path)
    lines = content.splitlines() if content is not None else []
    return lines[number - 1] if 0 < number <= len(lines) else None


def text_for_stranger(path: str) -> str | None:
    """Returns a file's text for evidence from another machine; None for a relative path.

    A relative path refers to another directory here.
    """
    return text(path) if path.startswith("/") else None


def line_for_stranger(path: str, number: int) -> str | None:
    return line(path, number) if path.startswith("/") else None


def _read(path: str) -> str | None:
    root = _root[0] if _root else None
    try:
        real = os.path.realpath(path) if root is None else _below(root, path)
        if not (path.endswith(".py") and real.endswith(".py")):
            return None
        with open(real, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, dir_fd=root)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def _below(root: int, path: str) -> str:
    """Resolves a path and its links within the open directory ``root``. Raises OSError."""
    parts: list[str] = []
    left = path.split("/")[::-1]
    links = 0
    while left:
        part = left.pop()
        if part in ("", ".", ".."):
            parts = parts[:-1] if part == ".." else parts
            continue
        try:
            target = os.readlink("/".join([*parts, part]), dir_fd=root)
        except OSError:
            parts.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        parts = [] if target.startswith("/") else parts
        left += target.split("/")[::-1]
    return "/".join(parts)
