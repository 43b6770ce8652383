"""Collectives as columns of numbers, which can be compared as arrays."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from safelaunch.model import Collective
from safelaunch.model.entries import Entries, Kinds, packed
from safelaunch.stacks.frames import Stack


class Window:
    """The collectives of one rank in one group that its record still holds, by sequence number.

    ``positions[i]`` is the index of number ``numbers[i]`` among the entries. If a number was recorded several times
    (the parts of a coalesced operation), the last one counts.
    """

    __slots__ = ("code_roots", "entries", "numbers", "positions")

    def __init__(
        self, entries: Entries, code_roots: tuple[str, ...], numbers: Sequence[int], positions: Sequence[int]
    ) -> None:
        self.entries = entries
        self.code_roots = code_roots
        if not _ascends(numbers):
            by_number = dict(zip(numbers, positions, strict=True))
            numbers = sorted(by_number)
            positions = [by_number[number] for number in numbers]
        self.numbers = packed(numbers)
        self.positions = packed(positions)

    def position(self, number: int) -> int | None:
        place = bisect_left(self.numbers, number)
        return self.positions[place] if place < len(self.numbers) and self.numbers[place] == number else None

    def at(self, number: int) -> Collective | None:
        position = self.position(number)
        return self.entries[position] if position is not None else None

    def stack(self, entry: Collective) -> Stack:
        return Stack(entry.frames, self.code_roots)

    def kinds(self) -> array[int]:
        kind_of, positions = self.entries.kind_of, self.positions
        if isinstance(positions, range):
            return kind_of[positions.start : positions.stop]
        return array("I", [kind_of[position] for position in positions])


def _ascends(numbers: Sequence[int]) -> bool:
    return isinstance(numbers, range) or all(map(int.__lt__, numbers, numbers[1:]))


def windows_of(entries: Entries, kinds: Mapping[int, Collective], code_roots: tuple[str, ...]) -> dict[str, Window]:
    groups = {kind.group for kind in kinds.values() if not kind.is_p2p}
    if len(groups) == 1 and not any(kind.is_p2p for kind in kinds.values()):
        return {groups.pop(): Window(entries, code_roots, entries.seqs, range(len(entries)))}
    positions: dict[str, array[int]] = {group: array("I") for group in groups}
    adders = {number: positions[kind.group].append for number, kind in kinds.items() if not kind.is_p2p}
    for position, number in enumerate(entries.kind_of):
        if number in adders:
            adders[number](position)
    seqs = entries.seqs
    return {
        group: Window(entries, code_roots, [seqs[place] for place in places], places)
        for group, places in positions.items()
    }


@dataclass(frozen=True)
class NumberedColumn:
    """A value for each of ``numbers``, which ascend."""

    numbers: Sequence[int]
    values: array[int]

    def at(self, number: int) -> int | None:
        first = self.numbers[0] if self.numbers else 0
        if isinstance(self.numbers, range):  # no gaps
            return self.values[number - first] if 0 <= number - first < len(self.values) else None
        place = bisect_left(self.numbers, number)
        return self.values[place] if place < len(self.numbers) and self.numbers[place] == number else None

    def values_of(self, begin: int, count: int) -> array[int]:
        """Returns values that must be there without a gap."""
        return self.values[begin - self.numbers[0] : begin - self.numbers[0] + count]

    def between(self, first: int, last: int) -> NumberedColumn:
        count = max(0, last - first + 1)
        return NumberedColumn(range(first, first + count), self.values_of(first, count))

    @property
    def whole(self) -> bool:
        """It has values, and no number is missing between the first and the last."""
        return isinstance(self.numbers, range) and bool(self.numbers)


V = TypeVar("V", bound=Hashable)


class Numbering(Generic[V]):
    """Maps what a function returns for entries to numbers, the same ones on all ranks.

    ``of(entry, stack)`` is called once per kind of entry, so it must only read what defines the kind.
    """

    def __init__(self, of: Callable[[Collective, Stack], V]) -> None:
        self._of = of
        self._numbers: dict[V, int] = {}
        self._values: list[V] = []
        self._known: dict[tuple[int, tuple[str, ...]], tuple[Kinds, dict[int, int]]] = {}
        self._translated: dict[tuple[int, tuple[str, ...], bytes], array[int]] = {}

    def column(self, window: Window) -> NumberedColumn:
        kinds, roots = window.entries.kinds, window.code_roots
        _, numbers = self._known.setdefault(
            (id(kinds), roots), (kinds, {})
        )  # holds a reference, so that ids stay unique
        column = window.kinds()
        key = (id(kinds), roots, column.tobytes())  # most ranks made the same calls as another
        if key not in self._translated:
            for kind in set(column) - numbers.keys():
                entry = kinds.all[kind]
                numbers[kind] = self.number_of(self._of(entry, window.stack(entry)))
            self._translated[key] = array("I", map(numbers.__getitem__, column))
        return NumberedColumn(window.numbers, self._translated[key])

    def value(self, number: int) -> V:
        return self._values[number]

    def number_of(self, value: V) -> int:
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number


def first_difference(columns: Iterable[NumberedColumn]) -> int | None:
    """Returns the smallest number for which two columns have different values.

    Linear in the entries: columns without a gap, sorted by their start, are each compared with the earlier one that
    reaches furthest.
    """
    differences: list[int] = []
    reference: NumberedColumn | None = None
    columns = list(columns)
    if not all(column.whole for column in columns):
        return _first_difference_with_gaps(columns)
    for column in sorted(columns, key=lambda column: column.numbers[0]):
        if reference is not None:
            difference = _difference(reference, column)
            if difference is not None:
                differences.append(difference)
        if reference is None or column.numbers[-1] > reference.numbers[-1]:
            reference = column
    return min(differences, default=None)


def _first_difference_with_gaps(columns: Iterable[NumberedColumn]) -> int | None:
    values: dict[int, int] = {}
    pairs = (pair for column in columns for pair in zip(column.numbers, column.values, strict=True))
    return min((number for number, value in pairs if values.setdefault(number, value) != value), default=None)


def _difference(column: NumberedColumn, other: NumberedColumn) -> int | None:
    begin = max(column.numbers[0], other.numbers[0])
    end = min(column.numbers[-1], other.numbers[-1]) + 1
    if begin >= end:
        return None
    values, its = column.values_of(begin, end - begin), other.values_of(begin, end - begin)
    if values == its:
        return None
    return next(begin + at for at, (a, b) in enumerate(zip(values, its, strict=True)) if a != b)
