"""Calls of one rank in order, and what makes two calls the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import eq

from safelaunch.model import Collective
from safelaunch.stacks.frames import Stack
from safelaunch.verdict.c10d import Signature, fits, signature
from safelaunch.verdict.columns import NumberedColumn, Numbering, Window

Identity = tuple[Hashable, ...]
UNKNOWN: Identity = ()


def identity_of(entry: Collective, stack: Stack) -> Identity:
    """Returns what makes it the same call on two ranks: the user's lines that led to it, innermost first.

    On a device, the backward pass makes calls from a thread without user frames: then all frames and the operation
    count.
    """
    if not entry.frames:
        return UNKNOWN
    user_frames = stack.user_frames
    places = tuple((frame.file, frame.line) for frame in user_frames or entry.frames)
    return places if user_frames else (*places, signature(entry))


def signature_of(entry: Collective, stack: Stack) -> Identity:
    """Identifies a call by its operation, if records have no frames at all (JSON dumps)."""
    call_signature = signature(entry)
    return UNKNOWN if None in call_signature else call_signature


@dataclass(frozen=True, eq=False)
class CallHistory:
    """The calls of one rank by number, without a gap."""

    window: Window
    column: NumberedColumn
    _identities: Numbering[Identity]
    _signatures: Numbering[Signature]

    @property
    def first(self) -> int:
        return self.column.numbers[0]

    @property
    def last(self) -> int:
        return self.column.numbers[-1]

    def at(self, number: int) -> Identity:
        value = self.column.at(number)
        return UNKNOWN if value is None else self._identities.value(value)

    def is_over(self, number: int) -> bool:
        entry = self.window.at(number)
        return entry is not None and entry.completed

    def misfits(self, begin: int, other: CallHistory, at: int, count: int) -> int:
        """Returns how many of ``count`` calls from the same places can't match, as one line can make many."""
        sides = ((self, begin), (other, at))
        own_signatures, other_signatures = (
            history._signatures.column(history.window).values_of(first, count) for history, first in sides
        )
        places = map(eq, self.column.values_of(begin, count), other.column.values_of(at, count))
        pairs = Counter(
            pair for pair, same in zip(zip(own_signatures, other_signatures, strict=True), places, strict=True) if same
        )
        return sum(times for pair, times in pairs.items() if not fits(*map(self._signatures.value, pair)))

    def before(self, number: int) -> set[Identity]:
        return self._of(self.column.values[: max(0, number - self.first)])

    def all(self) -> set[Identity]:
        return self._of(self.column.values)

    def overlap(self, begin: int, other: CallHistory, at: int) -> int:
        return min(self.last - begin, other.last - at) + 1

    def _of(self, values: Iterable[int]) -> set[Identity]:
        return set(map(self._identities.value, set(values)))


def histories_of(windows: Mapping[int, Window]) -> tuple[dict[int, CallHistory], bool]:
    """Returns the histories of ranks whose records have no gaps or unknown calls, and if frames identify calls."""
    by_frames = any(kind.frames for window in windows.values() for kind in window.entries.used().values())
    identities = Numbering(identity_of if by_frames else signature_of)
    signatures = Numbering(lambda entry, _: signature(entry))
    columns = {rank: identities.column(window) for rank, window in windows.items()}
    riddle = identities.number_of(UNKNOWN)
    histories = {
        rank: CallHistory(windows[rank], column, identities, signatures)
        for rank, column in columns.items()
        if column.whole and riddle not in column.values
    }
    return histories, by_frames
