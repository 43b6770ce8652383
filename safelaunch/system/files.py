"""Reads, replaces, locks and tests files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def text_of(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def link_of(path: str | os.PathLike[str]) -> str:
    try:
        return os.readlink(os.fspath(path))
    except OSError:
        return ""


def modified_ns(path: str | os.PathLike[str]) -> int:
    """Returns a file's modification time in Unix nanoseconds; 0 if it is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def replace_file(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Writes a file atomically, text as UTF-8. Readers see either the old or the new contents. Raises OSError.

    ``mode`` applies to a new file, before the umask.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, mode), "wb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:  # the disk is full
            temporary.unlink(missing_ok=True)
            raise
    temporary.replace(path)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file or directory with flock, until its last descriptor is closed. Returns False if already locked.

    Raises OSError if locks aren't supported.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Unlike ``pathlib``, these never raise, for example for a name that is too long.


def is_dir(path: Path) -> bool:
    return os.path.isdir(path)


def is_file(path: Path) -> bool:
    return os.path.isfile(path)


def exists(path: Path) -> bool:
    return os.path.exists(path)


def lexists(path: Path) -> bool:
    """True if the name exists, even as a broken link."""
    return os.path.lexists(path)
