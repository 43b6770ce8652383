"""The local engine and the runner's loop, with a shell in place of safelaunch: also where something is missing."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.addons.sweep import local
from safelaunch.addons.sweep.jobs import SweepJob, port_marks
from safelaunch.addons.sweep.journal import Journal, attempts, parse
from safelaunch.addons.sweep.local import Local, SweepPlace
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.pool import CpuSlots, GpuPool, Share
from safelaunch.addons.sweep.runner import Runner
from safelaunch.addons.sweep.spawn import JobCommand, is_held, spawn
from safelaunch.addons.sweep.stop_signals import Signals
from safelaunch.addons.sweep.sweep import Rules, Sweep
from safelaunch.addons.sweep.view import Snapshot
from safelaunch.job import process
from safelaunch.job.process import ProcessId
from safelaunch.leases.holder import ourselves
from safelaunch.leases.store import LeaseStore
from tests.support.nvml import stub
from tests.support.waiting import until


class Notes:
    """A screen that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    show_end = note

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        assert snapshot().jobs


class Scene:
    """A sweep of ``jobs`` in ``tmp_path``; each runs ``script`` in a shell, which gets safelaunch's words."""

    def __init__(self, tmp_path: Path, *names: str, script: str = "exit 0", slots: int = 2) -> None:
        self.paths = SweepPaths(tmp_path / "s")
        jobs = [SweepJob(name, ("t.py",), "", cwd=os.fspath(tmp_path)) for name in names]
        self.sweep = Sweep(jobs, Rules(slots, 99))
        self.pool = CpuSlots(slots, len(os.sched_getaffinity(0)))
        self.journal = Journal(self.paths.journal)
        self.screen = Notes()
        self.store = LeaseStore(os.fspath(tmp_path / "leases"))
        environ, program = dict(os.environ), ("/bin/sh", "-c", script)
        self.place = SweepPlace(self.paths, self.pool, self.store, self.journal, environ, program)

    def runner(self, clock: Callable[[], float] = time.monotonic) -> Runner:
        engine = Local(self.sweep, self.place, self.screen.note, clock)
        return Runner(self.sweep, engine, self.journal, self.paths, self.screen, clock)

    def run(self) -> list[str]:
        """Runs it; returns the states."""
        with Signals() as signals:
            self.runner().run(signals)
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


def test_job_that_cannot_execute_fails_and_others_continue(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b")
    scene.sweep.tracks["a"].job = replace(scene.sweep.tracks["a"].job, cwd="/nowhere")
    assert scene.run() == ["failed", "succeeded"]
    assert scene.sweep.tracks["a"].outcome is not None
    assert scene.sweep.tracks["a"].outcome.exit_code == 127
    assert "a could not be started: No such file or directory" in scene.screen.notes


def test_full_disk_delays_starts_and_loses_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a", "b", "c", script="echo $$ >> ran", slots=1)
    real, refused = Journal.record_start, []

    def started(self: Journal, job: SweepJob, attempt: int, process: ProcessId, gpus: Sequence[str]) -> None:
        if len(refused) < 2:
            refused.append(job.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, job, attempt, process, gpus)

    monkeypatch.setattr(Journal, "record_start", started)
    assert scene.run() == ["succeeded"] * 3
    assert refused == ["a", "a"]
    assert len((tmp_path / "ran").read_text().split()) == 3, "a job ran that the journal did not know"
    assert [note for note in scene.screen.notes if "no job can start now" in note] == [
        f"no job can start now; colaunch keeps trying ({scene.paths.journal} can't be written: No space left on device)"
    ]
    assert {track.attempts for track in scene.sweep.tracks.values()} == {1}


def test_fork_failure_delays_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a", "b")
    real, refused = local.spawn, []

    def start(command: JobCommand, tell: Callable[[ProcessId], None]) -> ProcessId:
        if len(refused) < 3:
            refused.append(command.log)
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(command, tell)

    monkeypatch.setattr(local, "spawn", start)
    assert scene.run() == ["succeeded"] * 2
    assert sorted(scene.recorded()) == [("a", 1, "succeeded"), ("b", 1, "succeeded")]


def test_lost_share_delays_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the node was faster."""
    scene = Scene(tmp_path, "a", "b")
    real, refused = scene.pool.take, []

    def take(job: SweepJob) -> Share | None:
        if len(refused) < 3:
            refused.append(job.name)
            return None
        return real(job)

    monkeypatch.setattr(scene.pool, "take", take)
    assert scene.run() == ["succeeded"] * 2
    assert sorted(scene.recorded()) == [("a", 1, "succeeded"), ("b", 1, "succeeded")]
    assert scene.pool.free() == 2


def test_screen_error_affects_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a", "b", "c", slots=1)

    def show(snapshot: Callable[[], Snapshot]) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(scene.screen, "show", show)
    assert scene.run() == ["succeeded"] * 3
    assert (
        scene.screen.notes.count("an internal error ended the display (ZeroDivisionError: oops). The sweep continues.")
        == 1
    )


def test_spawn_refused_by_journal_never_runs(tmp_path: Path) -> None:
    command = JobCommand(("/bin/sh", "-c", "touch ran"), {}, os.fspath(tmp_path), tmp_path / "log")

    def refuse(process: ProcessId) -> None:
        assert process.is_alive()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        spawn(command, refuse)
    assert not (tmp_path / "ran").exists()
    assert not is_held(tmp_path / "log")


def test_log_is_locked_while_job_process_lives(tmp_path: Path) -> None:
    """The first process ends; what it has started in the background still has the log as its stdout."""
    script = "read x < gate & exit 0"
    os.mkfifo(tmp_path / "gate")
    told: list[ProcessId] = []
    process = spawn(JobCommand(("/bin/sh", "-c", script), {}, os.fspath(tmp_path), tmp_path / "log"), told.append)
    assert told == [process]
    os.waitpid(process.pid, 0)
    assert is_held(tmp_path / "log")
    gate = os.open(tmp_path / "gate", os.O_WRONLY)
    os.write(gate, b"go\n")
    os.close(gate)
    deadline = time.monotonic() + 60
    while is_held(tmp_path / "log") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_held(tmp_path / "log")


def test_child_starts_with_default_signals(tmp_path: Path) -> None:
    script = "grep -E 'SigIgn|SigBlk' /proc/self/status"
    with Signals():
        process = spawn(
            JobCommand(("/bin/sh", "-c", script), {"PATH": "/bin:/usr/bin"}, "/", tmp_path / "log"),
            lambda process: None,
        )
        os.waitpid(process.pid, 0)
    found = dict(line.split(":\t") for line in (tmp_path / "log").read_text().splitlines())
    assert int(found["SigBlk"], 16) == 0
    assert int(found["SigIgn"], 16) & (1 << 12 | 1 << 24) == 0, "SIGPIPE or SIGXFSZ is ignored"


# --- GPUs and ports ---------------------------------------------------------------------------------------------------


def on_gpus(scene: Scene, node: stub.Node, *sizes: int) -> LeaseStore:
    """Gives the jobs of ``scene`` so many GPUs of ``node``; returns the node's leases."""
    for name, size in zip(scene.sweep.tracks, sizes, strict=True):
        scene.sweep.tracks[name].job = replace(scene.sweep.tracks[name].job, gpus=size)
    pool = GpuPool({**os.environ, **node.environ})
    jobs = [track.job for track in scene.sweep.tracks.values()]
    scene.sweep = Sweep(jobs, Rules(pool.capacity, 99, units={job.name: job.gpus for job in jobs}))
    scene.store = LeaseStore(os.fspath(node.lease_dir))
    scene.place = replace(scene.place, pool=pool, store=scene.store)
    return scene.store


def log_of(scene: Scene, name: str) -> list[str]:
    return scene.paths.log(name, 1).read_text().splitlines()


HELD = 'echo $CUDA_VISIBLE_DEVICES; for f in /proc/self/fd/*; do readlink $f; done | grep -c "^$LEASES/GPU"; '


def test_job_leases_only_its_own_gpus(tmp_path: Path, node: stub.Node) -> None:
    scene = Scene(tmp_path, "a", "b", "none", "late", script=HELD + "until [ -e gate ]; do sleep 0.02; done")
    store = on_gpus(scene, node, 5, 3, 0, 8)
    scene.place = replace(scene.place, environ={**os.environ, "LEASES": store.directory})
    seen: list[set[str]] = []

    def show(snapshot: Callable[[], Snapshot]) -> None:
        running = [job.job.name for job in snapshot().jobs if job.state == "running"]
        if running == ["a", "b", "none"] and all(len(log_of(scene, name)) == 2 for name in running):
            seen.append(set(store.look(map(stub.uuid, range(8)))))
            (tmp_path / "gate").touch()

    scene.screen.show = show  # type: ignore[method-assign]
    assert scene.run() == ["succeeded"] * 4
    everything = {stub.uuid(n) for n in range(8)}
    assert seen == [everything]
    a, b, none, late = (log_of(scene, name) for name in ("a", "b", "none", "late"))
    assert len(a[0].split(",")) == 5 and not set(a[0].split(",")) & set(b[0].split(","))
    assert [a[1], b[1], none, late[1]] == ["5", "3", ["", "0"], "8"]
    assert store.look(everything) == {} and store.waiting() == []
    assert not [note for note in scene.screen.notes if "waits" in note], "it must not wait for its own jobs"


def test_time_limit_excludes_wait_for_gpus(tmp_path: Path, node: stub.Node) -> None:
    """All GPUs are leased to another user for 1000 s; the job's limit is 60 s."""
    scene = Scene(tmp_path, "a")
    store = on_gpus(scene, node, 2)
    track = scene.sweep.tracks["a"]
    track.job = replace(track.job, timeout_s=60.0)
    keys = [stub.uuid(n) for n in range(8)]
    them = replace(ourselves("", "their.py"), pid=1)
    theirs = store.attempt(keys, lambda held: keys, them).lease
    assert theirs is not None
    late = [0.0]

    def show(snapshot: Callable[[], Snapshot]) -> None:
        if store.waiting():
            assert [one.name for one in store.waiting()] == ["a"]
            late[0] += 1000.0
            theirs.release()

    scene.screen.show = show  # type: ignore[method-assign]
    with Signals() as signals:
        scene.runner(lambda: time.monotonic() + late[0]).run(signals)
    assert (track.state, late[0] >= 1000.0, store.waiting()) == ("succeeded", True, [])
    assert track.outcome is not None and track.outcome.duration_s < 60
    (waits,) = [note for note in scene.screen.notes if "waits" in note]
    assert waits.startswith("a waits for GPUs in use by others:\n  GPU 0    leased by pid 1 ") and "their.py" in waits


def test_end_is_recorded_before_next_start_on_same_gpus(
    tmp_path: Path, node: stub.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``a`` and ``b`` end at almost the same time; the GPUs of ``a`` come first, but ``b`` is reaped first."""
    scene = Scene(tmp_path, "a", "b", "c")
    on_gpus(scene, node, 4, 4, 4)
    first_s: dict[int, float] = {}
    real = process.reap

    def reap(pid: int) -> int | None:
        """``a`` a second late."""
        first_s.setdefault(pid, time.monotonic())
        is_late = pid == next(iter(first_s)) and time.monotonic() < first_s[pid] + 1.0
        return None if is_late else real(pid)

    monkeypatch.setattr(process, "reap", reap)
    assert scene.run() == ["succeeded"] * 3
    held: set[str] = set()
    for record in map(json.loads, scene.paths.journal.read_text().splitlines()):
        gpus = set(record.get("gpus", ()))
        if record["event"] == "started":
            assert gpus and not held & gpus
            held |= gpus
        elif record["event"] == "ended":
            held -= gpus


def test_gpus_of_job_killed_at_start_are_freed(tmp_path: Path, node: stub.Node) -> None:
    scene = Scene(tmp_path, "a", "b")
    on_gpus(scene, node, 8, 8)
    scene.place = replace(scene.place, program=("/bin/sh", "-c", "case $2 in a) kill -9 $$;; esac", "sh"))
    assert scene.run() == ["failed", "succeeded"]


@pytest.mark.parametrize("moment", ["taken", "forked", "started"])
def test_colaunch_killed_at_any_moment_leaves_no_lease_and_no_job(tmp_path: Path, node: stub.Node, moment: str) -> None:
    """``kill -9`` of colaunch between taking GPUs for a job and seeing it run."""
    job = SweepJob("a", ("t.py",), "", gpus=2, cwd=os.fspath(tmp_path))
    keys = [stub.uuid(n) for n in range(8)]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def colaunch() -> None:
        share = GpuPool({**os.environ, **node.environ}).take(job)
        assert share is not None
        if moment == "taken":
            die()
        script = "echo $$ > pid; mv pid ran; while :; do sleep 0.05; done"
        keep = share.lease.hand_over()[1]
        command = JobCommand(
            ("/bin/sh", "-c", script), dict(os.environ), os.fspath(tmp_path), tmp_path / "log", keep=keep
        )
        spawn(command, lambda process: die() if moment == "forked" else None)
        share.lease.forget()
        until((tmp_path / "ran").exists)
        assert len(LeaseStore(os.fspath(node.lease_dir)).look(keys)) == 2, "the job alone holds them now"
        die()

    pid = os.fork()
    if not pid:
        try:
            colaunch()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    store = LeaseStore(os.fspath(node.lease_dir))
    until(lambda: store.look(keys) == {})
    assert (tmp_path / "ran").exists() == (moment == "started")


def test_job_ports_are_leased_and_filled_in(tmp_path: Path) -> None:
    met = tmp_path / "met"  # where each job waits for the other: one that has ended has given its ports back
    met.mkdir()
    both = f"touch {met}/$$; until [ $(ls {met} | wc -l) -eq 2 ]; do sleep 0.02; done"
    script = f'{both}; echo "$@"; echo $TB; echo $SAFELAUNCH_HELD; {sys.executable} -c "$CHECK"'
    check = (
        "import os, socket\n"
        "for item in os.environ['SAFELAUNCH_HELD'].split(','):\n"
        "    fd, _, key = item.partition(':')\n"
        "    is_socket = 'socket' in os.readlink(f'/proc/self/fd/{fd}')\n"
        "    if is_socket: print(socket.socket(fileno=int(fd)).getsockname()[1], key)\n"
    )
    scene = Scene(tmp_path, "a", "b", script=script)
    for name in "ab":
        words = ("t.py", *port_marks(2).values())
        env = (("TB", port_marks(2)["port2"]), ("CHECK", check))
        scene.sweep.tracks[name].job = replace(scene.sweep.tracks[name].job, words=words, ports=2, env=env)
    assert scene.run() == ["succeeded"] * 2
    said = {name: log_of(scene, name) for name in "ab"}
    numbers = {name: lines[0].split()[-2:] for name, lines in said.items()}
    assert len({*numbers["a"], *numbers["b"]}) == 4
    for name, lines in said.items():
        assert lines[1] == numbers[name][1]
        assert lines[3:] == [f"{number} port-{number}" for number in numbers[name]]
    assert scene.store.look([f"port-{number}" for number in numbers["a"]]) == {}
