"""Protocol of a running supervisor: one JSON line each way over a unix socket in its private run directory.

The supervisor answers ``{"command": "status"}`` at once, and ``{"command": "dump", "bundle_dir": ""}`` once the bundle
is written. Other commands come from add-ons: ``{"command": "record", "ask": {"duration_s": 10}}`` is answered after
that time.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from safelaunch.model import WRONG_RESULTS_KEY, EarlyLook, WrongResult
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import SafelaunchError

MAX_LINE = 1 << 20
LARGEST_ANSWER = 16 * MAX_LINE
REQUEST_DEADLINE_S = 5.0  # for a client to send
ANSWER_DEADLINE_S = 5.0  # for a client to read
MOST_CLIENTS = 64


Part = TypeVar("Part")
_NULL = msgspec.Raw(b"null")


class ControlRequest(msgspec.Struct, frozen=True):
    """A request for ``status``, ``dump`` or an add-on's service."""

    command: str
    bundle_dir: str = ""  # absolute; empty: the run's own
    ask: msgspec.Raw = _NULL  # in JSON


class RankStatus(msgspec.Struct, frozen=True):
    """A rank as its run sees it."""

    rank: int
    pid: int
    state: str
    step: int | None = None
    steps_per_s: float | None = None
    age_s: float | None = None  # since its last step, or its start; None without a beacon
    phase: str = ""
    signals: str = ""
    rss_bytes: int = 0  # without its children; 0: unknown
    gpu_bytes: int = 0
    doing: str = ""  # its position, if it has been silent for much longer than a step


class NodeStatus(msgspec.Struct, frozen=True):
    """A node of a job with several nodes, according to its own report."""

    host: str
    ranks: str
    step: int | None = None  # lowest of its ranks
    state: str = "heard"  # or ``silent``, ``ended``
    doing: str = ""
    leads: bool = False
    here: bool = False
    trouble: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    run: str
    name: str
    supervisor_pid: int
    cwd: str
    command: list[str]
    started_unix_s: float
    attempt: int
    world_size: int
    watch: str
    threshold_s: float  # time without a step before a suspicion
    threshold_why: str
    ranks: list[RankStatus]
    notes: list[str] = []
    early: list[EarlyLook] = []
    wrong_results: list[WrongResult] = msgspec.field(default_factory=list, name=WRONG_RESULTS_KEY)
    nodes: list[NodeStatus] = []
    alone: str = ""  # why ``nodes`` is empty
    usual_step_s: float = 0.0  # 0: unknown
    history: list[tuple[float, int]] = []  # the slowest rank's steps with their ages in seconds, oldest first
    job: str = ""  # the same for all supervisors of a job
    bundle_dir: str = ""


class DumpAnswer(msgspec.Struct, frozen=True):
    bundle: str = ""
    summary: str = ""
    problem: str = ""  # why the bundle is elsewhere, or missing


class ServiceAnswer(msgspec.Struct, Generic[Part], frozen=True):
    part: Part | None = None
    bundle_dir: str = ""
    problem: str = ""


class Client:
    """The server's side of one client's connection. No method blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""
        self._answer: memoryview | None = None
        # Deadline for the client to send or read; None while the supervisor works.
        self.until_s: float | None = time.monotonic() + REQUEST_DEADLINE_S
        self.is_open = True
        connection.setblocking(False)

    @property
    def asks(self) -> bool:
        return self.until_s is not None and self._answer is None

    def read(self) -> ControlRequest | None:
        """Returns the request once its line is complete, else None.

        Raises OSError or ValueError if that can't happen.
        """
        try:
            chunk = self._connection.recv(4096)
        except BlockingIOError:
            return None
        if not chunk or len(self._data) > 4096:
            raise ValueError("the client left, or sent too much")
        self._data += chunk
        if b"\n" not in self._data:
            return None
        request = from_json(self._data, ControlRequest)
        self.until_s = None
        return request

    def answer(self, value: object) -> None:
        self._answer = memoryview(msgspec.json.encode(value) + b"\n")
        self.until_s = time.monotonic() + ANSWER_DEADLINE_S
        self.send()

    def send(self) -> None:
        try:
            while self._answer:
                self._answer = self._answer[self._connection.send(self._answer) :]
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        self._connection.close()
        self.is_open = False


class Server:
    """The supervisor's side of the protocol. No method blocks. Raises OSError if the socket can't be created.

    If there are more than ``MOST_CLIENTS`` clients, drops the oldest one that hasn't sent a request.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # A client takes a socket without a listener for a dead supervisor's.
        early = path.with_name(f".{path.name}")
        self._listener.bind(os.fspath(early))
        self._listener.listen(MOST_CLIENTS)
        early.rename(path)
        self._listener.setblocking(False)
        self._knocks = select.poll()  # cheaper than a failing accept, several times a second
        self._knocks.register(self._listener, select.POLLIN)
        self._clients: list[Client] = []

    def poll(self, handle: Callable[[ControlRequest, Client], None]) -> None:
        """Accepts connections and passes complete requests to ``handle``."""
        if self._knocks.poll(0):
            self._accept()
        if not self._clients:
            return
        now = time.monotonic()
        for client in self._clients:
            if client.until_s is None:
                continue
            if now > client.until_s:
                client.close()
            elif client.asks:
                self._hear(client, handle)
            else:
                client.send()
        self._clients = [client for client in self._clients if client.is_open]

    def close(self) -> None:
        self._listener.close()
        for client in self._clients:
            client.close()

    def _accept(self) -> None:
        for _ in range(MOST_CLIENTS):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if len(self._clients) >= MOST_CLIENTS:
                silent = next((client for client in self._clients if client.asks), None)
                if silent is None:
                    connection.close()
                    continue
                silent.close()
                self._clients.remove(silent)
            self._clients.append(Client(connection))

    def _hear(self, client: Client, handle: Callable[[ControlRequest, Client], None]) -> None:
        try:
            request = client.read()
        except (OSError, ValueError, msgspec.DecodeError):
            client.close()
            return
        if request is None:
            return
        try:
            handle(request, client)
        except Exception:  # noqa: BLE001 - a failed request costs its client, not the watch
            client.close()


def ask(path: Path, request: ControlRequest, *, deadline_s: float) -> bytes:
    """Sends a request to the supervisor at ``path``, and returns its answer within ``deadline_s`` seconds in total.

    Raises SafelaunchError.
    """
    end_s = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            _connect(connection, path, end_s)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            data = bytearray()
            while not data.endswith(b"\n") and len(data) < LARGEST_ANSWER:
                connection.settimeout(max(end_s - time.monotonic(), 1e-3))
                chunk = connection.recv(65536)
                if not chunk:
                    break
                data += chunk
    except OSError as error:
        raise SafelaunchError(f"the run at {path.parent} does not answer: {error.strerror or error}") from error
    if not data:
        raise SafelaunchError(f"the run at {path.parent} ended before it answered")
    return bytes(data)


def _connect(connection: socket.socket, path: Path, end_s: float) -> None:
    """Connects with retries, because the kernel refuses clients while the supervisor's queue is full."""
    while True:
        try:
            connection.connect(os.fspath(path))
            return
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
