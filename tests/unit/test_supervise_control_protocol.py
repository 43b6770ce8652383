"""The supervisor's end of the control socket: slow or incomplete clients block no other client."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safelaunch.supervise.control import protocol as control
from safelaunch.supervise.control.protocol import Client, ControlRequest, Server, ask
from safelaunch.system.errors import SafelaunchError

BIG = "x" * (4 << 20)  # more than a socket holds


class Answering:
    """A server that is polled as in a supervisor, and the time of its slowest poll."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = Server(path)
        self.slowest_s = 0.0
        self.kept: list[Client] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            begin = time.thread_time()
            self.server.poll(self._handle)
            self.slowest_s = max(self.slowest_s, time.thread_time() - begin)
            time.sleep(0.005)

    def _handle(self, request: ControlRequest, client: Client) -> None:
        if request.command == "dump":
            self.kept.append(client)
        else:
            client.answer({"said": request.command, "much": BIG if request.command == "much" else ""})

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.server.close()
        for client in self.kept:
            client.close()

    def connected(self, said: bytes = b"") -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(os.fspath(self.path))
        client.settimeout(60)
        client.sendall(said)
        return client

    def status(self) -> str:
        return str(json.loads(ask(self.path, ControlRequest("status"), deadline_s=60.0))["said"])


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    monkeypatch.chdir(tmp_path)
    found = Answering(Path("control"))  # a short name: socket paths are
    yield found
    found.end()


QUESTION = b'{"command": "status"}\n'


SAID = {
    "nothing": b"", "half": b'{"comm', "NUL": b"\0", "a line": b"\n", "a list": b"[]\n", "no command": b"{}\n",
    "much": b"{" * 4000,
}  # fmt: skip


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_incomplete_requests_block_no_other_client(said: bytes, answering: Answering) -> None:
    clients = [answering.connected(said) for _ in range(3)]
    assert answering.status() == "status"
    for client in clients:
        client.close()
    assert answering.status() == "status"


def test_socket_has_a_listener_once_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    listen = socket.socket.listen

    def late(one: socket.socket, clients: int) -> None:
        found.append((tmp_path / "control").exists())
        listen(one, clients)

    monkeypatch.setattr(socket.socket, "listen", late)
    Server(tmp_path / "control").close()
    assert found == [False] and (tmp_path / "control").exists()


def test_silent_client_is_dropped(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_DEADLINE_S", 0.2)
    with answering.connected() as silent, answering.connected(b'{"comm') as half:
        assert silent.recv(1) == half.recv(1) == b""


def test_client_that_never_reads_is_dropped_without_blocking(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_DEADLINE_S", 0.5)
    threads = threading.active_count()
    deaf = [answering.connected(b'{"command": "much"}\n') for _ in range(5)]
    assert answering.status() == "status"
    slow = answering.connected(b'{"command": "much"}\n')
    time.sleep(0.7)
    with slow:
        while slow.recv(1 << 20):
            pass  # what had been sent before it was dropped
    assert threading.active_count() <= threads, "no thread waits for them"
    for client in deaf:
        client.close()


def test_slow_reader_gets_the_whole_answer(answering: Answering) -> None:
    with answering.connected(b'{"command": "much"}\n') as client:
        data = b""
        while chunk := client.recv(200_000):
            data += chunk
            time.sleep(0.001)
    assert len(json.loads(data)["much"]) == len(BIG)


def test_silent_clients_make_room_for_new_ones(answering: Answering) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    crowd = [answering.connected() for _ in range(3 * control.MOST_CLIENTS)]
    assert answering.status() == "status"
    assert len(list(Path("/proc/self/fd").iterdir())) - before - len(crowd) <= control.MOST_CLIENTS + 2
    for client in crowd:
        client.close()
    assert answering.slowest_s < 1.0
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * len(crowd)


def test_client_that_waits_for_a_dump_is_not_dropped(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering.connected(b'{"command": "dump"}\n') as patient:
        while not answering.kept:
            time.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(control, "REQUEST_DEADLINE_S", 0.2)
            time.sleep(0.5)
        crowd = [answering.connected() for _ in range(2 * control.MOST_CLIENTS)]
        assert answering.status() == "status"
        answering.kept[0].answer({"bundle": "/b"})
        assert json.loads(patient.recv(1000)) == {"bundle": "/b"}
        for client in crowd:
            client.close()


def test_client_is_answered_after_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the supervisor was busy for a moment, the kernel accepts no more connections."""
    monkeypatch.chdir(tmp_path)
    server = Server(Path("control"))
    crowd = []
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)
        crowd.append(client)
        try:
            client.connect("control")
        except BlockingIOError:
            break
    answers: list[bytes] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(Path("control"), ControlRequest("status"), deadline_s=30.0))
    )
    asking.start()
    time.sleep(0.2)
    while asking.is_alive():
        server.poll(lambda request, client: client.answer({"said": request.command}))
        time.sleep(0.005)
    assert json.loads(answers[0]) == {"said": "status"}
    for client in (server, *crowd):
        client.close()


def test_answer_that_trickles_in_has_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("control")
        listener.listen(1)

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                while not over.wait(0.05):
                    try:
                        connection.send(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(SafelaunchError, match="does not answer"):
            ask(Path("control"), ControlRequest("status"), deadline_s=0.5)
        assert time.monotonic() - begin < 60
        over.set()
        thread.join()
