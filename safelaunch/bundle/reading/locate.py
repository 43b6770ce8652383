"""Finds out what a path holds, and reads the evidence in it."""

from __future__ import annotations

import os
import platform
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import structs

from safelaunch import addons
from safelaunch.beacon import layout
from safelaunch.bundle.reading.bundles import is_bundle, merge, read_bundle, whole_of
from safelaunch.bundle.reading.dumps import read_dumps
from safelaunch.bundle.reading.guard import (
    MAX_FILE_BYTES,
    STDIN,
    FoundEvidence,
    ReadLimits,
    Unreadable,
    cannot_be_read,
    evidence_of,
    in_child,
    read_limited,
    within,
)
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.sink import Sink
from safelaunch.job.paths import RunPaths
from safelaunch.model import Outcome, RankExit
from safelaunch.system.files import is_dir, is_file, lexists
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Reader
    from safelaunch.capture.pages import AgentEvent

MAX_UNPACKED_BYTES = 1 << 30
MAX_UNPACKED_FILES = 100_000
_DEEPEST = 6  # folders of nodes, of bundles, of ranks: nothing deeper is ever read
_CHUNK_BYTES = 1 << 20
_MOST_OF_STDIN = 4 << 30
_NOTHING = (
    "it holds no bundle, no run directory, no log, no stacks and no Flight Recorder dumps (files whose names end in a"
    " rank number: nccl_trace_rank_0, comm_lib_trace_rank_0, dump_0.json)"
)
GIVE = (
    "Name a job's output, its stacks, its Flight Recorder dumps or a bundle. While the job hangs, `safelaunch dump"
    " --all` on its node needs no file."
)


def read(path: Path) -> FoundEvidence:
    """The evidence at ``path``: a bundle or its ``.tar.gz``, a folder of bundles from several nodes, a run directory,
    a folder of Flight Recorder dumps.

    Raises Unreadable if it holds none.
    """
    with tempfile.TemporaryDirectory(prefix="safelaunch-") as made:
        scratch = Path(made)
        return read_folder(folder_of(path, scratch), scratch)


def saved(path: Path, scratch: Path) -> Path:
    """The path itself; of standard input, a file in ``scratch`` with all of it. Raises Unreadable.

    What reads files goes through them more than once.
    """
    if path != STDIN:
        return path
    room = os.statvfs(scratch)
    limit = min(_MOST_OF_STDIN, room.f_bavail * room.f_frsize // 2)
    try:
        with path.open("rb") as source, (scratch / "stdin").open("wb") as target:
            while data := source.read(_CHUNK_BYTES):
                if target.tell() + len(data) > limit:
                    raise Unreadable(f"it is longer than {limit} bytes: save it as a file, and name that")
                target.write(data)
    except OSError as error:
        raise cannot_be_read(error) from error
    return scratch / "stdin"


def folder_of(path: Path, scratch: Path) -> Path:
    """The directory at ``path``, the contents of the archive there, unpacked in the empty directory ``scratch``, or the
    log itself. Raises Unreadable.
    """
    try:
        if path.is_dir() or _reader_of(path) is not None:
            return Path(os.path.realpath(path))
        if not path.is_file():
            missing = "this file or directory does not exist"
            raise Unreadable("it is neither a directory nor an archive" if path.exists() else missing)
        _reject_other_data(path)
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        cpu_s = min(60, 8 + (path.stat().st_size >> 18))
        in_child(lambda: _unpack(path, unpacked), ReadLimits(256 << 20, cpu_s, file_bytes=MAX_FILE_BYTES))
        return unpacked
    except OSError as error:
        raise cannot_be_read(error) from error


def _reader_of(*files: Path) -> Reader | None:
    """Returns the add-on that reads these files, if there is one. Raises OSError."""
    return next((reader for reader in addons.readers() if all(map(reader.claims, files))), None)


def bounds_of(paths: Sequence[Path]) -> ReadLimits:
    """The bounds for reading and diagnosing a folder of this size, or these files."""
    if (reader := _reader_of(*paths)) is not None:
        return reader.bounds(paths)
    size = _size(paths[0])
    return ReadLimits(min((384 << 20) + 4 * size, 4 << 30), cpu_s=8 + (size >> 21), file_bytes=MAX_FILE_BYTES)


def _size(folder: Path, deepest: int = _DEEPEST) -> int:
    """Bytes on the disk: a sparse file looks larger than it is."""
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


def read_folder(folder: Path, scratch: Path) -> FoundEvidence:
    """The evidence in a directory or file, as ``folder_of`` gives it. Raises Unreadable."""
    try:
        return _read_folder(folder, scratch) if folder.is_dir() else read_files([folder])
    except OSError as error:
        raise cannot_be_read(error) from error


def read_files(paths: Sequence[Path]) -> FoundEvidence:
    """The evidence in these files of one job. Raises Unreadable."""
    reader = _reader_of(*paths)
    if reader is None:
        raise Unreadable(f"of several paths, each has to be a log{_why_not()}")
    return reader.read(paths)


def _why_not() -> str:
    """Returns what a message adds if an add-on that reads files is missing."""
    missing = addons.missing("readers")
    return f", and this installation can't read logs: its add-on {missing[0]!r} is missing" if missing else ""


def _read_folder(folder: Path, scratch: Path) -> FoundEvidence:
    if is_bundle(folder):
        return replace(read_bundle(folder), bundles=(folder,))
    if _is_run_directory(folder):
        return read_run(folder, scratch)
    inside = sorted(
        path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink() and is_bundle(path)
    )
    alone = inside[0] if len(inside) == 1 else whole_of(inside)
    if alone is not None:
        found = read_bundle(alone)
        return replace(found, what=f"the bundle {alone.name}", files={"": f"{alone.name}/"}, bundles=(alone,))
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


def _dumps_in(folder: Path) -> FoundEvidence | None:
    dumps = read_dumps(folder, folder)
    if dumps is None and is_dir(folder / "flight_recorder"):
        dumps = read_dumps(within(folder, folder / "flight_recorder"), folder)
        files = {name: f"flight_recorder/{file}" for name, file in dumps.files.items()} if dumps is not None else {}
        dumps = FoundEvidence(dumps.what, dumps.evidence, dumps.problems, files) if dumps is not None else None
    return dumps


def _is_run_directory(path: Path) -> bool:
    return is_dir(path / "pages") and is_file(path / "owner")


def _unpack(archive: Path, scratch: Path) -> None:
    """Unpacks the regular files of a ``.tar.gz`` into ``scratch``; no name in it can lead outside."""
    room = os.statvfs(scratch)
    limit = min(MAX_UNPACKED_BYTES, room.f_bavail * room.f_frsize // 2)
    opened = False
    try:
        for write in (False, True):  # what is too large is rejected before the first file is written
            with tarfile.open(archive, "r:*") as tar:
                opened = True
                _unpack_all(tar, scratch, limit, write=write)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # tarfile and its decompressors raise nearly any type on damaged input
        if isinstance(error, OSError) and error.errno is not None:
            raise Unreadable(f"it cannot be unpacked in {scratch.parent.parent}: {error.strerror}") from error
        if opened or isinstance(error, EOFError):
            raise Unreadable("the archive is damaged or incomplete: copy it again from where it was written") from error
        what = f"it is neither a directory nor a bundle's archive (.tar.gz){_why_not()}"
        raise Unreadable(what, GIVE) from error


def _unpack_all(tar: tarfile.TarFile, scratch: Path, limit: int, *, write: bool) -> None:
    number = total = 0
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
        number, total = number + 1, total + max(0, member.size)
        size = max(total, tar.offset)  # a sparse member's size differs from the bytes to read past
        if number > MAX_UNPACKED_FILES or size > limit or member.size > MAX_FILE_BYTES:
            raise Unreadable("the archive is larger than any bundle: unpack it and name the directory")
        name = PurePosixPath(member.name)
        if not member.isfile() or member.issparse() or name.is_absolute() or ".." in name.parts:
            continue
        if write and len(name.parts) <= _DEEPEST and "\0" not in member.name:
            _unpack_one(tar, member, scratch / name)


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = open(target, "wb")  # noqa: SIM115 - closed below; an error here differs from one while writing
    except OSError:
        return  # the name is too long, or another member's directory
    with file:
        while source is not None and (data := source.read(_CHUNK_BYTES)):
            file.write(data)


# --- files that are no evidence ---------------------------------------------------------------------------------------

_NAMES_SHOWN = 3
_MAGIC = {
    b"PK\x03\x04": "a zip archive, such as a checkpoint",
    b"\x7fELF": "a program",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
}


def _reject_other_data(path: Path) -> None:
    """Raises Unreadable for data of a known kind that is neither text nor an archive."""
    with path.open("rb") as file:
        head = file.read(1 << 12)
    if head.startswith(b"\x80") or b'"pg_config"' in head:
        raise Unreadable("it is one Flight Recorder dump, or a pickle", "Name the folder with the dumps of all ranks.")
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    if kind:
        raise Unreadable(f"it is {kind}, not the output of a job", GIVE)


def holds_nothing(folder: Path) -> Unreadable:
    names = sorted(path.name for path in folder.iterdir())
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    shown = " and ".join(filter(None, (", ".join(names[:_NAMES_SHOWN]), *more)))
    return Unreadable(f"{_NOTHING}, only {shown}" if names else "it is an empty folder", GIVE)


# --- a run directory that nobody removed: everything was killed at once, or the machine was reset --------------------

MAX_PAGES = 8 * 4096  # a page and its companions, for each rank
MOST_OF_A_PAGE = 2 << 20
MAX_PAGES_BYTES = 1 << 30


def read_run(root: Path, scratch: Path) -> FoundEvidence:
    """The evidence left by a run's newest attempt; ``scratch``: an empty directory.

    It has only what the ranks recorded themselves: pages, last exceptions, output, and the dumps of torch and NCCL. The
    readers trust a live run's files, map them and open them for writing. So a stranger's files are copied first.
    """
    from safelaunch.capture import collect  # late: the readers of a live run, which files rarely need
    from safelaunch.capture.pages import Roster, read_meta

    found_there = RunPaths(root)
    run = RunPaths(scratch / "run")
    problems = list(_copy(found_there, run))
    roster = Roster(run)
    exits = _exits(roster.refresh())
    pages = {number: page for number, page in roster.pages().items() if number < MAX_RANKS}
    dumps = None
    if is_dir(found_there.flight_recorder):
        dumps = read_dumps(within(root, found_there.flight_recorder), root)
        problems += dumps.problems if dumps is not None else ()
    records = {rank.rank: rank.flight_record for rank in dumps.evidence.ranks} if dumps is not None else {}
    host, nowhere = platform.node(), Sink(Redactor())  # the files stay where they are
    ranks = []
    for number in sorted({*pages, *(worker for worker in roster.workers if 0 <= worker < MAX_RANKS), *records}):
        page = pages.get(number)
        if page is None:
            pid = roster.workers[number].pid if number in roster.workers else 0
            known = collect.RankBasics(pid=pid, exit=exits.get(number))
        else:
            meta = read_meta(roster.companion(page, layout.META_SUFFIX))
            known = collect.RankBasics(page.read(), page.pid, page.name, exits.get(number), meta.code_roots, meta.gpu)
        rank = collect.of_ended(number, known, run.pages, host, nowhere)
        ranks.append(structs.replace(rank, flight_record=records.get(number) or rank.flight_record))
    worlds = [rank.progress.world_size for rank in ranks if rank.progress is not None]
    outcome: Outcome = "crash" if any(code.returncode for code in exits.values()) else "hang"
    evidence = evidence_of(outcome, ranks, max([0, *(size for size in worlds if size <= MAX_RANKS)]))
    files = {f"ranks/{number}/progress.json": f"pages/{page.name}" for number, page in pages.items()} | {
        f"ranks/{number}/exception.json": f"pages/{page.name}{layout.EXCEPTION_SUFFIX}"
        for number, page in pages.items()
    }
    if dumps is not None:
        files |= {name: f"flight_recorder/{file}" for name, file in dumps.files.items()}
    return FoundEvidence("a run directory", evidence, tuple(problems), files)


def _copy(there: RunPaths, here: RunPaths) -> Iterator[str]:
    """Copies pages, their companions and the agent's events; yields what it left out."""
    here.pages.mkdir(parents=True)
    within(there.root, there.pages)
    names = [there.agent_events, there.agent_page, *sorted(there.pages.iterdir())]
    left = MAX_PAGES_BYTES
    for number, source in enumerate(names):
        if number > MAX_PAGES or left < 0:
            yield f"{len(names) - number} more files of pages/: ignored, because no run leaves so many"
            return
        if not lexists(source) or source.name.endswith(layout.SERVER_SUFFIX):
            continue
        try:
            data = read_limited(source, MOST_OF_A_PAGE)
        except Unreadable as error:
            yield f"{source.relative_to(there.root)}: {error.message}"
            continue
        left -= len(data)
        (here.root / source.relative_to(there.root)).write_bytes(data)


def _exits(events: list[AgentEvent]) -> dict[int, RankExit]:
    """The ranks' exits according to the agent; those in its first note ended before it stopped the others."""
    found: dict[int, RankExit] = {}
    attempt = max((event.attempt for event in events), default=0)
    for event in events:
        if event.attempt == attempt and event.exits:
            first = not found
            for rank, code in event.exits.items():
                found.setdefault(rank, RankExit(code, event.time_unix_s, before_close=first))
    return found
