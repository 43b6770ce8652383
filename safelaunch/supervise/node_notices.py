"""TODO."""

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
MOST_HOSTS = 64
LOST_S = 3.0  # the connection is gone: the job may just be ending


class NodeNotices:
    """``met``: every rank of the job has been under a supervisor that was heard, and a person was not told that this is
    over; ``apart``: the person was.
    """

    def __init__(self, meeting: SharedStore, channel: Channel, hosts: Sequence[str] = ()) -> None:
        """``hosts``: those that the scheduler has given to the job."""
        self._meeting = meeting
        self._hosts = hosts
        self._channel = channel
        self.met = self.apart = False
        self._lost_s: float | None = None
        self._silent: frozenset[int] = frozenset()
        self._compared: tuple[NodeCard, ...] = ()
        self._said: set[str] = set()
        self._begin_s: float | None = None
        self._next_s = 0.0
        self._come = 0  # nodes of a rendezvous, as far as a person was told
        self._said_host = False
        self._waiting: Rendezvous | None = None

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Who had come when the most had; None where all had, or torchrun has never waited."""
        found = self._waiting
        return found if found is not None and found.come < found.wanted else None

    def note_rendezvous(self, page: LeaderPage | None, now: float) -> None:
        """Of a rendezvous that does not complete; once, and again where more nodes have come."""
        self._begin_s = self._begin_s if self._begin_s is not None else now
        nodes = (self._channel.node, *self._channel.view.nodes)
        number = node_count(page)
        self._note(page, number, nodes, now - self._begin_s)
        if now < max(self._begin_s + RENDEZVOUS_S, self._next_s) or not self._come < number < self._meeting.nodes:
            return
        self._come = number
        self._next_s = now + LOST_S  # those that come next come together
        text = f"torchrun has started no rank yet: {number} of {self._meeting.nodes} nodes have joined the rendezvous"
        text += f" ({', '.join(node.host for node in nodes)}{', ...' * (number > len(nodes))})"
        ranks = {node.node_rank for node in nodes}
        if None not in ranks and number == len(nodes) and (missing := set(range(self._meeting.nodes)) - ranks):
            numbers = format_ranks({rank for rank in missing if rank is not None})
            text += f"; node rank {numbers} has not" if len(missing) == 1 else f"; node ranks {numbers} have not"
        if page is None:
            text += f"; the store where nodes meet does not answer ({self._channel.view.why})"
        say(text)

    def _note(self, page: LeaderPage | None, come: int, nodes: Sequence[NodeCard], waited_s: float) -> None:
        """Those that give up leave one by one, and the store ends with one of them: what counts is before that."""
        known = self._waiting
        if known is not None and (page is None or come < known.come):
            self._waiting = replace(known, waited_s=waited_s)
            return
        wanted = self._meeting.nodes
        ranks = {node.node_rank for node in nodes}
        whole = None not in ranks and come == len(nodes)
        self._waiting = Rendezvous(
            wanted,
            come,
            tuple(node.host for node in nodes)[:MOST_HOSTS],
            tuple(rank for rank in range(wanted) if rank not in ranks)[:MOST_HOSTS] if whole else (),
            _absent(self._hosts, nodes) if come == len(nodes) and len(self._hosts) == wanted else (),
            waited_s,
            "" if page is not None else self._channel.view.why,
        )

    def changes(self, seen: PeerView, now: float, *, covered: bool, ending: bool) -> None:
        """What has changed since the last tick. ``covered``: every rank is under a supervisor that is heard now.

        ``ending``: the ranks of this node have ended, or somebody stops the job here, so it judges nothing any more.
        """
        self._compare(seen.nodes)
        if self._channel.hosts and not self._said_host:
            self._said_host = True
            where = self._meeting.address
            say(f"started a store for the supervisors of this job: it listens at {where} until the job ends")
        if seen.page is not None:
            self._lost_s = None
            self.met = self.met or covered
            silent = frozenset(seen.page.silent)
            if self.apart and covered:
                self.apart = False
                say("contact with the other nodes is restored: one verdict for all")
            if self.met and silent - self._silent and not ending:
                self.apart = True
                say(
                    f"no message from a node for {SILENT_S:.0f} s: its safelaunch has stopped, or the node is gone. "
                    "Until it responds, each node judges alone"
                )
            self._silent = silent
        elif self.met:
            self._lost_s = self._lost_s or now
            if now - self._lost_s > LOST_S and not ending:
                self.met, self.apart = False, True
                say(f"lost contact with the other nodes ({seen.why}): until they are back, this node judges alone")

    def _compare(self, nodes: tuple[NodeCard, ...]) -> None:
        """Nodes that run something else than this one: NCCL and pickles of two versions rarely agree."""
        mine = self._channel.node
        for other in nodes if nodes != self._compared else ():
            for what in ("torch", "safelaunch", "script"):
                here, there = getattr(mine, what), getattr(other, what)
                text = f"{what} differs between nodes: {here} here, {there} on {other.host}"
                text = f"the script on {other.host} differs from the one here" if what == "script" else text
                if here != there and here and there and text not in self._said:
                    self._said.add(text)
                    say(text)
        self._compared = nodes


def _absent(hosts: Sequence[str], nodes: Sequence[NodeCard]) -> tuple[str, ...]:
    """The hosts of which no node has come, by their short names."""
    come = {node.host.partition(".")[0] for node in nodes}
    return tuple(host for host in hosts if host.partition(".")[0] not in come)[:MOST_HOSTS]
