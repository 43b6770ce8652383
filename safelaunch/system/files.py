"""What is done to files everywhere: read a text, replace one whole, lock one, ask what is at an untrusted path."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def text_of(path: str | os.PathLike[str]) -> str:
    """The text of a file, for example of ``/proc``; empty if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def link_of(path: str | os.PathLike[str]) -> str:
    """What a symbolic link points at, for example in ``/proc``; empty if it can't be read."""
    try:
        return os.readlink(os.fspath(path))
    except OSError:
        return ""


def modified_ns(path: str | os.PathLike[str]) -> int:
    """When a file was modified, in Unix nanoseconds; 0 if it is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def replace_file(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Writes a file whole or not at all; others see the old one or the new one. Raises OSError.

    ``mode``: of a new file, before the umask. Text is written as UTF-8.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(beside, flags, mode), "wb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:  # the disk is full
            beside.unlink(missing_ok=True)
            raise
    beside.replace(path)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file or directory (flock), which lasts as long as anybody has it open; False if another has it.

    Raises OSError where nothing can be locked.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- paths that another user may have chosen --------------------------------------------------------------------------
# ``pathlib`` raises for a name that is too long, and for a directory without search permission. ``os.path`` does not.


def is_dir(path: Path) -> bool:
    return os.path.isdir(path)


def is_file(path: Path) -> bool:
    return os.path.isfile(path)


def exists(path: Path) -> bool:
    return os.path.exists(path)


def lexists(path: Path) -> bool:
    """Whether the name exists, even as a broken link."""
    return os.path.lexists(path)
