"""The node with a slow link: ``links.slow_link`` by tables, and connections of this process."""

from __future__ import annotations

import itertools
import os
import socket

import pytest

from safelaunch.addons.slow.late_rank import needs_another, slow_ranks
from safelaunch.addons.slow.links import BusyConnection, busy_connections, slow_link
from safelaunch.addons.slow.readings import RankReadings
from safelaunch.addons.slow.service import Examination
from safelaunch.capture.sock_diag import TcpConnection, tcp_connections
from tests.unit.addons.record.recordings import ALL_REDUCE, FORWARD, recording

EVEN = {FORWARD: 0.4, ALL_REDUCE: 0.6}


def connections(
    *busy: tuple[str, str, float], hosts: str = "abc", sent: int = 1000, others_sent: int = 1000
) -> dict[str, list[BusyConnection]]:
    """Returns connections between all hosts, with these shares from one host to another; else 0.02."""
    shares = {(one, other): share for one, other, share in busy}

    def connection(one: str, other: str) -> BusyConnection:
        by_others = (one, other) not in shares
        share, count = shares.get((one, other), 0.02), others_sent if by_others else sent
        return BusyConnection(f"{one}:{other}", f"{other}:{one}", share, count)

    return {one: [connection(one, other) for other in hosts] for one in hosts}


@pytest.mark.parametrize(
    ("busy", "hosts", "host"),
    [
        ([("a", "b", 0.5), ("b", "c", 0.4)], "abc", "b"),  # a ring
        ([("a", "b", 0.5), ("c", "b", 0.4)], "abc", "b"),
        ([("b", "a", 0.5), ("b", "c", 0.5), ("a", "b", 0.5)], "abcd", "b"),
        ([], "abc", ""),
        ([("a", "b", 0.5)], "abc", ""),  # either end
        ([("a", "b", 0.5), ("b", "c", 0.5), ("c", "a", 0.5)], "abc", ""),  # all
        ([("a", "b", 0.5), ("c", "d", 0.5)], "abcd", ""),  # two links
        ([("a", "b", 0.15), ("b", "c", 0.15)], "abc", ""),  # not busy
        ([("a", "b", 0.5), ("b", "a", 0.5)], "ab", ""),
    ],
)
def test_only_the_node_at_all_busy_connections_is_named(
    busy: list[tuple[str, str, float]], hosts: str, host: str
) -> None:
    found = slow_link(connections(*busy, hosts=hosts))
    assert (found.host if found is not None else "") == host


@pytest.mark.parametrize(
    "busy",
    [
        [("a", "b", 0.4), ("b", "c", 0.4)],  # stages of a pipeline
        [("a", "b", 0.4), ("c", "b", 0.4), ("b", "a", 0.4), ("b", "c", 0.4)],  # a parameter server
    ],
)
def test_node_that_sends_or_receives_most_of_the_data_is_not_named(busy: list[tuple[str, str, float]]) -> None:
    assert slow_link(connections(*busy, sent=10_000, others_sent=5000)) is not None
    assert slow_link(connections(*busy, sent=10_000, others_sent=2000)) is None


def test_connection_between_two_addresses_of_one_node_does_not_count() -> None:
    seen = connections(hosts="abcd")
    seen["a"] += [BusyConnection("a2:1", "a3:2", 0.9, 1000), BusyConnection("a3:2", "a2:1", 0.9, 1000)]
    assert slow_link(seen) is None


def test_slow_link_is_not_named_if_the_ranks_hardly_wait() -> None:
    readings = [
        RankReadings(rank, host, connections=own)
        for rank, (host, own) in enumerate(connections(("a", "b", 0.5), ("b", "c", 0.5)).items())
    ]
    quick = Examination(recording(*[{FORWARD: 0.95, ALL_REDUCE: 0.05}] * 3), readings)
    assert slow_ranks([quick, quick], since_start=False) is None


def test_connections_to_strangers_do_not_count() -> None:
    seen = connections()
    for own in seen.values():
        own.append(BusyConnection(f"{own[0].local}9", "storage:443", 0.9))
    assert slow_link(seen) is None


def test_slow_link_needs_two_examinations_that_agree() -> None:
    def examination(*busy: tuple[str, str, float]) -> Examination:
        seen = itertools.count()
        readings = [RankReadings(next(seen), host, connections=own) for host, own in connections(*busy).items()]
        return Examination(recording(EVEN, EVEN, EVEN), readings)

    slow, other = examination(("a", "b", 0.5), ("b", "c", 0.5)), examination(("b", "c", 0.5), ("c", "a", 0.5))
    assert needs_another([slow]) and not needs_another([examination()]) and not needs_another([slow, slow])
    found = slow_ranks([slow, slow], since_start=False)
    assert found is not None and found.ranks == (1,) and found.reason is not None and found.reason.kind == "network"
    assert found.words == (
        "the network link of b (rank 1) is slow: data on it waits 50% of the time to be acknowledged, on the others 2%"
    )
    assert slow_ranks([slow, other], since_start=False) is None


def test_connection_is_busy_for_the_time_since_the_first_look() -> None:
    before = {1: TcpConnection("a:1", "b:2", 3.0)}
    after = {1: TcpConnection("a:1", "b:2", 5.5, 70), 2: TcpConnection("a:3", "b:2", 9.0)}
    assert busy_connections(before, after, 10.0) == [BusyConnection("a:1", "b:2", 0.25, 70)]
    reused = {1: TcpConnection("a:7", "b:9", 5.5)}
    assert busy_connections(before, reused, 10.0) == []


def test_kernel_lists_connections_with_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        accepted, _ = server.accept()
        with accepted:
            listed = tcp_connections()
            if listed is None:
                pytest.skip("this kernel doesn't list connections")
            connection = listed[os.fstat(one.fileno()).st_ino]
            there = listed[os.fstat(accepted.fileno()).st_ino]
    host, port = one_end = connection.local.rsplit(":", 1)
    assert host == "127.0.0.1" and port.isdigit() and one_end
    assert (connection.local, connection.remote) == (there.remote, there.local) and connection.busy_s >= 0
