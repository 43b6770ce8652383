"""c10d calls in progress, as graph nodes that threads wait for, and which of them can match each other."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.model import (
    Collective,
)
from safelaunch.stacks.receivers import is_result_of
from safelaunch.verdict.c10d import number_of, signature
from safelaunch.verdict.peers import PeerWait, line_before_c10d
from safelaunch.verdict.thread_view import View

_TRANSFERS = frozenset({"isend", "irecv", "batch_isend_irecv"})


@dataclass(frozen=True)
class OpenCall:
    """A c10d call under way, on all ranks that entered the same one."""

    group: str
    number: int
    is_p2p: bool
    signature: tuple[object, ...]
    rank: int = -1  # the rank that made it, if it is a send or receive


@dataclass(frozen=True)
class OpenTransfer:
    """A send or receive that a thread is in; None stands for unknown."""

    sends: bool | None
    peer: int | None  # rank of the world
    tag: int | None

    @classmethod
    def of(cls, wait: PeerWait) -> OpenTransfer:
        named = {word for word in ("send", "recv") if word in wait.op}
        sends = (wait.target is not None) if wait.peer is not None else ("send" in named) if len(named) == 1 else None
        return cls(sends, wait.peer, wait.tag)

    def may_meet(self, rank: int, other: OpenTransfer, other_rank: int) -> bool:
        """Returns whether this transfer of ``rank`` and ``other`` might be two ends of the same one."""
        directions = self.sends is None or other.sends is None or self.sends is not other.sends
        tags = self.tag is None or other.tag is None or self.tag == other.tag
        return directions and tags and self.peer in (None, other_rank) and other.peer in (None, rank)


def open_call_of(entry: Collective, rank: int) -> OpenCall:
    named = signature(entry)
    whose = rank if entry.is_p2p else -1
    return OpenCall(entry.group, number_of(entry), entry.is_p2p, (named[0] or "", *named[1:]), whose)


def names_transfer(view: View) -> bool:
    """Returns whether the thread waits for the result of a ``torch.distributed`` function, not of a group's method."""
    inner = line_before_c10d(view)
    return inner is not None and view.read_source is not None and is_result_of(inner, _TRANSFERS, view.read_source)
