"""The sources of evidence against real processes: sleeping, blocked, stopped, frozen, in D state, dead."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safelaunch.capture import gpu, kernel_log, look, memory, native_waits, node, proc, stacks, worker_server
from safelaunch.capture.flight_recorder import flight_record_of
from safelaunch.capture.look import Target
from safelaunch.job.process import ProcessId, descendants, identify, process_table
from safelaunch.model import FileLock, GilTest, ProcessState
from safelaunch.system.errors import CaptureError
from tests.support.paths import PROGRAMS

Start = Callable[..., "Program"]
PATIENCE_S = 90.0


class Program:
    """A running Python program; ``pid``, and ``wait_for`` a state of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def wait_for(self, reached: Callable[[ProcessState], bool], patience_s: float = PATIENCE_S) -> ProcessState:
        until = time.monotonic() + patience_s
        while not reached(state := proc.read_process(self.pid)):
            assert time.monotonic() < until, state
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return state

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    programs: list[Program] = []

    def run(source: str, *argv: str) -> Program:
        script = tmp_path / f"program{len(programs)}.py"
        script.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, str(script), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        programs.append(Program(process))
        return programs[-1]

    yield run
    for program in programs:
        tree = [one.pid for one in descendants([program.pid])] if program.process.poll() is None else []
        for pid in [program.pid, *tree]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.process.communicate()


def compiled(name: str, folder: Path) -> Path:
    """A library of ``programs``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler")
    library = folder / Path(name).with_suffix(".so")
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", library, PROGRAMS / name]
    subprocess.run(command, check=True)
    return library


def in_call(name: str) -> Callable[[ProcessState], bool]:
    return lambda state: state.main_thread is not None and state.main_thread.syscall_name == name


SLEEP = """
    import threading, time
    def background():
        time.sleep(1000)
    def train():
        time.sleep(1000)
    threading.Thread(target=background, daemon=True, name="bg").start()
    train()
"""
COUNT = """
    import time
    print("up", flush=True)
    n = 0
    while True:
        n += 1
"""


# --- /proc ------------------------------------------------------------------------------------------------------------


def test_a_sleeping_process(start: Start) -> None:
    program = start(SLEEP)
    state = program.wait_for(lambda s: in_call("clock_nanosleep")(s) and len(s.threads) == 2)
    assert (state.pid, state.ppid, state.state, state.note) == (program.pid, os.getpid(), "S", "")
    assert state.cmdline[0] == sys.executable
    assert identify(program.pid) == ProcessId(program.pid, state.start_ticks)
    assert state.rss_bytes > 1 << 20
    assert {thread.wchan for thread in state.threads} == {"hrtimer_nanosleep"}


BLOCKED = {
    "pipe": ("import os; r, w = os.pipe(); os.read(r, 1)", "read", r"pipe:\[\d+\]"),
    "accept": (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()",
        "accept4",
        r"tcp 127\.0\.0\.1:\d+ \(listening\)",
    ),
    "recv with a timeout": (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        "c = socket.create_connection(s.getsockname()); c.settimeout(1000); c.recv(1)",
        "poll",
        r"tcp 127\.0\.0\.1:\d+ -> 127\.0\.0\.1:\d+ \(established\)",
    ),
    "recv of a socketpair": (
        "import socket; a, b = socket.socketpair(); a.recv(1)",
        "recvfrom",
        r"unix socket:\[\d+\] .*",
    ),
    "flock": (
        "import fcntl, os, sys; a = os.open(sys.argv[0], 0); b = os.open(sys.argv[0], 0);"
        "fcntl.flock(a, 2); fcntl.flock(b, 2)",
        "flock",
        r"/.*/program0\.py, locked by pid \d+ \(python.*\)",  # by itself
    ),
    "flock that a child holds": (
        "import fcntl, os, sys, time; r, w = os.pipe()\n"
        "held = os.open(sys.argv[0], 0); mine = os.open(sys.argv[0], 0)\n"
        "if os.fork() == 0: fcntl.flock(held, 2); os.write(w, b'x'); time.sleep(1000)\n"
        "os.close(held); os.read(r, 1); fcntl.flock(mine, 2)",
        "flock",
        r"/.*/program0\.py, locked by pid \d+ \(python.*\)",
    ),
    "open of a fifo": (
        "import os, sys; path = sys.argv[0] + '.fifo'; os.mkfifo(path); os.open(path, os.O_RDONLY)",
        "openat",
        r"/.*/program0\.py\.fifo",
    ),
}


@pytest.mark.parametrize("case", list(BLOCKED))
def test_what_a_blocked_call_waits_for(start: Start, case: str) -> None:
    source, call, target = BLOCKED[case]
    state = start(source).wait_for(in_call(call))
    main = state.main_thread
    assert main is not None
    assert re.fullmatch(target, main.fd_target), main
    told = re.search(r"locked by pid (\d+) \(python\S* program0\.py, since \S+ \S+ UTC\)$", main.fd_target)
    assert main.locked_by == (int(told[1]) if told else None)


def test_the_locks_on_the_files_of_a_process(start: Start, tmp_path: Path) -> None:
    """Of one that sleeps and asks again, as sqlite does, those of others, too; never one that it shares."""
    path = tmp_path / "cache.lock"
    opened = "import fcntl, os, sys, time; file = open(sys.argv[1], 'w'); "
    source = opened + "fcntl.flock(file, 2); child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(1000)"
    holder = start(source, str(path))
    child = int(holder.line())
    lock = FileLock(str(path), holder.pid)
    assert holder.wait_for(in_call("clock_nanosleep")).locks == (lock,)
    assert proc.read_process(child).locks == ()
    asking = start(opened + "\nwhile True: time.sleep(0.1)", str(path))
    (seen,) = asking.wait_for(lambda state: in_call("clock_nanosleep")(state) and bool(state.locks)).locks
    assert (seen.path, seen.pid) == (lock.path, lock.pid) and ", since " in seen.program
    assert start(opened + "input()", str(path)).wait_for(in_call("read")).locks == ()


def test_a_lock_that_a_child_alone_has_left(start: Start, tmp_path: Path) -> None:
    """The kernel names its parent, which took the lock."""
    opened = "import fcntl, os, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2)"
    forked = f"{opened}; child = os.fork()\nif child: file.close(); print(child, flush=True)\ntime.sleep(1000)"
    child = int(start(forked, str(tmp_path / "cache.lock")).line())
    main = start(opened, str(tmp_path / "cache.lock")).wait_for(in_call("flock")).main_thread
    assert main is not None
    assert main.locked_by == child


def test_the_tree_and_a_zombie(start: Start) -> None:
    program = start(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c",
            "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"])
        dead = subprocess.Popen(["true"])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        print(child.pid, dead.pid, flush=True)
        time.sleep(1000)
        """
    )
    child, dead = (int(pid) for pid in program.line().split())
    until = time.monotonic() + PATIENCE_S
    while len(tree := descendants([program.pid])) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert {child, dead} <= {one.pid for one in tree}
    assert all(identify(one.pid) == one for one in tree)
    state = proc.read_process(dead)
    assert state.state == "Z"
    assert "zombie" in state.note
    assert "zombie" in stacks.stack_of(dead).missing


def test_an_orphan_is_seen_with_its_rank(start: Start) -> None:
    """It may hold what its rank waits for, a semaphore, say."""
    program = start(
        """
        import os, time
        if os.fork() == 0:
            if os.fork() == 0:
                print(os.getpid(), flush=True)
                time.sleep(1000)
            os._exit(0)
        os.wait()
        time.sleep(1000)
        """
    )
    orphan = int(program.line())
    try:
        program.wait_for(in_call("clock_nanosleep"))
        target = Target(0, 0, program.pid, proc.read_quick(program.pid).start_ticks)
        taken = look.take([target], deadline_s=PATIENCE_S)
        assert [child.pid for child in taken.ranks[0].children] == [orphan]
        assert proc.orphans(orphan, process_table()) == []  # it leads no session
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(CaptureError, match="is gone"):
        proc.read_process(process.pid)
    assert identify(process.pid) is None
    assert stacks.stack_of(process.pid).missing == f"process {process.pid} is gone"
    assert "gone" in stacks.dump(process.pid).missing
    assert "gone" in node.environment_of(process.pid).missing


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_users_process(start: Start) -> None:
    program = start(SLEEP)
    program.wait_for(in_call("clock_nanosleep"))
    os.seteuid(65534)
    try:
        state = proc.read_process(program.pid)
        environment = node.environment_of(program.pid)
    finally:
        os.seteuid(0)
    assert state.state == "S"
    assert state.cmdline[0] == sys.executable
    assert "permission denied" in state.note
    assert "permission denied" in environment.missing


def test_environment_of_a_process_is_redacted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    program = start(SLEEP)
    program.wait_for(in_call("clock_nanosleep"))  # in the midst of exec it has no environment yet
    environment = node.environment_of(program.pid).value
    assert environment is not None
    assert environment["WANDB_API_KEY"] == "[redacted]"
    assert environment["NCCL_DEBUG"] == "INFO"


# --- waits in a futex -------------------------------------------------------------------------------------------------

# What has run before leaves its traces on the stack.
TRACES = """
import decimal, json, re
def deep(n): return re.sub("a+", "b", json.dumps([n] * 50)) + (deep(n - 1) if n else "")
for _ in range(20): deep(30); decimal.Decimal(2).sqrt()
"""
TAKEN = "import threading; lock = threading.Lock(); lock.acquire()\n"
FOREIGN = "import ctypes, sys; c = ctypes.CDLL(sys.argv[1] if sys.argv[1:] else None); a, b = bytes(64), bytes(64)\n"
RESTS = {
    "a lock": (TAKEN + "with lock: pass", "lock"),
    "a lock with a timeout": (TAKEN + "lock.acquire(timeout=1000)", "lock"),
    "a queue": ("import queue; queue.Queue().get()", "lock"),
    "an event": ("import threading; threading.Event().wait(1000)", "lock"),
    "a thread": (
        "import threading as t, time; a = t.Thread(target=time.sleep, args=(1000,)); a.start(); a.join()",
        "lock",
    ),
    "the GIL": (
        "import ctypes, threading; threading.Timer(0.1, ctypes.PyDLL(None).sleep, (1000,)).start()\nwhile True: pass",
        "gil",
    ),
    "a semaphore of processes": (
        "import multiprocessing; lock = multiprocessing.Lock(); lock.acquire(); lock.acquire()",
        r"_multiprocessing\..*|libpython.*|python.*",
    ),
    "ctypes, a condition": (FOREIGN + "c.pthread_cond_wait(a, b)", "libffi.*"),
    "ctypes, a semaphore": (FOREIGN + "c.sem_wait(a)", "libffi.*"),
    "a library": (FOREIGN + "c.rest(0)", "librests.so"),
    "a library, by a pointer": (FOREIGN + "c.rest(1)", "librests.so"),
    "a library, its thread": (FOREIGN + "c.rest(2)", "librests.so"),
    "a library, the system call": (FOREIGN + "c.rest(3)", "librests.so"),
}


@pytest.mark.parametrize("traces", ["", TRACES], ids=["", "after others"])
@pytest.mark.parametrize("case", list(RESTS))
def test_whose_code_waits_in_a_futex(start: Start, tmp_path: Path, case: str, traces: str) -> None:
    source, expected = RESTS[case]
    words = [os.fspath(compiled("librests.c", tmp_path))] if case.startswith("a library") else []
    program = start(f"{traces}\n{source}", *words)

    def rests(state: ProcessState, words: str = ".+") -> bool:
        main = state.main_thread
        return main is not None and main.syscall_name == "futex" and re.fullmatch(words, main.rests_in) is not None

    program.wait_for(lambda state: rests(state, expected))
    for _ in range(10):
        assert rests(state := program.wait_for(rests), expected), state.main_thread


@pytest.mark.torch
def test_who_waits_for_a_collective_rests_in_torch(start: Start, tmp_path: Path) -> None:
    source = """
        import sys, time
        import torch, torch.distributed as dist
        rank, file = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        print("up", flush=True)
        if rank:
            time.sleep(10000)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    """
    ranks = [start(source, str(number), os.fspath(tmp_path / "store")) for number in range(2)]
    assert [rank.line() for rank in ranks] == ["up", "up"]
    state = ranks[0].wait_for(lambda state: in_call("futex")(state) and state.threads[0].rests_in not in ("", "lock"))
    assert state.threads[0].rests_in.startswith("libtorch")


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200, b"#!/bin/sh\n" * 9])
def test_a_file_that_is_no_program_has_no_functions(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    found = native_waits.Resting(memory.ProcessMemory(os.getpid()))._functions(memory.Mapping(0, 1, 0, os.fspath(file)))
    assert found == ()


# --- stacks -----------------------------------------------------------------------------------------------------------


def stack_of(pid: int, state: ProcessState | None = None, **more: Any) -> stacks.Result[stacks.StackSample]:
    """With a deadline that a busy machine doesn't miss."""
    return stacks.stack_of(pid, state, **{"deadline_s": PATIENCE_S, **more})


def functions(result: stacks.Result[stacks.StackSample]) -> list[str]:
    assert result.value is not None, result.missing
    main = result.value.main_thread
    assert main is not None
    return [frame.function for frame in main.frames]


def test_stacks_of_a_sleeping_process(start: Start) -> None:
    program = start(SLEEP)
    state = program.wait_for(lambda s: in_call("clock_nanosleep")(s) and len(s.threads) == 2)
    result = stack_of(program.pid, state)
    assert functions(result) == ["train", "<module>"]
    assert (result.how, result.note) == ("py-spy dump --json --nonblocking", "")
    assert result.value is not None
    text = stacks.to_text(result.value, state)
    assert f'Thread {program.pid} (idle): "MainThread" [S, clock_nanosleep, in hrtimer_nanosleep]\n    train (' in text
    assert '"bg"' in text


def test_which_threads_ran_while_they_were_read(start: Start) -> None:
    program = start(
        """
        import threading, time
        def spin():
            while True: pass
        def rest():
            time.sleep(1000)
        for target in (spin, rest):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()
        rest()
        """
    )
    program.wait_for(lambda state: len(state.threads) == 3 and state.threads[2].syscall_name == "clock_nanosleep")
    sample = stack_of(program.pid).value
    assert sample is not None
    assert {thread.name: thread.torn for thread in sample.threads} == {"MainThread": False, "spin": True, "rest": False}
    assert ", ran while it was read" in stacks.to_text(sample)
    threads = proc.scheduled(program.pid)  # py-spy does not tell the kernel's number of Python 3.10's threads
    assert [proc.tid_of(memory.ProcessMemory(program.pid), thread.ident, threads) for thread in sample.threads] == [
        thread.os_tid for thread in sample.threads
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_threads_of_a_process_in_a_container_have_their_numbers_here(start: Start) -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", textwrap.dedent(SLEEP)]
    program = start("import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words)

    def sleeper() -> ProcessState | None:
        found = [proc.read_process(one.pid) for one in descendants([program.pid])]
        return next((one for one in found if in_call("clock_nanosleep")(one) and len(one.threads) == 2), None)

    program.wait_for(lambda _: sleeper() is not None)
    inside = sleeper()
    assert inside is not None
    sample = stack_of(inside.pid).value
    assert sample is not None and sample.main_thread is not None
    threads = proc.scheduled(inside.pid)
    assert {thread.os_tid for thread in sample.threads} == set(threads)
    assert not any(thread.active or thread.torn for thread in sample.threads)
    assert [proc.tid_of(memory.ProcessMemory(inside.pid), thread.ident, threads) for thread in sample.threads] == [
        thread.os_tid for thread in sample.threads
    ]


def test_a_stopped_process_stays_stopped(start: Start) -> None:
    program = start(SLEEP)
    program.wait_for(in_call("clock_nanosleep"))
    os.kill(program.pid, signal.SIGSTOP)
    program.wait_for(lambda s: s.state == "T")
    result = stack_of(program.pid)
    assert functions(result) == ["train", "<module>"]
    assert proc.state_letter(program.pid) == "T"


@pytest.fixture
def uninterruptible(start: Start, tmp_path: Path) -> Program:
    """A Python process in D state: it waits in vfork for a child that does not exec."""
    library = compiled("libwait.c", tmp_path)
    program = start(
        """
        import ctypes, sys
        def load_shard():
            ctypes.CDLL(sys.argv[1]).wait_d()
        load_shard()
        """,
        os.fspath(library),
    )
    # With its child: a process that loads a library waits for the disk in this state as well.
    program.wait_for(lambda state: state.state == "D" and bool(descendants([program.pid])))
    return program


def test_uninterruptible_sleep(uninterruptible: Program) -> None:
    state = proc.read_process(uninterruptible.pid)
    assert state.main_thread is not None
    assert state.main_thread.wchan
    result = stack_of(uninterruptible.pid, state)
    assert functions(result)[-2:] == ["load_shard", "<module>"]
    assert "uninterruptible sleep" in stacks.with_c_frames_of(uninterruptible.pid, state, deadline_s=20).missing


def test_py_spy_that_waits_for_a_d_state_is_given_up(uninterruptible: Program) -> None:
    blocked = stacks.dump(uninterruptible.pid, deadline_s=0.5)
    assert "no answer within 0.5 s" in blocked.missing
    # When the wait ends, the process goes on as if nobody had looked.
    child, *_ = descendants([uninterruptible.pid])
    os.kill(child.pid, signal.SIGKILL)
    assert uninterruptible.process.wait(PATIENCE_S) == 0


def test_a_py_spy_killed_at_any_moment_leaves_its_target_running(start: Start) -> None:
    program = start(COUNT)
    assert program.line() == "up"
    for milliseconds in range(1, 31):
        stacks.dump(program.pid, deadline_s=milliseconds / 1000)
        assert proc.state_letter(program.pid) not in ("T", "t")
    before = proc.read_process(program.pid).threads[0].cpu_ms
    program.wait_for(lambda state: state.threads[0].cpu_ms > before)


def test_native_code_that_holds_the_gil(start: Start) -> None:
    program = start(
        """
        import ctypes
        def tokenize():
            ctypes.PyDLL(None).sleep(1000)
        tokenize()
        """
    )
    program.wait_for(in_call("clock_nanosleep"))
    result = stack_of(program.pid)
    assert functions(result) == ["tokenize", "<module>"]
    assert result.value is not None
    main = result.value.main_thread
    assert main is not None
    assert (main.owns_gil, main.active) == (True, False)
    native = stacks.with_c_frames_of(program.pid, deadline_s=PATIENCE_S)
    assert "sleep" in functions(native)
    assert native.value is not None
    assert native.value.native


def test_not_a_python_process() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert "not a Python process" in stack_of(process.pid).missing
    finally:
        process.kill()
        process.wait()


def test_eight_processes_at_once(start: Start) -> None:
    from concurrent.futures import ThreadPoolExecutor

    programs = [start(SLEEP) for _ in range(8)]
    for program in programs:
        program.wait_for(in_call("clock_nanosleep"))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda program: stack_of(program.pid), programs))
    assert all(functions(result) == ["train", "<module>"] for result in results)


FAKES = {
    "hanging": ("#!/bin/sh\nexec sleep 1000\n", 0o755, "no answer within 0.5 s"),
    "hanging, its child holds the pipe": ("#!/bin/sh\nsleep 1000\n", 0o755, "no answer within 0.5 s"),
    "gone, its child holds the pipe": ("#!/bin/sh\nsleep 1000 &\n", 0o755, "no answer within 0.5 s"),
    "not executable": ("#!/bin/sh\n", 0o644, "cannot start"),
    "garbage": ("#!/bin/sh\necho garbage\n", 0o755, "unreadable output"),
    "failing": ("#!/bin/sh\necho 'Error: no luck' >&2\nexit 1\n", 0o755, "no luck"),
    "endless": ("#!/bin/sh\nexec cat /dev/zero\n", 0o755, "no answer within 0.5 s"),
}


@pytest.mark.parametrize("case", list(FAKES))
def test_a_py_spy_that_does_not_work(tmp_path: Path, case: str) -> None:
    script, mode, expected = FAKES[case]
    fake = tmp_path / "py-spy"
    fake.write_text(script)
    fake.chmod(mode)
    result = stacks.dump(os.getpid(), deadline_s=0.5 if "0.5 s" in expected else PATIENCE_S, py_spy=str(fake))
    assert expected in result.missing


def test_no_py_spy_at_all(tmp_path: Path) -> None:
    assert "cannot start" in stacks.dump(os.getpid(), py_spy=str(tmp_path / "missing")).missing


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup of a mounted freezer: v1's, or any of v2's."""
    for root in (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")):
        group = root / f"safelaunch-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "cgroup.procs").exists():
            break
        group.rmdir()
    else:
        pytest.skip("no cgroup may be made here")
    yield group
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:  # the kernel frees the group when its last process is reaped
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)


def test_a_frozen_process(freezer: Path, start: Start) -> None:
    program = start(SLEEP)
    program.wait_for(in_call("clock_nanosleep"))
    (freezer / "cgroup.procs").write_text(str(program.pid))
    v1 = freezer / "freezer.state"
    switch, on, off = (v1, "FROZEN", "THAWED") if v1.exists() else (freezer / "cgroup.freeze", "1", "0")
    switch.write_text(on)
    try:
        state = program.wait_for(lambda s: s.frozen)
        result = stack_of(program.pid, state)
        assert functions(result) == ["train", "<module>"]
    finally:
        switch.write_text(off)
        program.process.kill()
        program.process.wait()


# --- the worker server ------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        yield path, server


def answer(server: socket.socket, *parts: bytes, hold: bool = False) -> threading.Thread:
    """Answer one connection with ``parts``; with ``hold`` keep it open until the client closes it."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            for part in parts:
                connection.sendall(part)
            while hold and connection.recv(4096):
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    "parts", [(HEAD + b"pong",), (HEAD[:20], HEAD[20:] + b"po", b"ng"), (HEAD + b"pong and more",)]
)
def test_an_answer_ends_with_its_length_not_with_the_connection(
    listener: tuple[str, socket.socket], parts: tuple[bytes, ...]
) -> None:
    path, server = listener
    thread = answer(server, *parts, hold=True)
    begin = time.monotonic()
    assert worker_server.post(path, "ping", deadline_s=PATIENCE_S) == b"pong"
    assert time.monotonic() - begin < PATIENCE_S
    thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("parts", "hold", "reason"),
    [
        ((), True, "timeout"),
        ((HEAD + b"po",), True, "timeout"),
        ((HEAD + b"po",), False, "broken"),
        ((), False, "broken"),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), False, "no handler"),
        ((b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno",), False, "broken"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",), True, "broken"),
        ((b"SSH-2.0\r\n\r\n",), True, "broken"),
    ],
)
def test_an_answer_that_is_none(
    listener: tuple[str, socket.socket], parts: tuple[bytes, ...], hold: bool, reason: str
) -> None:
    path, server = listener
    thread = answer(server, *parts, hold=hold)
    with pytest.raises(worker_server.Unanswered) as caught:
        worker_server.post(path, "ping", deadline_s=0.3 if reason == "timeout" else PATIENCE_S)
    assert caught.value.kind == reason
    thread.join(PATIENCE_S)


def test_request_to_server_that_accepts_nothing_times_out(listener: tuple[str, socket.socket], tmp_path: Path) -> None:
    path, _ = listener
    for _ in range(4):  # fills the queue: then connecting itself fails
        with pytest.raises(worker_server.Unanswered) as caught:
            worker_server.post(path, "ping", deadline_s=0.1)
        assert caught.value.kind == "timeout"
    assert worker_server.gil_test(path, deadline_s=0.1) == GilTest(ping=False)
    assert worker_server.gil_test(str(tmp_path / "none")) == GilTest()
    capture = flight_record_of(str(tmp_path / "none"))
    assert capture.record.missing == "the worker server isn't running"
    too_long = str(tmp_path / ("x" * 200))
    with pytest.raises(worker_server.Unanswered) as caught:
        worker_server.post(too_long, "ping", deadline_s=0.1)
    assert caught.value.kind == "broken"


SERVER = """
    import ctypes, os, sys, time
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _WorkerServer, _register_handler, _dump_fr_trace
    def reply(body):
        def handler(request, response):
            response.set_content(body(), "application/octet-stream")
            response.set_status(200)
        return handler
    _register_handler("safelaunch_gil", reply(lambda: b"ok"))
    _register_handler("safelaunch_flight_record", reply(_dump_fr_trace))
    server = _WorkerServer(sys.argv[1])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=0, world_size=1)
    for _ in range(3):
        dist.all_reduce(torch.ones(4, 3))
    print("up", flush=True)
    sys.stdin.readline()
    ctypes.PyDLL(None).sleep(1000)
"""


@pytest.mark.torch
def test_the_worker_server_of_a_real_rank(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "ws")
    program = start(SERVER, path)
    assert program.line() == "up"
    assert worker_server.gil_test(path, deadline_s=PATIENCE_S) == GilTest(ping=True, python=True)
    # A handler of its own, unlike the beacon's, imports torch._inductor for the frames: seconds on a busy machine.
    free = flight_record_of(path, json_deadline_s=PATIENCE_S, pickle_deadline_s=PATIENCE_S)
    assert free.record.value is not None
    assert [entry.op for entry in free.record.value.entries] == ["gloo:all_reduce"] * 3
    assert free.record.value.entries[-1].frames[-1].file.endswith("program0.py")
    assert free.json.value is not None
    assert free.pickle.value is not None

    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    program.wait_for(in_call("clock_nanosleep"))
    # The ping is answered by a thread of the server: on a busy machine that can take more than a moment.
    tested = (worker_server.gil_test(path, deadline_s=deadline_s) for deadline_s in (1.0, 5.0, 30.0))
    assert next((found for found in tested if found.ping), None) == GilTest(ping=True, python=False)
    held = flight_record_of(path, json_deadline_s=PATIENCE_S, pickle_deadline_s=0.3)
    assert held.record.value is not None
    assert held.record.note == "without frames"
    assert "no answer within 0.3 s" in held.pickle.missing
    assert flight_record_of(path, ask_python=False).pickle.missing == "not queried: the GIL isn't free"

    os.kill(program.pid, signal.SIGSTOP)
    # Every thread: the server's may run on for a moment, and answer.
    program.wait_for(lambda state: all(thread.state == "T" for thread in state.threads))
    assert worker_server.gil_test(path, deadline_s=0.3) == GilTest(ping=False)


@pytest.mark.torch
def test_a_loader_worker_is_recognised(start: Start) -> None:
    program = start(
        """
        import time
        import torch.utils.data as data
        class Shards(data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                time.sleep(1000)
        next(iter(data.DataLoader(Shards(), num_workers=1)))
        """
    )
    until = time.monotonic() + PATIENCE_S
    while not (tree := descendants([program.pid])) and time.monotonic() < until:
        time.sleep(0.02)
    worker = tree[0].pid
    assert len(tree) == 1
    Program.wait_for(_of(program, worker), in_call("clock_nanosleep"))
    result = stack_of(worker)
    assert functions(result)[0].endswith("__getitem__")
    assert result.value is not None
    assert proc.role_of(proc.read_process(worker), (result.value,)) == "dataloader worker"


def _of(program: Program, pid: int) -> Program:
    other = Program(program.process)
    other.pid = pid
    return other


# --- the node ---------------------------------------------------------------------------------------------------------


def test_gpus_or_the_reason_why_not(tmp_path: Path) -> None:
    result = gpu.gpus(deadline_s=PATIENCE_S)
    assert (result.value is None) == bool(result.missing)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    stuck = gpu.gpus(deadline_s=0.3, python=str(fake))
    assert "the driver might be stuck" in stuck.missing


def test_the_users_own_modules_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    assert "wrong module" not in gpu.gpus(deadline_s=PATIENCE_S).missing


def test_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexec /bin/sleep 1000\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the driver might be stuck" in gpu.nvidia_smi_text(deadline_s=0.3).missing


def test_kernel_log_versions_and_resources(tmp_path: Path) -> None:
    kernel = kernel_log.kernel_log()
    assert (kernel.value is None) == bool(kernel.missing)
    versions = node.versions().value
    assert versions is not None
    assert versions["kernel"] == os.uname().release
    resources = node.resources(pid=os.getpid(), cwd=str(tmp_path / "missing")).value
    assert resources is not None
    assert resources.memory_bytes["MemTotal"] > 0
    assert resources.disks["/tmp"]["total_bytes"] > 0
    assert resources.disks[str(tmp_path / "missing")] == {"missing": "No such file or directory"}
