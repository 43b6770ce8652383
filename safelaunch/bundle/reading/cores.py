"""Reads files on all cores, in processes with bounded memory and time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TypeVar

from safelaunch.bundle.reading.guard import Bounds, TooMuch, all_in_child, bind, give_time

_T = TypeVar("_T")
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
    alone = _Alone(parse)
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


class _Alone:
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


def _bounds(paths: Sequence[Path]) -> Bounds:
    """The bounds for a part: memory for the largest file, time for all of them."""
    sizes = list(map(_size, paths))
    memory = min(_MEMORY_BYTES + _PER_BYTE * max(sizes, default=0), _MOST_MEMORY_BYTES)
    return Bounds(memory, _CPU_S + (sum(sizes) >> 21))


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
