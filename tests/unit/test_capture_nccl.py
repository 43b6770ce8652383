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

# --- nccl's ras service is asked once, only where it is this job's and safe to ask, and may answer anything -----------

HEALTHY = (Process(0, 100), Process(1, 101, gpu=1))
SICK = (Process(0, 100), Process(1, 101, gpu=1, state="unresponsive"), Process(2, 102, gpu=2, state="dead"))
SAID = (
    NcclProcess("10.0.0.1", 100, 0, 0),
    NcclProcess("10.0.0.1", 101, 1, 1, "unresponsive"),
    NcclProcess("10.0.0.1", 102, 2, 2, "dead"),
)


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.28.7", "2.28.9", "2.29.2", "2.30.4"])
def test_json_of_every_version_says_the_same(version: str) -> None:
    """Up to 2.28.9 a comma is missing wherever a rank is."""
    found = parse(as_json(SICK, version=version), "node/a/nccl_ras.txt")
    assert found.communicators == (NcclCommunicator(3, SAID),)
    assert (found.version, found.file) == (version, "node/a/nccl_ras.txt")


def test_several_communicators_keep_their_own_numbers() -> None:
    found = parse(as_json(SICK, version="2.28.9", sizes=(3, 2)))
    assert [(one.size, len(one.processes)) for one in found.communicators] == [(3, 3), (2, 2)]


def test_a_process_that_left_a_communicator_has_answered() -> None:
    found = parse(as_json((Process(0, 100), Process(1, 101, state="left"))))
    assert [one.state for one in found.communicators[0].processes] == ["answers", "answers"]


def test_text_names_processes_in_trouble_and_no_others() -> None:
    """What is listed under a communicator is not taken: NCCL lists there what it has listed above."""
    found = parse(as_text(SICK))
    assert found.version == "2.28.3"
    assert found.communicators == ()
    assert {(one.pid, one.gpu, one.state) for one in found.processes} == {(101, 1, "unresponsive"), (102, 2, "dead")}


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
def test_what_no_nccl_says_is_refused(text: str) -> None:
    with pytest.raises(CaptureError):
        parse(text)


def test_too_many_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_PROCESSES", 2)
    with pytest.raises(CaptureError, match="too many"):
        parse(as_json(SICK))


# --- whom to ask ------------------------------------------------------------------------------------------------------


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
def test_versions(texts: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert version_in(*texts) == expected


def test_the_version_of_a_library_is_in_its_name_or_its_package(tmp_path: Path) -> None:
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
def test_ports(text: str, port: int) -> None:
    assert port_of(text) == port


def test_listening_sockets_are_read_from_the_kernels_table() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:6D7C 0100007F:8888 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
   2: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1
"""
    assert list(sockets.find_listening(table, 28028)) == [(4711, "127.0.0.1")]


# --- asking -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Path]:
    """This process has loaded NCCL, as far as anybody can see."""
    path = tmp_path / "libnccl.so.2.29.7"
    path.write_bytes(b"\0" * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield path


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Service]]:
    """Those of a test; the first one's port is where the rank's environment says that NCCL listens."""
    found: list[Service] = []

    def environment(pid: int) -> Result[dict[str, str]]:
        return Result({"NCCL_RAS_ADDR": f"localhost:{found[0].port}"}, "", 0.0)

    monkeypatch.setattr(nccl_ras, "environment_of", environment)
    monkeypatch.setattr(nccl_ras, "HANDSHAKE_S", 60.0)
    yield found
    for service in found:
        service.close()


def asked(
    pids: Sequence[int], libraries: Iterable[str] = (), *, spare: str = "", deadline_s: float = 60.0
) -> Result[str]:
    """The answer, from a process that has loaded NCCL."""
    answer = ask(pids, libraries, spare=spare, deadline_s=deadline_s)
    assert answer is not None
    return answer


@pytest.mark.usefixtures("library")
def test_the_answer_comes_as_it_is(services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    answer = asked([os.getpid()])
    assert (answer.value, answer.missing, answer.note) == (as_json(HEALTHY), "", "")
    assert services[0].heard == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"], "one question"


@pytest.mark.usefixtures("library")
def test_an_nccl_without_json_is_asked_for_text(services: list[Service]) -> None:
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
def test_a_broken_service_costs_its_answer_and_a_bounded_time(
    services: list[Service], fault: Fault, reason: str
) -> None:
    services.append(Service(json=as_json(HEALTHY), fault=fault))
    answer = asked([os.getpid()], deadline_s=2.0)
    assert answer.value is None
    assert reason.lower() in answer.missing.lower()
    assert sum(words.endswith("STATUS") for words in services[0].heard) <= 1, "never asked twice"


@pytest.mark.usefixtures("library")
def test_a_flood_is_cut(services: list[Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MOST_BYTES", 1 << 20)
    services.append(Service(json="{}", fault="floods"))
    answer = asked([os.getpid()])
    assert answer.value is not None
    assert len(answer.value) == 1 << 20
    assert "truncated" in answer.note


@pytest.mark.usefixtures("library")
def test_a_process_that_does_not_answer_is_passed_over_for_another(
    services: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a node share the port, and the kernel gives a connection to any of them, be it stopped."""
    monkeypatch.setattr(nccl_ras, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(nccl_ras, "ATTEMPTS", 40)
    services.append(Service(json=as_json(HEALTHY), fault="silent"))
    services.append(Service(json=as_json(HEALTHY), port=services[0].port))
    answer = asked([os.getpid()], deadline_s=30.0)
    assert answer.value == as_json(HEALTHY)


@pytest.mark.usefixtures("library")
def test_a_port_on_which_another_job_listens_is_left_alone(services: list[Service]) -> None:
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
def test_what_may_crash_of_the_question_is_not_asked(
    services: list[Service], versions: tuple[str, ...], spare: str, reason: str
) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    answer = asked([os.getpid()], versions, spare=spare)
    assert reason in answer.missing
    assert bool(services[0].heard) == (not reason)


def test_a_version_that_nobody_knows_is_not_asked(tmp_path: Path, services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(b"\0" * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        answer = asked([os.getpid()])
    assert "version is unknown" in answer.missing


def test_without_nccl_there_is_nobody_to_ask(services: list[Service]) -> None:
    services.append(Service(json=as_json(HEALTHY)))
    assert ask([os.getpid()]) is None
    assert ask([]) is None
    assert services[0].heard == []


@pytest.mark.usefixtures("library")
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, services: list[Service]) -> None:
    services.append(Service(json=""))
    services[0].close()
    answer = asked([os.getpid()])
    assert "no process listens" in answer.missing
    monkeypatch.setattr(nccl_ras, "environment_of", lambda pid: Result({"NCCL_RAS_ENABLE": "0"}, "", 0.0))
    answer = asked([os.getpid()])
    assert "NCCL_RAS_ENABLE=0" in answer.missing


# --- what nccl warned of, read from logs in the forms that its versions write -----------------------------------------

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


def test_warnings_are_read_by_process_each_once() -> None:
    assert warnings_in(LOG) == {
        71: ("Failed to open libibverbs.so[.1]", "socketProgress: Connection closed by remote peer b<5>"),
        72: ("Cuda failure 'driver shutting down'",),
        73: ("Call to ibv_modify_qp failed with 110",),
    }


def test_of_very_many_the_first_and_the_last_are_kept() -> None:
    (found,) = warnings_in("".join(f"a:1:1 [0] x.cc:1 NCCL WARN number {n}\n" for n in range(1000))).values()
    assert len(found) == MAX_WARNINGS and (found[0], found[-1]) == ("number 0", "number 999")


def test_a_file_holds_what_its_name_says_or_several_processes(tmp_path: Path) -> None:
    assert path_of("/logs/%h.%p.txt", "node1", 71) == Path("/logs/node1.71.txt")
    assert path_of("%h-100%%-%p.%x", "node1.cluster.example.com", 71) == Path("node1-100%-71.%x")
    one = tmp_path / "nccl.node1.71.log"
    one.write_text(LOG)
    found = logs_of([one, tmp_path / "missing"], "node/node1", [71, 73])
    assert set(found) == {71, 73}
    assert found[73].file == "node/node1/nccl.node1.71.log"


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "binary"])
def test_what_is_no_log_has_no_warnings(kind: str, tmp_path: Path) -> None:
    path, real = tmp_path / "nccl.log", tmp_path / "real"
    real.write_text(LOG)
    {
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(real),
        "directory": path.mkdir,
        "binary": lambda: path.write_bytes(os.urandom(4096)),
    }[kind]()
    assert logs_of([path], "node/a", [71]) == {}


def test_a_huge_log_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    filler = "node1:71:71 [0] NCCL INFO nothing\n" * (2 * MAX_BYTES // 34)
    path.write_text(f"a:71:1 [0] x.cc:1 NCCL WARN begin\n{filler}a:71:1 [0] x.cc:1 NCCL WARN end\n")
    assert logs_of([path], "node/a", [71])[71].warnings == ("begin", "end")
