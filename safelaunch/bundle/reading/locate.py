"""Determines which kind of evidence is at a path, and reads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from safelaunch import addons
from safelaunch.bundle.reading.archive import CHUNK_BYTES, MAX_DEPTH, MAX_UNPACKED_FILES, unpack
from safelaunch.bundle.reading.bundles import complete_bundle, is_bundle, is_slow_bundle, read_bundle
from safelaunch.bundle.reading.dumps import read_dumps
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import MAX_FILE_BYTES, STDIN, Unreadable, cannot_be_read, within
from safelaunch.bundle.reading.guard import ReadLimits, in_child
from safelaunch.bundle.reading.merging import merge
from safelaunch.bundle.reading.rejection import holds_nothing, missing_reader, reject_other_data
from safelaunch.bundle.reading.run_directory import is_run_directory, read_run
from safelaunch.system.files import is_dir

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Reader

_MOST_OF_STDIN = 4 << 30


def read(path: Path) -> EvidenceSource:
    """Returns the evidence at a path. Raises Unreadable if there is none.

    The path can be a bundle or its ``.tar.gz``, a folder of bundles from several nodes, a run directory, or a folder of
    Flight Recorder dumps.
    """
    with tempfile.TemporaryDirectory(prefix="safelaunch-") as directory:
        scratch = Path(directory)
        return read_folder(folder_of(path, scratch), scratch)


def save_stdin(path: Path, scratch: Path) -> Path:
    """Saves standard input to a file in ``scratch``, because it has to be read several times. Raises Unreadable.

    Returns any other path unchanged.
    """
    if path != STDIN:
        return path
    room = os.statvfs(scratch)
    limit = min(_MOST_OF_STDIN, room.f_bavail * room.f_frsize // 2)
    try:
        with path.open("rb") as source, (scratch / "stdin").open("wb") as target:
            while data := source.read(CHUNK_BYTES):
                if target.tell() + len(data) > limit:
                    raise Unreadable(f"it is longer than {limit} bytes: save it as a file, and name that file")
                target.write(data)
    except OSError as error:
        raise cannot_be_read(error) from error
    return scratch / "stdin"


def folder_of(path: Path, scratch: Path) -> Path:
    """Returns the directory or log file at ``path``, or unpacks an archive into the empty directory ``scratch``.

    Raises Unreadable.
    """
    try:
        if path.is_dir() or _reader_of(path) is not None:
            return Path(os.path.realpath(path))
        if not path.is_file():
            missing = "this file or directory does not exist"
            raise Unreadable("it is neither a directory nor an archive" if path.exists() else missing)
        reject_other_data(path)
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        cpu_s = min(60, 8 + (path.stat().st_size >> 18))
        in_child(lambda: unpack(path, unpacked), ReadLimits(256 << 20, cpu_s, file_bytes=MAX_FILE_BYTES))
        return unpacked
    except OSError as error:
        raise cannot_be_read(error) from error


def _reader_of(*files: Path) -> Reader | None:
    return next((reader for reader in addons.readers() if all(map(reader.claims, files))), None)


def bounds_of(paths: Sequence[Path]) -> ReadLimits:
    if (reader := _reader_of(*paths)) is not None:
        return reader.bounds(paths)
    size = _size(paths[0])
    return ReadLimits(min((384 << 20) + 4 * size, 4 << 30), cpu_s=8 + (size >> 21), file_bytes=MAX_FILE_BYTES)


def _size(folder: Path, deepest: int = MAX_DEPTH) -> int:
    # Counts blocks on the disk, because sparse files look larger than they are.
    with suppress(OSError), os.scandir(folder) as entries:
        return sum(
            _size(Path(entry), deepest - 1) if entry.is_dir(follow_symlinks=False) and deepest else _bytes_of(entry)
            for entry in islice(entries, MAX_UNPACKED_FILES)
        )
    return 0


def _bytes_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0  # it is gone


def read_folder(folder: Path, scratch: Path) -> EvidenceSource:
    """Returns the evidence at a path that ``folder_of`` returned. Raises Unreadable."""
    try:
        return _read_folder(folder, scratch) if folder.is_dir() else read_files([folder])
    except OSError as error:
        raise cannot_be_read(error) from error


def read_files(paths: Sequence[Path]) -> EvidenceSource:
    """Returns the evidence in files of one job. Raises Unreadable."""
    reader = _reader_of(*paths)
    if reader is None:
        raise Unreadable(f"of several paths, each must be a log{missing_reader()}")
    return reader.read(paths)


def _read_folder(folder: Path, scratch: Path) -> EvidenceSource:
    if is_bundle(folder) or is_slow_bundle(folder):
        return replace(read_bundle(folder), bundles=(folder,))
    if is_run_directory(folder):
        return read_run(folder, scratch)
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink())
    inside = [path for path in visible if is_bundle(path)] or [path for path in visible if is_slow_bundle(path)][-1:]
    only_bundle = inside[0] if len(inside) == 1 else complete_bundle(inside)
    if only_bundle is not None:
        evidence = read_bundle(only_bundle)
        return replace(
            evidence, what=f"the bundle {only_bundle.name}", files={"": f"{only_bundle.name}/"}, bundles=(only_bundle,)
        )
    if inside:
        merged = merge([read_bundle(path) for path in inside], [path.name for path in inside])
        return replace(merged, bundles=tuple(inside))
    dumps = _dumps_in(folder)
    for reader in addons.readers():
        if (texts := reader.read_folder(folder, dumps)) is not None:
            return texts
    if dumps is None:
        raise holds_nothing(folder)
    return dumps


def _dumps_in(folder: Path) -> EvidenceSource | None:
    dumps = read_dumps(folder, folder)
    if dumps is None and is_dir(folder / "flight_recorder"):
        dumps = read_dumps(within(folder, folder / "flight_recorder"), folder)
        files = {name: f"flight_recorder/{file}" for name, file in dumps.files.items()} if dumps is not None else {}
        dumps = EvidenceSource(dumps.what, dumps.evidence, dumps.problems, files) if dumps is not None else None
    return dumps
