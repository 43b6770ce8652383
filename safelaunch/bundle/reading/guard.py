"""Runs work on untrusted files in a child process with limited memory and CPU time.

A malicious file can kill its reader: a pickle with a dictionary key of a hundred thousand nested tuples, or an archive
with a header that announces gigabytes. Then only the child dies, and the caller gets a message. The limit is on CPU
time, because a busy machine or a slow disk isn't malicious.
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

from safelaunch.bundle.reading.files import Unreadable

_T = TypeVar("_T")
# Messages of the child: a mark for each value, then all values, or the reason for stopping.
_VALUE, _DONE, _REFUSED, _NO_MEMORY, _FAILED = b".", b"d", b"r", b"m", b"f"
_SMALL_FILE_BYTES = 1 << 20  # semaphores are files too


@dataclass(frozen=True)
class ReadLimits:
    memory_bytes: int  # additional address space
    cpu_s: int
    file_bytes: int = _SMALL_FILE_BYTES  # size of any file that it writes


class LimitExceeded(Unreadable):
    """Raised because the work exceeded its limits, or killed its process.

    ``finished`` has the values completed by then.
    """

    def __init__(self, message: str, finished: int = 0) -> None:
        super().__init__(message)
        self.finished = finished


def limit_process(bounds: ReadLimits) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGESIZE") + bounds.memory_bytes)
    _lower(resource.RLIMIT_FSIZE, bounds.file_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    allow_cpu_time(bounds.cpu_s)


def allow_cpu_time(cpu_s: int) -> None:
    """Allows this process ``cpu_s`` more seconds of CPU time, after which SIGXCPU kills it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def in_child(work: Callable[[], _T], bounds: ReadLimits) -> _T:
    """Runs ``work()`` in a child. Raises the Unreadable that it raised, or LimitExceeded if the child died early."""
    return all_in_child(lambda: [work()], bounds)[0]


def all_in_child(work: Callable[[], Iterable[_T]], bounds: ReadLimits) -> list[_T]:
    """Runs ``work()`` in a child, and returns all values that it yields; raises as ``in_child`` does."""
    parent_end, child_end = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(parent_end)
        os.close(child_end)
        raise Unreadable(f"safelaunch could not start a process to read it: {error.strerror}") from error
    if not pid:
        _run_child(work, bounds, child_end)
    os.close(child_end)
    try:
        with open(parent_end, "rb") as pipe:
            output = pipe.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    marks = len(output) - len(output.lstrip(_VALUE))
    kind, payload = output[marks : marks + 1], output[marks + 1 :]
    code = os.waitstatus_to_exitcode(status)
    if kind == _DONE and code == 0:
        values: list[_T] = pickle.loads(payload)  # noqa: S301 - written by our own child, from checked values
        return values
    if kind == _REFUSED:
        fix, _, message = payload.decode().partition("\0")
        raise Unreadable(message, fix)
    raise LimitExceeded(_why(kind, payload, code, bounds), marks)


def _run_child(work: Callable[[], Iterable[_T]], bounds: ReadLimits, descriptor: int) -> NoReturn:
    """Does the work in the child, and exits without flushing output, because the parent writes it."""
    try:
        with open(descriptor, "wb", buffering=0) as pipe:
            limit_process(bounds)
            try:
                values = []
                for value in work():
                    values.append(value)
                    pipe.write(_VALUE)
                _send(pipe.write, _DONE + pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL))
            except Unreadable as error:
                _send(pipe.write, _REFUSED + f"{error.fix}\0{error.message}".encode("utf-8", "replace"))
            except MemoryError:
                _send(pipe.write, _NO_MEMORY)
            except Exception as error:  # noqa: BLE001 - the parent reports it
                _send(pipe.write, _FAILED + _fault(error).encode("utf-8", "replace"))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - Ctrl-C, or the parent is gone; the parent reports the exit code
        os._exit(1)


def _send(write: Callable[[memoryview], int], data: bytes) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[write(unsent) :]


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
