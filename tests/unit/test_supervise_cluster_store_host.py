"""The helper that serves the store: it starts once, on its host alone, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safelaunch.job import process
from safelaunch.leases.ports import listening
from safelaunch.supervise.cluster.store import Address, StoreClient
from safelaunch.supervise.cluster.store_host import StoreHost, is_this_host
from tests.support.waiting import until

STARTS_S = 100.0  # torch is imported
PARENT = """
import sys
from pathlib import Path
from safelaunch.supervise.cluster.store_host import StoreHost
from safelaunch.supervise.cluster.store import Address
host = StoreHost(Address("127.0.0.1", int(sys.argv[1])), sys.executable, Path(sys.argv[2]), lambda pid: print(pid))
host.start()
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., StoreHost]]:
    made: list[StoreHost] = []

    def start(host: str, port: int, python: str = sys.executable) -> StoreHost:
        one = StoreHost(Address(host, port), python, tmp_path / f"{len(made)}.log", lambda pid: None)
        one.start()
        made.append(one)
        return one

    yield start
    for one in made:
        one.close()


def port() -> int:
    import random

    taken = listening()
    return next(number for number in iter(lambda: random.randrange(20_000, 32_000), 0) if number not in taken)


@pytest.mark.torch
@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.nightly), "localhost"])
def test_first_supervisor_on_a_host_starts_the_store(make: Callable[..., StoreHost], host: str) -> None:
    number = port()
    one, other = make(host, number), make(host, number)
    assert [one.has_started, other.has_started] == [True, False]
    for address in (Address(host, number), Address("127.0.0.1", number)):
        store = StoreClient(address, deadline_s=STARTS_S)
        store.add("n", 1, deadline_s=30)
        store.close()
    assert (one.problem, other.problem) == ("", "")
    one.close()
    assert number not in listening()


@pytest.mark.torch
@pytest.mark.parametrize("stopped", [False, True])
def test_store_ends_if_its_parent_is_killed(tmp_path: Path, stopped: bool) -> None:
    words = [sys.executable, "-c", PARENT, str(port()), str(tmp_path / "log")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = process.identify(int(parent.stdout.readline()))
        assert helper is not None and helper.is_alive()
        if not stopped:  # else it has not begun to import torch
            StoreClient(Address("127.0.0.1", int(words[3])), deadline_s=STARTS_S).close()
        parent.send_signal(signal.SIGKILL)
    until(lambda: not helper.is_alive(), "its end")


@pytest.mark.torch
def test_store_host_survives_signals_to_the_whole_job(make: Callable[..., StoreHost]) -> None:
    one = make("127.0.0.1", port())
    for number in process.FORWARDED:
        os.kill(one._pid, number)
    store = StoreClient(one.address, deadline_s=STARTS_S)
    assert store.add("n", 1, deadline_s=30) == 1
    store.close()


@pytest.mark.torch
def test_stopped_store_does_not_delay_the_end(make: Callable[..., StoreHost]) -> None:
    one = make("127.0.0.1", port())
    helper = process.identify(one._pid)
    assert helper is not None
    helper.send(signal.SIGSTOP)
    one.close()
    assert not helper.is_alive()


def test_interpreter_without_torch_is_reported(make: Callable[..., StoreHost], tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    without.chmod(0o700)
    one = make("127.0.0.1", port(), os.fspath(without))
    until(lambda: one.problem, "its end")
    assert "No module named 'torch'" in one.problem


def test_nonexistent_interpreter_is_reported(make: Callable[..., StoreHost]) -> None:
    one = make("127.0.0.1", port(), "/nonexistent/python")
    assert not one.has_started
    assert "No such file" in one.problem


def test_other_hosts_start_no_store(make: Callable[..., StoreHost]) -> None:
    assert not make("192.0.2.1", port()).has_started  # a documentation address
    assert is_this_host("127.0.0.1") and is_this_host("localhost")
    assert not is_this_host("host.invalid")
