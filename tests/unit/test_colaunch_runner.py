"""The runner's loop with a shell in place of safelaunch: what it does when something cannot be had just now."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.colaunch import spawn
from safelaunch.colaunch.jobs import Job
from safelaunch.colaunch.journal import Journal, attempts, parse
from safelaunch.colaunch.paths import SweepPaths
from safelaunch.colaunch.pool import Share, Slots
from safelaunch.colaunch.runner import Place, Runner
from safelaunch.colaunch.signals import Signals
from safelaunch.colaunch.spawn import Command
from safelaunch.colaunch.sweep import Rules, Sweep
from safelaunch.colaunch.view import Snapshot
from safelaunch.launch.process import ProcessId


class Notes:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        assert snapshot().jobs


class Scene:
    """A sweep of ``jobs`` in ``tmp_path``; each runs ``script`` in a shell, which gets safelaunch's words."""

    def __init__(self, tmp_path: Path, *names: str, script: str = "exit 0", slots: int = 2) -> None:
        self.paths = SweepPaths(tmp_path / "s")
        jobs = [Job(name, ("t.py",), "", cwd=os.fspath(tmp_path)) for name in names]
        self.sweep = Sweep(jobs, Rules(slots, 99))
        self.pool = Slots(slots, sorted(os.sched_getaffinity(0)))
        self.journal = Journal(self.paths.journal)
        self.screen = Notes()
        self.place = Place(self.paths, self.pool, self.journal, dict(os.environ), ("/bin/sh", "-c", script))

    def run(self) -> list[str]:
        """Runs it; returns the states."""
        with Signals() as signals:
            Runner(self.sweep, self.place, self.screen).run(signals)
        self.journal.close()
        return [track.state for track in self.sweep.tracks.values()]

    def recorded(self) -> list[tuple[str, int, str]]:
        found = attempts(parse(self.paths.journal.read_bytes(), "")[0])
        return [(each.job, each.number, each.outcome.state if each.outcome else "") for each in found]


def test_jobs_run_and_are_recorded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b", "c", script='echo "$@"; echo $OMP_NUM_THREADS >&2')
    assert scene.run() == ["succeeded"] * 3
    assert scene.recorded() == [(name, 1, "succeeded") for name in "abc"]
    bundles = scene.paths.bundles("a")
    assert scene.paths.log("a", 1).read_text().splitlines()[0] == f"a --bundle-dir {bundles} t.py"
    assert scene.pool.free() == 2


def test_what_cannot_be_executed_fails_and_the_others_go_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b")
    scene.sweep.tracks["a"].job = replace(scene.sweep.tracks["a"].job, cwd="/nowhere")
    assert scene.run() == ["failed", "succeeded"]
    assert scene.sweep.tracks["a"].outcome is not None
    assert scene.sweep.tracks["a"].outcome.exit_code == 127
    assert "a could not be started: No such file or directory" in scene.screen.notes


def test_a_journal_on_a_full_disk_holds_jobs_back_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "a", "b", "c", script="echo $$ >> ran", slots=1)
    real, refused = Journal.started, []

    def started(self: Journal, job: Job, attempt: int, process: ProcessId, gpus: Sequence[str]) -> None:
        if len(refused) < 2:
            refused.append(job.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, job, attempt, process, gpus)

    monkeypatch.setattr(Journal, "started", started)
    assert scene.run() == ["succeeded"] * 3
    assert refused == ["a", "a"]
    assert len((tmp_path / "ran").read_text().split()) == 3, "a job ran that the journal did not know"
    assert [note for note in scene.screen.notes if "no job can be started" in note] == [
        "no job can be started, and it is tried again and again "
        f"({scene.paths.journal} cannot be written: No space left on device)"
    ]
    assert {track.attempts for track in scene.sweep.tracks.values()} == {1}


def test_no_process_to_be_had_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a", "b")
    real, refused = spawn.start, []

    def start(command: Command, tell: Callable[[ProcessId], None]) -> ProcessId:
        if len(refused) < 3:
            refused.append(command.log)
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(command, tell)

    monkeypatch.setattr(spawn, "start", start)
    assert scene.run() == ["succeeded"] * 2
    assert sorted(scene.recorded()) == [("a", 1, "succeeded"), ("b", 1, "succeeded")]


def test_a_share_that_is_gone_when_it_is_taken_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with leases: another user of the node was faster."""
    scene = Scene(tmp_path, "a", "b")
    real, refused = scene.pool.take, []

    def take(units: int) -> Share | None:
        if len(refused) < 3:
            refused.append(units)
            return None
        return real(units)

    monkeypatch.setattr(scene.pool, "take", take)
    assert scene.run() == ["succeeded"] * 2
    assert sorted(scene.recorded()) == [("a", 1, "succeeded"), ("b", 1, "succeeded")]
    assert scene.pool.free() == 2


def test_a_fault_of_the_screen_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a", "b", "c", slots=1)

    def show(snapshot: Callable[[], Snapshot]) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(scene.screen, "show", show)
    assert scene.run() == ["succeeded"] * 3
    assert scene.screen.notes.count("a fault of safelaunch's own ended the display (ZeroDivisionError: oops)") == 1


def test_a_process_that_is_not_told_to_go_never_runs(tmp_path: Path) -> None:
    command = Command(("/bin/sh", "-c", "touch ran"), {}, os.fspath(tmp_path), tmp_path / "log")

    def refuse(process: ProcessId) -> None:
        assert process.is_alive()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        spawn.start(command, refuse)
    assert not (tmp_path / "ran").exists()
    assert not spawn.is_held(tmp_path / "log")


def test_a_log_is_held_while_anything_of_the_job_lives(tmp_path: Path) -> None:
    """The first process ends; what it has started in the background still has the log as its stdout."""
    script = "read x < gate & exit 0"
    os.mkfifo(tmp_path / "gate")
    told: list[ProcessId] = []
    process = spawn.start(Command(("/bin/sh", "-c", script), {}, os.fspath(tmp_path), tmp_path / "log"), told.append)
    assert told == [process]
    os.waitpid(process.pid, 0)
    assert spawn.is_held(tmp_path / "log")
    gate = os.open(tmp_path / "gate", os.O_WRONLY)
    os.write(gate, b"go\n")
    os.close(gate)
    deadline = time.monotonic() + 10
    while spawn.is_held(tmp_path / "log") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not spawn.is_held(tmp_path / "log")


def test_a_child_starts_with_default_signals_and_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    script = "grep -E 'SigIgn|SigBlk|Cpus_allowed_list' /proc/self/status"
    with Signals():
        process = spawn.start(
            Command(("/bin/sh", "-c", script), {"PATH": "/bin:/usr/bin"}, "/", tmp_path / "log", (core,)),
            lambda process: None,
        )
        os.waitpid(process.pid, 0)
    found = dict(line.split(":\t") for line in (tmp_path / "log").read_text().splitlines())
    assert found["Cpus_allowed_list"] == str(core)
    assert int(found["SigBlk"], 16) == 0
    assert int(found["SigIgn"], 16) & (1 << 12 | 1 << 24) == 0, "SIGPIPE or SIGXFSZ is ignored"
