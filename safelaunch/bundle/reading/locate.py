"""Finds out what a path holds, and reads the evidence in it."""

from __future__ import annotations

import os
import platform
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import structs

from safelaunch.addons.logs import lines as log_lines
from safelaunch.addons.logs import reader as logs
from safelaunch.addons.logs import stacks
from safelaunch.beacon import layout
from safelaunch.bundle.reading.bundles import is_bundle, merge, read_bundle, whole_of
from safelaunch.bundle.reading.dumps import read_dumps
from safelaunch.bundle.reading.guard import (
    MAX_FILE_BYTES,
    Bounds,
    Found,
    Unreadable,
    cannot_be_read,
    evidence_of,
    in_child,
    read_limited,
    within,
)
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.result import Sink
from safelaunch.job.paths import RunPaths
from safelaunch.model import Outcome, RankEvidence, RankExit
from safelaunch.system.files import is_dir, is_file, lexists
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.capture.pages import AgentEvent

MAX_UNPACKED_BYTES = 1 << 30
MAX_UNPACKED_FILES = 100_000
_DEEPEST = 6  # folders of nodes, of bundles, of ranks: nothing deeper is ever read
_CHUNK_BYTES = 1 << 20
_LOG_BYTES, _MOST_OF_STDIN = 512 << 20, 4 << 30
_NOTHING = (
    "it holds no bundle, no run directory, no log, no stacks and no Flight Recorder dumps (files whose names end in a"
    " rank number: nccl_trace_rank_0, comm_lib_trace_rank_0, dump_0.json)"
)
_NO_OUTPUT = (
    "it is neither a bundle, nor Flight Recorder dumps, nor stacks, nor the log of a job: no line of it looks like the"
    " output of a launcher, torch, Python or a training script"
)
_GIVE = (
    "Name a job's output, its stacks, its Flight Recorder dumps or a bundle. While the job hangs, `safelaunch dump"
    " --all` on its node needs no file."
)


def read(path: Path) -> Found:
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
    if path != log_lines.STDIN:
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
        if path.is_dir() or log_lines.is_log(path):
            return Path(os.path.realpath(path))
        if not path.is_file():
            missing = "this file or directory does not exist"
            raise Unreadable("it is neither a directory nor an archive" if path.exists() else missing)
        _reject_other_data(path)
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        cpu_s = min(60, 8 + (path.stat().st_size >> 18))
        in_child(lambda: _unpack(path, unpacked), Bounds(256 << 20, cpu_s, file_bytes=MAX_FILE_BYTES))
        return unpacked
    except OSError as error:
        raise cannot_be_read(error) from error


def bounds_of(folder: Path) -> Bounds:
    """The bounds for reading and diagnosing a folder of this size."""
    if not folder.is_dir():
        return of_logs([folder])
    size = _size(folder)
    return Bounds(min((384 << 20) + 4 * size, 4 << 30), cpu_s=8 + (size >> 21), file_bytes=MAX_FILE_BYTES)


def of_logs(paths: Sequence[Path]) -> Bounds:
    """The bounds for reading logs: what counts in them is kept, of whatever size they are."""
    size = sum(path.stat().st_size for path in paths)
    return Bounds(_LOG_BYTES, cpu_s=30 + (size >> 22))


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


def read_folder(folder: Path, scratch: Path) -> Found:
    """The evidence in a directory, as ``folder_of`` gives it. Raises Unreadable."""
    try:
        return _read_folder(folder, scratch)
    except OSError as error:
        raise cannot_be_read(error) from error


def read_several(paths: Sequence[Path]) -> Found:
    """The evidence in these logs of one job. Raises Unreadable."""
    if not all(map(log_lines.is_log, paths)):
        raise Unreadable("of several paths, each has to be a log")
    return _of_texts(paths)


def _of_texts(paths: Sequence[Path], root: Path | None = None) -> Found:
    """What logs and saved stacks tell together."""
    saved = stacks.Stacks.of(paths, root)
    rest = [path for path in paths if path not in saved.whole]
    if not rest and (alone := saved.found()) is not None:
        return alone
    printed = logs.read_logs(rest, root)
    found = saved.found(only_named=bool(printed.evidence.ranks))
    if found is None and not (printed.evidence.ranks or printed.remarks):
        _reject_other_texts(paths, root, printed)
    if found is None or printed.evidence.ranks:
        return printed if found is None else _with_stacks(printed, found)
    return replace(found, remarks=(*found.remarks, *printed.remarks))


def _read_folder(folder: Path, scratch: Path) -> Found:
    if not folder.is_dir():
        return _of_texts([folder])
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
    dumps = read_dumps(folder, folder)
    if dumps is None and is_dir(folder / "flight_recorder"):
        dumps = read_dumps(within(folder, folder / "flight_recorder"), folder)
        files = {name: f"flight_recorder/{file}" for name, file in dumps.files.items()} if dumps is not None else {}
        dumps = Found(dumps.what, dumps.evidence, dumps.problems, files) if dumps is not None else None
    texts = log_lines.logs_in(folder)
    if dumps is None and not texts:
        raise _holds_nothing(folder)
    if dumps is None:
        return _of_texts(texts, folder)
    printed = logs.read_logs(texts, folder)
    found = dumps
    if printed.evidence.ranks:
        joined = _joined(printed, dumps, lambda rank, dump: structs.replace(rank, flight_record=dump.flight_record))
        found = joined
    seen = stacks.Stacks.of(texts, folder).found(only_named=True)
    return found if seen is None else _with_stacks(found, seen)


def _joined(one: Found, other: Found, both: Callable[[RankEvidence, RankEvidence], RankEvidence]) -> Found:
    """What ``one`` tells, and beside it what ``other`` tells of the same job. ``both``: of a rank that is in both."""
    ranks = {rank.rank: rank for rank in one.evidence.ranks if rank.rank not in one.evidence.labels}
    for rank in other.evidence.ranks:
        ranks[rank.rank] = both(ranks[rank.rank], rank) if rank.rank in ranks else rank
    world = max(one.evidence.world_size, other.evidence.world_size)
    labels, files = {}, {**one.files, **other.files}
    for rank in (rank for rank in one.evidence.ranks if rank.rank in one.evidence.labels):
        number = rank.rank if rank.rank not in ranks else max(world, *(rank + 1 for rank in ranks))
        ranks[number], labels[number] = structs.replace(rank, rank=number), one.evidence.labels[rank.rank]
        old = f"ranks/{rank.rank}/"
        own = {name: file for name, file in one.files.items() if name.startswith(old)}
        files |= {f"ranks/{number}/{name.removeprefix(old)}": file for name, file in own.items()}
    world = max(world, *(number + 1 for number in ranks)) if ranks else world
    evidence = structs.replace(
        one.evidence,
        labels=labels,
        world_size=world,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        missing_ranks=tuple(rank for rank in range(world) if rank not in ranks),
        printed=None,
        world_guessed=one.evidence.world_guessed and other.evidence.world_guessed,
    )
    what, problems = f"{one.what}, {other.what}", (*one.problems, *other.problems)
    return replace(one, what=what, evidence=evidence, problems=problems, files=files)


def _with_stacks(found: Found, seen: Found) -> Found:
    return _joined(found, seen, lambda rank, one: structs.replace(rank, main=one.main, pid=rank.pid or one.pid))


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
        raise Unreadable("it is neither a directory nor a bundle's archive (.tar.gz)", _GIVE) from error


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

_LINES_LOOKED_AT, _COLUMNS_LOOKED_AT, _NAMES_SHOWN = 400, 400, 3
_EMPTY = "an empty file"
_KINDS = {
    ".md": "Markdown", ".rst": "reStructuredText", ".html": "HTML", ".csv": "a table", ".json": "JSON", ".toml": "TOML",
    ".yaml": "YAML", ".yml": "YAML", ".py": "Python source", ".ipynb": "a notebook", ".sh": "a shell script",
    ".sbatch": "a shell script", ".slurm": "a shell script",
}  # fmt: skip
_MAGIC = {
    b"PK\x03\x04": "a zip archive, such as a checkpoint",
    b"\x7fELF": "a program",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
}
# At least five words without numbers, paths or assignments, as a person writes them.
_PROSE = re.compile(r"[-*#>\s]*(?:[^\W\d_][\w'’-]*[.,;:!?)]* +\(?){4,}[^\W\d_][\w'’-]*[.,;:!?)]*")


def _reject_other_data(path: Path) -> None:
    """Raises Unreadable for data of a known kind that is neither text nor an archive."""
    with path.open("rb") as file:
        head = file.read(1 << 12)
    if head.startswith(b"\x80") or b'"pg_config"' in head:
        raise Unreadable("it is one Flight Recorder dump, or a pickle", "Name the folder with the dumps of all ranks.")
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    if kind:
        raise Unreadable(f"it is {kind}, not the output of a job", _GIVE)


def _reject_other_texts(paths: Sequence[Path], root: Path | None, printed: Found) -> None:
    """Raises Unreadable for texts that no job has printed."""
    kinds = dict.fromkeys(map(_kind_of, paths))
    they_are = "it is" if len(paths) == 1 and root is None else "they are" if root is None else "its logs are"
    if [*kinds] == [_EMPTY]:
        raise Unreadable(f"{they_are} empty", _GIVE)
    if root is not None and ("" not in kinds or not printed.is_output):
        raise _holds_nothing(root)
    if "" not in kinds:
        raise Unreadable(f"{they_are} {' and '.join(kinds)}, not the output of a job", _GIVE)
    if not printed.is_output:
        raise Unreadable(_NO_OUTPUT, _GIVE)


def _kind_of(path: Path) -> str:
    """Returns the kind of a text that no job has printed; empty if a job might have printed it."""
    if path == log_lines.STDIN:
        return ""
    read = islice(log_lines.lines_of(path, path.name), _LINES_LOOKED_AT)
    lines = [line.text[:_COLUMNS_LOOKED_AT] for line in read if line is not None and line.text.strip()]
    if not lines:
        return _EMPTY
    if kind := _KINDS.get(path.suffix.lower()):
        return kind
    if lines[0].startswith("#!"):
        return "a script"
    prose, of_a_job = sum(map(bool, map(_PROSE.fullmatch, lines))), sum(map(log_lines.is_of_a_job, lines))
    return "prose" if 2 * prose > len(lines) >= 4 * of_a_job else ""


def _holds_nothing(folder: Path) -> Unreadable:
    names = sorted(path.name for path in folder.iterdir())
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    shown = " and ".join(filter(None, (", ".join(names[:_NAMES_SHOWN]), *more)))
    return Unreadable(f"{_NOTHING}, only {shown}" if names else "it is an empty folder", _GIVE)


# --- a run directory that nobody removed: everything was killed at once, or the machine was reset --------------------

MAX_PAGES = 8 * 4096  # a page and its companions, for each rank
MOST_OF_A_PAGE = 2 << 20
MAX_PAGES_BYTES = 1 << 30


def read_run(root: Path, scratch: Path) -> Found:
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
            known = collect.Known(pid=pid, exit=exits.get(number))
        else:
            meta = read_meta(roster.companion(page, layout.META_SUFFIX))
            known = collect.Known(page.read(), page.pid, page.name, exits.get(number), meta.code_roots, meta.gpu)
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
    return Found("a run directory", evidence, tuple(problems), files)


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
