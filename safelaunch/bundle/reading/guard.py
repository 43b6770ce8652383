"""Works on a stranger's files in a child with bounded memory and time.

A malicious file can kill the process that reads it: a pickle whose dictionary has a key of a hundred thousand nested
tuples, an archive whose header announces gigabytes. The child may die of it; the caller gets one line.

Time is CPU time, because a busy machine or a slow disk is no sign of malice.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from safelaunch.bundle.reading.found import Unreadable

_T = TypeVar("_T")
# The child's messages: a mark for each value, then all values, or the reason for having no more.
_MADE, _DONE, _REFUSED, _NO_MEMORY, _FAILED = b".", b"d", b"r", b"m", b"f"
_SMALL_FILE_BYTES = 1 << 20  # a semaphore is a file too


@dataclass(frozen=True)
class Bounds:
    """Limits. ``memory_bytes``: additional address space; ``file_bytes``: the size of any file that it writes."""

    memory_bytes: int
    cpu_s: int
    file_bytes: int = _SMALL_FILE_BYTES


class TooMuch(Unreadable):
    """The work exceeded its bounds, or killed its process. ``made``: the number of values finished before."""

    def __init__(self, message: str, made: int = 0) -> None:
        super().__init__(message)
        self.made = made


def bind(bounds: Bounds) -> None:
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


def in_child(work: Callable[[], _T], bounds: Bounds) -> _T:
    """Runs ``work()`` in a child. Raises Unreadable if it does, and TooMuch if the child died before its end."""
    return all_in_child(lambda: [work()], bounds)[0]


def all_in_child(work: Callable[[], Iterable[_T]], bounds: Bounds) -> list[_T]:
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
        raise Unreadable(payload.decode())
    raise TooMuch(_why(kind, payload, code, bounds), marks)


def _work(work: Callable[[], Iterable[_T]], bounds: Bounds, descriptor: int) -> NoReturn:
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
                _send(pipe.write, _REFUSED + error.message.encode("utf-8", "replace"))
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


def _why(kind: bytes, payload: bytes, code: int, bounds: Bounds) -> str:
    if kind == _FAILED:
        return f"an internal error of safelaunch; please report it: {payload.decode()}"
    if kind == _NO_MEMORY:
        return f"reading it takes more than {bounds.memory_bytes >> 20} MB of memory"
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {bounds.cpu_s} s of CPU time"
    with suppress(ValueError):
        return f"reading it killed the reader ({signal.Signals(-code).name})"
    return f"its reader failed with exit code {code}"
