"""The entries of a Flight Recorder, by column: what a loop repeats is kept once, and only the numbers per entry.

A record of 2000 entries holds a few dozen *kinds* of entry (the same operation, sizes, stack), each over and over again
with other numbers. Kept this way 4096 records fit into memory, and those who compare ranks compare arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import eq
from typing import Any, overload

import msgspec

from safelaunch.model import Collective

_FEW = 4


class Kinds:
    """Kinds of entry by number, of one record or of the records of many ranks, which have most of them in common."""

    def __init__(self) -> None:
        self.all: list[Collective] = []
        self._numbers: dict[Collective, int] = {}

    def number_of(self, kind: Collective) -> int:
        """``kind``: as :func:`kind_of` gives it."""
        number = self._numbers.setdefault(kind, len(self.all))
        if number == len(self.all):
            self.all.append(kind)
        return number


class Entries(Sequence[Collective]):
    """Entries, oldest first. An entry is put together when it is asked for: loops over all of them use the columns.

    ``kind_of[i]`` is entry ``i``'s number in ``kinds``; the other columns are its numbers, as in ``Collective``.
    """

    __slots__ = ("created_ns", "kind_of", "kinds", "p2p_seqs", "record_ids", "seqs")

    def __init__(
        self,
        kinds: Kinds,
        kind_of: array[int],
        *,
        seqs: Sequence[int],
        p2p_seqs: Sequence[int],
        record_ids: Sequence[int],
        created_ns: Sequence[int],
    ) -> None:
        self.kinds = kinds
        self.kind_of = kind_of
        self.seqs = packed(seqs)
        self.p2p_seqs = packed(p2p_seqs)
        self.record_ids = packed(record_ids)
        self.created_ns = packed(created_ns)

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
        )

    def used(self) -> dict[int, Collective]:
        """The kinds that occur in it, by number."""
        return {number: self.kinds.all[number] for number in sorted(set(self.kind_of))}

    def with_kinds(self, change: Callable[[Collective], Collective], kinds: Kinds) -> Entries:
        """The same entries with their kinds changed; the new ones go to ``kinds``."""
        numbers = {number: kinds.number_of(change(kind)) for number, kind in self.used().items()}
        return Entries(
            kinds,
            array("I", map(numbers.__getitem__, self.kind_of)),
            seqs=self.seqs,
            p2p_seqs=self.p2p_seqs,
            record_ids=self.record_ids,
            created_ns=self.created_ns,
        )

    def positions_of(self, kinds: Collection[int]) -> list[int]:
        """Where the entries of these kinds stand, oldest first."""
        if len(kinds) > _FEW:
            return [at for at, kind in enumerate(self.kind_of) if kind in kinds]
        found = []
        for kind in kinds:  # at the speed of C: mostly there is one entry of one kind
            at = -1
            for _ in range(self.kind_of.count(kind)):
                at = self.kind_of.index(kind, at + 1)
                found.append(at)
        return sorted(found)

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


def kind_of(entry: Collective) -> Collective:
    """The entry without its own numbers: they are 0."""
    return msgspec.structs.replace(entry, seq=0, p2p_seq=0, record_id=0, created_ns=0)


def packed(numbers: Sequence[int]) -> Sequence[int]:
    """The same numbers in less room: those that count up by one, or not at all, as a range or a :class:`Same`."""
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
    """One number, many times."""

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
