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
from safelaunch.model import AgentState, Lost, NodeEvidence, ServerProbe
from safelaunch.supervise.cluster.exchange import Peer, PeerView
from safelaunch.supervise.cluster.messages import Beat, NodeCard
from safelaunch.supervise.cluster.store import probe
from safelaunch.supervise.cluster.store_host import is_this_host
from safelaunch.system import procstat

PROBE_S = 2.0
MOST_PROBED = 8
LARGEST_SCRIPT = 8 << 20

NodeActivity = Literal["", "watching", "failing", "stopping", "ended"]


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


def _last(beat: Beat) -> NodeActivity:
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
