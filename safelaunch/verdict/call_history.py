"""The calls of one rank in order, and what makes two calls the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from operator import eq

from safelaunch.model import Collective
from safelaunch.stacks.frames import Stack
from safelaunch.verdict.c10d import fits, signature
from safelaunch.verdict.columns import NumberedColumn, Numbering, Window

Identity = tuple[Hashable, ...]
UNKNOWN: Identity = ()


def identity_of(entry: Collective, stack: Stack) -> Identity:
    """What makes it the same call on two ranks: the user's lines that led to it, innermost first.

    A backward pass on a device calls from a thread that runs nothing of the user's: then it is all frames, and what was
    called. ``UNKNOWN`` where there are no frames.
    """
    if not entry.frames:
        return UNKNOWN
    mine = stack.user_frames
    places = tuple((frame.file, frame.line) for frame in mine or entry.frames)
    return places if mine else (*places, signature(entry))


def signature_of(entry: Collective, stack: Stack) -> Identity:
    """The same where records hold no frames at all (JSON dumps): what was called, where that is told."""
    told = signature(entry)
    return UNKNOWN if None in told else told


class CallHistory:
    """The calls of one rank by number, without a gap; ``at(number)`` is a call's identity."""

    def __init__(self, window: Window, column: NumberedColumn, identities: Numbering, signatures: Numbering) -> None:
        self.window = window
        self.column = column
        self._identities = identities
        self._signatures = signatures

    @property
    def first(self) -> int:
        return self.column.numbers[0]

    @property
    def last(self) -> int:
        return self.column.numbers[-1]

    def at(self, number: int) -> Identity:
        """``UNKNOWN`` where the record does not hold that number."""
        found = self._identities.value(self.column.at(number))
        return found if isinstance(found, tuple) else UNKNOWN

    def is_over(self, number: int) -> bool:
        entry = self.window.at(number)
        return entry is not None and entry.completed

    def misfits(self, begin: int, other: CallHistory, at: int, count: int) -> int:
        """Returns how many of ``count`` calls from the same places cannot meet, as one line leads to many calls."""
        sides = ((self, begin), (other, at))
        mine, theirs = (one._signatures.column(one.window).values_of(first, count) for one, first in sides)
        places = map(eq, self.column.values_of(begin, count), other.column.values_of(at, count))
        pairs = Counter(pair for pair, same in zip(zip(mine, theirs, strict=True), places, strict=True) if same)
        return sum(times for pair, times in pairs.items() if not self._may_meet(*pair))

    def _may_meet(self, one: int, other: int) -> bool:
        a, b = self._signatures.value(one), self._signatures.value(other)
        return not isinstance(a, tuple) or not isinstance(b, tuple) or fits(a, b)

    def before(self, number: int) -> set[Identity]:
        return self._of(self.column.values[: max(0, number - self.first)])

    def all(self) -> set[Identity]:
        return self._of(self.column.values)

    def overlap(self, begin: int, other: CallHistory, at: int) -> int:
        """How many calls both have from there on."""
        return min(self.last - begin, other.last - at) + 1

    def _of(self, values: Iterable[int]) -> set[Identity]:
        return {found for value in set(values) if isinstance(found := self._identities.value(value), tuple)}


def histories_of(windows: Mapping[int, Window]) -> tuple[dict[int, CallHistory], bool]:
    """``(rank → history, are calls told by frames)``, of the ranks whose records hold neither gaps nor riddles.

    One way of telling calls serves all ranks: a record with frames is not compared with one that has none.
    """
    by_frames = any(kind.frames for window in windows.values() for kind in window.entries.used().values())
    identities = Numbering(identity_of if by_frames else signature_of)
    signatures = Numbering(lambda entry, _: signature(entry))
    columns = {rank: identities.column(window) for rank, window in windows.items()}
    riddle = identities.number_of(UNKNOWN)
    found = {
        rank: CallHistory(windows[rank], column, identities, signatures)
        for rank, column in columns.items()
        if column.whole and riddle not in column.values
    }
    return found, by_frames
