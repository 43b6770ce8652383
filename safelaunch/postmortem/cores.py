"""Files read by all cores: unpickling is most of the work, and Python does that on one core only."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

MOST_PROCESSES = 16
WORTH_IT_BYTES = 8 << 20  # less is read faster than processes start
_FILES_AT_ONCE = 32


def parse_all(
    paths: Sequence[Path], parse: Callable[[Sequence[Path]], list[_T]], *, worth_it_bytes: int = WORTH_IT_BYTES
) -> Iterator[_T]:
    """What ``parse`` makes of the files, in their order. It gets some at a time, and gives one value for each.

    Where processes cannot be had, or one of them is killed (memory), this process reads the rest.
    """
    parts = [paths[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(paths), _FILES_AT_ONCE)]
    done = 0
    processes = min(len(os.sched_getaffinity(0)), len(parts), MOST_PROCESSES)
    if processes > 1 and sum(map(_size, paths)) >= worth_it_bytes:
        try:
            for made in _by_processes(processes, parse, parts):
                yield from made
                done += 1
        except (OSError, BrokenProcessPool):
            pass  # the rest is read below
    for part in parts[done:]:
        yield from parse(part)


def _by_processes(
    count: int, parse: Callable[[Sequence[Path]], list[_T]], parts: Sequence[Sequence[Path]]
) -> Iterator[list[_T]]:
    # Forked: a fresh interpreter would import all of this again. There is one thread to fork from, the command's own.
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork"))
    try:
        yield from pool.map(parse, parts)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it says what is wrong
