"""The journal: cut off at every byte, written to a full disk, opened twice; what --resume makes of it."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.addons.sweep import journal as module
from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.journal import Attempt, Journal, attempts, history, parse
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.remains import recovered, wait_for_remains
from safelaunch.addons.sweep.sweep import Rules, Sweep
from safelaunch.job.process import ProcessId, identify
from safelaunch.system.errors import SafelaunchError, UsageError

GONE = ProcessId(2**22 - 7, 1)
DONE = AttemptOutcome("succeeded", 0, 1.5, 40, ("GPU-1",), "", {"loss": 0.5, "tag": "é"})
JOBS = [SweepJob(name, ("t.py", name), "") for name in ("a", "b", "c")]


def journal_of_three(path: Path) -> None:
    """a succeeded, b failed and then succeeded, c runs."""
    journal = Journal(path)
    journal.record_launch(3)
    for job, number, outcome in [
        (JOBS[0], 1, DONE),
        (JOBS[1], 1, AttemptOutcome("failed", 1, 0.1, bundle="/b")),
        (JOBS[1], 2, DONE),
        (JOBS[2], 1, None),
    ]:
        journal.record_start(job, number, GONE)
        if outcome is not None:
            journal.record_end(job.name, number, outcome)
    journal.close()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_journal_reads_back_its_records(tmp_path: Path) -> None:
    path = tmp_path / "s" / "journal.jsonl"
    journal_of_three(path)
    found = attempts(parse(path.read_bytes(), "")[0])
    assert [(each.job, each.number, each.outcome and each.outcome.state) for each in found] == [
        ("a", 1, "succeeded"),
        ("b", 1, "failed"),
        ("b", 2, "succeeded"),
        ("c", 1, None),
    ]
    assert found[0].outcome == DONE
    assert found[0].process == GONE
    assert found[0].fingerprint == JOBS[0].fingerprint


def test_journal_cut_at_any_byte_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every length, the file opens, the sweep continues to its end, and all records are whole lines.

    Written data is readable whether it is on the disk or not, so thousands of fsyncs would only take time.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = tmp_path / "whole"
    journal_of_three(whole)
    data = whole.read_bytes()
    path = tmp_path / "journal.jsonl"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        journal = Journal(path)
        acknowledged = [json.loads(line) for line in data[:length].split(b"\n")[:-1]]
        assert list(journal.records)[: len(acknowledged)] == acknowledged
        assert len(journal.records) - len(acknowledged) <= 1
        known = history(attempts(journal.records), JOBS)
        done = {name for name, before in known.before.items() if before.outcome is not None}
        assert done >= {
            each["job"] for each in acknowledged if each["event"] == "ended" and each["state"] == "succeeded"
        }
        sweep = Sweep(JOBS, Rules(1, 9), known.before)
        while not sweep.finished:
            job = sweep.next()
            assert job is not None
            sweep.mark_started(job)
            assert job.name not in done, "a finished job is repeated"
            journal.record_start(job, sweep.tracks[job.name].attempts, GONE)
            journal.record_end(job.name, sweep.tracks[job.name].attempts, DONE)
            sweep.mark_ended(job.name, DONE)
        journal.close()
        records, good = parse(path.read_bytes(), "")
        assert good == path.stat().st_size
        assert history(attempts(records), JOBS).done == 3
        numbers = [(each.job, each.number) for each in attempts(records)]
        assert len(numbers) == len(set(numbers)), "two attempts have the same number, and so the same log"


@pytest.mark.parametrize("tail", [b"\0" * 40, b'{"event": "sta', b"\xff\xfe", b"[1]", b"7"])
def test_journal_with_torn_last_line_is_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "j"
    journal_of_three(path)
    before = path.read_bytes()
    path.write_bytes(before + tail)
    journal = Journal(path)
    assert path.read_bytes() == before
    journal.record_launch(3)
    journal.close()
    assert len(parse(path.read_bytes(), "")[0]) == before.count(b"\n") + 1


def test_journal_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal_of_three(path)
    before = path.read_bytes()
    path.write_bytes(before[:-1])
    Journal(path).close()
    assert path.read_bytes() == before


def test_journal_damaged_in_the_middle_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal_of_three(path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:-5]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match=r"j:3: the journal is damaged"):  # exit code 2: nothing was started
        Journal(path)


def test_journal_line_torn_in_its_middle_is_cut(tmp_path: Path) -> None:
    """After a power failure, the second page might exist without the first: it was never acted upon."""
    path = tmp_path / "j"
    path.write_bytes(b'{"event": "begun", "pid": 1}\n\0\0\0"}\n')
    journal = Journal(path)
    assert [record["pid"] for record in journal.records] == [1]
    journal.close()
    assert path.read_bytes() == b'{"event": "begun", "pid": 1}\n'


def test_journal_in_use_is_rejected(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    first.record_launch(1)
    with pytest.raises(UsageError, match=f"another safelaunch colaunch runs this sweep \\(pid {os.getpid()}\\)"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


def test_journal_that_is_a_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "j").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot write the sweep there"):
        Journal(tmp_path / "j")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("written", [0, 10])
def test_journal_on_full_disk_keeps_ends_and_allows_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.record_start(JOBS[0], 1, GONE)
    before = path.read_bytes()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if written:
            return real(descriptor, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    journal.record_end("a", 1, DONE)
    assert not journal.catch_up()
    with pytest.raises(OSError, match="earlier records"):
        journal.record_start(JOBS[1], 1, GONE)
    assert path.read_bytes() == before, "nothing must follow half a line"
    monkeypatch.setattr(module.os, "write", real)
    journal.record_start(JOBS[1], 1, GONE)
    journal.close()
    found = attempts(parse(path.read_bytes(), "")[0])
    assert [(each.job, each.outcome) for each in found] == [("a", DONE), ("b", None)]


def test_journal_records_of_other_versions_are_skipped() -> None:
    started = {"event": "started", "job": "a", "attempt": 1, "fingerprint": "f", "pid": 1, "start_ticks": 2}
    ended = {"event": "ended", "job": "a", "attempt": 1, "state": "glorious", "exit_code": 0}
    found = attempts([{"event": "new"}, {"job": "a"}, started, ended, {**ended, "attempt": "x"}, {**ended, "job": "b"}])
    assert found == (Attempt("a", 1, "f", ProcessId(1, 2)),)


@pytest.mark.parametrize(
    ("left", "state"), [("0\n", "succeeded"), ("1\n", None), ("0", None), ("", None), (None, None)]
)
def test_success_while_colaunch_was_killed_is_recovered(tmp_path: Path, left: str | None, state: str | None) -> None:
    paths = SweepPaths(tmp_path)
    paths.job("a").mkdir(parents=True)
    paths.log("a", 1).write_text("loss=0.5\n")
    if left is not None:
        paths.exit_file("a", 1).write_text(left)
    began_s = time.time() - 60
    found = recovered(
        Attempt("a", 1, "f", GONE, None, ("GPU-1",), began_s), [replace(JOBS[0], metrics=("loss=(.*)",))], paths
    )
    assert (found.state if found else None) == state
    if found:
        assert 59 < found.duration_s < 70
        assert (found.gpus, found.metrics) == (("GPU-1",), {"loss": 0.5})
    assert recovered(Attempt("a", 1, "f", GONE), JOBS[1:], paths) is None


# --- what it means ----------------------------------------------------------------------------------------------------


def attempt(name: str, number: int, state: str | None, fingerprint: str = "") -> Attempt:
    job = next(job for job in JOBS if job.name == name)
    ended = None if state is None else AttemptOutcome(state, 0)  # type: ignore[arg-type]
    return Attempt(name, number, fingerprint or job.fingerprint, GONE, ended)


def test_history_counts_only_success_of_same_work() -> None:
    known = history(
        [
            attempt("a", 1, "failed"),
            attempt("a", 2, "succeeded"),
            attempt("b", 1, "succeeded", "another"),
            attempt("c", 1, None),
        ],
        JOBS,
    )
    assert {name: (b.attempts, b.outcome is not None) for name, b in known.before.items()} == {
        "a": (2, True),
        "b": (1, False),
        "c": (1, False),
    }
    assert known.changed == ("b",)
    assert [each.job for each in known.unfinished] == ["c"]
    assert known.done == 1


def test_history_counts_job_that_changed_back() -> None:
    known = history([attempt("a", 1, "succeeded"), attempt("a", 2, "failed", "another")], JOBS)
    assert known.done == 1
    assert known.changed == ()


class Clock:
    """A clock that advances only in ``sleep``, with events at given times."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_remains_without_processes_need_no_wait(tmp_path: Path) -> None:
    said: list[str] = []
    clock = Clock()
    wait_for_remains([attempt("a", 1, None)], SweepPaths(tmp_path), said.append, clock=clock, sleep=clock.sleep)
    assert (said, clock.now) == ([], 0.0)


def test_remains_wait_while_log_is_locked(tmp_path: Path) -> None:
    import fcntl

    paths = SweepPaths(tmp_path)
    paths.job("a").mkdir(parents=True)
    holder = os.open(paths.log("a", 1), os.O_WRONLY | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    said: list[str] = []
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 20 and holder >= 0:
            fcntl.flock(holder, fcntl.LOCK_UN)

    try:
        wait_for_remains([attempt("a", 1, None)], paths, said.append, clock=clock, sleep=sleep)
        assert 20 < clock.now < 21
        assert "waiting for the processes of its jobs to end: a" in said[0]
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(SafelaunchError, match="processes of a are still alive"):
            wait_for_remains([attempt("a", 1, None)], paths, said.append, clock=clock, sleep=clock.sleep)
    finally:
        os.close(holder)


def test_remains_ignore_reused_pid(tmp_path: Path) -> None:
    """Our own pid with another start time belongs to another process, which is neither waited for nor signalled."""
    ours = identify(os.getpid())
    assert ours is not None
    other = Attempt("a", 1, "f", ProcessId(ours.pid, ours.start_ticks - 1))
    clock = Clock()
    wait_for_remains([other], SweepPaths(tmp_path), lambda text: None, clock=clock, sleep=clock.sleep)
    assert clock.now == 0.0
