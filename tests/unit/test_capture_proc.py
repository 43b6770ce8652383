"""Parsing of the kernel's files about processes, sockets and control groups."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from safelaunch.capture import cgroups, file_locks, proc, sockets, waits
from safelaunch.capture.proc import (
    parse_io,
    parse_schedstat,
    parse_syscall,
    role_of,
)
from safelaunch.model import Frame, ProcessState, StackSample, Thread
from safelaunch.system import procstat

REST = "S 10 20 30 0 -1 4194304 98 0 0 0 250 50 7 8 20 0 1 0 77510 3133440 360 18446744073709551615 1 2 3"


@pytest.mark.parametrize("name", ["python", "my (job) x", "a) R 1 (b", ") S 1", "((", "pt_main_thread", "a\nb"])
def test_procstat_parses_any_process_name(name: str) -> None:
    stat = procstat.parse(f"4711 ({name}) {REST}")
    assert (stat.pid, stat.name, stat.state, stat.ppid, stat.start_ticks) == (4711, name, "S", 10, 77510)
    assert stat.cpu_ms == 3000  # 300 ticks of 10 ms; the children's 7 and 8 do not count
    assert stat.rss_bytes > 0


@pytest.mark.parametrize("text", ["", "4711 python S 1", "4711 (python) S 1", "x (y) " + REST])
def test_procstat_rejects_other_text(text: str) -> None:
    with pytest.raises(ValueError):
        procstat.parse(text)


@pytest.mark.parametrize(
    ("name", "handler", "found"),
    [
        ("SIGALRM", "print", (True, False)),
        ("SIGUSR1", "print", (True, False)),
        ("SIGALRM", "signal.SIG_IGN", (False, False)),
        ("SIGTERM", "print", (False, False)),
        ("SIGINT", "print", (False, False)),
        ("SIGQUIT", "print", (True, False)),
        ("SIGRTMIN", "print", (True, False)),
        ("SIGCHLD", "print", (False, True)),
    ],
)
def test_process_state_reports_handled_signals(name: str, handler: str, found: tuple[bool, bool]) -> None:
    code = f"import signal; signal.signal(signal.{name}, {handler}); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"up\n"
        state = proc.read_quick(program.pid)
        assert (state.handles_signals, state.handles_child_ends) == found
        program.kill()


LOCKS = """\
1: POSIX  ADVISORY  WRITE 4000 08:02:77 0 EOF
2: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF
2: -> FLOCK  ADVISORY  WRITE 4712 fe:00:131 0 EOF
3: FLOCK  ADVISORY  READ 0 fe:00:132 0 EOF
a line of another kernel, with six words
"""


def test_file_lock_table_lists_holders_only() -> None:
    """Waiters and holders in other containers are left out."""
    assert list(file_locks.parse(LOCKS)) == [
        file_locks.LockRow(4000, (0x08, 2, 77), exclusive=True),
        file_locks.LockRow(4711, (0xFE, 0, 131), exclusive=True, of_file=True),
    ]


BYTES = """\
1: POSIX  ADVISORY  WRITE 4000 08:02:77 10 10
2: POSIX  ADVISORY  WRITE 4001 08:02:77 100 100
2: -> POSIX  ADVISORY  WRITE 4002 08:02:77 100 100
2: -> POSIX  ADVISORY  WRITE 4003 08:02:77 100 100
3: POSIX  ADVISORY  WRITE 0 08:02:78 0 EOF
3: -> POSIX  ADVISORY  WRITE 4004 08:02:78 0 EOF
"""


@pytest.mark.parametrize(("pid", "inode", "holder"), [(4002, 77, 4001), (4003, 77, 4001), (4000, 77, 0), (4004, 78, 0)])
def test_blocking_file_lock_is_found_by_byte_range(pid: int, inode: int, holder: int) -> None:
    """Several processes can lock different bytes of one file. The holder of the last lock is in another container."""
    lock = file_locks._blocking_lock(BYTES, pid, (0x08, 2, inode))
    assert (lock.pid if lock is not None else 0) == holder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("running", None),
        ("", None),
        ("-1 0x7ffd 0x7fd8", None),
        ("0 0x5 0x7f00 0x1000 0x0 0x0 0x0 0x7ffe 0x7fd8", (0, (5, 0x7F00, 0x1000, 0, 0, 0))),
        ("230 0x1 0x1 0x7ffe 0x0 0x0 0x0 0x7ffe 0x7fd8", (230, (1, 1, 0x7FFE, 0, 0, 0))),
    ],
)
def test_syscall_line_is_parsed(text: str, expected: object) -> None:
    assert parse_syscall(text) == expected


def test_io_has_characters_read_and_written() -> None:
    assert parse_io("rchar: 100\nwchar: 23\nsyscr: 5\nread_bytes: 4096\n") == (100, 23)
    assert parse_io("") is None


def test_schedstat_has_core_wait_time_and_slices() -> None:
    assert parse_schedstat("35191115 6325405 221") == (6, 221)
    assert parse_schedstat("") is None


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("nr_periods 14\nnr_throttled 13\nthrottled_time 6727857053\n", 6_727_857),
        ("usage_usec 5\nnr_throttled 1\nthrottled_usec 4711\n", 4711),
        ("", 0),
    ],
    ids=["v1", "v2", "no limit"],
)
def test_cgroup_throttled_time_is_parsed(text: str, microseconds: int) -> None:
    assert cgroups.parse_throttled_us(text) == microseconds


HALF = (0).to_bytes(8, "little") + (500_000_000).to_bytes(8, "little")
AT_110 = (110).to_bytes(8, "little") + bytes(8)


@pytest.mark.parametrize(
    ("name", "arguments", "memory", "ends"),
    [
        ("clock_nanosleep", (1, 1, 8, 0), AT_110, 110.0),  # time.sleep() of Python 3.11: until a time
        ("clock_nanosleep", (1, 0, 8, 0), HALF, 100.5),
        ("clock_nanosleep", (1, 1, 8, 0), b"", 0.0),  # its limit can't be read
        ("nanosleep", (8,), HALF, 100.5),
        ("futex", (4096, 393, 0, 0), b"", None),  # lock.acquire()
        ("futex", (4096, 137, 0, 8), AT_110, 110.0),  # lock.acquire(timeout=10)
        ("futex", (4096, 128, 0, 8), HALF, 100.5),
        ("poll", (8, 1, 2500), b"", 102.5),
        ("poll", (8, 1, 0xFFFFFFFF), b"", None),
        ("epoll_wait", (3, 8, 1, 0xFFFFFFFFFFFFFFFF), b"", None),
        ("select", (0, 0, 0, 0, 8), (0).to_bytes(8, "little") + (500_000).to_bytes(8, "little"), 100.5),
        ("pselect6", (0, 0, 0, 0, 0), b"", None),
        ("read", (7, 8, 1), b"", None),
    ],
)
def test_system_call_end_time_is_computed(
    name: str, arguments: tuple[int, ...], memory: bytes, ends: float | None
) -> None:
    arguments = (*arguments, *(0,) * (6 - len(arguments)))
    assert waits.ends_s(name, arguments, lambda address, size: memory[:size], now=100.0) == ends


@pytest.mark.parametrize(
    ("machine", "number", "name"),
    [
        ("x86_64", 0, "read"),
        ("x86_64", 202, "futex"),
        ("x86_64", 230, "clock_nanosleep"),
        ("aarch64", 63, "read"),
        ("aarch64", 98, "futex"),
        ("aarch64", 115, "clock_nanosleep"),
        ("x86_64", 99999, ""),
        ("riscv64", 63, ""),
    ],
)
def test_system_call_name_depends_on_machine(machine: str, number: int, name: str) -> None:
    assert waits.name_of(number, machine) == name


@pytest.mark.parametrize(
    ("name", "arguments", "child"),
    [
        ("wait4", (4711, 0, 0, 0, 0, 0), 4711),
        ("wait4", (0xFFFFFFFFFFFFFFFF, 0, 0, 0, 0, 0), None),  # any child
        ("wait4", (0, 0, 0, 0, 0, 0), None),
        ("waitid", (1, 4711, 0, 4, 0, 0), 4711),
        ("waitid", (0, 4711, 0, 4, 0, 0), None),
        ("read", (7, 0, 0, 0, 0, 0), None),
    ],
)
def test_wait_call_names_its_child(name: str, arguments: tuple[int, ...], child: int | None) -> None:
    assert waits.child_of(name, arguments) == child


# --- roles ------------------------------------------------------------------------------------------------------------

WORKER = Frame("/env/lib/site-packages/torch/utils/data/_utils/worker.py", 349, "_worker_loop")
BOOTSTRAP = Frame("/usr/lib/python3.12/multiprocessing/process.py", 314, "BaseProcess._bootstrap")
SERVE = Frame("/usr/lib/python3.12/multiprocessing/forkserver.py", 300, "main")
FORKSERVER = ("python", "-c", "from multiprocessing.forkserver import main; main(5, 6, [])")
TRACKER = ("python", "-c", "from multiprocessing.resource_tracker import main;main(19)")


@pytest.mark.parametrize(
    ("cmdline", "frames", "role"),
    [
        (("python", "train.py"), (WORKER, BOOTSTRAP), "dataloader worker"),
        (FORKSERVER, (WORKER, BOOTSTRAP, SERVE), "dataloader worker"),
        (FORKSERVER, (BOOTSTRAP, SERVE), "child"),
        (FORKSERVER, (SERVE,), "forkserver"),
        (FORKSERVER, (), "forkserver"),
        (TRACKER, (), "resource tracker"),
        (("sh", "-c", "sleep 1"), (), "child"),
        (("python", "train.py"), (Frame("/home/me/worker.py", 1, "_worker_loop"),), "child"),
    ],
)
def test_process_role_is_recognized(cmdline: tuple[str, ...], frames: tuple[Frame, ...], role: str) -> None:
    state = ProcessState(5, 1, 1, 0.0, "python", cmdline, "S")
    assert role_of(state, (StackSample(5, 0.0, "py-spy", (Thread(frames),)),)) == role


# --- sockets ----------------------------------------------------------------------------------------------------------

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11111 1 0 100 0 0 10 0
   1: 0100000A:0050 0200000A:2328 01 00000000:00000000 00:00000000 00000000     0        0 22222 1 0 20 4 30 10 -1
   2: 0100000A:9C40 0300000A:01BB 02 00000001:00000000 01:00000000 00000000     0        0 33333 2 0 20 4 30 10 -1
"""
TCP6 = """  sl  local_address                         remote_address                        st ...
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 44444 1 0
"""
UNIX = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 55555 /run/my socket
0000000000000000: 00000003 00000000 00000000 0001 03 66666
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="recorded on a little-endian machine")
@pytest.mark.parametrize(
    ("table", "protocol", "inode", "text"),
    [
        (TCP, "tcp", 11111, "tcp 127.0.0.1:8080 (listening)"),
        (TCP, "tcp", 22222, "tcp 10.0.0.1:80 -> 10.0.0.2:9000 (established)"),
        (TCP, "tcp", 33333, "tcp 10.0.0.1:40000 -> 10.0.0.3:443 (connecting)"),
        (TCP, "tcp", 1111, ""),
        (TCP6, "tcp6", 44444, "tcp6 [::1]:8080 (listening)"),
        ("", "tcp", 1, ""),
        ("header\nbroken line", "udp", 1, ""),
    ],
)
def test_inet_socket_is_described(table: str, protocol: str, inode: int, text: str) -> None:
    assert sockets.find_inet(table, protocol, inode) == text


def test_resending_connection_is_found() -> None:
    """Only the first: the second has no data in flight, the third is not late, and the fourth still connects."""
    table = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 01004D0A:B8F2 02004D0A:9E41 01 0000005C:00000000 01:00000132 00000003     0        0 11111 2 0 1600 4 30 1 -1
   1: 01004D0A:B8F4 02004D0A:9E41 01 00000000:00000000 00:00000000 00000000     0        0 22222 1 0 20 4 30 10 -1
   2: 01004D0A:B8F6 02004D0A:9E41 01 00000010:00000000 01:00000013 00000000     0        0 33333 2 0 20 4 30 10 -1
   3: 01004D0A:B8F8 02004D0A:0050 02 00000001:00000000 01:00000132 00000003     0        0 44444 2 0 1600 4 30 1 -1
broken
"""
    assert sockets.find_resending(table) == (11111,)


def test_idle_connection_is_not_resending() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"arrives")
        assert not sockets.resends(os.getpid())
    assert not sockets.resends(1 << 30)


def test_unix_socket_is_described() -> None:
    assert sockets.find_unix(UNIX, 55555) == "unix /run/my socket"
    assert sockets.find_unix(UNIX, 66666) == "unix socket:[66666] (unnamed, e.g. a socketpair)"
    assert sockets.find_unix(UNIX, 1) == ""


# --- control groups ---------------------------------------------------------------------------------------------------


def test_cgroup_membership_is_parsed() -> None:
    assert cgroups.parse_membership("6:freezer:/a\n5:cpu,cpuacct:/b\n0::/user.slice/x:y\n") == {
        "freezer": "/a",
        "cpu": "/b",
        "cpuacct": "/b",
        "": "/user.slice/x:y",
    }


def test_cgroup_directory_in_container_is_mount_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path in ``/proc/<pid>/cgroup`` is the host's, while the mount is the group itself."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    monkeypatch.setattr(cgroups, "membership", lambda pid: {"": "/kubepods/pod1"})
    assert cgroups.directory(1, root=tmp_path) == tmp_path
    (tmp_path / "kubepods" / "pod1").mkdir(parents=True)
    assert cgroups.directory(1, root=tmp_path) == tmp_path / "kubepods" / "pod1"


SLEEPING_THREAD = """
#include <pthread.h>
#include <unistd.h>
static void *run(void *unused) { for (;;) sleep(600); }
void start(void) { pthread_t thread; pthread_create(&thread, 0, run, 0); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_native_thread_is_attributed_to_its_library(tmp_path: Path) -> None:
    """The thread sleeps in the C library, but was started by another library."""
    source, library = tmp_path / "own.c", tmp_path / "libown.so"
    source.write_text(SLEEPING_THREAD)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).start(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until, threads = time.monotonic() + 60, []
        while not threads:
            assert time.monotonic() < until
            all_threads = proc.read_process(process.pid).threads
            threads = [
                thread for thread in all_threads if thread.tid != process.pid and thread.libraries == (str(library),)
            ]
        process.communicate(b"")
    assert [thread.rests_in for thread in threads] == ["libown.so"]


def test_sleeping_thread_has_its_system_call_however_often_it_wakes() -> None:
    script = """
        import threading, time
        def wake_often():
            while True:
                time.sleep(0.0001)
        for _ in range(3):
            threading.Thread(target=wake_often, daemon=True).start()
        print("ready", flush=True)
        time.sleep(600)
        """
    with subprocess.Popen([sys.executable, "-c", dedent(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            states = [thread for _ in range(200) for thread in proc.read_process(process.pid).threads]
        finally:
            process.kill()
    assert any(thread.state == "S" and thread.syscall_name for thread in states)
    assert not [thread for thread in states if thread.state == "S" and thread.syscall is None]
