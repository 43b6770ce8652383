"""Sends and receives, as NCCL records them (``send 0->1``, ``recv 1<-0``, in ranks of the group): which meet which?

``p2p_seq`` counts those of one rank with any peer, so it is not the same on both sides. The n-th send of a pair meets
the n-th receive; where a ring buffer has wrapped, only those still pending can be counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from safelaunch.model import Collective
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import elements, op_name

_PEER = re.compile(r"(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


@dataclass(frozen=True)
class RecordedTransfer:
    """One entry: data of ``sender`` for ``receiver`` (global ranks), as ``rank`` recorded it."""

    rank: int
    sender: int
    receiver: int
    entry: Collective

    @property
    def peer(self) -> int:
        return self.receiver if self.rank == self.sender else self.sender

    @property
    def elements(self) -> int | None:
        return elements(self.entry.input_sizes)

    def fits(self, other: RecordedTransfer) -> bool:
        """In size and type, as far as both are known."""
        known = self.elements is not None and other.elements is not None
        types = [set(one.entry.input_dtypes) - {""} for one in (self, other)]
        return (not known or self.elements == other.elements) and (not all(types) or types[0] == types[1])

    def says(self) -> str:
        """``sends 4 elements of Float to rank 1``."""
        dtypes = ", ".join(dict.fromkeys(self.entry.input_dtypes))
        many = "elements" if self.elements is None else f"{self.elements} elements"
        of = f"{many}{' of ' + dtypes if dtypes else ''}"
        return (
            f"sends {of} to rank {self.receiver}"
            if self.rank == self.sender
            else f"receives {of} from rank {self.sender}"
        )


_Sides = dict[tuple[int, int], dict[int, RecordedTransfer]]  # (sender, receiver) → place → transfer


class Transfers:
    """The sends and receives of all ranks. Every peer of a rank asks for that rank's again: each is read once."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._read: dict[tuple[int, str], list[RecordedTransfer] | None] = {}
        self._sides: dict[tuple[int, str, bool], _Sides] = {}

    def of(self, rank: int, group: str) -> list[RecordedTransfer] | None:
        """All that ``rank``'s window holds in ``group``, in order; None where one of them does not name its peer."""
        if (rank, group) not in self._read:
            self._read[rank, group] = self._of(rank, group)
        return self._read[rank, group]

    def _of(self, rank: int, group: str) -> list[RecordedTransfer] | None:
        found = []
        ranks = self._alignment.ranks_of(group)
        for entry in self._alignment.transfers(rank, group):
            match = _PEER.search(op_name(entry))
            peer = int(match.group(3)) if match is not None else -1
            if match is None or not 0 <= peer < len(ranks):
                return None
            ends = (rank, ranks[peer]) if match.group(1) == "send" else (ranks[peer], rank)
            found.append(RecordedTransfer(rank, *ends, entry))
        return found

    def pending(self, rank: int, group: str) -> list[tuple[RecordedTransfer, RecordedTransfer | None]] | None:
        """What ``rank`` has not completed in ``group``, each with the peer's entry that it meets, if that is there.

        None where nobody can say: the backend records no peers.
        """
        mine = self.of(rank, group)
        if not mine:
            return None
        places = {whole: _places(mine, whole) for whole in (True, False)}
        found = []
        for one in mine:
            if not one.entry.completed:
                whole = self._alignment.is_whole(one.rank) and self._alignment.is_whole(one.peer)
                met = self._opposite(one, whole).get(places[whole][id(one)])
                found.append((one, met if met is not None and met.entry.started is not False else None))
        return found

    def peers_missing(self, rank: int, group: str) -> frozenset[int] | None:
        """The ranks that ``rank`` waits for in its sends and receives of ``group``; None where nobody can say."""
        waiting = self.pending(rank, group)
        return None if waiting is None else frozenset(one.peer for one, met in waiting if met is None)

    def unequal(self, rank: int, group: str) -> tuple[RecordedTransfer, RecordedTransfer] | None:
        """A send and the receive that it meets, of another size or type: ``(send, receive)``."""
        for one, met in self.pending(rank, group) or ():
            if met is not None and not one.fits(met):
                return (one, met) if one.rank == one.sender else (met, one)
        return None

    def _opposite(self, one: RecordedTransfer, whole: bool) -> dict[int, RecordedTransfer]:
        """The peer's transfers between the same two ranks in the same direction as ``one``, by their place."""
        key = (one.peer, one.entry.group, whole)
        if key not in self._sides:
            theirs = self.of(one.peer, one.entry.group) or []
            places = _places(theirs, whole)
            sides = self._sides[key] = {}
            for other in theirs:
                if id(other) in places:
                    sides.setdefault((other.sender, other.receiver), {})[places[id(other)]] = other
        return self._sides[key].get((one.sender, one.receiver), {})


def _places(side: Iterable[RecordedTransfer], whole: bool) -> dict[int, int]:
    """Which each is, by identity, of its side's transfers between the same two ranks in the same direction.

    ``whole``: all of them count; else only those not completed, as completed ones may have left the ring of either.
    """
    counts: Counter[tuple[int, int]] = Counter()
    places = {}
    for one in side:
        if whole or not one.entry.completed:
            places[id(one)] = counts[one.sender, one.receiver]
            counts[one.sender, one.receiver] += 1
    return places
