"""What this node knows of the nodes of its job: as evidence, and what a person is told of them."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from safelaunch.capture.gather import gather
from safelaunch.model import AgentState, Lost, NodeEvidence, Rendezvous, ServerProbe, format_ranks
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.hosting import is_this_host
from safelaunch.supervise.cluster.messages import Beat, LeaderPage, NodeCard, Peer, PeerView, node_count
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import probe
from safelaunch.system import procstat
from safelaunch.system.console import say

PROBE_S = 2.0
MOST_PROBED = 8
LARGEST_SCRIPT = 8 << 20

Last = Literal["", "watching", "failing", "stopping", "ended"]


def nodes_of(
    seen: PeerView,
    node: NodeCard,
    beat: Beat,
    *,
    store: Lost,
    port: int | None,
    agent_error: str = "",
    missed_s: float = 0.0,
) -> tuple[NodeEvidence, ...]:
    """This node and the others that it has heard of; takes ``PROBE_S`` where some of them are silent.

    ``store``: how it was lost, if that was not by the end of this node's own agent. ``port``: the store's, to see if
    the hosts of silent nodes answer. Nobody listens there on other hosts, and a host that says so is alive. Where the
    interface by which this node met them is down, whoever answers may be none of them: another route leads elsewhere.
    """
    own = replace(_said(seen.slot, node, beat), here=True, agent_error=agent_error, missed_s=round(missed_s, 1))
    found = [_evidence_of(peer, seen.peers, store) for peer in seen.peers]
    return (own, *(_probed(found, seen.address, seen.peers, port) if port is not None else found))


def _evidence_of(peer: Peer, peers: Sequence[Peer], store: Lost) -> NodeEvidence:
    hosts = peer.node.hosts and (len(peers) == 1 or sum(peer.node.hosts for peer in peers) == 1)
    found = _said(peer.slot, peer.node, peer.beat)
    return replace(found, silent_s=round(peer.silent_s, 1), store=store if hosts else "")


def _said(slot: int, node: NodeCard, beat: Beat | None) -> NodeEvidence:
    """What the node says of itself."""
    found = NodeEvidence(node.host, slot, (), torch=node.torch, safelaunch=node.safelaunch, script=node.script)
    if beat is None:
        return found
    return replace(found, ranks=beat.ranks, last=_last(beat), trouble=beat.trouble, agent=beat.agent)


def _last(beat: Beat) -> Last:
    if beat.doing in ("stopping", "ended"):
        return beat.doing
    return "failing" if beat.round_of("crash") else "watching"


def _probed(nodes: Sequence[NodeEvidence], own: str, peers: Sequence[Peer], port: int) -> list[NodeEvidence]:
    silent = [at for at, node in enumerate(nodes) if node.is_gone]
    if silent and own and not _has_link(own):
        return [replace(node, probe="no route") if node.is_gone else node for node in nodes]
    silent = silent[:MOST_PROBED]
    calls = [lambda at=at: probe(peers[at].node.address, port, deadline_s=PROBE_S) for at in silent]
    answers: dict[int, ServerProbe | None] = dict(zip(silent, gather(calls, deadline_s=PROBE_S + 1.0), strict=True))
    return [replace(node, probe=answers.get(at) or "") for at, node in enumerate(nodes)]


_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP_AND_RUNNING = 0x41  # IFF_UP, IFF_RUNNING


def _has_link(address: str) -> bool:
    """Whether this host still has the address, on an interface that is up and has a carrier.

    An interface keeps its IPv4 address while it is down. Only its first one is found; of any other, it counts as up.
    """
    flags: int
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            try:
                found = socket.inet_ntoa(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
                (flags,) = struct.unpack_from("H", fcntl.ioctl(asked, _GET_FLAGS, request), 16)
            except OSError:
                continue  # it has no IPv4 address, or has just gone
            if found == address:
                return flags & _UP_AND_RUNNING == _UP_AND_RUNNING
    return is_this_host(address)


def agent_state(pid: int) -> AgentState:
    """How the torchrun agent with this pid is."""
    try:
        letter = procstat.parse(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")).state
    except FileNotFoundError:
        return "gone"
    except (OSError, ValueError):
        return ""
    return "stopped" if letter in "Tt" else "gone" if letter in "ZX" else "running"


def digest_of(script: Path) -> str:
    """A few characters that tell two scripts apart; empty where it cannot be read."""
    import hashlib  # late: it loads OpenSSL, 4 MB that a job of one node does without

    try:
        with script.open("rb") as file:
            return hashlib.blake2b(file.read(LARGEST_SCRIPT), digest_size=6).hexdigest()
    except OSError:
        return ""


# --- what a person is told of them ------------------------------------------------------------------------------------


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

    def who_has_come(self, page: LeaderPage | None, now: float) -> None:
        """Of a rendezvous that does not complete; once, and again where more nodes have come."""
        self._begin_s = self._begin_s if self._begin_s is not None else now
        nodes = (self._channel.node, *self._channel.seen.nodes)
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
            text += f"; the store where nodes meet does not answer ({self._channel.seen.why})"
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
            "" if page is not None else self._channel.seen.why,
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
