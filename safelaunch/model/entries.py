"""Stores a Flight Recorder's entries by column: repeated fields once per kind, numbers once per entry.

A record of 2000 entries has only a few dozen *kinds* of entry (operation, sizes and stack), which recur with different
numbers. Stored this way, 4096 records fit into memory, and comparing ranks means comparing arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any, overload

import msgspec

from safelaunch.model import Collective

_FEW = 4


class Kinds:
    """Numbers the kinds of entry in one record, or in the records of many ranks, which have most kinds in common."""

    def __init__(self) -> None:
        self.all: list[Collective] = []
        self._numbers: dict[Collective, int] = {}

    def number_of(self, kind: Collective) -> int:
        """Returns the number of ``kind``, which :func:`kind_of` returned. Adds the kind if it is new."""
        number = self._numbers.setdefault(kind, len(self.all))
        if number == len(self.all):
            self.all.append(kind)
        return number


class Entries(Sequence[Collective]):
    """A record's entries, oldest first.

    Indexing builds an entry on demand; loops over all entries should use the columns.

    ``kind_of[i]`` is entry ``i``'s kind, as a number in ``kinds``. The other columns are fields of ``Collective``.
    """

    __slots__ = ("_used", "created_ns", "kind_of", "kinds", "p2p_seqs", "record_ids", "seqs", "threads")

    def __init__(
        self,
        kinds: Kinds,
        kind_of: array[int],
        *,
        seqs: Sequence[int],
        p2p_seqs: Sequence[int],
        record_ids: Sequence[int],
        created_ns: Sequence[int],
        threads: Sequence[int] = (),
    ) -> None:
        self.kinds = kinds
        self.kind_of = kind_of
        self._used: dict[int, Collective] = {}
        self.seqs = packed(seqs)
        self.p2p_seqs = packed(p2p_seqs)
        self.record_ids = packed(record_ids)
        self.created_ns = packed(created_ns)
        self.threads = packed(threads or Same(0, len(kind_of)))

    @classmethod
    def of(cls, entries: Iterable[Collective]) -> Entries:
        if isinstance(entries, Entries):
            return entries
        kinds, entries = Kinds(), list(entries)
        return cls(
            kinds,
            array("I", [kinds.number_of(kind_of(entry)) for entry in entries]),
            seqs=[entry.seq for entry in entries],
            p2p_seqs=[entry.p2p_seq for entry in entries],
            record_ids=[entry.record_id for entry in entries],
            created_ns=[entry.created_ns for entry in entries],
            threads=[entry.thread for entry in entries],
        )

    def used(self) -> Mapping[int, Collective]:
        if not self._used:
            self._used = {number: self.kinds.all[number] for number in sorted(set(self.kind_of))}
        return self._used

    def with_kinds(self, change: Callable[[Collective], Collective], kinds: Kinds) -> Entries:
        """Returns the same entries after applying ``change`` to their kinds, which are added to ``kinds``."""
        numbers = {number: kinds.number_of(change(kind)) for number, kind in self.used().items()}
        return Entries(
            kinds,
            array("I", map(numbers.__getitem__, self.kind_of)),
            seqs=self.seqs,
            p2p_seqs=self.p2p_seqs,
            record_ids=self.record_ids,
            created_ns=self.created_ns,
            threads=self.threads,
        )

    def positions_of(self, wanted: Callable[[Collective], bool]) -> list[int]:
        return positions(self.kind_of, {number for number, kind in self.used().items() if wanted(kind)})

    def matching(self, wanted: Callable[[Collective], bool]) -> list[Collective]:
        return [self[position] for position in self.positions_of(wanted)]

    def __len__(self) -> int:
        return len(self.kind_of)

    @overload
    def __getitem__(self, at: int) -> Collective: ...
    @overload
    def __getitem__(self, at: slice) -> list[Collective]: ...
    def __getitem__(self, at: int | slice) -> Collective | list[Collective]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        return msgspec.structs.replace(
            self.kinds.all[self.kind_of[at]],
            seq=self.seqs[at],
            p2p_seq=self.p2p_seqs[at],
            record_id=self.record_ids[at],
            created_ns=self.created_ns[at],
            thread=self.threads[at],
        )

    def __iter__(self) -> Iterator[Collective]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Entries, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Entries({list(self)!r})"


def positions(numbers: Sequence[int], wanted: Collection[int]) -> list[int]:
    """Returns, in order, the positions at which ``numbers`` has one of ``wanted``."""
    if len(wanted) > _FEW:
        return [at for at, number in enumerate(numbers) if number in wanted]
    found = []
    for number in wanted:  # count and index run at the speed of C; mostly one kind has one entry
        at = -1
        for _ in range(numbers.count(number)):
            at = numbers.index(number, at + 1)
            found.append(at)
    return sorted(found)


def kind_of(entry: Collective) -> Collective:
    """Returns the entry with the numbers that distinguish it from others of its kind set to 0."""
    return msgspec.structs.replace(entry, seq=0, p2p_seq=0, record_id=0, created_ns=0, thread=0)


def packed(numbers: Sequence[int]) -> Sequence[int]:
    """Returns the numbers in less memory: a range if they count up by one, a :class:`Same` if all are equal."""
    if isinstance(numbers, (range, Same)) or not numbers:
        return numbers or range(0)
    first, last = numbers[0], numbers[-1]
    if first == last and len(numbers) > 1 and numbers.count(first) == len(numbers):
        return Same(first, len(numbers))
    if last - first == len(numbers) - 1:
        counting = range(first, last + 1)
        if all(map(eq, numbers, counting)):
            return counting
    return numbers if isinstance(numbers, array) else array("q", numbers)


class Same(Sequence[int]):
    __slots__ = ("_length", "_number")

    def __init__(self, number: int, length: int) -> None:
        self._number, self._length = number, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Same(self._number, len(range(*at.indices(self._length))))
        if not -self._length <= at < self._length:
            raise IndexError(at)
        return self._number
