"""Looks do not disturb a healthy process: calls that a ptrace stop ends early, in code that takes this for an error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safelaunch.capture import look, proc, stacks
from safelaunch.job.process import descendants
from tests.support.paths import PROGRAMS

PROGRAM = """
import ctypes, subprocess, sys, time
library, semaphore, writes = sys.argv[1:]
if writes:
    subprocess.Popen([sys.executable, "-u", "-c", writes])
ctypes.CDLL(library).begin(int(semaphore))
print("up", file=sys.stderr, flush=True)
time.sleep(10000)
"""
LINE = 300_000
WRITES = f"import sys\nwhile True: sys.stdout.write('x' * {LINE} + '\\n')"


@pytest.fixture
def semaphore() -> Iterator[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.semget(0, 1, 0o600)  # IPC_PRIVATE
    assert found >= 0
    yield found
    libc.semctl(found, 0, 0)  # IPC_RMID


@contextlib.contextmanager
def running(folder: Path, semaphore: int, writes: str = "") -> Iterator[subprocess.Popen[str]]:
    compiler = shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler")
    source, library = PROGRAMS / "libundisturbed.c", folder / "libundisturbed.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    command = [sys.executable, "-c", PROGRAM, library, str(semaphore), writes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and process.stderr.readline() == "up\n"
            while len(proc.read_process(process.pid).threads) < 5:
                time.sleep(0.01)
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    for pid in [*(one.pid for one in descendants([process.pid])), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def target(process: subprocess.Popen[str]) -> look.Target:
    state = proc.read_quick(process.pid)
    return look.Target(0, 0, process.pid, state.start_ticks)


@pytest.mark.parametrize(
    "times", [60, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)], id="1000")]
)
def test_looks_disturb_nothing(tmp_path: Path, semaphore: int, times: int) -> None:
    lines: list[int] = []

    def read_slowly() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(len(line.rstrip("\n")))
            time.sleep(0.01)

    with running(tmp_path, semaphore, WRITES) as process:
        reader = threading.Thread(target=read_slowly)
        reader.start()
        read, calls = 0, set()
        for _ in range(times):
            seen = look.take([target(process)], deadline_s=60.0).ranks[0].processes
            read += sum(one.stack.value is not None for one in seen)
            calls |= {thread.syscall_name for one in seen if one.state for thread in one.state.threads}
            assert process.poll() is None, process.stderr and process.stderr.read()
        end(process)
        reader.join()
    assert {"recvfrom", "epoll_wait", "rt_sigtimedwait", "write"} <= calls
    assert len(lines) > times / 10 and set(lines[1:-1]) == {LINE}
    assert read >= 1.9 * times


def test_a_stop_would_disturb_it(tmp_path: Path, semaphore: int) -> None:
    """So the test above can fail."""
    with running(tmp_path, semaphore) as process:
        for _ in range(20):
            if process.poll() is not None:
                break
            stacks.dump(process.pid, deadline_s=60.0)
        assert process.wait(60) == 3 and process.stderr is not None
        assert process.stderr.read().endswith(": EINTR\n")
