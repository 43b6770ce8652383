"""py-spy's recordings: what it writes, and processes that it cannot sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safelaunch.addons.record import sampling
from safelaunch.addons.record.recording import ProcessRecord, StackNumbering
from safelaunch.addons.record.sampling import SampleTarget, from_folded, from_trace, rate_for, records_of, sample
from safelaunch.capture import command
from safelaunch.job.process import identify
from safelaunch.system.errors import CaptureError
from tests.unit.addons.record.recordings import DATA

SPIN = "def spin():\n while True:\n  pass\nprint(flush=True)\nspin()"


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def taken(*processes: subprocess.Popen[bytes], folder: Path, py_spy: str | None = None) -> list[ProcessRecord]:
    begun = [(one.pid, identify(one.pid)) for one in processes]
    asked = [SampleTarget(pid, known.start_ticks if known is not None else 1) for pid, known in begun]
    return sample(asked, StackNumbering(), folder, duration_s=1.0, rate_hz=20, py_spy=py_spy)


def test_chrome_trace_is_read_with_times_and_threads() -> None:
    threads = from_trace((DATA / "gil.chrometrace.json").read_bytes())
    names = {one.name for one in threads.values()}
    assert {"MainThread", "prefetch"} <= names
    for one in threads.values():
        assert all(seconds >= 0.0 for seconds in one.seconds.values()) and sum(one.seconds.values()) > 1.0
    prefetch = next(one for one in threads.values() if one.name == "prefetch")
    assert {stack[-1].function for stack in prefetch.seconds} == {"tokenize"}


def test_folded_stacks_with_unusual_names_are_read() -> None:
    text = (
        "thread (7): main; a;f (/x/a (1).py:3);g (/x/b.py:4) 5\n"
        "thread (0x7f): ;f (/x/a.py:3) 2\nnonsense\nthread (8): t 3\n"
    )
    found = from_folded(text.encode(), 0.1)
    assert sorted(found) == [7, 127]
    ((stack, seconds),) = found[7].seconds.items()
    assert [one.function for one in stack] == [" a", "f", "g"] and stack[1].file == "/x/a (1).py"
    assert seconds == pytest.approx(0.5)


def test_main_thread_is_recognized_by_number_or_name() -> None:
    found = from_folded(b"thread (0x7): MainThread;f (/x/a.py:3) 2\nthread (0x9): t;f (/x/a.py:3) 2\n", 0.1)
    assert [(one.name, one.main) for one in records_of(4711, {"all": found}, StackNumbering())] == [
        ("MainThread", True),
        ("t", False),
    ]


@pytest.mark.parametrize(("passes", "cpus", "rate"), [(6, 2, 6), (24, 96, 20), (56, 32, 10), (700, 2, 1)])
def test_sampling_rate_stays_within_the_cpu_share(passes: int, cpus: int, rate: int) -> None:
    assert rate_for(passes, cpus, 0.01) == rate
    assert rate == 1 or passes * rate * sampling.SAMPLE_CPU_S <= 1.1 * 0.01 * cpus


def test_process_that_cannot_be_sampled_does_not_affect_others(
    spinning: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    other = subprocess.Popen(["sleep", "60"])
    try:
        seen, ended, no_python = taken(spinning, gone, other, folder=tmp_path)
    finally:
        other.kill()
        other.wait()
    main = seen.threads[0]
    assert main.main and sum(seconds for _, seconds in main.stacks) > 0 and main.active and main.gil
    assert not seen.problem
    assert ended.problem == "the process has ended" and not ended.threads
    assert "py-spy record" in no_python.problem and not no_python.threads
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_stopped_process_is_sampled_and_stays_stopped(spinning: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.kill(spinning.pid, signal.SIGSTOP)
    (seen,) = taken(spinning, folder=tmp_path)
    assert seen.threads and not seen.threads[0].active
    assert Path(f"/proc/{spinning.pid}/stat").read_text().split()[2] == "T"


def test_missing_or_hanging_py_spy_is_reported(
    spinning: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "PATIENCE_S", 0.2)
    hangs = tmp_path / "py-spy"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o700)
    (seen,) = taken(spinning, folder=tmp_path, py_spy=os.fspath(hangs))
    assert "no answer within 1.2 s" in seen.problem
    (seen,) = taken(spinning, folder=tmp_path, py_spy=os.fspath(tmp_path / "none"))
    assert "cannot start" in seen.problem


def test_concurrent_helpers_can_be_abandoned(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    slow, quick = command.run_together([["sleep", "60"], ["false"]], tmp_path, deadline_s=30.0, stop=stop)
    assert slow.timed_out and slow.returncode is not None
    assert quick.timed_out or quick.returncode == 1


def test_concurrent_helpers_end_with_their_supervisor(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(command.run_together, [["sleep", "60"], ["sleep", "60"]], tmp_path, deadline_s=60.0)
        while not asked.done():  # they might just be starting
            command.helper_reports.end_all()
            time.sleep(0.01)
        slow = asked.result()
    assert [one.returncode for one in slow] == [-9, -9]


def test_helper_does_not_start_once_the_supervisor_ends(tmp_path: Path) -> None:
    reports = command.HelperReports()
    begun: list[int] = []
    reports.send_to(begun.append)

    def start() -> str:
        try:
            with reports.running(["sleep", "60"]) as process:
                return str(process.wait())
        except CaptureError as error:
            return error.message

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(start) for _ in range(64)]
        while len(begun) < 4:
            time.sleep(0.001)
        reports.close()
        answers = {one.result() for one in asked}
    assert answers <= {"-9", "the supervisor is ending"} and "-9" in answers
