"""Sockets and pipes: what they are, and which processes have the other end."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from safelaunch.capture import descriptor_holders, proc, sock_diag, sockets
from safelaunch.capture.descriptor_holders import with_ends
from safelaunch.model import OtherEnd, ProcessState, ThreadState
from safelaunch.system import procstat

# --- other ends of pipes and connections, with real processes that wait there -----------------------------------------

READS = "import os, sys; os.read(int(sys.argv[1]), 1)"
WRITES = "import os, sys; os.write(int(sys.argv[1]), bytes(1 << 20))"
RECEIVES = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
SLEEPS = "import time; time.sleep(600)"


@contextmanager
def started(code: str, *fds: int) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, fds)], pass_fds=fds)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def waiting(pid: int, *calls: str) -> ProcessState:
    """Returns the process once its thread is in one of these system calls."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        state = proc.read_process(pid)
        thread = state.main_thread
        if thread is not None and thread.syscall_name in calls:
            return state
        time.sleep(0.02)
    raise AssertionError(f"{pid} is not in {calls}: {state}")


def ends(state: ProcessState, *pids: int, deadline_s: float = 60.0) -> tuple[OtherEnd, ...] | None:
    (process,) = with_ends([state], pids, deadline_s=deadline_s)
    assert process.main_thread is not None
    return process.main_thread.ends


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    fds = os.pipe()
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def test_pipe_reader_ends_are_its_writers(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with started(READS, reading) as reader, started(SLEEPS, writing) as writer, started(SLEEPS, reading) as other:
        waiting(writer, "clock_nanosleep", "select")
        state = waiting(reader, "read")
        holders = ends(state, reader, writer, other, os.getpid())
    assert holders is not None and [end.pid for end in holders] == [writer, os.getpid()]
    assert all(end.name for end in holders)


def test_pipe_writer_ends_are_its_readers(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    with started(WRITES, writing) as writer, started(SLEEPS, writing) as other:
        state = waiting(writer, "write")
        holders = ends(state, other, writer, os.getpid())
    assert holders is not None and [end.pid for end in holders] == [os.getpid()]


def test_tcp_connection_ends_are_peer_process(connection: tuple[socket.socket, socket.socket]) -> None:
    with started(RECEIVES, connection[0].fileno()) as reader, started(SLEEPS) as other:
        holders = ends(waiting(reader, "recvfrom"), reader, other, os.getpid())
    assert holders is not None and [end.pid for end in holders] == [os.getpid()]


def test_socket_pair_ends_are_peer_processes() -> None:
    """Like ``multiprocessing.Pipe()``: ``/proc`` doesn't tell which ends belong together."""
    near, far = socket.socketpair()
    if sock_diag.unix_peer(os.fstat(near.fileno()).st_ino) is None:
        pytest.skip("this kernel does not tell about Unix sockets (sock_diag)")
    with near, far, started(READS, near.fileno()) as reader, started(SLEEPS, far.fileno()) as other:
        waiting(other, "clock_nanosleep", "select")
        holders = ends(waiting(reader, "read"), reader, other, os.getpid())
    assert holders is not None and [end.pid for end in holders] == [other, os.getpid()]


def test_unconnected_socket_has_no_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as alone:
        assert sock_diag.unix_peer(os.fstat(alone.fileno()).st_ino) is None
        assert sock_diag.unix_peer(os.fstat(server.fileno()).st_ino) is None


# --- other ends held by processes out of sight ------------------------------------------------------------------------
# Unread messages are counted for the whole machine, on which other programs might be active.


def closed(reader: int, *pids: int) -> bool:
    (process,) = with_ends([waiting(reader, "read")], pids, deadline_s=60.0)
    assert process.main_thread is not None
    return process.main_thread.ends_closed


def until_ended(pid: int) -> None:
    until = time.monotonic() + 60
    while (state := procstat.read(pid)) is not None and state.state != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


def nothing_else_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides unread messages of other processes' sockets."""
    real = sock_diag.unix_sockets
    if real() is None:
        pytest.skip("this kernel does not tell about Unix sockets (sock_diag)")

    def told() -> dict[int, sock_diag.UnixSocket]:
        own_targets = {target for _, target in sockets.descriptors(os.getpid())}
        each = (real() or {}).items()
        return {
            inode: unix_socket
            for inode, unix_socket in each
            if f"socket:[{inode}]" in own_targets or not unix_socket.unread
        }

    monkeypatch.setattr(descriptor_holders, "unix_sockets", told)


def test_pipe_ends_are_closed_if_all_holders_are_known(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    with near, far, started(READS, pipe[0], near.fileno()) as reader:
        nothing_else_unread(monkeypatch)
        assert closed(reader, os.getpid())
        with started(SLEEPS, pipe[1]) as child:  # which has no descriptors that others don't have
            waiting(child, "clock_nanosleep", "select")
            assert closed(reader, os.getpid(), child)
            os.kill(child, 9)
            until_ended(child)
            states = [waiting(reader, "read"), proc.read_process(child)]  # the job's own, not reaped
            process, _ = with_ends(states, [os.getpid()])
            assert process.main_thread is not None and process.main_thread.ends_closed
        far.close()
        near.close()
        assert closed(reader, os.getpid()), "no process has the other end"


def test_pipe_ends_are_open_if_descriptors_might_be_passed_on(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver might be a process in another container, or a thread with a separate descriptor table."""
    near, far = socket.socketpair()
    with near, far, started(READS, pipe[0], near.fileno()) as reader:
        near.close()
        nothing_else_unread(monkeypatch)
        assert closed(reader, os.getpid())
        monkeypatch.setattr(
            descriptor_holders, "descriptors", lambda pid, real=sockets.descriptors: real(pid) if pid == reader else ()
        )
        assert not closed(reader, os.getpid())


def test_pipe_ends_are_open_while_descriptor_is_in_flight(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as broker, socket.socket(socket.AF_UNIX) as near:
        broker.bind(str(tmp_path / "broker"))
        broker.listen()
        with started(READS, pipe[0]) as reader:
            nothing_else_unread(monkeypatch)
            assert closed(reader, os.getpid())
            near.connect(str(tmp_path / "broker"))
            socket.send_fds(near, [b"x"], [pipe[1]])
            near.close()
            assert not closed(reader, os.getpid()), "the connection is not accepted yet"
            accepted_connection, _ = broker.accept()
            with accepted_connection:
                assert not closed(reader, os.getpid()), "the message is not read yet"
                for fd in socket.recv_fds(accepted_connection, 1, 1)[1]:
                    os.close(fd)
                assert closed(reader, os.getpid())


def test_pipe_ends_of_splice_are_its_writers(pipe: tuple[int, int]) -> None:
    code = "import ctypes, os, sys; o = os.open('/dev/null', os.O_WRONLY); " + (
        "ctypes.CDLL(None).splice(int(sys.argv[1]), None, o, None, 1 << 16, 0)"
    )
    with started(code, pipe[0]) as reader, started(SLEEPS, pipe[1]) as writer:
        waiting(writer, "clock_nanosleep", "select")
        holders = ends(waiting(reader, "splice"), reader, writer)
    assert holders is not None and [end.pid for end in holders] == [writer]


def test_pipe_ends_are_open_if_process_is_unreadable(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of the process doesn't matter, because the connection that sent the end can be closed by now."""
    nothing_else_unread(monkeypatch)
    with started(SLEEPS) as old:
        waiting(old, "clock_nanosleep", "select")
        time.sleep(0.05)  # start times are distinguished by the kernel's ticks
        with started(READS, pipe[0]) as reader, started(SLEEPS, pipe[1]) as daemon:
            waiting(reader, "read")
            waiting(daemon, "clock_nanosleep", "select")
            refused = {f"/proc/{pid}/fd": 0 for pid in (old, daemon)}

            def scandir(path: str, real: Callable[[str], object] = os.scandir) -> object:
                if path in refused:
                    raise PermissionError(13, "Permission denied")
                return real(path)

            monkeypatch.setattr(os, "scandir", scandir)
            assert not closed(reader, old)
            assert not closed(reader, daemon)
            refused.clear()
            assert closed(reader, old, daemon)


def test_socket_sharers_are_other_holders() -> None:
    """Another holder can shut the socket down."""
    near, far = socket.socketpair()
    with near, far, started(READS, near.fileno()) as reader, started(SLEEPS, near.fileno()) as other:
        near.close()
        waiting(other, "clock_nanosleep", "select")
        (process,) = with_ends([waiting(reader, "read")], [reader, other, os.getpid()], deadline_s=60.0)
    assert process.main_thread is not None and process.main_thread.lock_sharers == (other,)


def test_pipe_ends_after_deadline_are_unknown(pipe: tuple[int, int]) -> None:
    """The relevant process might be among those that were not searched."""
    with started(READS, pipe[0]) as reader:
        assert ends(waiting(reader, "read"), os.getpid(), deadline_s=-1.0) is None


def test_connection_ends_in_job_are_found_after_deadline(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    with started(RECEIVES, near.fileno()) as reader, started(SLEEPS, far.fileno()) as serving:
        states = [waiting(reader, "recvfrom"), waiting(serving, "clock_nanosleep", "select")]
        process, _ = with_ends(states, [reader, serving, os.getpid()], deadline_s=-1.0)
    assert process.main_thread is not None and process.main_thread.ends is not None
    assert [end.pid for end in process.main_thread.ends] == [serving]


def test_connection_end_found_before_deadline_is_kept(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(RECEIVES, connection[0].fileno()) as reader:
        state = waiting(reader, "recvfrom")
        clock = iter((0.0, 0.0, 100.0))  # the beginning, before the first process, before the second
        fake = SimpleNamespace(monotonic=lambda: next(clock), thread_time=lambda: 0.0)
        monkeypatch.setattr(descriptor_holders, "time", fake)
        holders = ends(state, os.getpid(), reader)
        assert holders is not None and [end.pid for end in holders] == [os.getpid()]


def test_thread_without_descriptor_wait_causes_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(pid: int) -> Iterator[object]:
        raise AssertionError("searched")

    monkeypatch.setattr(descriptor_holders, "descriptors", search)
    asleep = ThreadState(7, "python", "S", syscall_name="clock_nanosleep")
    state = ProcessState(7, 1, 5, 0.0, "python", (), "S", (asleep,))
    assert with_ends([state], [os.getpid()]) == (state,)


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 10 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 11 1 0 20 4 30 10 -1
   2: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 30 10 -1
   3: 0100007F:C351 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 13 1 0 20 4 30 10 -1
   4: 0100007F:1F90 0100007F:C351 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
   5: 0100007F:C352 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 14 1 0 20 4 30 10 -1
   6: 0100007F:1F90 0100007F:C352 01 00000000:00000009 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
"""


def semaphores() -> list[str]:
    """Returns device and inode of each semaphore that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return [f"{line[3]} {line[4]}" for line in lines if len(line) == 6 and line[5].startswith("/dev/shm/sem.")]


def test_semaphore_ends_are_job_processes_that_mapped_it() -> None:
    """A daemon started by a rank has mapped it as well, but is no process of the job."""
    lock = multiprocessing.get_context("fork").Lock()
    (mapped,) = semaphores()[-1:]
    with subprocess.Popen(["sleep", "60"]) as stranger, lock:
        pid = os.fork()
        if pid == 0:
            lock.acquire()
        try:
            thread = ThreadState(7, "python", "S", syscall_name="futex", futex_file=mapped)
            state = ProcessState(7, 1, 5, 0.0, "python", (), "S", (thread,))
            (process,) = with_ends([state], [os.getpid(), pid, stranger.pid])
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            stranger.kill()
    assert {end.pid for end in process.threads[0].ends or ()} == {os.getpid(), pid}


@pytest.mark.parametrize(("context", "is_named"), [("fork", False), ("spawn", True)])
def test_semaphore_opened_by_name_has_same_file(context: str, is_named: bool) -> None:
    """Its creator shows a temporary name, which is deleted. A process that opens it shows the real name."""
    lock = multiprocessing.get_context(context).Lock()
    code = (
        "import sys, time, _multiprocessing as m\n"
        "lock = m.SemLock._rebuild(0, 1, 1, sys.argv[1]) if sys.argv[1] != '-' else None\n"
        "time.sleep(3600)"
    )
    (mapped,) = semaphores()[-1:]
    with lock, subprocess.Popen([sys.executable, "-c", code, lock._semlock.name if is_named else "-"]) as opener:
        pid = os.fork()
        if pid == 0:
            lock.acquire()
        try:
            waiting(pid, "futex")
            waiting(opener.pid, "clock_nanosleep", "select")
            state = proc.read_process(pid)
            (process,) = with_ends([state], [os.getpid(), pid, opener.pid])
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            opener.kill()
    (waiter,) = (thread for thread in process.threads if thread.tid == pid)
    assert waiter.futex_file == mapped
    assert {end.pid for end in waiter.ends or ()} == {os.getpid(), pid, *([opener.pid] if is_named else [])}
    assert waiter.fd_target.endswith(" (deleted)") is not is_named
    if is_named:
        assert waiter.fd_target == f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}"


def test_listener_is_chosen_by_address() -> None:
    line = "   0: {}:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0 0 10 0\n"
    at = {"0100007F": 20, "0200007F": 21}
    table = TABLE.splitlines()[0] + "\n" + "".join(line.format(*row) for row in at.items())
    assert sockets._listener(table, "0200007F:1F90") == 21
    assert sockets._listener(table, "0300007F:1F90") is None
    assert sockets._listener(table + line.format("00000000", 22), "0300007F:1F90") == 22
    shared = table + line.format("0200007F", 23)
    assert sockets._listener(shared, "0200007F:1F90") is None, "SO_REUSEPORT: either might have the connection"


@pytest.mark.parametrize(
    ("inode", "other"), [(11, {11: 12}), (12, {12: 11}), (13, {}), (14, {14: 10}), (99, {}), (10, {})]
)
def test_other_end_of_tcp_socket_is_found(inode: int, other: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of 14 is not accepted yet, so its listener has it."""
    tables: Callable[[object], str] = lambda path: TABLE if str(path).endswith("tcp") else ""  # noqa: E731
    monkeypatch.setattr(sockets, "_read", tables)
    assert sockets.other_ends(os.getpid(), [inode]) == other
