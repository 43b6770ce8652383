"""Choice of ports to lease, and leased ports that other programs can't take but the job can use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from safelaunch.leases import ports
from safelaunch.leases.holder import ourselves
from safelaunch.leases.store import LeaseStore
from safelaunch.system.errors import ResourceError

ABOUT = ourselves("", "train.py")


@pytest.fixture
def store(tmp_path: Path) -> LeaseStore:
    return LeaseStore(os.fspath(tmp_path / "leases"))


def serve(port: int, *, reuse: bool = True, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.parametrize(
    ("ephemeral", "reserved", "first", "without"),
    [
        ("32768\t60999\n", "", 20000, {32768, 60999, 29400, 29500}),
        ("32768\t60999\n", "20000-20010,20012\n", 20011, {20010, 20012}),
        ("15000 61000", "", 61001, set(range(29000, 29600))),
        ("", "", 20000, {32768}),
        ("nonsense", "x-y,,5-", 20000, {32768}),
    ],
)
def test_candidate_ports_avoid_ephemeral_and_reserved_ranges(
    ephemeral: str, reserved: str, first: int, without: set[int]
) -> None:
    candidates = list(ports.candidates(ephemeral, reserved))
    outside = candidates[: candidates.index(1024) + 1] if 1024 in candidates else candidates
    assert candidates[0] == first
    assert not set(outside) & without
    assert len(set(candidates)) == len(candidates) and max(candidates) <= 65535


def test_candidate_ports_exist_if_all_are_ephemeral() -> None:
    candidates = list(ports.candidates("1024 65535", ""))
    assert candidates[0] == 20000 and 29500 not in candidates


def test_leased_port_is_reserved_and_can_be_served(store: LeaseStore) -> None:
    leased_ports = ports.take(store, 2, ABOUT)
    other_ports = ports.take(store, 2, ABOUT)
    assert len({*leased_ports.ports, *other_ports.ports}) == 4
    low, high = (int(word) for word in Path(ports.EPHEMERAL).read_text().split())
    assert not [port for port in leased_ports.ports if low <= port <= high]
    with pytest.raises(OSError, match="Address already in use"):
        serve(leased_ports.ports[0], reuse=False)
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with serve(leased_ports.ports[0], family=family), pytest.raises(OSError, match="Address already in use"):
                serve(leased_ports.ports[0], family=family)
        except OSError as error:
            assert family == socket.AF_INET6 and error.errno == 97, "only a kernel without IPv6 is an excuse"
    leased_ports.release(), other_ports.release()
    assert store.look([ports.port_key(port) for port in (*leased_ports.ports, *other_ports.ports)]) == {}


@pytest.mark.parametrize("leased", [True, False])
def test_ports_of_separate_lease_directories_do_not_collide(tmp_path: Path, leased: bool) -> None:
    stores = [LeaseStore(os.fspath(tmp_path / name)) for name in ("one", "other")]
    taken = [ports.take(store, 3, ABOUT) if leased else ports.take_unleased(3) for store in stores]
    assert len({number for each in taken for number in each.ports}) == 6
    for each in taken:
        each.release()


def test_leased_port_is_listening_only_while_served(store: LeaseStore) -> None:
    leased_ports = ports.take(store, 1, ABOUT)
    assert leased_ports.ports[0] not in ports.listening()
    with serve(leased_ports.ports[0]):
        assert leased_ports.ports[0] in ports.listening()
    leased_ports.release()


def test_port_served_without_lease_is_skipped(store: LeaseStore) -> None:
    probe = ports.take(store, 1, ABOUT)
    (port,) = probe.ports
    probe.release()
    with serve(port):
        other = ports.take(store, 1, ABOUT)
        assert other.ports != (port,)
        assert ports.port_key(port) not in store.look([ports.port_key(port)]), "and not kept for nothing"
        other.release()


def test_take_without_enough_ports_raises(store: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "candidates", lambda *_: iter([20000, 20001]))
    with pytest.raises(ResourceError, match="fewer than 3 ports"):
        ports.take(store, 3, ABOUT)
    assert store.look([ports.port_key(20000), ports.port_key(20001)]) == {}
