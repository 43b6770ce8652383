"""Prints notices about other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from safelaunch.model import Rendezvous, format_ranks
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.exchange import PeerView
from safelaunch.supervise.cluster.messages import LeaderPage, NodeCard, node_count
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.system.console import say

RENDEZVOUS_S = 30.0
MOST_NAMED_HOSTS = 64
LOST_S = 3.0  # without a connection, as the job might be ending


class NodeNotices:
    def __init__(self, store: SharedStore, channel: Channel, hosts: Sequence[str] = ()) -> None:
        self._store = store
        self._hosts = hosts
        self._channel = channel
        self.met = False  # all nodes watch the job, by the last notice
        self.apart = False  # contact was lost, by the last notice
        self._lost_s: float | None = None
        self._silent_slots: frozenset[int] = frozenset()
        self._compared: tuple[NodeCard, ...] = ()
        self._printed: set[str] = set()
        self._begin_s: float | None = None
        self._next_s = 0.0
        self._joined = 0
        self._has_printed_host = False
        self._waiting: Rendezvous | None = None

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Returns the rendezvous at the time with the most nodes; None if it was complete."""
        waiting = self._waiting
        return waiting if waiting is not None and waiting.come < waiting.wanted else None

    def note_rendezvous(self, page: LeaderPage | None, now: float) -> None:
        """While some nodes are still missing, prints which nodes have joined."""
        self._begin_s = self._begin_s if self._begin_s is not None else now
        nodes = (self._channel.node, *self._channel.view.nodes)
        number = node_count(page)
        self._note(page, number, nodes, now - self._begin_s)
        if now < max(self._begin_s + RENDEZVOUS_S, self._next_s) or not self._joined < number < self._store.nodes:
            return
        self._joined = number
        self._next_s = now + LOST_S  # so that nodes that join together get one notice
        text = f"torchrun has started no rank yet: {number} of {self._store.nodes} nodes have joined the rendezvous"
        text += f" ({', '.join(node.host for node in nodes)}{', ...' * (number > len(nodes))})"
        ranks = {node.node_rank for node in nodes}
        if None not in ranks and number == len(nodes) and (missing := set(range(self._store.nodes)) - ranks):
            numbers = format_ranks({rank for rank in missing if rank is not None})
            text += f"; node rank {numbers} has not" if len(missing) == 1 else f"; node ranks {numbers} have not"
        if page is None:
            text += f"; the store where nodes meet does not answer ({self._channel.view.why})"
        say(text)

    def _note(self, page: LeaderPage | None, joined: int, nodes: Sequence[NodeCard], waited_s: float) -> None:
        """Keeps the state with the most nodes, because waiting nodes give up one by one."""
        before = self._waiting
        if before is not None and (page is None or joined < before.come):
            self._waiting = replace(before, waited_s=waited_s)
            return
        wanted = self._store.nodes
        ranks = {node.node_rank for node in nodes}
        is_complete = None not in ranks and joined == len(nodes)
        self._waiting = Rendezvous(
            wanted,
            joined,
            tuple(node.host for node in nodes)[:MOST_NAMED_HOSTS],
            tuple(rank for rank in range(wanted) if rank not in ranks)[:MOST_NAMED_HOSTS] if is_complete else (),
            _absent(self._hosts, nodes) if joined == len(nodes) and len(self._hosts) == wanted else (),
            waited_s,
            "" if page is not None else self._channel.view.why,
        )

    def note_changes(self, view: PeerView, now: float, *, covered: bool, ending: bool) -> None:
        """Prints what changed since the last tick.

        Args:
            covered: Whether every rank has a supervisor that responds.
            ending: Whether this node's ranks have ended, or this node is stopping the job.
        """
        self._compare(view.nodes)
        if self._channel.hosts and not self._has_printed_host:
            self._has_printed_host = True
            where = self._store.address
            say(f"started a store for the supervisors of this job: it listens at {where} until the job ends")
        if view.page is not None:
            self._lost_s = None
            self.met = self.met or covered
            silent = frozenset(view.page.silent)
            if self.apart and covered:
                self.apart = False
                say("contact with the other nodes is restored: one verdict for all")
            if self.met and silent - self._silent_slots and not ending:
                self.apart = True
                say(
                    f"no message from a node for {SILENT_S:.0f} s: its safelaunch has stopped, or the node is gone. "
                    "Until it responds, each node judges alone"
                )
            self._silent_slots = silent
        elif self.met:
            self._lost_s = self._lost_s or now
            if now - self._lost_s > LOST_S and not ending:
                self.met, self.apart = False, True
                say(f"lost contact with the other nodes ({view.why}): until they are back, this node judges alone")

    def _compare(self, nodes: tuple[NodeCard, ...]) -> None:
        """Prints differences between nodes, because different versions of NCCL or of pickles rarely work together."""
        own = self._channel.node
        for node in nodes if nodes != self._compared else ():
            for what in ("torch", "safelaunch", "script"):
                ours, theirs = getattr(own, what), getattr(node, what)
                text = f"{what} differs between nodes: {ours} here, {theirs} on {node.host}"
                text = f"the script on {node.host} differs from the one here" if what == "script" else text
                if ours != theirs and ours and theirs and text not in self._printed:
                    self._printed.add(text)
                    say(text)
        self._compared = nodes


def _absent(hosts: Sequence[str], nodes: Sequence[NodeCard]) -> tuple[str, ...]:
    come = {node.host.partition(".")[0] for node in nodes}
    return tuple(host for host in hosts if host.partition(".")[0] not in come)[:MOST_NAMED_HOSTS]
