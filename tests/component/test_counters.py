"""The counters of work, of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safelaunch.capture import counters, sock_diag
from safelaunch.capture.counters import Counters
from safelaunch.job.process import identify
from safelaunch.supervise.watch.work import Background, ObservedWork, find_work, learn

PATIENCE_S = 90.0
# Each does its work at each line it reads, and says when it has begun.
BUSY = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print(threading.enumerate()[1].native_id, flush=True)
input()
"""
WRITER = """
import time
print("up", flush=True)
with open("/dev/null", "wb", buffering=0) as file:
    while True:
        file.write(bytes(1 << 16))
        time.sleep(0.02)
"""
RECEIVER = """
import socket, sys
peer = socket.create_connection(("::1" if sys.argv[2] == "6" else "127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while peer.recv(65536): pass
"""
PARENT = """
import os, subprocess, sys, threading, time
print("up", flush=True)
for line in sys.stdin:
    child = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '1000'])"])
    print(child.pid, flush=True)
"""
SERVER = """
import ctypes, mmap, threading, time
def serve():
    ctypes.CDLL(None).prctl(15, b"pt_workerserver", 0, 0, 0)
    print(threading.get_native_id(), flush=True)
    while True:
        with mmap.mmap(-1, 1 << 21) as pages:
            for at in range(0, len(pages), 4096): pages[at] = 1
            until = time.process_time() + 0.05
            while time.process_time() < until: pass
        time.sleep(0.3)
threading.Thread(target=serve, daemon=True).start()
input()
"""
FAULTS = """
import mmap, time
print("up", flush=True)
while True:
    with mmap.mmap(-1, 1 << 21) as pages:
        for at in range(0, len(pages), 4096): pages[at] = 1
    time.sleep(0.05)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def run(source: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, *words]
        running.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        return running[-1]

    yield run
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(
    process: subprocess.Popen[str], wanted: Callable[[tuple[ObservedWork, ...]], bool]
) -> tuple[ObservedWork, ...]:
    """The work since now, as soon as it has what is wanted."""
    before = counters.read([process.pid])
    end = time.monotonic() + PATIENCE_S
    while not wanted(work := find_work(before, counters.read([process.pid], before), Background())):
        assert time.monotonic() < end, work
        time.sleep(0.2)
    return work


def has(kind: str, tid: int | None = None) -> Callable[[tuple[ObservedWork, ...]], bool]:
    return lambda work: any(one.kind == kind and (tid is None or one.tid == tid) for one in work)


def test_a_thread_that_computes(start: Start) -> None:
    process = start(BUSY)
    tid = int(line(process))
    work = until(process, has("cpu", tid))
    assert has("cpu", process.pid)(work) is False  # the main thread waits


def test_answers_of_the_worker_server_are_no_work(start: Start) -> None:
    process = start(SERVER)
    server = int(line(process))
    begin = counters.read([process.pid])
    time.sleep(2.0)
    end = counters.read([process.pid], begin)
    (one,) = end.processes.values()
    assert set(one.servers) == {server}
    assert server not in one.threads
    assert find_work(begin, end, Background()) == ()


def test_a_process_that_writes_or_touches_memory(start: Start) -> None:
    writer, toucher = start(WRITER), start(FAULTS)
    assert line(writer) == line(toucher) == "up"
    assert has("io", writer.pid)(until(writer, has("io")))  # its main thread does
    assert has("faults", toucher.pid)(until(toucher, has("faults")))


@pytest.mark.parametrize("family", ["4", "6"])
def test_what_a_connection_carries(start: Start, family: str) -> None:
    """The receiver waits in recv, which counts as neither read nor write."""
    if family == "6" and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    kind = socket.AF_INET6 if family == "6" else socket.AF_INET
    with socket.create_server(("::1" if family == "6" else "127.0.0.1", 0), family=kind) as server:
        process = start(RECEIVER, str(server.getsockname()[1]), family)
        connection, _ = server.accept()
        with connection:
            assert line(process) == "up"
            before = counters.read([process.pid])
            assert sum(len(one.sockets) for one in before.processes.values()) == 1
            connection.sendall(bytes(100_000))
            end = time.monotonic() + PATIENCE_S
            while not has("network")(work := find_work(before, counters.read([process.pid], before), Background())):
                assert time.monotonic() < end
            (one,) = (one for one in work if one.kind == "network")
            assert (one.pid, one.tid) == (process.pid, None)
            after = counters.read([process.pid], before)
            (sent,) = next(iter(after.processes.values())).sockets.values()
            assert 100_000 <= sent <= 100_002  # a connection's first segment counts as a byte


def test_children_and_their_children(start: Start) -> None:
    process = start(PARENT)
    assert line(process) == "up" and process.stdin is not None
    before = counters.read([process.pid])
    process.stdin.write("go\n")
    process.stdin.flush()
    child = int(line(process))
    until(process, lambda work: len(counters.read([process.pid]).processes) == 3)
    after = counters.read([process.pid], before)
    assert {pid for pid, _ in after.processes} > {process.pid, child}
    assert {one.rank for one in after.processes.values()} == {process.pid}
    started = identify(child)
    assert started is not None and (child, started.start_ticks) in after.processes
    assert has("children")(find_work(before, after, Background()))


def test_the_same_children_where_the_kernel_names_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(PARENT)
    assert line(process) == "up" and process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    line(process)
    until(process, lambda work: len(counters.read([process.pid]).processes) == 3)
    read = counters._read

    def without_children(path: str) -> str:
        if path.endswith("/children"):
            raise FileNotFoundError(path)
        return read(path)

    whole = counters.read([process.pid])
    monkeypatch.setattr(counters, "_read", without_children)
    assert counters.read([process.pid]).processes.keys() == whole.processes.keys()


def test_a_process_at_rest_does_no_work_and_is_learned(start: Start) -> None:
    process = start("print('up', flush=True); input()")
    assert line(process) == "up"
    before = counters.read([process.pid])
    time.sleep(1.0)
    after = counters.read([process.pid], before)
    assert find_work(before, after, Background()) == ()
    assert learn(Background(), before, after).seconds >= 1.0


def test_what_cannot_be_read_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("print('up', flush=True); input()")
    assert line(process) == "up"
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert counters.read([ended.pid]).processes == {}
    assert not counters.read([process.pid]).partial
    monkeypatch.setattr(sock_diag, "tcp_bytes", lambda: None)
    assert counters.read([process.pid]).partial
    monkeypatch.undo()
    monkeypatch.setattr(counters, "MAX_THREADS", 0)
    cut = counters.read([process.pid])
    assert cut.partial and [one.threads for one in cut.processes.values()] == [{}]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_users_process(start: Start) -> None:
    process = start("print('up', flush=True); input()")
    assert line(process) == "up"
    os.seteuid(65534)
    try:
        seen: Counters = counters.read([process.pid])
        connections = sock_diag.tcp_bytes()
    finally:
        os.seteuid(0)
    assert seen.partial and connections is not None
    assert len(seen.processes) == 1


def test_the_ports_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("mlx5_0", 3), ("mlx5_1", 4)):
        folder = tmp_path / name / "ports/1/counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(f"{number}\n")
        (folder / "port_rcv_data").write_text("N/A\n")
    monkeypatch.setattr(counters, "RDMA", tmp_path)
    assert counters.read([]).rdma_bytes == 4 * 7
