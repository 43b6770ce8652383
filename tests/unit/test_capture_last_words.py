"""Files of an ended rank: faulthandler's output and the exit record, also truncated or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import safelaunch
from safelaunch.beacon import layout, output, page
from safelaunch.beacon.caught_exceptions import SLOT_BYTES
from safelaunch.capture.cgroups import nearest
from safelaunch.capture.last_words import parse_caught, parse_fatal, read
from safelaunch.capture.memory_kills import KillCounts, count_in, deaths_between, kill_counts, kills_of
from safelaunch.capture.rank_output import TAIL_BYTES, UnfinishedLine, ends_of_files
from safelaunch.model import CaughtException, ExitCall, FatalError, Frame, MemoryKills

TWO_THREADS = """Fatal Python error: Segmentation fault

Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/train.py", line 7 in upload

Current thread 0x00007f20 [python] (most recent call first):
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 40 in <module>

Extension modules: numpy.core, torch._C (total: 2)
"""
ABORT = TWO_THREADS.replace("Current thread", "Thread").replace("Segmentation fault", "Aborted")
UPLOAD = (Frame("/usr/lib/python3.11/threading.py", 331, "wait"), Frame("/home/me/train.py", 7, "upload"))
STEP = (Frame("/home/me/train.py", 12, "step"), Frame("/home/me/train.py", 40, "<module>"))


def test_fatal_error_has_stack_of_current_thread() -> None:
    assert parse_fatal(TWO_THREADS) == FatalError("Segmentation fault", STEP, (UPLOAD, STEP))


def test_fatal_error_without_current_thread_uses_main_thread() -> None:
    assert parse_fatal(ABORT) == FatalError("Aborted", STEP, (UPLOAD, STEP))


def test_sigterm_stacks_are_no_fatal_error() -> None:
    assert parse_fatal(TWO_THREADS.split("\n", 2)[2]) is None
    assert parse_fatal("") is None


def test_fatal_error_after_sigterm_stacks_is_found() -> None:
    assert parse_fatal(TWO_THREADS.split("\n", 2)[2] + TWO_THREADS) == FatalError(
        "Segmentation fault", STEP, (UPLOAD, STEP)
    )


@pytest.mark.parametrize("length", range(0, len(TWO_THREADS), 7))
def test_truncated_fault_text_adds_no_frames(length: int) -> None:
    """Only frames that are in the text are returned."""
    fatal = parse_fatal(TWO_THREADS[:length])
    assert fatal is None or all(frame.file in TWO_THREADS[:length] for frame in fatal.frames)


def test_fault_text_of_running_python_is_parsed(tmp_path: Path) -> None:
    script = tmp_path / "die.py"
    script.write_text("import faulthandler\n\ndef die():\n    faulthandler._sigsegv()\n\ndie()\n")
    done = subprocess.run([sys.executable, "-X", "faulthandler", script], capture_output=True, text=True, check=False)
    fatal = parse_fatal(done.stderr)
    assert fatal is not None
    assert (fatal.message, [(f.line, f.function) for f in fatal.frames]) == (
        "Segmentation fault",
        [(4, "die"), (6, "<module>")],
    )


def test_exit_record_is_read(tmp_path: Path) -> None:
    frames = [{"file": "/home/me/naïve.py", "line": 25, "function": "leave"}]
    page.note(str(tmp_path / "0-0-1.exit"), {"function": "os._exit", "code": 4, "frames": frames})
    assert read(tmp_path / "0-0-1").exit_call == ExitCall("os._exit", 4, (Frame("/home/me/naïve.py", 25, "leave"),))


@pytest.mark.parametrize(
    "text", ["", "os._exit", '{"function":"os._exit"}', '{"code":4}', '{"function":"f","code":"x"}']
)
def test_damaged_exit_record_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "0-0-1.exit").write_text(text)
    assert read(tmp_path / "0-0-1").exit_call is None


def test_rank_without_files_has_no_last_words(tmp_path: Path) -> None:
    words = read(tmp_path / "0-0-1")
    assert (words.exception, words.fault_text, words.fatal, words.exit_call, words.log.value) == (
        None,
        "",
        None,
        None,
        None,
    )
    assert words.log.missing


# --- the out-of-memory killer -----------------------------------------------------------------------------------------


def test_memory_kill_is_matched_by_pid_in_kernel_log() -> None:
    log = "Memory cgroup out of memory: Killed process 41 (python)\nOut of memory: Killed process 412 (python)\n"
    none = KillCounts()
    assert kills_of(412, none, none, log).kernel_line.endswith("Killed process 412 (python)")
    assert kills_of(4, none, none, log) == MemoryKills()


def test_memory_kills_before_job_do_not_count() -> None:
    assert kills_of(1, KillCounts(3, 7), KillCounts(4, 7), "") == MemoryKills("", 1, 0)
    assert kills_of(1, KillCounts(None, 7), KillCounts(4, 7), "") == MemoryKills("", None, 0)


def test_memory_kill_count_is_parsed_for_both_cgroup_versions() -> None:
    assert count_in("low 0\noom 5\noom_kill 2\noom_group_kill 0\n") == 2
    assert count_in("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n") == 3
    assert count_in("") is None


def test_cgroup_without_memory_controller_uses_its_parent(tmp_path: Path) -> None:
    job = tmp_path / "user.slice" / "safelaunch-run"
    job.mkdir(parents=True)
    assert nearest(job, "memory.events", root=tmp_path) == ""
    (job.parent / "memory.events").write_text("oom_kill 2\n")
    assert nearest(job, "memory.events", root=tmp_path) == "oom_kill 2"
    (job / "memory.events").write_text("oom_kill 1\n")
    assert nearest(job, "memory.events", root=tmp_path) == "oom_kill 1"


def test_memory_kill_counts_of_running_kernel_are_read() -> None:
    counts = kill_counts()
    assert counts.node is None or counts.node >= 0


# --- exceptions that were caught --------------------------------------------------------------------------------------

CATCHING = """
import contextlib, sys, threading
from safelaunch.beacon import caught_exceptions
caught_exceptions.install(sys.argv[1])

def fails(kind):
    raise kind("a\\ttab, and\\na line")

def hands_on():
    try:
        fails(RuntimeError)
    finally:
        pass  # not caught here

def aside():
    with contextlib.suppress(OSError):
        fails(OSError)

for number in range(int(sys.argv[2])):
    try:
        fails(ValueError)
    except ValueError:
        pass
for item in range(3):
    pass
try:
    next(iter(()))
except StopIteration:
    pass
try:
    hands_on()
except RuntimeError:
    last = 1
thread = threading.Thread(target=aside)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 can tell")
def test_caught_exceptions_are_recorded(tmp_path: Path) -> None:
    script, notes = tmp_path / "catching.py", tmp_path / "notes"
    script.write_text(CATCHING)
    environment = {**os.environ, "PYTHONPATH": str(Path(safelaunch.__file__).parents[1])}
    subprocess.run([sys.executable, script, notes, "100"], env=environment, check=True)
    caught = parse_caught(notes.read_bytes())
    assert [exception.type for exception in caught] == ["ValueError"] * 63 + ["RuntimeError"]
    assert caught[-1].message == "a tab, and a line"
    assert (caught[-1].raised.line, caught[-1].raised.function) == (7, "fails")
    assert (Path(caught[-1].caught.file), caught[-1].caught.function) == (script, "<module>")
    assert caught[-1].caught.line == 32
    # too many exceptions: recording has stopped
    busy = tmp_path / "busy"
    subprocess.run([sys.executable, script, busy, "100000"], env=environment, check=True)
    assert "RuntimeError" not in {exception.type for exception in parse_caught(busy.read_bytes())}


def test_caught_exceptions_need_sys_monitoring(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("import sys\nvars(sys).pop('monitoring', None)\n" + CATCHING)
    environment = {**os.environ, "PYTHONPATH": str(Path(safelaunch.__file__).parents[1])}
    subprocess.run([sys.executable, script, tmp_path / "notes", "1"], env=environment, check=True)
    assert not (tmp_path / "notes").exists()


@pytest.mark.parametrize("slot", [b"", b"\xff" * 40, b"1\t2\t3", b"x\t" * 8 + b"x", b"1\tE\tm\t-2\tf\tF\t3\tg\tG"])
def test_damaged_caught_exception_slot_is_skipped(slot: bytes) -> None:
    good = b"1500000000\tE\tm\t2\tf\tF\t3\tg\tG"
    size = SLOT_BYTES
    (exception,) = parse_caught(slot.ljust(size, b"\0") + good.ljust(size, b"\0"))
    assert exception == CaughtException("E", "m", 1.5, Frame("F", 2, "f"), Frame("G", 3, "g"))


def test_deaths_between_pids_are_found_in_kernel_log() -> None:
    log = (
        "2026-11-22 16:00:00 python[99]: segfault at 0 ip 00007f\n"
        "2026-11-22 16:00:01 python[120]: segfault at 65a16c621cc0 ip 00007f1ec918b809\n"
        "2026-11-22 16:00:02 traps: python[130] general protection fault ip:7f1e sp:7ffe error:0 in libc.so.6\n"
        "2026-11-22 16:00:03 Out of memory: Killed process 140 (python) total-vm:1kB\n"
        "2026-11-22 16:00:04 python[150]: segfault at 0 ip 00007f\n"
        "2026-11-22 16:00:05 usb 1-1: new device [145]: high-speed\n"
        "2026-11-22 16:00:06 python[200]: segfault at 0 ip 00007f\n"
    )
    deaths = deaths_between(100, 200, {150}, log)
    assert [line.split()[1] for line in deaths] == ["16:00:01", "16:00:02", "16:00:03"], "150 lives: it is another one"
    assert deaths_between(100, 200, (), "") == ()
    assert len(deaths_between(0, 10**6, (), log, most=2)) == 2
    assert all(len(line) <= 200 for line in deaths_between(0, 10, (), "python[5]: segfault at " + "x" * 999))


def test_output_files_of_ranks_are_read_at_their_ends(tmp_path: Path) -> None:
    ranks = [subprocess.Popen(["sleep", "60"], stdout=out, stderr=err) for out, err in _files_of_three(tmp_path)]
    try:
        ends = ends_of_files(dict(enumerate(process.pid for process in ranks)))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert {who: [result.value for result in several] for who, several in ends.items()} == {
        (0, 1): ["both\n"],
        (1,): ["of rank 1\n"],
        (2,): ["x" * 9 + "\n" + "y" * (TAIL_BYTES - 20) + "\n"],  # whole lines at the end, each in its last state
    }


def _files_of_three(tmp_path: Path) -> list[tuple[int, int]]:
    texts = ["both\n", "of rank 1\n", "z" * 99 + "\n" + "bar\r" + "x" * 9 + "\n" + "y" * (TAIL_BYTES - 20) + "\n"]
    paths = [tmp_path / f"{number}.log" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    shared, own, long = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in paths)
    return [(shared, subprocess.DEVNULL), (shared, own), (long, long)]


# --- position of the cursor after the output --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "line_feeds"),
    [
        ([], 0),
        ([(output.STDERR, b"an epoch\n")], 0),
        ([(output.STDERR, b"\r 50%|##  | 23.92it/s")], 1),
        ([(output.STDERR, b"\r 50%|##  | 23.92it/s"), (output.STDERR, b"\n")], 0),
        ([(output.STDERR, b"50 %\r")], 1),
        ([(output.STDERR, b"\n\n"), (output.STDERR, b"\r 50%|##  |"), (output.STDERR, b"\x1b[A\x1b[A")], 3),
        ([(output.STDERR, b"an epoch\n"), (output.STDOUT, b"into a file")], 0),
    ],
)
def test_unfinished_line_counts_needed_line_feeds(
    written: list[tuple[int, bytes]], line_feeds: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not os.path.samestat(os.fstat(1), os.fstat(2)), "capfd gives stdout and stderr different files"
    ring = output.Ring(os.fspath(tmp_path / f"{layout.page_name(0, 0, os.getpid())}{layout.RING_SUFFIX}"))
    for stream, data in written:
        ring.append(stream, data)
    assert UnfinishedLine(tmp_path).line_feeds(0) == line_feeds
    assert UnfinishedLine(tmp_path).line_feeds(time.time_ns()) == 0, "safelaunch's own line came after it"


def test_unfinished_line_in_damaged_ring_needs_no_line_feed(tmp_path: Path) -> None:
    (tmp_path / f"{layout.page_name(0, 0, os.getpid())}{layout.RING_SUFFIX}").write_bytes(b"x" * 100)
    assert UnfinishedLine(tmp_path).line_feeds(0) == 0
    assert UnfinishedLine(tmp_path / "gone").line_feeds(0) == 0
