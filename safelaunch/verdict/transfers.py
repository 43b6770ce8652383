"""Sends and receives that match, as NCCL records them (``send 0->1``, ``recv 1<-0``, in ranks of the group).

The n-th send of a pair matches its n-th receive; ``p2p_seq`` counts transfers with all peers. If a ring buffer has
wrapped, only pending ones can be counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from safelaunch.model import Collective
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import Signature, elements, fits, op_name

_PEER = re.compile(r"(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


@dataclass(frozen=True)
class RecordedTransfer:
    """An entry: data from ``sender`` to ``receiver`` (global ranks)."""

    rank: int  # the rank that recorded it
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
        """Returns whether sizes and types match, as far as they are known."""
        return fits(self._signature, other._signature)

    @property
    def _signature(self) -> Signature:
        return ("", self.elements, frozenset(self.entry.input_dtypes) - {""} or None)

    def words(self) -> str:
        """Describes it: ``sends 4 elements of Float to rank 1``."""
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
    """The sends and receives of all ranks, each read once."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._read: dict[tuple[int, str], list[RecordedTransfer] | None] = {}
        self._sides: dict[tuple[int, str, bool], _Sides] = {}

    def of(self, rank: int, group: str) -> list[RecordedTransfer] | None:
        """Returns the recorded transfers in order; None if one of them has no peer."""
        if (rank, group) not in self._read:
            self._read[rank, group] = self._of(rank, group)
        return self._read[rank, group]

    def _of(self, rank: int, group: str) -> list[RecordedTransfer] | None:
        transfers = []
        ranks = self._alignment.ranks_of(group)
        for entry in self._alignment.transfers(rank, group):
            match = _PEER.search(op_name(entry))
            peer = int(match.group(3)) if match is not None else -1
            if match is None or not 0 <= peer < len(ranks):
                return None
            ends = (rank, ranks[peer]) if match.group(1) == "send" else (ranks[peer], rank)
            transfers.append(RecordedTransfer(rank, *ends, entry))
        return transfers

    def pending(self, rank: int, group: str) -> list[tuple[RecordedTransfer, RecordedTransfer | None]] | None:
        """Returns each uncompleted transfer with the peer's matching entry; None if peers aren't recorded."""
        transfers = self.of(rank, group)
        if not transfers:
            return None
        places = {whole: _places(transfers, whole) for whole in (True, False)}
        unfinished = []
        for transfer in transfers:
            if not transfer.entry.completed:
                whole = self._alignment.is_whole(transfer.rank) and self._alignment.is_whole(transfer.peer)
                met = self._opposite(transfer, whole).get(places[whole][id(transfer)])
                unfinished.append((transfer, met if met is not None and met.entry.started is not False else None))
        return unfinished

    def peers_missing(self, rank: int, group: str) -> frozenset[int] | None:
        """Returns the ranks that ``rank`` waits for in ``group``'s transfers."""
        waiting = self.pending(rank, group)
        return None if waiting is None else frozenset(transfer.peer for transfer, met in waiting if met is None)

    def unequal(self, rank: int, group: str) -> tuple[RecordedTransfer, RecordedTransfer] | None:
        """Returns a send and the matching receive with another size or type."""
        for transfer, met in self.pending(rank, group) or ():
            if met is not None and not transfer.fits(met):
                return (transfer, met) if transfer.rank == transfer.sender else (met, transfer)
        return None

    def _opposite(self, transfer: RecordedTransfer, whole: bool) -> dict[int, RecordedTransfer]:
        key = (transfer.peer, transfer.entry.group, whole)
        if key not in self._sides:
            peer_transfers = self.of(transfer.peer, transfer.entry.group) or []
            places = _places(peer_transfers, whole)
            sides = self._sides[key] = {}
            for other in peer_transfers:
                if id(other) in places:
                    sides.setdefault((other.sender, other.receiver), {})[places[id(other)]] = other
        return self._sides[key].get((transfer.sender, transfer.receiver), {})


def _places(side: Iterable[RecordedTransfer], whole: bool) -> dict[int, int]:
    """Numbers transfers, by identity, among those between the same two ranks in the same direction.

    Unless ``whole``, completed ones don't count, as they might have left either ring.
    """
    counts: Counter[tuple[int, int]] = Counter()
    places = {}
    for transfer in side:
        if whole or not transfer.entry.completed:
            places[id(transfer)] = counts[transfer.sender, transfer.receiver]
            counts[transfer.sender, transfer.receiver] += 1
    return places
