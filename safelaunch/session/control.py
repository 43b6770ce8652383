"""Talking to a running supervisor: one JSON line each way over a unix socket in its private run directory.

``{"command": "status"}`` is answered at once; ``{"command": "dump", "bundle_dir": ""}`` when the bundle is written.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from safelaunch.errors import SafelaunchError

MAX_LINE = 1 << 20
ANSWER_DEADLINE_S = 5.0


class Request(msgspec.Struct, frozen=True):
    """What a client asks for: ``status`` or ``dump``. ``bundle_dir``: an absolute path; empty is the run's own."""

    command: str
    bundle_dir: str = ""


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the watch sees it. ``age_s``: since its last step, or since it started; None without a beacon."""

    rank: int
    pid: int
    state: str
    step: int | None = None
    steps_per_s: float | None = None
    age_s: float | None = None
    phase: str = ""
    signals: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """One run. ``threshold_s``: without a step for so long it is suspected; ``threshold_why``: where from.

    ``notes``: what slows it down.
    """

    run: str
    name: str
    supervisor_pid: int
    cwd: str
    command: list[str]
    started_unix_s: float
    attempt: int
    world_size: int
    watch: str
    threshold_s: float
    threshold_why: str
    ranks: list[RankStatus]
    notes: list[str] = []


class DumpAnswer(msgspec.Struct, frozen=True):
    """The bundle of a live run. ``problem`` says why it is not where it was wanted, or why there is none."""

    bundle: str = ""
    summary: str = ""
    problem: str = ""


class Client:
    """The server's end of one connection: a request that wants an answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""
        connection.setblocking(False)

    def read(self) -> Request | None:
        """The request once its line is whole, None before. Raises OSError or ValueError when it cannot come."""
        try:
            chunk = self._connection.recv(4096)
        except BlockingIOError:
            return None
        if not chunk or len(self._data) > 4096:
            raise ValueError("the client left, or says too much")
        self._data += chunk
        return msgspec.json.decode(self._data, type=Request) if b"\n" in self._data else None

    def answer(self, value: object) -> None:
        """Sends one JSON line and closes, in a thread: a client that does not read is not waited for."""
        data = msgspec.json.encode(value) + b"\n"
        threading.Thread(target=self._send, args=(data,), name="answer", daemon=True).start()

    def _send(self, data: bytes) -> None:
        try:
            self._connection.settimeout(ANSWER_DEADLINE_S)
            self._connection.sendall(data)
        except OSError:
            return  # it was its question
        finally:
            self._connection.close()

    def close(self) -> None:
        self._connection.close()


class Server:
    """The supervisor's side. ``poll`` never blocks. Raises OSError when the socket cannot be made."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(os.fspath(path))
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._waiting: list[Client] = []

    def poll(self, handle: Callable[[Request, Client], None]) -> None:
        """Takes new connections and hands whole requests to ``handle``, which answers now or later."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._waiting.append(Client(connection))
        for client in list(self._waiting):
            try:
                request = client.read()
            except (OSError, ValueError, msgspec.DecodeError):
                self._waiting.remove(client)
                client.close()
                continue
            if request is not None:
                self._waiting.remove(client)
                try:
                    handle(request, client)
                except Exception:  # noqa: BLE001 - a question that cannot be answered costs who asked it, not the watch
                    client.close()


def ask(path: Path, request: Request, *, deadline_s: float) -> bytes:
    """One question to the supervisor listening at ``path``; its answer line. Raises SafelaunchError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            connection.connect(os.fspath(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            data = b""
            while not data.endswith(b"\n") and len(data) < 16 * MAX_LINE:
                chunk = connection.recv(65536)
                if not chunk:
                    break
                data += chunk
    except OSError as error:
        raise SafelaunchError(f"the run at {path.parent} does not answer: {error.strerror or error}") from error
    if not data:
        raise SafelaunchError(f"the run at {path.parent} ended before it answered")
    return data


def runs(root: Path) -> list[Path]:
    """The run directories below ``root`` that have a control socket, oldest first."""
    found = [entry for entry in root.glob("r[0-9]*") if (entry / "control").exists()]
    return sorted(found, key=lambda entry: entry.stat().st_mtime)
