"""Reads a stranger's files: in bounded pieces, in a child with bounded memory and time, and on all cores.

A malicious file can kill the process that reads it: a pickle whose dictionary has a key of a hundred thousand nested
tuples, an archive whose header announces gigabytes. The child may die of it; the caller gets one line.

Time is CPU time, because a busy machine or a slow disk is no sign of malice.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import stat
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from safelaunch.model import Evidence, Outcome, RankEvidence
from safelaunch.system.errors import SafelaunchError

# --- what is found, and bounded reads ---------------------------------------------------------------------------------

STDIN = Path("/dev/stdin")
MAX_FILE_BYTES = 256 << 20
OUTSIDE = "it is a link that leads out of the directory"
LINK = "it is a link, and safelaunch follows no links here"


class Unreadable(SafelaunchError):
    """A file that is not what it should be. The message says what is wrong, without the path. ``fix`` has no NUL."""


@dataclass(frozen=True)
class ReportedError:
    """A line that reports an error, on which no evidence rests. ``where``: its file and line; ``words``: both."""

    where: str
    words: str


@dataclass(frozen=True)
class FoundEvidence:
    """The evidence at a path. ``what``: its kind in words (``a bundle``); ``problems``: unreadable files, with reasons.

    ``files``: the file in a claim (``ranks/3/flight_recorder.json``) → the real file, if that is another one.
    ``bundles``: the directories of the bundles that it was read from. ``taken``: of a bundle, from the last progress to
    when it was written, in Unix seconds; zeros where that is not known. ``source``: what the verdict read of the user's
    files, by their paths; None where that is not kept. ``remarks``: what is no fault of a rank, in words.
    ``is_output``: of texts, a job may have printed some line of them. ``errors``: errors
    of the job besides the evidence, the most telling first. ``summary``: lines to print if nothing shows how the job
    ended. ``is_quiet``: no error is reported. ``launch``: the command that a log shows, as one that runs the job under
    safelaunch.
    """

    what: str
    evidence: Evidence
    problems: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    bundles: tuple[Path, ...] = ()
    taken: tuple[float, float] = (0.0, 0.0)
    source: Mapping[str, str] | None = None
    remarks: tuple[str, ...] = ()
    is_output: bool = True
    errors: tuple[ReportedError, ...] = ()
    summary: tuple[str, ...] = ()
    is_quiet: bool = True
    launch: tuple[str, ...] = ()

    def read_source(self, path: str) -> str | None:
        """The text of a source file for the verdict: as it was then, otherwise what has that path here and now."""
        if self.source is not None:
            return self.source.get(path) or None
        from safelaunch.capture import user_source

        return user_source.text_for_stranger(path)


def evidence_of(outcome: Outcome, ranks: Iterable[RankEvidence], world: int = 0) -> Evidence:
    """The evidence on these ranks of a job of ``world``, or more where they say so."""
    by_rank = {rank.rank: rank for rank in ranks}
    world = max([world, *(rank + 1 for rank in by_rank)])
    missing = tuple(rank for rank in range(world) if rank not in by_rank)
    return Evidence(outcome, world, tuple(by_rank[rank] for rank in sorted(by_rank)), missing)


def read_limited(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file. Raises Unreadable for anything else, and for a file that is too large.

    The last part of the path must not be a link; ``within`` checks the directories.
    """
    try:
        mode = path.lstat().st_mode  # opening a device may already do something
        if not stat.S_ISREG(mode):
            raise Unreadable(LINK if stat.S_ISLNK(mode) else "it is not a regular file")
        # A FIFO in the folder must not block us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if status.st_size > limit_bytes:
                raise Unreadable(f"it is too large: {status.st_size} bytes, and the limit is {limit_bytes}")
            return file.read(status.st_size)  # not the limit: read allocates that much memory at once
    except OSError as error:
        raise cannot_be_read(error) from error


def cannot_be_read(error: OSError) -> Unreadable:
    """``error`` in words."""
    return Unreadable(f"it cannot be read: {error.strerror or error}")


def within(root: Path, path: Path) -> Path:
    """``path`` with its links resolved. Raises Unreadable if they lead out of ``root``, and OSError.

    ``root`` is the user's path, with its own links resolved.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise Unreadable(OUTSIDE)
    return real


# --- in a child -------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")
# The child's messages: a mark for each value, then all values, or the reason for having no more.
_MADE, _DONE, _REFUSED, _NO_MEMORY, _FAILED = b".", b"d", b"r", b"m", b"f"
_SMALL_FILE_BYTES = 1 << 20  # a semaphore is a file too


@dataclass(frozen=True)
class ReadLimits:
    """Limits. ``memory_bytes``: additional address space; ``file_bytes``: the size of any file that it writes."""

    memory_bytes: int
    cpu_s: int
    file_bytes: int = _SMALL_FILE_BYTES


class TooMuch(Unreadable):
    """The work exceeded its bounds, or killed its process. ``made``: the number of values finished before."""

    def __init__(self, message: str, made: int = 0) -> None:
        super().__init__(message)
        self.made = made


def bind(bounds: ReadLimits) -> None:
    """Limits the calling process, beyond its current use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGESIZE") + bounds.memory_bytes)
    _lower(resource.RLIMIT_FSIZE, bounds.file_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    give_time(bounds.cpu_s)


def give_time(cpu_s: int) -> None:
    """Gives the calling process ``cpu_s`` more seconds of CPU time; then SIGXCPU kills it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def in_child(work: Callable[[], _T], bounds: ReadLimits) -> _T:
    """Runs ``work()`` in a child. Raises Unreadable if it does, and TooMuch if the child died before its end."""
    return all_in_child(lambda: [work()], bounds)[0]


def all_in_child(work: Callable[[], Iterable[_T]], bounds: ReadLimits) -> list[_T]:
    """All values that ``work()`` yields; see ``in_child``."""
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise Unreadable(f"safelaunch could not start a process to read it: {error.strerror}") from error
    if not pid:
        _work(work, bounds, theirs)
    os.close(theirs)
    try:
        with open(ours, "rb") as pipe:
            told = pipe.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    marks = len(told) - len(told.lstrip(_MADE))
    kind, payload = told[marks : marks + 1], told[marks + 1 :]
    code = os.waitstatus_to_exitcode(status)
    if kind == _DONE and code == 0:
        values: list[_T] = pickle.loads(payload)  # noqa: S301 - our own child wrote it, of values that it had checked
        return values
    if kind == _REFUSED:
        fix, _, message = payload.decode().partition("\0")
        raise Unreadable(message, fix)
    raise TooMuch(_why(kind, payload, code, bounds), marks)


def _work(work: Callable[[], Iterable[_T]], bounds: ReadLimits, descriptor: int) -> NoReturn:
    """Runs in the child, which exits at once: the parent's unwritten output is the parent's to write."""
    try:
        with open(descriptor, "wb", buffering=0) as pipe:
            bind(bounds)
            try:
                values = []
                for value in work():
                    values.append(value)
                    pipe.write(_MADE)
                _send(pipe.write, _DONE + pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL))
            except Unreadable as error:
                _send(pipe.write, _REFUSED + f"{error.fix}\0{error.message}".encode("utf-8", "replace"))
            except MemoryError:
                _send(pipe.write, _NO_MEMORY)
            except Exception as error:  # noqa: BLE001 - the parent reports it
                _send(pipe.write, _FAILED + _fault(error).encode("utf-8", "replace"))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - Ctrl-C, or nobody listens: the parent has its own way to end
        os._exit(1)


def _send(write: Callable[[memoryview], int], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[write(left) :]


def _fault(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    return f"{type(error).__name__}{place}: {str(error)[:200]}"


def _why(kind: bytes, payload: bytes, code: int, bounds: ReadLimits) -> str:
    if kind == _FAILED:
        return f"an internal error of safelaunch; please report it: {payload.decode()}"
    if kind == _NO_MEMORY:
        return f"reading it takes more than {bounds.memory_bytes >> 20} MB of memory"
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {bounds.cpu_s} s of CPU time"
    with suppress(ValueError):
        return f"reading it killed the reader ({signal.Signals(-code).name})"
    return f"its reader failed with exit code {code}"


# --- on all cores -----------------------------------------------------------------------------------------------------

_Parse = Callable[[Sequence[Path]], Iterable[_T]]

MOST_PROCESSES = 16
WORTH_IT_BYTES = 8 << 20  # below this, reading is faster than starting processes
MOST_GIVEN_UP = 4  # files that kill their reader are no accident, and each may take seconds
_FILES_AT_ONCE = 32
_MEMORY_BYTES, _PER_BYTE, _CPU_S = 256 << 20, 24, 2  # a dump's objects take 15 times its size
_MOST_MEMORY_BYTES = 2 << 30


def parse_all(paths: Sequence[Path], parse: _Parse[_T], *, worth_it_bytes: int = WORTH_IT_BYTES) -> Iterator[_T | str]:
    """Yields one value per file, in order. ``parse`` gets several files at a time and gives one value for each.

    A file that exceeds the bounds of its reader gives the reason instead of a value; the others are unaffected.
    """
    parts = [paths[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(paths), _FILES_AT_ONCE)]
    processes = min(len(os.sched_getaffinity(0)), len(parts), MOST_PROCESSES)
    alone = _OneByOne(parse)
    if processes < 2 or sum(map(_size, paths)) < worth_it_bytes:
        for part in parts:
            yield from alone.read(part)
        return
    while parts:
        done = 0
        try:
            for made in _by_processes(processes, parse, parts):
                done += 1
                yield from made
        except (OSError, MemoryError, BrokenProcessPool):
            yield from alone.read(parts[done])  # one of the parts in progress; the others are read again
            done += 1
        parts = parts[done:]


class _OneByOne:
    """Reads files one after the other in a child. If a file kills the child, it continues without that file."""

    def __init__(self, parse: _Parse[_T]) -> None:
        self._parse = parse
        self._given_up = 0

    def read(self, paths: Sequence[Path]) -> Iterator[_T | str]:
        while paths:
            if self._given_up >= MOST_GIVEN_UP:
                yield from [f"skipped, because {self._given_up} other files could not be read"] * len(paths)
                return
            try:
                yield from all_in_child(lambda paths=paths: self._parse(paths), _bounds(paths))  # type: ignore[misc]
                return
            except TooMuch as error:
                self._given_up += 1
                fatal = min(error.made, len(paths) - 1)
                yield from self.read(paths[:fatal])
                yield error.message
                paths = paths[fatal + 1 :]


def _bounds(paths: Sequence[Path]) -> ReadLimits:
    """The bounds for a part: memory for the largest file, time for all of them."""
    sizes = list(map(_size, paths))
    memory = min(_MEMORY_BYTES + _PER_BYTE * max(sizes, default=0), _MOST_MEMORY_BYTES)
    return ReadLimits(memory, _CPU_S + (sum(sizes) >> 21))


def _by_processes(count: int, parse: _Parse[_T], parts: Sequence[Sequence[Path]]) -> Iterator[list[_T]]:
    # Fork: a new interpreter would import all of this again, and this process has only one thread.
    bounds = _bounds([max((path for part in parts for path in part), key=_size)])
    pool = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("fork"), initializer=bind, initargs=(bounds,)
    )
    try:
        yield from pool.map(partial(_timed, parse), parts)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _timed(parse: _Parse[_T], paths: Sequence[Path]) -> list[_T]:
    """Reads one part within its time, in a process that reads several."""
    give_time(_bounds(paths).cpu_s)
    return list(parse(paths))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # reading it gives the reason
