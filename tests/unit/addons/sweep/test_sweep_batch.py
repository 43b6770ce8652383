"""The batch engine without a scheduler, and what is Slurm's: scripts, words, claims, how a job stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safelaunch.addons.sweep import slurm, task
from safelaunch.addons.sweep.adopt import adopt
from safelaunch.addons.sweep.attempt_files import AttemptClaim, AttemptFiles, TaskEnd
from safelaunch.addons.sweep.batch import BatchEngine, Site
from safelaunch.addons.sweep.batch_script import SweepPrograms, script, work_name
from safelaunch.addons.sweep.engine import RunningAttempt
from safelaunch.addons.sweep.errors import SpecError
from safelaunch.addons.sweep.jobs import SweepJob, port_marks
from safelaunch.addons.sweep.journal import Attempt as Past
from safelaunch.addons.sweep.journal import Journal, attempts, history, parse
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.position import AttemptPosition, final_state, judge
from safelaunch.addons.sweep.scheduler import ListedJob, QueueError, SubmittedWork
from safelaunch.addons.sweep.sweep import Rules, Sweep
from safelaunch.job.process import ProcessId
from safelaunch.settings.yamlfile import parse_yaml
from tests.support import golden
from tests.support.paths import ROOT
from tests.unit.addons.sweep import shell_queue

PATHS = SweepPaths(Path("/sweeps/s"))
PROGRAMS = SweepPrograms(
    ("/venv/bin/python", "-P", "-m", "safelaunch"), ("/venv/bin/python", "-P", "-m", "the.task", "slurm")
)
SLURM = slurm.Slurm({})


def job(name: str = "a", *command: str, **more: Any) -> SweepJob:
    return SweepJob(name, command or ("--nproc-per-node=2", "train.py"), "s.yaml:1", cwd="/srv/it's", **more)


# --- the scripts ------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "one": job(batch=("--partition=gpu", "--mem=32G"), gpus=2, timeout_s=7200.0),
    "quoted": job("lr-1", "exec", "--", "python", "t.py", "--lr", "1", env=(("NAME", "it's $HOME `x`\n"),), gpus=0),
    "nodes": job("wide", "--nproc-per-node=8", "t.py", port_marks(1)["port"], ports=1, nodes=2, gpus=8, needs=("a",)),
    "tasks": job("tasks", "exec", "--", "accelerate", "launch", "t.py", nodes=4, gpus=1, batch=("--time=90",)),
}


def script_of(one: SweepJob, programs: SweepPrograms = PROGRAMS) -> str:
    return script("train.0123456789-5", one, 1, PATHS, programs, SLURM)


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_script_matches_golden_file(name: str) -> None:
    one = SCRIPTS[name]
    work = SubmittedWork("train.0123456789-5", one, Path("PLACE"), Path("100%"), ("12", "13") if one.needs else ())
    golden.compare(f"sbatch_scripts/{name}.sh", f"# {' '.join(SLURM.submit_command(work))}\n{script_of(one)}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_run_by_shell_keeps_values(name: str, tmp_path: Path) -> None:
    """With the task replaced by a program that shows its words: no value of a job is read by the shell."""
    show, one = tmp_path / "show", SCRIPTS[name]
    show.write_text(f"#!{sys.executable}\nimport os, sys\nprint(ascii([sys.argv[1:], os.environ.get('NAME')]))\n")
    show.chmod(0o755)
    text = script_of(one, replace(PROGRAMS, task=(os.fspath(show),)))
    said = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, env={}, check=True).stdout
    assert ascii(dict(one.env).get("NAME")) in said
    assert ascii(one.cwd) in said
    assert ascii(one.words[-1]) in said or one.ports


def test_submission_name_survives_squeue() -> None:
    assert work_name("", "1f", 3) == "colaunch.1f-3"
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,60}", work_name("é|" * 60, "1f", 3))


# --- the words of the file --------------------------------------------------------------------------------------------


def words(text: str) -> tuple[str, ...]:
    return slurm.words_of(parse_yaml(text, "s.yaml"))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--partition=x", "cannot be given here"),
        ("--dependency=afterok:1", "cannot be given here"),
        ("--depend=afterok:1", "cannot be given here"),
        ("-c", "long form"),
        ("rm -rf", "long form"),
    ],
)
def test_sbatch_option_of_engine_is_rejected(word: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as error:
        words(f"\nsbatch: '{word}'")
    assert str(error.value).startswith("s.yaml:2: ")


def test_slurm_keys_become_sbatch_options() -> None:
    found = words("{time: 90, partition: 'a,b', sbatch: [--mem=4G, --exclusive, --time-min=5]}")
    assert found == ("--time=90", "--partition=a,b", "--mem=4G", "--exclusive", "--time-min=5")
    assert words("sbatch: []") == ()


# --- what squeue lists ------------------------------------------------------------------------------------------------


def test_squeue_lines_are_parsed() -> None:
    text = (
        "12|RUNNING|n[1-2]|None|a.1f-1\n13|PENDING||Priority|x|y\nwhat\n14|CANCELLED||DependencyNeverSatisfied|b\n"
        "15|COMPLETING|n1|None|c\n"
    )
    assert slurm.parse(text) == [
        ListedJob("a.1f-1", "12", "running", "RUNNING", "", "n[1-2]"),
        ListedJob("x|y", "13", "queued", "PENDING", "Priority"),
        ListedJob("b", "14", "ended", "CANCELLED", "DependencyNeverSatisfied", hopeless=True),
        ListedJob("c", "15", "running", "COMPLETING", "", "n1"),
    ]


def test_sbatch_environment_has_no_variables_of_surrounding_job() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SBATCH_JOB_NAME": "x", "SBATCH_PARTITION": "p",
             "CUDA_VISIBLE_DEVICES": "3", "SQUEUE_FORMAT": "%i"}  # fmt: skip
    assert slurm.clean(given) == {"PATH": "/bin", "SLURM_CONF": "/c", "SBATCH_PARTITION": "p"}


@pytest.mark.parametrize(
    ("text", "passing", "full"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1, 0),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1, 0),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", 0, 0),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", 0, 0),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size)", 0, 1),
    ],
)
def test_slurm_error_is_classified(text: str, passing: int, full: int) -> None:
    error = slurm.slurm_error(text)
    assert (error.passing, error.full) == (bool(passing), bool(full))


# --- claims -----------------------------------------------------------------------------------------------------------


def test_claim_of_two_tasks_one_wins_and_requeue_takes_over(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 1)
    first, other = AttemptClaim("x-1", 0, "n1", 1.0), AttemptClaim("x-2", 0, "n2", 2.0)
    assert files.claim(first) is None
    assert files.claim(other) == first
    assert files.claim(replaced := AttemptClaim("x-1", 1, "n3", 3.0)) is None, "requeued"
    assert files.claim(first) == replaced, "a requeued job's first run, on a node that was lost"
    assert files.read_claim() == replaced
    assert [each.name for each in tmp_path.iterdir()] == ["attempt-1.claim"]


def test_claim_on_disk_without_links_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*places: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_claim_of_two_tasks_one_wins_and_requeue_takes_over(tmp_path)


def run_task(place: Path, name: str, *command: str, restart: int = 0, options: Sequence[str] = ()) -> int:
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
    words = [sys.executable, "-m", task.__name__, slurm.__name__, name, os.fspath(place), "1", *options]
    words += ["--cwd", os.fspath(place), "--", *command]
    return subprocess.run(words, env=env, capture_output=True).returncode


def test_task_started_twice_runs_once_and_writes_end(tmp_path: Path) -> None:
    place = tmp_path / "jobs" / "a"
    place.mkdir(parents=True)
    shell = ("/bin/sh", "-c", "echo ran >> ran; echo out; exit 3")
    assert run_task(place, "12", *shell) == 3
    assert run_task(place, "13", *shell) == task.EXIT_SPARE, "a double submission"
    assert run_task(place, "12", *shell, restart=1) == 3, "requeued"
    end = AttemptFiles(place, 1).read_end()
    assert end is not None and (end.exit_code, end.restart, end.signalled) == (3, 1, False)
    AttemptFiles(place, 1).close()
    assert run_task(place, "12", *shell, restart=2) == 3, "its end has been recorded: it must not run again"
    assert (place / "ran").read_text() == "ran\nran\n"
    assert (place / "attempt-1.log").read_text() == "out\nout\n"


def test_task_over_time_limit_or_unstartable_writes_end(tmp_path: Path) -> None:
    place = tmp_path / "jobs" / "a"
    place.mkdir(parents=True)
    assert run_task(place, "12", "/bin/sleep", "600", options=["--timeout", "0.1"]) == 143
    end = AttemptFiles(place, 1).read_end()
    assert end is not None and end.over_limit and not end.signalled
    (place / "attempt-1.claim").unlink()
    assert run_task(place, "12", "/no/such/program") == 127


# --- how a job stands -------------------------------------------------------------------------------------------------

CLAIM = AttemptClaim("a", 0, "n1", 1.0)
END = TaskEnd("a", 0, 0, 1.0)


def replace_end(**more: Any) -> TaskEnd:
    return TaskEnd(**{"name": "a", "restart": 0, "duration_s": 1.0, **more})


SIGNALLED = replace_end(exit_code=143, signalled=True)


def listed(state: str, name: str = "a", reason: str = "None", number: str = "12") -> ListedJob:
    (found,) = slurm.parse(f"{number}|{state}|n1|{reason}|{name}")
    return found


@pytest.mark.parametrize(
    ("jobs", "claim", "end", "stands"),
    [
        ([listed("PENDING")], None, None, "queued"),
        ([listed("RUNNING")], None, None, "running"),
        ([listed("RUNNING")], CLAIM, None, "running"),
        ([listed("RUNNING")], CLAIM, END, "ended"),  # Slurm doesn't list it as ended yet
        ([listed("RUNNING")], CLAIM, replace_end(exit_code=3), "ended"),
        ([listed("COMPLETING")], CLAIM, SIGNALLED, "running"),
        ([listed("PENDING", reason="BeginTime")], CLAIM, SIGNALLED, "queued"),  # preempted: it comes back
        ([listed("PREEMPTED")], CLAIM, SIGNALLED, "ended"),
        ([listed("COMPLETED")], CLAIM, END, "ended"),
        ([], CLAIM, END, "ended"),  # Slurm has forgotten it
        ([], CLAIM, None, "unsettled"),
        ([listed("NODE_FAIL")], CLAIM, None, "unsettled"),
        ([listed("RUNNING")], AttemptClaim("a", 1, "n1", 1.0), END, "running"),
        ([], AttemptClaim("a", 1, "n1", 1.0), END, "unsettled"),  # the end is of the run before
        ([], None, None, "absent"),
        ([listed("CANCELLED", reason="DependencyNeverSatisfied")], None, None, "hopeless"),
        ([listed("CANCELLED")], None, None, "ended"),
        ([listed("FAILED")], None, None, "unsettled"),
        ([listed("FAILED", "b"), listed("RUNNING")], CLAIM, None, "running"),  # b was the spare one
        ([listed("PENDING", "b")], CLAIM, END, "ended"),
    ],
)
def test_attempt_position_follows_scheduler_claim_and_end(
    jobs: list[ListedJob], claim: AttemptClaim | None, end: TaskEnd | None, stands: str
) -> None:
    assert judge(jobs, claim, end).stage == stands


def ended(code: int | None, state: str = "", **more: Any) -> AttemptPosition:
    end = None if code is None else replace_end(exit_code=code, **more)
    return AttemptPosition("ended", listed(state) if state else None, end)


@pytest.mark.parametrize(
    ("standing", "verdict", "expected"),
    [
        (ended(0, "TIMEOUT", signalled=True), "", ("succeeded", "")),
        (ended(1, "FAILED"), "crash", ("failed", "")),
        (ended(124, "FAILED"), "hang", ("hung", "")),
        (ended(124, "FAILED"), "", ("hung", "")),
        (ended(124, "FAILED"), "crash", ("failed", "")),
        (ended(125, "FAILED"), "hang", ("hung", "")),
        (ended(143, "TIMEOUT", signalled=True), "", ("timed-out", "time limit")),
        (ended(143, "", signalled=True, word="TIMEOUT"), "", ("timed-out", "time limit")),
        (ended(143, "CANCELLED", signalled=True), "", ("cancelled", "scancel")),
        (ended(143, "", signalled=True, word="PREEMPTED"), "", ("cancelled", "preempted")),
        (ended(143, "FAILED", over_limit=True), "", ("timed-out", "timeout")),
        (ended(1, "CANCELLED"), "", ("failed", "")),  # it ended by itself, before scancel
        (ended(None, "NODE_FAIL"), "", ("failed", "node failed")),
        (ended(None, "OUT_OF_MEMORY"), "", ("failed", "out of memory")),
        (ended(137, "OUT_OF_MEMORY"), "crash", ("failed", "out of memory")),
        (ended(None, "FAILED"), "", ("failed", "")),
        (ended(None, "COMPLETED"), "", ("succeeded", "")),  # its disk was read-only
        (ended(None), "", ("failed", "lost")),
    ],
)
def test_end_of_attempt_gives_state_and_cause(
    standing: AttemptPosition, verdict: str, expected: tuple[str, str]
) -> None:
    assert final_state(standing, verdict, SLURM, asked_by_us=False, claimed=True) == expected


def test_attempt_cancelled_by_us_is_cancelled() -> None:
    for code, state in ((143, "cancelled"), (0, "succeeded")):
        found = ended(code, "CANCELLED", signalled=True)
        assert final_state(found, "", SLURM, asked_by_us=True, claimed=True) == (state, "")


def test_attempt_without_claim_has_failed() -> None:
    never = final_state(ended(None, "FAILED"), "", SLURM, asked_by_us=False, claimed=False)
    assert never == ("failed", "never began")


# --- the journal ------------------------------------------------------------------------------------------------------


def test_resume_adopts_submitted_attempts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    a, b, gone = job("a"), job("b"), job("gone")
    journal.record_launch(3, "1f")
    for each, name in ((a, "x.1f-1"), (b, "x.1f-2"), (gone, "x.1f-3"), (b, "x.1f-4")):
        journal.record_submission(each, 1, name)
    journal.close()
    found = attempts(parse((tmp_path / "j").read_bytes(), "")[0])
    assert [each.handed for each in found[:2]] == [("x.1f-1",), ("x.1f-2", "x.1f-4")]
    changed = replace(b, env=(("X", "1"),))
    before, going_on, others = adopt(history(found, [a, changed]), [a, changed])
    assert list(going_on) == ["a"] and before["a"].with_engine and not before["b"].with_engine
    assert [each.job for each in others] == ["b", "gone"]


def test_resume_does_not_adopt_local_attempts() -> None:
    past = Past("a", 1, job().fingerprint, ProcessId(1, 1))
    assert adopt(history([past], [job()]), [job()])[1:] == ({}, [])


# --- the engine, with answers in place of Slurm ----------------------------------------------------------------------


class Answers(slurm.Slurm):
    """Slurm, but what it is asked is kept, and what it lists is ``jobs``."""

    def __init__(self) -> None:
        super().__init__({})
        self.jobs: list[ListedJob] = []
        self.asked: list[tuple[str, ...]] = []
        self.errors: list[str] = []

    def _answer(self) -> None:
        if self.errors:
            raise slurm.slurm_error(self.errors.pop(0))

    def submit(self, work: SubmittedWork) -> str:
        self.asked.append((work.name, *work.after))
        self._answer()
        return str(100 + len(self.asked))

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        self.asked.append(("scancel", *numbers))

    def list(self) -> list[ListedJob]:  # type: ignore[override]
        self._answer()
        return self.jobs


def at_once(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except QueueError as error:
        future.set_exception(error)
    return future


class Scene:
    def __init__(self, tmp_path: Path, *jobs: SweepJob) -> None:
        self.slurm, self.said, self.now = Answers(), list[str](), 0.0
        self.paths = SweepPaths(tmp_path / "s")
        self.journal = Journal(self.paths.journal)
        self.sweep = Sweep(jobs, Rules(1 << 30, 1 << 30, ahead=True))
        site = Site(self.paths, self.journal, PROGRAMS, "1f")
        self.engine = BatchEngine(self.sweep, self.slurm, site, self.said.append, {}, lambda: self.now, at_once)

    def turn(self, seconds: float = 0.0) -> None:
        for _ in range(6):
            self.now += seconds / 6
            for job, outcome in self.engine.poll():
                self.journal.record_end(job.name, self.sweep.tracks[job.name].attempts, outcome)
                self.sweep.mark_ended(job.name, outcome)
            self.engine.submit()

    def states(self) -> list[str]:
        return [track.state for track in self.sweep.tracks.values()]


def test_submission_is_recorded_first_and_needs_become_dependencies(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"), job("b"), job("c", needs=("a", "b")))
    scene.turn()
    assert scene.slurm.asked == [("colaunch.1f-1",), ("colaunch.1f-2",), ("colaunch.1f-3", "101", "102")]
    names = [each.handed[0] for each in attempts(parse(scene.paths.journal.read_bytes(), "")[0])]
    assert names == ["colaunch.1f-1", "colaunch.1f-2", "colaunch.1f-3"]
    assert all((scene.paths.batch_script(name).stat().st_mode & 0o777) == 0o600 for name in names)


def test_unclear_answer_is_looked_up_before_resubmission(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.slurm.errors = ["Socket timed out on send/recv operation"]
    scene.slurm.jobs = [ListedJob("colaunch.1f-1", "7", "queued")]
    scene.turn(3600.0)
    assert len(scene.slurm.asked) == 1, "it is there: Slurm had taken it"
    scene.slurm.jobs = []
    scene.turn(12.0)
    assert len(scene.slurm.asked) == 1, "not at once: a listing may lag behind"
    scene.turn(100.0)
    scene.turn()
    assert len(scene.slurm.asked) == 2
    assert scene.sweep.tracks["a"].attempts == 1, "the same attempt, which only one of both can claim"


def test_refused_submission_fails_only_its_job(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"), job("b"))
    scene.slurm.errors = ["Batch job submission failed: Invalid partition name specified"]
    scene.slurm.jobs = [ListedJob("colaunch.1f-2", "102", "queued")]
    scene.turn()
    assert scene.states() == ["failed", "running"]
    assert any("Invalid partition" in text for text in scene.said)


def test_job_limit_reached_delays_submission(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *(job(f"a{number}") for number in range(4)))
    scene.slurm.errors = ["Job violates accounting/QOS policy (job submit limit)"]
    scene.slurm.jobs = [ListedJob(f"colaunch.1f-{number}", str(number), "queued") for number in range(1, 5)]
    scene.turn()
    assert scene.slurm.asked == [("colaunch.1f-1",)]
    scene.turn(100.0)
    assert [name for (name,) in scene.slurm.asked] == [f"colaunch.1f-{number}" for number in (1, 1, 2, 3, 4)]
    assert sum("job limit is reached" in text for text in scene.said) == 1


def test_unavailable_scheduler_is_reported_once_and_loses_no_job(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.turn()
    scene.slurm.jobs = [ListedJob("colaunch.1f-1", "101", "queued")]
    scene.slurm.errors = ["Unable to contact slurm controller"] * 3
    for _ in range(4):
        scene.turn(20.0)
    assert sum("doesn't respond" in text for text in scene.said) == 1
    assert sum("responds again" in text for text in scene.said) == 1


def test_duplicate_submission_of_running_attempt_is_cancelled(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.turn()
    given = scene.engine._attempts["a"]
    given.names.append("again")
    given.files.claim(AttemptClaim("colaunch.1f-1", 0, "n1", 1.0))
    scene.slurm.jobs = [ListedJob("colaunch.1f-1", "101", "running"), ListedJob("again", "102", "queued")]
    scene.turn(30.0)
    assert set(scene.slurm.asked[1:]) == {("scancel", "102")}


def test_stop_cancels_each_job_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.turn()
    scene.slurm.jobs = [ListedJob("colaunch.1f-1", "101", "queued", reason="Priority")]
    scene.turn(5.0)
    assert scene.engine.look() == {"a": RunningAttempt(queued_for="Priority")}
    scene.sweep.stop("stopped by SIGINT")
    scene.engine.cancel(kill=False)
    scene.turn(5.0)
    scene.turn(5.0)
    assert scene.slurm.asked[1:] == [("scancel", "101")]
    scene.slurm.jobs = [ListedJob("colaunch.1f-1", "101", "ended", "CANCELLED")]
    scene.turn(20.0)
    assert scene.states() == ["cancelled"] and not scene.engine.unfinished


def test_other_scheduler_needs_only_queue_and_job_view(tmp_path: Path) -> None:
    """Real processes: two jobs, one that needs both, and one that fails and is tried again."""
    jobs = [replace(job(name), cwd=os.fspath(tmp_path), gpus=0) for name in "ab"]
    jobs += [replace(jobs[0], name="c", needs=("a", "b")), replace(jobs[0], name="d", retries=1)]
    paths, environ = SweepPaths(tmp_path / "s"), {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    queue = shell_queue.Shell(environ)
    run = ("/bin/sh", "-c", "echo $1 >> ran; [ $1 != d ]")  # $0 is --run-name
    programs = SweepPrograms(run, (sys.executable, "-m", task.__name__, shell_queue.__name__))
    journal = Journal(paths.journal)
    sweep = Sweep(jobs, Rules(1 << 30, 1 << 30, ahead=queue.keeps_order))
    engine = BatchEngine(sweep, queue, Site(paths, journal, programs, "1f"), lambda text: None, {})
    deadline = time.monotonic() + 120
    while not sweep.finished and time.monotonic() < deadline:
        for ended, outcome in engine.poll():
            sweep.mark_ended(ended.name, outcome)
        engine.submit()
        time.sleep(engine.tick_s)
    assert [each.wait(60) for each in queue.jobs.values()].count(0) == 3
    assert [track.state for track in sweep.tracks.values()] == ["succeeded", "succeeded", "succeeded", "failed"]
    ran = (tmp_path / "ran").read_text().split()
    assert sorted(ran) == ["a", "b", "c", "d", "d"] and ran.index("c") > max(ran.index("a"), ran.index("b"))
    assert sweep.tracks["d"].attempts == 2
