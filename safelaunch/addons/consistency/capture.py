"""Reads the files into which ranks write their consistency checks; ``layout`` describes the format."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from safelaunch.addons.consistency import layout
from safelaunch.system.decoding import from_json

LARGEST = 64 << 20
MOST_TENSORS = 1 << 20


class SeriesInfo(msgspec.Struct, frozen=True):
    key: str
    kind: str
    every: int
    rank: int
    groups: tuple[tuple[int, ...], ...]
    # Name, and index in ``groups``.
    tensors: Annotated[
        tuple[tuple[str, Annotated[int, msgspec.Meta(ge=0)]], ...], msgspec.Meta(max_length=MOST_TENSORS)
    ]


@dataclass(frozen=True, slots=True)
class SeriesCheck:
    rank: int
    about: SeriesInfo
    position: int
    prints: tuple[int, ...]
    sizes: tuple[float, ...]
    gradients: tuple[float, ...]
    sentinel: tuple[tuple[int, float], ...] = ()  # (step, largest local gradient) since the last check, oldest first
    losses: tuple[tuple[int, float], ...] = ()  # (step, loss)
    rounds: int = 0  # steps up to ``position`` before which the ranks communicated (see ``layout``)

    @property
    def moment(self) -> tuple[int, int]:
        return self.rounds, self.position


class SeriesReader:
    """Reads the file of one series, which is mapped into memory.

    Raises BlockingIOError while the rank is still creating the file, and OSError or ValueError if the file is damaged.
    """

    def __init__(self, path: Path, rank: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size < 8 * layout.CHECK_HEADER:  # the rank has created the file but not extended it yet
                raise BlockingIOError(f"{path.name} is not ready")
            if size > LARGEST:
                raise ValueError(f"{path.name} is too large")
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        words = self._words = memoryview(self._map)[: size // 8 * 8].cast("q")
        if words[0] != layout.CHECK_MAGIC:
            raise BlockingIOError(f"{path.name} is not ready")
        begin, length = 8 * layout.CHECK_HEADER, words[layout.CHECK_LENGTH]
        self.about = from_json(self._map[begin : begin + max(0, length)], SeriesInfo)
        self._begin = layout.CHECK_HEADER + (length + 7) // 8
        self._slots, self._size = words[layout.CHECK_SLOTS], words[layout.CHECK_SLOT_SIZE]
        least = layout.CHECK_SLOT + 3 * len(self.about.tensors) + layout.CHECK_WINDOW
        if self._slots < 1 or self._size < least or self._begin + self._slots * self._size > len(words):
            raise ValueError(f"{path.name} is damaged")
        if any(group >= len(self.about.groups) for _, group in self.about.tensors):
            raise ValueError(f"{path.name} names an unknown group")
        self._rank = rank
        self._next = 0
        self._before = 0

    def read(self) -> list[SeriesCheck]:
        checks = []
        newest = max(self._words[self._begin + n * self._size] for n in range(self._slots)) // 2
        for number in range(max(self._next, newest - self._slots), newest):
            at = self._begin + number % self._slots * self._size
            if self._words[at] != 2 * number + 2:
                continue
            check = self._parse(self._words[at : at + self._size].tobytes())
            if self._words[at] == 2 * number + 2:
                checks.append(check)
                self._before = self._words[at + 6]
        self._next = max(self._next, newest)
        return checks

    def _parse(self, data: bytes) -> SeriesCheck:
        whole, floats = memoryview(data).cast("q"), memoryview(data).cast("d")
        count, first = len(self.about.tensors), layout.CHECK_SLOT
        position, steps = whole[1], whole[6]
        sentinel = floats[first + 3 * count : first + 3 * count + layout.CHECK_WINDOW]
        own = range(max(self._before + 1, steps - layout.CHECK_WINDOW + 1), steps + 1)
        at = first + 3 * count + layout.CHECK_WINDOW
        losses = floats[at : at + min(max(whole[3], 0), layout.CHECK_WINDOW)]
        return SeriesCheck(
            rank=self._rank,
            about=self.about,
            position=position,
            prints=tuple(whole[first : first + count]),
            sizes=tuple(floats[first + count : first + 2 * count]),
            gradients=tuple(floats[first + 2 * count : first + 3 * count]),
            sentinel=tuple((position - steps + step, sentinel[step % layout.CHECK_WINDOW]) for step in own),
            losses=tuple((whole[4] + n, value) for n, value in enumerate(losses)),
            rounds=whole[5],
        )
