"""Finds the node whose network link is slow, by the TCP connections between the nodes' ranks.

A slow link slows all ranks equally, so none arrives late. But data waits for its acknowledgement on the connections
from and to that node, and hardly on the others.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from safelaunch.capture.counters import socket_inodes
from safelaunch.capture.sock_diag import TcpConnection, tcp_connections

BUSY = 0.2  # share of the time in which a slow connection has unacknowledged data
TIMES = 2.0  # how many times the share of other connections
ALIKE = 0.25  # of a slow connection's bytes: another one has to send that many to be compared
MOST_CONNECTIONS = 64  # of a rank


class BusyConnection(msgspec.Struct, frozen=True):
    """A rank's TCP connection to another node: both addresses, and the share of time with unacknowledged data."""

    local: str
    remote: str
    busy: Annotated[float, Meta(ge=0.0, le=1.0)]
    sent_bytes: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class SlowLink:
    host: str
    busy: float
    """mean share of time in which its connections had unacknowledged data"""
    busy_elsewhere: float
    """the largest such share of other connections"""


def connections_of(pids: Collection[int]) -> dict[int, dict[int, TcpConnection]]:
    """Returns each process's TCP connections to other addresses, by inode. Empty if the kernel doesn't list them."""
    connections = tcp_connections() or {}
    all_here = {inode: each for inode, each in connections.items() if _host(each.local) != _host(each.remote)}
    return {pid: {inode: all_here[inode] for inode in _sockets(pid) if inode in all_here} for pid in pids}


def busy_connections(
    before: Mapping[int, TcpConnection], after: Mapping[int, TcpConnection], seconds: float
) -> list[BusyConnection]:
    made = []
    for inode, now in after.items():
        was = before.get(inode)
        if was is not None and (was.local, was.remote) == (now.local, now.remote):
            busy = round(min(1.0, max(0.0, (now.busy_s - was.busy_s) / seconds)), 4)
            made.append(BusyConnection(now.local, now.remote, busy, max(0, now.sent_bytes - was.sent_bytes)))
    return sorted(made, key=lambda each: -each.busy)[:MOST_CONNECTIONS]


def slow_link(connections: Mapping[str, Sequence[BusyConnection]]) -> SlowLink | None:
    """Returns the only node that all busy connections begin or end at.

    None if the other nodes exchange far less data with each other, as with a parameter server.

    Args:
        connections: Host → its ranks' connections to other nodes.
    """
    owner = {each.local: host for host, own in connections.items() for each in own}
    edges: dict[tuple[str, str], float] = defaultdict(float)
    sent: Counter[tuple[str, str]] = Counter()
    for host, own in connections.items():
        for each in own:
            if owner.get(each.remote, host) != host:  # otherwise, it leads to a disk or a dashboard
                edge = host, owner[each.remote]
                edges[edge] = max(edges[edge], each.busy)
                sent[edge] += each.sent_bytes
    if len(connections) < 3:
        return None  # of two nodes, either can have the slow link
    most = max(edges.values(), default=0.0)
    heavy = {edge: busy for edge, busy in edges.items() if busy >= most / TIMES}
    at_all = set.intersection(*map(set, heavy)) if heavy else set()
    if most < BUSY or len(at_all) != 1:
        return None
    (host,) = at_all
    least = ALIKE * min(sent[edge] for edge in heavy)
    alike = [busy for edge, busy in edges.items() if host not in edge and sent[edge] >= least]
    elsewhere, mean = max(alike, default=1.0), sum(heavy.values()) / len(heavy)
    return SlowLink(host, mean, elsewhere) if mean >= TIMES * elsewhere else None


def _sockets(pid: int) -> Iterable[int]:
    try:
        return socket_inodes(pid, os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - ten times as fast
    except OSError:
        return ()


def _host(address: str) -> str:
    return address.rpartition(":")[0]
