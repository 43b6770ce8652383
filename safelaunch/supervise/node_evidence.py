"""Describes the job's nodes: their own reports, and whether the hosts of silent nodes respond."""

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
    view: PeerView,
    node: NodeCard,
    beat: Beat,
    *,
    store: Lost,
    port: int | None,
    agent_error: str = "",
    missed_s: float = 0.0,
) -> tuple[NodeEvidence, ...]:
    """Returns this node and all others. Takes ``PROBE_S`` if some nodes are silent and ``port`` is given.

    A host that refuses a connection to the store's port is alive. If the interface to the other nodes is down, nothing
    is probed, because another route might lead to other hosts.

    Args:
        store: How the store was lost, unless this node's agent ended.
        port: The store's port.
    """
    own = replace(_self_report(view.slot, node, beat), here=True, agent_error=agent_error, missed_s=round(missed_s, 1))
    peers = [_evidence_of(peer, view.peers, store) for peer in view.peers]
    return (own, *(_probed(peers, view.address, view.peers, port) if port is not None else peers))


def _evidence_of(peer: Peer, peers: Sequence[Peer], store: Lost) -> NodeEvidence:
    hosts = peer.node.hosts and (len(peers) == 1 or sum(peer.node.hosts for peer in peers) == 1)
    evidence = _self_report(peer.slot, peer.node, peer.beat)
    return replace(evidence, silent_s=round(peer.silent_s, 1), store=store if hosts else "")


def _self_report(slot: int, node: NodeCard, beat: Beat | None) -> NodeEvidence:
    evidence = NodeEvidence(node.host, slot, (), torch=node.torch, safelaunch=node.safelaunch, script=node.script)
    if beat is None:
        return evidence
    return replace(evidence, ranks=beat.ranks, last=_last(beat), trouble=beat.trouble, agent=beat.agent)


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
    """Returns whether an interface of this host has the address, is up and has a carrier.

    The address alone isn't enough, because an interface that is down keeps its IPv4 address. Only the first address of
    each interface is found; any other address counts as up.
    """
    flags: int
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            try:
                own = socket.inet_ntoa(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
                (flags,) = struct.unpack_from("H", fcntl.ioctl(asked, _GET_FLAGS, request), 16)
            except OSError:
                continue
            if own == address:
                return flags & _UP_AND_RUNNING == _UP_AND_RUNNING
    return is_this_host(address)


def agent_state(pid: int) -> AgentState:
    try:
        letter = procstat.parse(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")).state
    except FileNotFoundError:
        return "gone"
    except (OSError, ValueError):
        return ""
    return "stopped" if letter in "Tt" else "gone" if letter in "ZX" else "running"


def digest_of(script: Path) -> str:
    """Returns a short digest for comparing scripts; empty if the script is unreadable."""
    import hashlib  # late: it loads OpenSSL, 4 MB

    try:
        with script.open("rb") as file:
            return hashlib.blake2b(file.read(LARGEST_SCRIPT), digest_size=6).hexdigest()
    except OSError:
        return ""
