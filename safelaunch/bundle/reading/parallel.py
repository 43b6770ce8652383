"""Parses many untrusted files on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TypeVar

from safelaunch.bundle.reading.guard import LimitExceeded, ReadLimits, all_in_child, allow_cpu_time, limit_process

_T = TypeVar("_T")
_Parse = Callable[[Sequence[Path]], Iterable[_T]]
MOST_PROCESSES = 16
PARALLEL_FROM_BYTES = 8 << 20  # below this, starting processes takes longer than reading
MOST_FAILURES = 4  # files that fail are no accident, and each can take seconds
_FILES_AT_ONCE = 32
_MEMORY_BYTES, _PER_BYTE, _CPU_S = 256 << 20, 24, 2  # a dump's objects take 15 times its size
_MOST_MEMORY_BYTES = 2 << 30


def parse_all(
    paths: Sequence[Path], parse: _Parse[_T], *, parallel_from_bytes: int = PARALLEL_FROM_BYTES
) -> Iterator[_T | str]:
    """Parses files with ``parse``, which takes several at a time. Yields one value per file, in order.

    If a file exceeds its reader's limits, yields the reason instead; other files are unaffected.
    """
    parts = [paths[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(paths), _FILES_AT_ONCE)]
    processes = min(len(os.sched_getaffinity(0)), len(parts), MOST_PROCESSES)
    sequential = _SequentialReader(parse)
    if processes < 2 or sum(map(_size, paths)) < parallel_from_bytes:
        for part in parts:
            yield from sequential.read(part)
        return
    while parts:
        done = 0
        try:
            for values in _parse_in_pool(processes, parse, parts):
                done += 1
                yield from values
        except (OSError, MemoryError, BrokenProcessPool):
            yield from sequential.read(parts[done])  # one of the parts in progress; the pool rereads the others
            done += 1
        parts = parts[done:]


class _SequentialReader:
    """Reads files in a child, one after the other.

    If a file kills the child, a new child continues with the next file.
    """

    def __init__(self, parse: _Parse[_T]) -> None:
        self._parse = parse
        self._failures = 0

    def read(self, paths: Sequence[Path]) -> Iterator[_T | str]:
        while paths:
            if self._failures >= MOST_FAILURES:
                yield from [f"skipped, because {self._failures} other files could not be read"] * len(paths)
                return
            try:
                yield from all_in_child(lambda paths=paths: self._parse(paths), _bounds(paths))  # type: ignore[misc]
                return
            except LimitExceeded as error:
                self._failures += 1
                fatal = min(error.finished, len(paths) - 1)
                yield from self.read(paths[:fatal])
                yield error.message
                paths = paths[fatal + 1 :]


def _bounds(paths: Sequence[Path]) -> ReadLimits:
    # Memory for the largest file, time for all.
    sizes = list(map(_size, paths))
    memory = min(_MEMORY_BYTES + _PER_BYTE * max(sizes, default=0), _MOST_MEMORY_BYTES)
    return ReadLimits(memory, _CPU_S + (sum(sizes) >> 21))


def _parse_in_pool(count: int, parse: _Parse[_T], parts: Sequence[Sequence[Path]]) -> Iterator[list[_T]]:
    # Fork: a new interpreter would repeat all imports, and this process has only one thread.
    bounds = _bounds([max((path for part in parts for path in part), key=_size)])
    pool = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("fork"), initializer=limit_process, initargs=(bounds,)
    )
    try:
        yield from pool.map(partial(_parse_in_time, parse), parts)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _parse_in_time(parse: _Parse[_T], paths: Sequence[Path]) -> list[_T]:
    allow_cpu_time(_bounds(paths).cpu_s)
    return list(parse(paths))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
