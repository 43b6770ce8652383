"""Queries NCCL's RAS service, which reports a job's communicators and the state of their processes.

The service uses a line-based text protocol on localhost, port 28028 or the one in ``NCCL_RAS_ADDR``. All processes of a
node share the port, even across jobs, so it is queried only if no process outside this job listens on it.

JSON is available since NCCL 2.28.7; up to 2.28.9, it lacks a comma before each missing rank. NCCL before 2.28 might
crash, so it isn't queried. NCCL before 2.29.2 might crash if a rank of several communicators is missing.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from safelaunch.capture import sockets
from safelaunch.capture.node import environment_of
from safelaunch.capture.result import Result, attempt, left, within_or
from safelaunch.model import NcclCommunicator, NcclProcess, NcclState, NcclWitness
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import text_of

PORT = 28028
SINCE = (2, 28)
HARMLESS_SINCE = (2, 29, 2)
DEADLINE_S = 8.0
HANDSHAKE_S = 1.0  # a stopped process accepts and never replies; the next attempt might reach another process
ATTEMPTS = 4
LEG_S = 2  # for each process; NCCL adds up to 5 s
MOST_BYTES = 8 << 20
MOST_PROCESSES = 1 << 16  # of all communicators
_MOST_PIDS = 16
HOW = "NCCL's RAS service"
LIBRARY = "libnccl.so"
FILE = "nccl_ras.txt"

Version = tuple[int, ...]


def ask(
    pids: Sequence[int], libraries: Iterable[str] = (), *, spare: str = "", deadline_s: float = DEADLINE_S
) -> Result[str] | None:
    """Returns the service's raw answer, or None if no process of ``pids`` has loaded NCCL. Never raises.

    Args:
        libraries: NCCL versions from Flight Recorder dumps.
        spare: Reason why a process of the job must not crash; empty if a crash does no harm.
    """
    loaded = within_or(None, 1.0, "/proc/<pid>/maps", lambda: _loaded(pids))
    if loaded is None:
        return None
    pid, library = loaded
    notes: list[str] = []

    def converse() -> str:
        until = time.monotonic() + deadline_s
        version = version_in(*libraries) or version_of(library)
        _allow(version, spare)
        env = environment_of(pid).value or {}
        text, note = _first_answer(_addresses(pids, pid, env), until)
        notes.append(note)
        return text

    result = attempt(HOW, converse)
    return replace(result, note="".join(notes))


def _allow(version: Version, spare: str) -> None:
    name = ".".join(map(str, version))
    if not version:
        raise CaptureError("not queried: NCCL's version is unknown")
    if version < SINCE:
        raise CaptureError(f"not queried: NCCL {name} might crash when queried (2.28 and later don't)", kind="outdated")
    if version < HARMLESS_SINCE and spare:
        reason = f"not queried, because {spare}: NCCL {name} might crash if a process is missing (2.29.2 doesn't)"
        raise CaptureError(reason, kind="outdated")


def _loaded(pids: Sequence[int]) -> tuple[int, str] | None:
    for pid in pids[:_MOST_PIDS]:
        if match := re.search(rf"\S*/{re.escape(LIBRARY)}\S*", text_of(f"/proc/{pid}/maps")):
            return pid, match[0]
    return None


def version_in(*texts: str) -> Version:
    """Returns the first version in these texts (``2.28.9``, ``libnccl.so.2.28.9``); empty if there is none."""
    version = next((match for text in texts if (match := re.search(r"\b(\d+)\.(\d+)\.(\d+)", text))), None)
    return tuple(map(int, version.groups())) if version else ()


def version_of(library: str) -> Version:
    """Reads the version from the file's name, else from its package (``nvidia_nccl_cu12-2.28.9.dist-info``)."""
    path = Path(library)
    with suppress(OSError):
        path = path.resolve()
    packages = path.parents[3].glob("nvidia_nccl_cu*-*.dist-info") if len(path.parents) > 3 else ()
    names = sorted(package.name.partition("-")[2] for package in packages)
    return version_in(path.name, *(names if len(names) == 1 else ()))


def _addresses(pids: Sequence[int], pid: int, env: Mapping[str, str]) -> list[tuple[str, int]]:
    """Returns addresses on which only ranks of this job listen. Raises CaptureError."""
    if env.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        raise CaptureError("disabled by NCCL_RAS_ENABLE=0", kind="absent")
    port = port_of(env.get("NCCL_RAS_ADDR", ""))
    hosts = sockets.listeners(pid, port)
    if not hosts:
        raise CaptureError(f"no process listens on port {port}", kind="absent")
    if hosts.keys() - {inode for pid in pids for inode in sockets.inodes(pid)}:
        fix = "give each job on a node its own NCCL_RAS_ADDR"
        raise CaptureError(f"not queried: processes outside this job also listen on port {port}", fix)
    return [(_LOOPBACK.get(host, host), port) for host in dict.fromkeys(hosts.values())]


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def port_of(address: str) -> int:
    port = address.rpartition(":")[2].strip()
    return int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else PORT


# --- the conversation -------------------------------------------------------------------------------------------------


def _first_answer(addresses: Sequence[tuple[str, int]], until: float) -> tuple[str, str]:
    """Queries the addresses in turn and returns the first answer. Tries the next one only if the handshake fails."""
    reasons = []
    for number in range(ATTEMPTS):
        address = addresses[number % len(addresses)]
        try:
            with socket.create_connection(address, timeout=min(HANDSHAKE_S, left(until))) as connection:
                service = _RasConnection(connection)
                service.begin(min(until, time.monotonic() + HANDSHAKE_S))
                return service.status(until)
        except OSError as error:  # or a timeout
            reasons.append(str(error) or type(error).__name__)
    raise CaptureError(f"no answer on port {addresses[0][1]}: {'; '.join(dict.fromkeys(reasons))}", kind="timeout")


class _RasConnection:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def begin(self, until: float) -> None:
        """Performs the handshake.

        Raises OSError if no process answers, CaptureError if the peer uses another protocol.
        """
        first = self._say("CLIENT PROTOCOL 2", until)
        if not first.upper().startswith("SERVER PROTOCOL "):
            raise CaptureError(f"not a RAS service: {first[:80]!r}", kind="broken")
        self._say(f"TIMEOUT {LEG_S}", until)

    def status(self, until: float) -> tuple[str, str]:
        """Returns the answer, and a note if it is incomplete. Raises CaptureError."""
        try:
            as_json = self._say("SET FORMAT json", until) == "OK"
            self._send("STATUS" if as_json else "VERBOSE STATUS", until)
        except OSError as error:
            raise CaptureError(f"it stopped answering: {error}", kind="timeout") from error
        note = ""
        try:
            while self._receive(until):
                if len(self._data) > MOST_BYTES:
                    note = f"answer truncated: longer than {MOST_BYTES} bytes"
                    break
        except OSError as error:
            note = f"incomplete answer: {error}"
        text = bytes(self._data[:MOST_BYTES]).decode("utf-8", "replace")
        if not text.strip():
            raise CaptureError(note or "it closed the connection without an answer", kind="timeout")
        return text, note

    def _say(self, words: str, until: float) -> str:
        self._send(words, until)
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > 4096 or not self._receive(until):
                raise ConnectionError("the connection ended, or the line is too long")
        line = bytes(self._data[:end]).decode("utf-8", "replace").strip()
        del self._data[: end + 1]
        return line

    def _send(self, words: str, until: float) -> None:
        self._connection.settimeout(left(until))
        self._connection.sendall(f"{words}\n".encode())

    def _receive(self, until: float) -> bool:
        self._connection.settimeout(left(until))
        chunk = self._connection.recv(1 << 16)
        self._data += chunk
        return bool(chunk)


# --- the answer -------------------------------------------------------------------------------------------------------


class _Missing(msgspec.Struct):
    unresponsive: bool = False
    considered_dead: bool = False


class _RasRank(msgspec.Struct):
    rank: int = -1
    host: str = ""
    pid: int = -1
    nvml_dev: int = -1


class _MissingRank(_RasRank):
    status: _Missing = msgspec.field(default_factory=_Missing)


class _Communicator(msgspec.Struct):
    size: int = 0
    ranks: list[_RasRank] = []
    missing_ranks: list[_MissingRank] = []


class _RasReply(msgspec.Struct):
    nccl_version: str
    communicators: list[_Communicator]


# The missing comma between a line's end and a name on the next line.
_NO_COMMA = re.compile(r'(["\d\]}])([ \t]*\r?\n[ \t]*")')
_PROCESS = re.compile(r"\s+Process (\d{1,10}) on node (\S{1,255}) managing GPUs? (\d{0,4})")


def parse(text: str, file: str = "") -> NcclWitness:
    """Parses an answer in either format. Raises CaptureError if it isn't from NCCL."""
    if not text.lstrip().startswith("{"):
        return _of_text(text, file)
    try:
        answer = _decoded(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise CaptureError(f"the answer from NCCL's RAS service is damaged: {error}", kind="broken") from error
    if (
        sum(len(communicator.ranks) + len(communicator.missing_ranks) for communicator in answer.communicators)
        > MOST_PROCESSES
    ):
        raise CaptureError("the answer from NCCL's RAS service names too many processes", kind="broken")
    communicators = tuple(
        NcclCommunicator(communicator.size, tuple(_processes(communicator))) for communicator in answer.communicators
    )
    return NcclWitness(answer.nccl_version[:64], communicators, file=file)


def _decoded(text: str) -> _RasReply:
    try:
        return from_json(text, _RasReply)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return from_json(_NO_COMMA.sub(r"\1,\2", text), _RasReply)


def _processes(communicator: _Communicator) -> Iterator[NcclProcess]:
    for rank in communicator.ranks:
        yield NcclProcess(rank.host[:255], rank.pid, rank.rank, rank.nvml_dev)
    for missing in communicator.missing_ranks:
        state: NcclState = "unresponsive" if missing.status.unresponsive else "answers"  # but has left the communicator
        state = "dead" if missing.status.considered_dead else state
        yield NcclProcess(missing.host[:255], missing.pid, missing.rank, missing.nvml_dev, state)


def _of_text(text: str, file: str) -> NcclWitness:
    version = re.search(r"^NCCL version (\S{1,64})", text, re.MULTILINE)
    if version is None:
        raise CaptureError("not an answer from NCCL's RAS service", kind="broken")
    processes: dict[tuple[str, int], NcclProcess] = {}
    state: NcclState | None = None
    for line in text.splitlines():
        if line and not line[0].isspace():
            state = {"INCOMPLETE": "unresponsive", "DEAD": "dead"}.get(line.strip())  # type: ignore[assignment]
        elif state is not None and (match := _PROCESS.match(line)):
            gpu = int(match[3]) if match[3] else -1
            process = NcclProcess(match[2], int(match[1]), gpu=gpu, state=state)
            processes.setdefault((process.host, process.pid), process)
    return NcclWitness(version[1], processes=tuple(processes.values())[:MOST_PROCESSES], file=file)
