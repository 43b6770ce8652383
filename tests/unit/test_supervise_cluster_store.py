"""The store's client, with torch's own servers, and with servers that misbehave."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from safelaunch.supervise.cluster.store import (
    LARGEST_VALUE,
    LONGEST_KEY,
    Address,
    NodeStoreError,
    StoreClient,
    ValueTooLarge,
)

SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
store.set("from torch", "a value")
print(store.port, flush=True)
for line in sys.stdin:
    print(store.get(line.strip()).decode(), flush=True)
"""


@pytest.fixture(scope="module", params=["libuv", "older"])
def server(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-W", "ignore", "-c", SERVER, request.param]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.address = Address("127.0.0.1", int(process.stdout.readline()))  # type: ignore[attr-defined]
        yield process
        process.kill()


@pytest.fixture
def store(server: subprocess.Popen[str]) -> Iterator[StoreClient]:
    client = StoreClient(server.address)  # type: ignore[attr-defined]
    yield client
    client.close()


@pytest.mark.torch
def test_values_are_exchanged_with_torch(store: StoreClient, server: subprocess.Popen[str]) -> None:
    assert store.get("from torch", deadline_s=30) == b"a value"
    store.set("from us", b"another", deadline_s=30)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("from us\n")
    server.stdin.flush()
    assert server.stdout.readline() == "another\n"


@pytest.mark.torch
def test_store_operations_return_torch_compatible_results(store: StoreClient) -> None:
    assert store.get("none", deadline_s=30) is None
    assert [store.add("number", 2, deadline_s=30), store.add("number", -1, deadline_s=30)] == [2, 1]
    assert store.compare_set("once", b"", b"first", deadline_s=30) == b"first"
    assert store.compare_set("once", b"", b"second", deadline_s=30) == b"first"
    assert store.compare_set("once", b"first", b"second", deadline_s=30) == b"second"
    assert store.compare_set("never", b"something", b"else", deadline_s=30) == b"something"
    assert store.get("never", deadline_s=30) is None
    assert store.get_all(["once", "number"], deadline_s=30) == [b"second", b"1"]
    assert store.get_all(["once", "none"], deadline_s=30) is None
    assert store.get_all([], deadline_s=30) == []
    assert store.exchange("mine", b"beat", "once", deadline_s=30) == b"second"
    assert store.read_all(["mine", "once"], deadline_s=30) == [b"beat", b"second"]
    assert (store.read("mine", deadline_s=30), store.read_all([], deadline_s=30)) == (b"beat", [])
    assert [store.has(keys, deadline_s=30) for keys in (["mine"], ["mine", "once"], ["mine", "none"])] == [
        True,
        True,
        False,
    ]
    assert [store.delete("once", deadline_s=30), store.delete("once", deadline_s=30)] == [True, False]


@pytest.mark.torch
def test_largest_value_is_stored_and_larger_ones_are_refused(store: StoreClient) -> None:
    large = bytes(range(256)) * (LARGEST_VALUE // 256)
    store.set("large", large, deadline_s=30)
    assert store.get("large", deadline_s=30) == large
    longest = "k" * (LONGEST_KEY - 1)
    store.set(longest, b"", deadline_s=30)
    assert store.get(longest, deadline_s=30) == b""
    with pytest.raises(ValueTooLarge):
        store.set("larger", large + b"x", deadline_s=30)
    with pytest.raises(ValueTooLarge):
        store.get(longest + "k", deadline_s=30)
    assert store.get("large", deadline_s=30) == large  # nothing was sent of them


# --- other servers ----------------------------------------------------------------------------------------------------

Serve = Callable[[socket.socket], None]
PING = 5 + 1  # bytes before the nonce of the handshake


def greeted(connection: socket.socket) -> None:
    words = b""
    while len(words) < PING + 4:
        words += connection.recv(64)
    connection.sendall(words[PING : PING + 4])


@pytest.fixture
def serving() -> Iterator[Callable[[Serve], Address]]:
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def start(serve: Serve) -> Address:
        def run() -> None:
            connection, _ = listener.accept()
            connections.append(connection)
            serve(connection)

        threading.Thread(target=run, daemon=True).start()
        return Address("127.0.0.1", listener.getsockname()[1])

    yield start
    listener.close()
    for connection in connections:
        connection.close()


def test_ras_without_listener_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NodeStoreError, match=r"no store at 127\.0\.0\.1"):
        StoreClient(Address("127.0.0.1", port), deadline_s=5)


def test_silent_server_is_abandoned_in_time(serving: Callable[[Serve], Address]) -> None:
    begin = time.monotonic()
    with pytest.raises(NodeStoreError, match="no answer in time"):
        StoreClient(serving(lambda connection: None), deadline_s=0.2)
    assert time.monotonic() - begin < 60


def test_foreign_server_is_not_mistaken_for_a_store(serving: Callable[[Serve], Address]) -> None:
    with pytest.raises(NodeStoreError, match="no TCPStore"):
        StoreClient(serving(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")), deadline_s=60)


def test_late_answer_after_a_timeout_is_discarded(serving: Callable[[Serve], Address]) -> None:
    client = StoreClient(serving(greeted), deadline_s=60)
    with pytest.raises(NodeStoreError, match="no answer in time"):
        client.add("n", 1, deadline_s=0.1)
    with pytest.raises(NodeStoreError):
        client.add("n", 1, deadline_s=60)


@pytest.mark.parametrize("length", [-1, 1 << 62])
def test_answer_of_impossible_length_is_an_error(serving: Callable[[Serve], Address], length: int) -> None:
    def serve(connection: socket.socket) -> None:
        greeted(connection)
        connection.recv(64)
        connection.sendall(struct.pack("<q", length) + b"x" * 64)

    with pytest.raises(NodeStoreError, match="bytes"):
        StoreClient(serving(serve), deadline_s=60).compare_set("k", b"", b"v", deadline_s=60)


def test_server_that_closes_during_an_answer_is_reported(serving: Callable[[Serve], Address]) -> None:
    def serve(connection: socket.socket) -> None:
        greeted(connection)
        connection.recv(64)
        connection.sendall(struct.pack("<q", 100) + b"x" * 10)
        connection.close()

    with pytest.raises(NodeStoreError, match="closed"):
        StoreClient(serving(serve), deadline_s=60).compare_set("k", b"", b"v", deadline_s=60)


def test_server_that_reads_nothing_does_not_block(serving: Callable[[Serve], Address]) -> None:
    client = StoreClient(serving(greeted), deadline_s=60)
    with pytest.raises(NodeStoreError, match="no answer in time"):
        client.set("k", b"v" * LARGEST_VALUE, deadline_s=0.3)
