"""What a path holds, and the evidence in it."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from safelaunch.postmortem.bundles import is_bundle, merge, read_bundle
from safelaunch.postmortem.dumps import read_dumps
from safelaunch.postmortem.found import MAX_FILE_BYTES, Found, Unreadable
from safelaunch.postmortem.rundirs import is_run_directory, read_run

MAX_ARCHIVE_BYTES = 4 << 30
MAX_ARCHIVE_FILES = 200_000
_NOTHING = (
    "it holds no bundle, no run directory, and no Flight Recorder dumps (files whose names end in a rank's number:"
    " nccl_trace_rank_0, comm_lib_trace_rank_0, dump_0.json)"
)


def read(path: Path) -> Found:
    """The evidence at ``path``: a bundle or its ``.tar.gz``, a folder of bundles from several nodes, a run directory,
    a folder of Flight Recorder dumps.

    Raises Unreadable where it holds none.
    """
    try:
        if path.is_file():
            with _unpacked(path) as folder:
                return _read_folder(folder)
        if not path.is_dir():
            raise Unreadable("there is no such file or directory" if not path.exists() else "it is no directory")
        return _read_folder(path)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


def _read_folder(folder: Path) -> Found:
    if is_bundle(folder):
        return read_bundle(folder)
    if is_run_directory(folder):
        return read_run(folder)
    inside = sorted(
        path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink() and is_bundle(path)
    )
    if len(inside) == 1:
        found = read_bundle(inside[0])
        return Found(f"the bundle {inside[0].name}", found.evidence, found.problems, {"": f"{inside[0].name}/"})
    if inside:
        return merge([read_bundle(path) for path in inside], [path.name for path in inside])
    dumps = read_dumps(folder)
    if dumps is None and (folder / "flight_recorder").is_dir():
        dumps = read_dumps(folder / "flight_recorder")
        files = {name: f"flight_recorder/{file}" for name, file in dumps.files.items()} if dumps is not None else {}
        dumps = Found(dumps.what, dumps.evidence, dumps.problems, files) if dumps is not None else None
    if dumps is None:
        raise Unreadable(_NOTHING)
    return dumps


@contextmanager
def _unpacked(archive: Path) -> Iterator[Path]:
    """The regular files of a ``.tar.gz`` in a directory of our own; nothing in it can name a place outside."""
    with tempfile.TemporaryDirectory(prefix="safelaunch-") as scratch:
        try:
            with tarfile.open(archive, "r:*") as tar:
                _unpack(tar, Path(scratch))
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise Unreadable(f"it is no bundle's archive, and no directory: {error}") from error
        yield Path(scratch)


def _unpack(tar: tarfile.TarFile, scratch: Path) -> None:
    total = 0
    for number, member in enumerate(tar):
        total += member.size
        if number >= MAX_ARCHIVE_FILES or total > MAX_ARCHIVE_BYTES or member.size > MAX_FILE_BYTES:
            raise Unreadable("the archive holds more than a bundle would")
        name = PurePosixPath(member.name)
        if not member.isfile() or name.is_absolute() or ".." in name.parts:
            continue
        source = tar.extractfile(member)
        if source is not None:
            target = scratch / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
