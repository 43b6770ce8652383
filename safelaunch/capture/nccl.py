"""What NCCL itself says of a job: its RAS service, and the warnings in its logs."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from safelaunch.capture import sockets
from safelaunch.capture.node import environment_of
from safelaunch.capture.result import Result, attempt, left, within_or
from safelaunch.model import NcclCommunicator, NcclLog, NcclProcess, NcclState, NcclWitness
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import text_of

# --- the RAS service --------------------------------------------------------------------------------------------------
# The service listens on localhost, port 28028, or where ``NCCL_RAS_ADDR`` says; its protocol is lines of text. All
# processes of a node share that port, also those of other jobs. So only a port on which ranks of this job alone
# listen is asked. JSON exists since NCCL 2.28.7; up to 2.28.9 it lacks a comma wherever a rank is missing. An NCCL
# before 2.28 may crash when it is asked, so it is not; one before 2.29.2 may, where a rank of several communicators
# is missing.

PORT = 28028
SINCE = (2, 28)
HARMLESS_SINCE = (2, 29, 2)
DEADLINE_S = 8.0
HANDSHAKE_S = 1.0  # a stopped process accepts a connection and says nothing; the next may reach another one
ATTEMPTS = 4
LEG_S = 2  # how long NCCL waits for a process; it adds up to 5 s
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
    """The answer of the service that the ranks ``pids`` run, as it came; None where none of them has loaded NCCL.

    ``libraries``: NCCL's version as Flight Recorders give it. ``spare``: why no process of the job may crash of the
    question, if that would do harm. Never raises.
    """
    found = within_or(None, 1.0, "/proc/<pid>/maps", lambda: _loaded(pids))
    if found is None:
        return None
    pid, library = found
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
    """Raises CaptureError where the question may harm the job."""
    name = ".".join(map(str, version))
    if not version:
        raise CaptureError("not asked: NCCL's version is not known")
    if version < SINCE:
        raise CaptureError(f"not asked: NCCL {name} may crash when it is (2.28 and later do not)", kind="outdated")
    if version < HARMLESS_SINCE and spare:
        reason = f"not asked, as {spare}: NCCL {name} may crash where a process is missing (2.29.2 does not)"
        raise CaptureError(reason, kind="outdated")


# --- whom to ask ------------------------------------------------------------------------------------------------------


def _loaded(pids: Sequence[int]) -> tuple[int, str] | None:
    """The first process that has loaded NCCL, and from which file."""
    for pid in pids[:_MOST_PIDS]:
        if found := re.search(rf"\S*/{re.escape(LIBRARY)}\S*", text_of(f"/proc/{pid}/maps")):
            return pid, found[0]
    return None


def version_in(*texts: str) -> Version:
    """The first version in these texts: ``2.28.9``, ``libnccl.so.2.28.9``; empty where there is none."""
    found = next((match for text in texts if (match := re.search(r"\b(\d+)\.(\d+)\.(\d+)", text))), None)
    return tuple(map(int, found.groups())) if found else ()


def version_of(library: str) -> Version:
    """From the name of the file, else from the package that it belongs to (``nvidia_nccl_cu12-2.28.9.dist-info``)."""
    path = Path(library)
    with suppress(OSError):
        path = path.resolve()
    packages = path.parents[3].glob("nvidia_nccl_cu*-*.dist-info") if len(path.parents) > 3 else ()
    names = sorted(package.name.partition("-")[2] for package in packages)
    return version_in(path.name, *(names if len(names) == 1 else ()))


def _addresses(pids: Sequence[int], pid: int, env: Mapping[str, str]) -> list[tuple[str, int]]:
    """Where ranks of this job listen, and nobody else. Raises CaptureError."""
    if env.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        raise CaptureError("it does not run: NCCL_RAS_ENABLE=0", kind="absent")
    port = port_of(env.get("NCCL_RAS_ADDR", ""))
    found = sockets.listeners(pid, port)
    if not found:
        raise CaptureError(f"nobody listens on port {port}", kind="absent")
    if found.keys() - {inode for pid in pids for inode in sockets.inodes(pid)}:
        fix = "give each job on a node its own NCCL_RAS_ADDR"
        raise CaptureError(f"not asked: not only ranks of this job listen on port {port}", fix)
    return [(_LOOPBACK.get(host, host), port) for host in dict.fromkeys(found.values())]


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def port_of(address: str) -> int:
    """The port in ``host:port`` or ``[host]:port``; the default one where there is none."""
    port = address.rpartition(":")[2].strip()
    return int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else PORT


# --- the conversation -------------------------------------------------------------------------------------------------


def _first_answer(addresses: Sequence[tuple[str, int]], until: float) -> tuple[str, str]:
    """The answer and a note about it. Tries again only where nobody has taken the connection."""
    reasons = []
    for number in range(ATTEMPTS):
        address = addresses[number % len(addresses)]
        try:
            with socket.create_connection(address, timeout=min(HANDSHAKE_S, left(until))) as connection:
                service = _RasConnection(connection)
                service.begin(min(until, time.monotonic() + HANDSHAKE_S))
                return service.status(until)
        except OSError as error:  # also a timeout
            reasons.append(str(error) or type(error).__name__)
    raise CaptureError(f"no answer on port {addresses[0][1]}: {'; '.join(dict.fromkeys(reasons))}", kind="timeout")


class _RasConnection:
    """One connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def begin(self, until: float) -> None:
        """Raises OSError where nobody speaks, CaptureError where somebody speaks something else."""
        first = self._say("CLIENT PROTOCOL 2", until)
        if not first.upper().startswith("SERVER PROTOCOL "):
            raise CaptureError(f"it is no RAS service: {first[:80]!r}", kind="broken")
        self._say(f"TIMEOUT {LEG_S}", until)

    def status(self, until: float) -> tuple[str, str]:
        """The answer to the one question, and a note where it is not whole. Raises CaptureError."""
        try:
            as_json = self._say("SET FORMAT json", until) == "OK"
            self._send("STATUS" if as_json else "VERBOSE STATUS", until)
        except OSError as error:
            raise CaptureError(f"it stopped answering: {error}", kind="timeout") from error
        note = ""
        try:
            while self._receive(until):
                if len(self._data) > MOST_BYTES:
                    note = f"the answer is longer than {MOST_BYTES} bytes: cut"
                    break
        except OSError as error:
            note = f"the answer does not end: {error}"
        text = bytes(self._data[:MOST_BYTES]).decode("utf-8", "replace")
        if not text.strip():
            raise CaptureError(note or "it closed the connection without an answer", kind="timeout")
        return text, note

    def _say(self, words: str, until: float) -> str:
        """The line that comes back. Raises OSError."""
        self._send(words, until)
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > 4096 or not self._receive(until):
                raise ConnectionError("the connection ended, or a line did not")
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


# A value at the end of a line, and a name in the next: there belongs a comma.
_NO_COMMA = re.compile(r'(["\d\]}])([ \t]*\r?\n[ \t]*")')
_PROCESS = re.compile(r"\s+Process (\d{1,10}) on node (\S{1,255}) managing GPUs? (\d{0,4})")


def parse(text: str, file: str = "") -> NcclWitness:
    """An answer, of whichever of the two formats. Raises CaptureError for what no NCCL says."""
    if not text.lstrip().startswith("{"):
        return _of_text(text, file)
    try:
        answer = _decoded(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise CaptureError(f"the answer of NCCL's RAS service is damaged: {error}", kind="broken") from error
    if (
        sum(len(communicator.ranks) + len(communicator.missing_ranks) for communicator in answer.communicators)
        > MOST_PROCESSES
    ):
        raise CaptureError("the answer of NCCL's RAS service names too many processes", kind="broken")
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
    for gone in communicator.missing_ranks:
        state: NcclState = "unresponsive" if gone.status.unresponsive else "answers"  # but has left the communicator
        state = "dead" if gone.status.considered_dead else state
        yield NcclProcess(gone.host[:255], gone.pid, gone.rank, gone.nvml_dev, state)


def _of_text(text: str, file: str) -> NcclWitness:
    version = re.search(r"^NCCL version (\S{1,64})", text, re.MULTILINE)
    if version is None:
        raise CaptureError("it is no answer of NCCL's RAS service", kind="broken")
    found: dict[tuple[str, int], NcclProcess] = {}
    state: NcclState | None = None
    for line in text.splitlines():
        if line and not line[0].isspace():  # a heading
            state = {"INCOMPLETE": "unresponsive", "DEAD": "dead"}.get(line.strip())  # type: ignore[assignment]
        elif state is not None and (match := _PROCESS.match(line)):
            gpu = int(match[3]) if match[3] else -1
            one = NcclProcess(match[2], int(match[1]), gpu=gpu, state=state)
            found.setdefault((one.host, one.pid), one)
    return NcclWitness(version[1], processes=tuple(found.values())[:MOST_PROCESSES], file=file)


# --- the log files that NCCL_DEBUG_FILE asks for ----------------------------------------------------------------------

MAX_BYTES = 4 << 20  # of a file: its beginning and its end
MAX_WARNINGS = 32
MAX_CHARACTERS = 500

# ``[2025-06-01 12:00:00] host:pid:tid [gpu] file.cc:41 NCCL WARN text``; older versions have neither time nor file.
_WARNING = re.compile(
    r"^(?:\[[^\]\n]{8,40}\] )?(?P<host>[^\s:]+):(?P<pid>\d+)(?::\d+)? \[-?\d+\] (?:\S+:\d+ )?NCCL WARN (?P<text>.+)$",
    re.MULTILINE,
)


def path_of(pattern: str, host: str, pid: int) -> Path:
    """The file of a process: NCCL replaces ``%h`` by the host's name up to its first dot, and ``%p`` by the pid."""
    values = {"%h": host.partition(".")[0], "%p": str(pid), "%%": "%"}
    return Path(re.sub("%[hp%]", lambda found: values[found[0]], pattern))


def warnings_in(text: str) -> dict[int, tuple[str, ...]]:
    """Pid → its warnings, each once, in their order; of many the first ones and the last."""
    found: dict[int, dict[str, None]] = {}
    for match in _WARNING.finditer(text):
        found.setdefault(int(match["pid"]), {})[match["text"].strip()[:MAX_CHARACTERS]] = None
    return {pid: _ends(tuple(texts)) for pid, texts in found.items()}


def _ends(texts: tuple[str, ...]) -> tuple[str, ...]:
    half = MAX_WARNINGS // 2
    return texts if len(texts) <= MAX_WARNINGS else (*texts[:half], *texts[-half:])


def logs_of(paths: Iterable[Path], folder: str, pids: Sequence[int]) -> Mapping[int, NcclLog]:
    """Pid → what it warned of. ``folder``: where the bundle has these files. An unreadable file has no warnings."""
    found: dict[int, NcclLog] = {}
    for path in paths:
        for pid, warnings in warnings_in(_read(path)).items():
            if pid in pids:
                found[pid] = NcclLog(f"{folder}/{path.name}", warnings)
    return found


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                return ""
            data = file.read(MAX_BYTES // 2)
            if info.st_size > MAX_BYTES:
                file.seek(info.st_size - MAX_BYTES // 2)
            return (data + file.read(MAX_BYTES // 2)).decode("utf-8", "replace")
    except OSError:
        return ""
