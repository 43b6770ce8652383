"""Defines the messages between the caller of ``safelaunch.launch`` and its supervisor, one line of JSON each."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import msgspec

from safelaunch.model import Verdict
from safelaunch.system.decoding import from_json

_CHUNK = 1 << 16
_T = TypeVar("_T")


class LaunchRequest(msgspec.Struct, frozen=True, tag="request"):
    own: tuple[tuple[str, str | None], ...]  # safelaunch's options, as on its command line
    torchrun: tuple[str, ...]  # torchrun's options for the same ``LaunchConfig``
    script: tuple[str, ...]  # entrypoint's name
    argv: tuple[str, ...]  # command line of the caller
    python: str
    torch_package: str
    torch_version: str
    pid: int
    start_ticks: int


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """From the caller: a signal or interrupt is ending the job."""


class RanksEnded(msgspec.Struct, frozen=True, tag="ended"):
    """From the caller: all ranks have ended."""

    failed: bool


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the supervisor: the job can start, with these environment variables."""

    env: dict[str, str]
    run_dir: str = ""  # empty if the job isn't watched


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """From the supervisor: the job must not start."""

    kind: str  # name of the error class
    message: str
    fix: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """From the supervisor: the job hangs, and its ranks are about to be ended."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The supervisor's last message."""

    hung: bool = False
    verdict: Verdict | None = None
    bundle: str = ""


FromCaller = LaunchRequest | Stopping | RanksEnded
FromSupervisor = Ready | Refused | Stop | Done


class Connection:
    """One end of the connection. ``other`` is the type of messages that the other end sends."""

    def __init__(self, end: socket.socket, other: Any) -> None:
        self._end = end
        self._other = other
        self._rest = b""
        self.is_open = True

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: FromCaller | FromSupervisor) -> None:
        try:
            self._end.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self.is_open = False

    def received(self) -> list[Any]:
        try:
            while self.is_open:
                self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # nothing more for now
        *lines, self._rest = self._rest.split(b"\n")
        return [from_json(line, self._other) for line in lines]

    def wait(self) -> Any:
        while b"\n" not in self._rest:
            if not self.is_open:
                return None
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return from_json(line, self._other)

    def _read(self, flags: int = 0) -> None:
        try:
            chunk = self._end.recv(_CHUNK, flags)
        except ConnectionError:
            chunk = b""
        self._rest += chunk
        self.is_open = bool(chunk)

    def close(self) -> None:
        self.is_open = False
        self._end.close()
