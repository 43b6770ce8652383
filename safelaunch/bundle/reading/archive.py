"""Unpacks untrusted archives of bundles."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from safelaunch.bundle.reading.files import MAX_FILE_BYTES, Unreadable
from safelaunch.bundle.reading.rejection import GIVE, missing_reader

if TYPE_CHECKING:
    pass


MAX_UNPACKED_BYTES = 1 << 30
MAX_UNPACKED_FILES = 100_000
MAX_DEPTH = 6  # directories of nodes, bundles and ranks; deeper ones are never read
CHUNK_BYTES = 1 << 20


def unpack(archive: Path, scratch: Path) -> None:
    """Unpacks the regular files of a ``.tar.gz`` below ``scratch``, whatever their names are."""
    room = os.statvfs(scratch)
    limit = min(MAX_UNPACKED_BYTES, room.f_bavail * room.f_frsize // 2)
    opened = False
    try:
        for write in (False, True):  # rejects archives that are too large before writing a file
            with tarfile.open(archive, "r:*") as tar:
                opened = True
                _unpack_all(tar, scratch, limit, write=write)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # tarfile and its decompressors raise nearly any type for damaged input
        if isinstance(error, OSError) and error.errno is not None:
            raise Unreadable(f"it cannot be unpacked in {scratch.parent.parent}: {error.strerror}") from error
        if opened or isinstance(error, EOFError):
            raise Unreadable("the archive is damaged or incomplete: copy it again from its source") from error
        what = f"it is neither a directory nor a bundle's archive (.tar.gz){missing_reader()}"
        raise Unreadable(what, GIVE) from error


def _unpack_all(tar: tarfile.TarFile, scratch: Path, limit: int, *, write: bool) -> None:
    number = total = 0
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
        number, total = number + 1, total + max(0, member.size)
        size = max(total, tar.offset)  # a sparse member's size differs from the bytes to read
        if number > MAX_UNPACKED_FILES or size > limit or member.size > MAX_FILE_BYTES:
            raise Unreadable("the archive is larger than any bundle: unpack it and name the directory")
        name = PurePosixPath(member.name)
        if not member.isfile() or member.issparse() or name.is_absolute() or ".." in name.parts:
            continue
        if write and len(name.parts) <= MAX_DEPTH and "\0" not in member.name:
            _unpack_one(tar, member, scratch / name)


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = open(target, "wb")  # noqa: SIM115 - closed below; errors here and while writing differ
    except OSError:
        return
    with file:
        while source is not None and (data := source.read(CHUNK_BYTES)):
            file.write(data)
