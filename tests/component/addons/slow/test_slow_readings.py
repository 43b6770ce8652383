"""Readings of real processes that are kept from running: ``readings.measure``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from safelaunch.addons.slow.readings import RankReadings, measure
from safelaunch.capture.look import Target
from safelaunch.system import procstat
from tests.support.nvml import stub
from tests.support.waiting import until

SPIN, SLEEP = "while True: pass", "import time; time.sleep(600)"


@contextmanager
def running(program: str, cpus: set[int] | None = None) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        if cpus is not None:
            os.sched_setaffinity(process.pid, cpus)
        until(lambda: procstat.read(process.pid) is not None, "the process")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def measured(*pids: int, seconds: float = 1.5) -> list[RankReadings]:
    stats = [procstat.read(pid) for pid in pids]
    targets = [Target(rank, rank, stat.pid, stat.start_ticks) for rank, stat in enumerate(stats) if stat is not None]
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return measure(targets, "a", stop)


def test_stopped_process_differs_from_a_sleeping_one() -> None:
    with running(SLEEP) as asleep, running(SLEEP) as stopped:
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: (procstat.read(stopped) or procstat.Stat(0, "", "", 0, 0, 0, 0)).state == "T", "the stop")
        sleeping, halted = measured(asleep, stopped)
    assert sleeping.shares["stopped"] == 0.0 and halted.shares["stopped"] == 1.0


def test_process_that_shares_its_cpu_waits_for_it_and_the_rival_is_named() -> None:
    cpu = {min(os.sched_getaffinity(0))}
    with running(SPIN, cpu) as one, running(SPIN, cpu):
        (reading,) = measured(one, seconds=3.0)
    if "cpu-queue" not in reading.shares:
        pytest.skip("this kernel doesn't count the time in a run queue")
    assert reading.shares["cpu-queue"] > 0.3
    assert reading.rival.endswith(" CPUs")  # on a busy machine, some other process might have used more


def test_process_that_ends_has_no_readings() -> None:
    with running(SLEEP) as staying, running("import time; time.sleep(0.5)") as ending:
        readings = measured(staying, ending)
    assert [reading.rank for reading in readings] == [0]


def test_ranks_gpus_are_read_with_their_clocks_and_the_errors_that_grew(
    node: stub.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    with running(SLEEP) as one, running(SLEEP) as other:
        users = [f"process {number} {pid} {stub.GIB}" for number, pid in enumerate((one, other))]
        slow = stub.values(1, sm_clock=1300, replays=40)
        lines = [*users, *stub.values(0, sm_clock=1980, replays=7)]
        node.write(*lines, *stub.values(1, sm_clock=1300, replays=9))
        threading.Timer(1.5, node.write, (*lines, *slow)).start()
        first, second = measured(one, other, seconds=3.0)
    assert first.gpu is not None and second.gpu is not None
    assert (first.gpu.sm_clock_mhz, second.gpu.sm_clock_mhz) == (1980, 1300)
    assert (first.gpu_errors, second.gpu_errors) == ({}, {"pcie_replays": 31})
