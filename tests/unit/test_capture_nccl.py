"""NCCL's RAS service and its log files."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from safelaunch.capture import nccl_ras, sockets
from safelaunch.capture.nccl_logs import MAX_BYTES, MAX_WARNINGS, logs_of, path_of, warnings_in
from safelaunch.capture.nccl_ras import ask, parse, port_of, version_in, version_of
from safelaunch.capture.result import Result
from safelaunch.model import NcclCommunicator, NcclProcess
from safelaunch.system.errors import CaptureError
from tests.support.ras_service import Fault, Process, Service, as_json, as_text

# --- NCCL's RAS service is queried once, only if it is this job's and the query is safe -------------------------------

HEALTHY = (Process(0, 100), Process(1, 101, gpu=1))
SICK = (Process(0, 100), Process(1, 101, gpu=1, state="unresponsive"), Process(2, 102, gpu=2, state="dead"))
SAID = (
    NcclProcess("10.0.0.1", 100, 0, 0),
    NcclProcess("10.0.0.1", 101, 1, 1, "unresponsive"),
    NcclProcess("10.0.0.1", 102, 2, 2, "dead"),
)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.28.7", "2.28.9", "2.29.2", "2.30.4"])
def test_ras_json_of_each_version_parses_to_same_processes(version: str) -> None:
    """Up to 2.28.9, the comma in front of each rank is missing."""
    answer = parse(as_json(SICK, version=version), "node/a/nccl_ras.txt")
    assert answer.communicators == (NcclCommunicator(3, SAID),)
    assert (answer.version, answer.file) == (version, "node/a/nccl_ras.txt")


def test_ras_communicators_keep_their_sizes() -> None:
    answer = parse(as_json(SICK, version="2.28.9", sizes=(3, 2)))
    assert [(communicator.size, len(communicator.processes)) for communicator in answer.communicators] == [
        (3, 3),
        (2, 2),
    ]


def test_ras_process_that_left_communicator_counts_as_answering() -> None:
    answer = parse(as_json((Process(0, 100), Process(1, 101, state="left"))))
    assert [process.state for process in answer.communicators[0].processes] == ["answers", "answers"]


def test_ras_text_names_only_failing_processes() -> None:
    """Processes listed under a communicator repeat those listed above it."""
    answer = parse(as_text(SICK))
    assert answer.version == "2.28.3"
    assert answer.communicators == ()
    assert {(process.pid, process.gpu, process.state) for process in answer.processes} == {
        (101, 1, "unresponsive"),
        (102, 2, "dead"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{" * 100_000,
        '{"a": ' * 100_000,
        as_json(SICK)[:-200],
        '{"nccl_version": 7, "communicators": []}',
        '{"nccl_version": "2.29.2"}',
        '{"nccl_version": "2.29.2", "communicators": [{"size": "two"}]}',
        '{"nccl_version": "\\ud800", "communicators": [{"ranks": [{"rank": 1e400}]}]}',
        "HTTP/1.1 200 OK",
        "ERROR: Unknown command STATUS\n",
    ],
)
def test_ras_parser_rejects_other_text(text: str) -> None:
    with pytest.raises(CaptureError):
        parse(text)


def test_ras_parser_rejects_too_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_PROCESSES", 2)
    with pytest.raises(CaptureError, match="too many"):
        parse(as_json(SICK))


# --- versions and ports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("2.28.9",), (2, 28, 9)),
        (("NCCL version 2.30.4+cuda13.0",), (2, 30, 4)),
        (("libnccl.so.2.27.5",), (2, 27, 5)),
        (("libnccl.so.2", "2.29.7"), (2, 29, 7)),
        (("", "N/A", "gloo"), ()),
    ],
)
def test_nccl_version_is_found_in_text(texts: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert version_in(*texts) == expected


def test_nccl_library_version_comes_from_name_or_package(tmp_path: Path) -> None:
    library = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert version_of(os.fspath(library)) == ()
    (tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info").mkdir()
    assert version_of(os.fspath(library)) == (2, 28, 9)
    (tmp_path / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    assert version_of(os.fspath(library)) == (), "two packages, and nothing says which was loaded"
    library.rename(library.with_name("libnccl.so.2.26.2"))
    library.symlink_to("libnccl.so.2.26.2")
    assert version_of(os.fspath(library)) == (2, 26, 2)


@pytest.mark.parametrize(
    ("text", "port"),
    [("", 28028), ("localhost:28030", 28030), ("[::1]:28031", 28031), ("host", 28028), ("a:0", 28028), ("a:b", 28028)],
)
def test_ras_port_is_parsed_from_address(text: str, port: int) -> None:
    assert port_of(text) == port


def test_listening_sockets_are_found_in_kernel_table() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:6D7C 0100007F:8888 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
   2: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1
"""
    assert list(sockets.find_listening(table, 28028)) == [(4711, "127.0.0.1")]


# --- queries ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Path]:
    """Library that this process has mapped, as if it had loaded NCCL."""
    path = tmp_path / "libnccl.so.2.29.7"
    path.write_bytes(b"\0" * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield path


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Service]]:
    """Services of a test. The rank's environment points to the port of the first one."""
    servers: list[Service] = []

    def environment(pid: int) -> Result[dict[str, str]]:
        return Result({"NCCL_RAS_ADDR": f"localhost:{servers[0].port}"}, "", 0.0)

    monkeypatch.setattr(nccl_ras, "environment_of", environment)
    monkeypatch.setattr(nccl_ras, "HANDSHAKE_S", 60.0)
    yield servers
    for service in servers:
        service.close()


def asked(
    pids: Sequence[int], libraries: Iterable[str] = (), *, spare: str = "", deadline_s: float = 60.0
) -> Result[str]:
    """Returns the answer for a process that has loaded NCCL."""
    answer = ask(pids, libraries, spare=spare, deadline_s=deadline_s)
    assert answer is not None
    return answer


@pytest.mark.usefixtures("library")
def test_ras_answer_is_returned_unchanged(services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    answer = asked([os.getpid()])
    assert (answer.value, answer.missing, answer.note) == (as_json(HEALTHY), "", "")
    assert services[0].heard == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"], "one question"


@pytest.mark.usefixtures("library")
def test_ras_without_json_is_asked_for_text(services: list[Service]) -> None:
    services.append(Service(text=as_text(SICK)))
    answer = asked([os.getpid()])
    assert answer.value == as_text(SICK)
    assert services[0].heard[-1] == "VERBOSE STATUS"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("silent", "timed out"),
        ("silent after STATUS", "timed out"),
        ("closes", "connection"),
        ("closes after STATUS", "without an answer"),
        ("no newline", "connection"),
        ("speaks HTTP", "not a RAS service"),
    ],
)
def test_broken_ras_service_is_reported_within_deadline(services: list[Service], fault: Fault, reason: str) -> None:
    services.append(Service(json=as_json(HEALTHY), fault=fault))
    answer = asked([os.getpid()], deadline_s=2.0)
    assert answer.value is None
    assert reason.lower() in answer.missing.lower()
    assert sum(words.endswith("STATUS") for words in services[0].heard) <= 1, "never asked twice"


@pytest.mark.usefixtures("library")
def test_ras_answer_flood_is_truncated(services: list[Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_BYTES", 1 << 20)
    services.append(Service(json="{}", fault="floods"))
    answer = asked([os.getpid()])
    assert answer.value is not None
    assert len(answer.value) == 1 << 20
    assert "truncated" in answer.note


@pytest.mark.usefixtures("library")
def test_silent_ras_process_is_skipped_for_another(services: list[Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a node share the port, and the kernel hands a connection to any of them, even a stopped one."""
    monkeypatch.setattr(nccl_ras, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(nccl_ras, "ATTEMPTS", 40)
    services.append(Service(json=as_json(HEALTHY), fault="silent"))
    services.append(Service(json=as_json(HEALTHY), port=services[0].port))
    answer = asked([os.getpid()], deadline_s=30.0)
    assert answer.value == as_json(HEALTHY)


@pytest.mark.usefixtures("library")
def test_ras_port_shared_with_other_job_is_not_queried(services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    code = f"import socket; s = socket.create_server(('127.0.0.1', {services[0].port}), reuse_port=True)"
    code += "; print('up', flush=True); s.accept()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        answer = asked([os.getpid()])
        other.kill()
    assert "processes outside this job also listen" in answer.missing
    assert services[0].heard == []


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("versions", "spare", "reason"),
    [
        (("2.27.5",), "", "might crash"),
        (("2.28.9",), "the job continues", "not queried, because the job continues"),
        (("2.28.9",), "", ""),
        (("2.29.2",), "the job continues", ""),
        ((), "the job continues", ""),
    ],
    ids=["crashes", "may crash, and the job lives", "may crash, and the job ends", "safe", "the library's name"],
)
def test_ras_version_that_might_crash_is_not_queried(
    services: list[Service], versions: tuple[str, ...], spare: str, reason: str
) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    answer = asked([os.getpid()], versions, spare=spare)
    assert reason in answer.missing
    assert bool(services[0].heard) == (not reason)


def test_ras_of_unknown_version_is_not_queried(tmp_path: Path, services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(b"\0" * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        answer = asked([os.getpid()])
    assert "version is unknown" in answer.missing


def test_ras_is_not_queried_without_nccl(services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    assert ask([os.getpid()]) is None
    assert ask([]) is None
    assert services[0].heard == []


@pytest.mark.usefixtures("library")
def test_ras_without_listener_is_reported(monkeypatch: pytest.MonkeyPatch, services: list[Service]) -> None:
    services.append(Service(json=""))
    services[0].close()
    answer = asked([os.getpid()])
    assert "no process listens" in answer.missing
    monkeypatch.setattr(nccl_ras, "environment_of", lambda pid: Result({"NCCL_RAS_ENABLE": "0"}, "", 0.0))
    answer = asked([os.getpid()])
    assert "NCCL_RAS_ENABLE=0" in answer.missing


# --- NCCL's warnings, read from logs in the forms that its versions write ---------------------------------------------

LOG = """\
node1:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>

node1:71:80 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
node1:71:80 [0] NCCL INFO transport/shm.cc:114 -> 2

[2025-11-24 11:20:21] node1:71:80 [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed by remote peer b<5>
node1:71:80 [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed by remote peer b<5>
node1:72:81 [32735] NCCL WARN Cuda failure 'driver shutting down'
[2026-03-13 22:26:02] host-01.example.com:73 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110
NCCL version 2.21.5+cuda12.4
"""


def test_nccl_warnings_are_grouped_by_process_without_repeats() -> None:
    assert warnings_in(LOG) == {
        71: ("Failed to open libibverbs.so[.1]", "socketProgress: Connection closed by remote peer b<5>"),
        72: ("Cuda failure 'driver shutting down'",),
        73: ("Call to ibv_modify_qp failed with 110",),
    }


def test_nccl_warnings_beyond_limit_keep_first_and_last() -> None:
    (warnings,) = warnings_in("".join(f"a:1:1 [0] x.cc:1 NCCL WARN number {n}\n" for n in range(1000))).values()
    assert len(warnings) == MAX_WARNINGS and (warnings[0], warnings[-1]) == ("number 0", "number 999")


def test_nccl_log_is_matched_to_processes_by_name_or_content(tmp_path: Path) -> None:
    assert path_of("/logs/%h.%p.txt", "node1", 71) == Path("/logs/node1.71.txt")
    assert path_of("%h-100%%-%p.%x", "node1.cluster.example.com", 71) == Path("node1-100%-71.%x")
    log = tmp_path / "nccl.node1.71.log"
    log.write_text(LOG)
    logs = logs_of([log, tmp_path / "missing"], "node/node1", [71, 73])
    assert set(logs) == {71, 73}
    assert logs[73].file == "node/node1/nccl.node1.71.log"


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "binary"])
def test_nccl_log_that_is_no_text_file_has_no_warnings(kind: str, tmp_path: Path) -> None:
    path, real = tmp_path / "nccl.log", tmp_path / "real"
    real.write_text(LOG)
    {
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(real),
        "directory": path.mkdir,
        "binary": lambda: path.write_bytes(os.urandom(4096)),
    }[kind]()
    assert logs_of([path], "node/a", [71]) == {}


def test_huge_nccl_log_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    filler = "node1:71:71 [0] NCCL INFO nothing\n" * (2 * MAX_BYTES // 34)
    path.write_text(f"a:71:1 [0] x.cc:1 NCCL WARN begin\n{filler}a:71:1 [0] x.cc:1 NCCL WARN end\n")
    assert logs_of([path], "node/a", [71])[71].warnings == ("begin", "end")
