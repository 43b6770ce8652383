"""A stand-in for NCCL's RAS service: the same lines on another port, healthy or broken in one way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal[
    "", "silent", "silent after STATUS", "closes", "closes after STATUS", "floods", "no newline", "speaks HTTP"
]


@dataclass(frozen=True)
class Process:
    """One process. Its ``state`` is ``answers``, ``left`` (the communicator), ``unresponsive`` or ``dead``."""

    rank: int
    pid: int
    host: str = "10.0.0.1"
    gpu: int = 0
    state: str = "answers"


def as_json(processes: Sequence[Process], *, version: str = "2.29.2", sizes: Sequence[int] = ()) -> str:
    """One communicator of all processes, or several of the first ``sizes``; as NCCL of that version writes it."""
    sizes = sizes or (len(processes),)
    lines = [
        "{",
        f'  "nccl_version": "{version}",',
        '  "cuda_runtime_version": 13000,',
        '  "cuda_driver_version": 13000,',
    ]
    lines += [
        '  "timestamp": "2026-01-01 12:00:00",',
        f'  "communicators_count": {len(sizes)},',
        '  "communicators": [',
    ]
    lines.append(",\n".join(_communicator(processes[:size], _with_comma(version)) for size in sizes))
    lines += ["  ],", '  "ras": {', '    "collection_time_sec": 2.001,', '    "timeouts_count": 1', "  }", "}"]
    return "\n".join(lines) + "\n"


def _with_comma(version: str) -> bool:
    return tuple(map(int, version.split(".")[:3])) > (2, 28, 9)


def _communicator(processes: Sequence[Process], comma: bool) -> str:
    there = [one for one in processes if one.state == "answers"]
    missing = [one for one in processes if one.state != "answers"]
    return "\n".join(
        [
            "    {",
            '      "hash": "0xae94423cfbb2ef4a",',
            '      "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",',
            f'      "size": {len(processes)},',
            f'      "ranks_count": {len(there)},',
            f'      "missing_ranks_count": {len(missing)},',
            '      "ranks": [',
            ",\n".join(_rank(one, ",", '"init_state": 0') + _COUNTS for one in there),
            "      ],",
            '      "missing_ranks": [',
            ",\n".join(_rank(one, "," if comma else "", _missing(one)) + "\n        }" for one in missing),
            "      ]",
            "    }",
        ]
    )


def _rank(one: Process, comma: str, status: str) -> str:
    names = {"rank": one.rank, "host": f'"{one.host}"', "pid": one.pid, "cuda_dev": one.gpu}
    lines = [f'          "{name}": {value},' for name, value in names.items()]
    lines += [
        f'          "nvml_dev": {one.gpu}{comma}',
        '          "status": {',
        f"            {status}",
        "          }",
    ]
    return "\n".join(["        {", *lines])


_COUNTS = ',\n          "collective_counts": {\n            "AllReduce": 7\n          }\n        }'


def _missing(one: Process) -> str:
    unresponsive, dead = (str(one.state in states).lower() for states in (("unresponsive", "dead"), ("dead",)))
    return f'"unresponsive": {unresponsive},\n            "considered_dead": {dead}'


def as_text(processes: Sequence[Process], *, version: str = "2.28.3") -> str:
    """The summary for people: only processes in trouble are named."""
    lines = [f"NCCL version {version} compiled with CUDA 13.0", "CUDA runtime version 13000, driver version 13000", ""]
    lines += ["Job summary", "===========", "", "  Nodes  Processes         GPUs  Processes     GPUs"]
    lines += [f"      1  {len(processes):9}            1  {len(processes):9}  {len(processes):7}", ""]
    lines += ["Communicators... (2.05s)", "=============", "", "Errors", "======", ""]
    for heading, state in (("INCOMPLETE", "unresponsive"), ("DEAD", "dead")):
        named = [one for one in processes if one.state == state]
        lines += [heading, f"  {len(named)} job processes", *map(_words, named), ""] if named else []
    lines += ["#0-0 (cf264af53edbe986) INCOMPLETE", "  Missing communicator data from 1 rank"]
    return "\n".join([*lines, "  Process 1 on node 10.9.9.9 managing GPU 0", ""])


def _words(one: Process) -> str:
    return f"  Process {one.pid} on node {one.host} managing GPU {one.gpu}"


@dataclass
class Service:
    """Listens until ``close``, and keeps each client's lines in ``heard``. An old NCCL has no ``json``, only text."""

    json: str | None = None
    text: str = ""
    fault: Fault = ""
    host: str = "127.0.0.1"
    port: int = 0
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listening = socket.create_server((self.host, self.port), reuse_port=True)
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # a thread in accept() would keep it open
        for one in (self._listening, *self._open):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._talk(connection)
        except OSError:
            pass
        finally:
            if not self.fault.startswith("silent"):
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            wants_json = False
            if self.fault == "closes":
                return
            for line in lines:
                words = line.decode().strip()
                self.heard.append(words)
                if self.fault == "silent":
                    continue
                if words.endswith("STATUS"):
                    self._status(connection, wants_json)
                    return
                wants_json |= words == "SET FORMAT json" and self.json is not None
                connection.sendall(self._reply(words))

    def _reply(self, words: str) -> bytes:
        if self.fault == "speaks HTTP":
            return b"HTTP/1.1 400 Bad Request\r\n\r\n"
        if self.fault == "no newline":
            return b"x" * 8192
        if words.startswith("CLIENT PROTOCOL"):
            return b"SERVER PROTOCOL 2\n"
        return b"OK\n" if self.json is not None or not words.startswith("SET") else f"ERROR: {words}\n".encode()

    def _status(self, connection: socket.socket, wants_json: bool) -> None:
        if self.fault in ("silent after STATUS", "closes after STATUS"):
            return
        while self.fault == "floods":
            connection.sendall(b"{" * (1 << 16))
        connection.sendall(((self.json if wants_json else self.text) or "").encode())
