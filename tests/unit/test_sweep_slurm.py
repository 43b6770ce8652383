"""The Slurm engine without Slurm: scripts, words, claims, what squeue lists, how a job stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safelaunch.cli.colaunch_slurm import adopted
from safelaunch.job.process import ProcessId
from safelaunch.sweep.jobs import Job, port_marks
from safelaunch.sweep.journal import Attempt as Past
from safelaunch.sweep.journal import Handed, Journal, attempts, parse
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.placeholders import Text
from safelaunch.sweep.resume import history
from safelaunch.sweep.slurm import queue, task, words
from safelaunch.sweep.slurm.claims import AttemptFiles, Claim, End
from safelaunch.sweep.slurm.engine import Site, SlurmEngine
from safelaunch.sweep.slurm.judge import Listed, Standing, judge, spare, state_of
from safelaunch.sweep.slurm.queue import SlurmError
from safelaunch.sweep.slurm.script import Attempt, Batch, Programs, alike, batch_name, command, script
from safelaunch.sweep.sweep import Rules, Sweep
from safelaunch.system.errors import SpecError

GOLDEN = Path(__file__).parent / "golden"
PATHS = SweepPaths(Path("/sweeps/s"))
PROGRAMS = Programs(("/venv/bin/python", "-P", "-m", "safelaunch"), ("/venv/bin/python", "-P", "-m", "the.task"))


def job(name: str = "a", *command: str, **more: Any) -> Job:
    return Job(name, command or ("--nproc-per-node=2", "train.py"), "s.yaml:1", cwd="/srv/it's", **more)


# --- the scripts ------------------------------------------------------------------------------------------------------

BATCHES = {
    "one": (job(batch=("--partition=gpu", "--mem=32G"), gpus=2, timeout_s=7200.0),),
    "array": (
        job("lr-1", "exec", "--", "python", "t.py", "--lr", "1", env=(("NAME", "it's $HOME"),), gpus=0),
        job("lr-2", "exec", "--", "python", "t.py", "--lr", "2", env=(("NAME", "`x`\n"),), gpus=0),
    ),
    "nodes": (
        job("wide", "--nproc-per-node=8", "t.py", port_marks(1)["port"], ports=1, nodes=2, gpus=8, needs=("a", "b")),
    ),
    "tasks": (job("tasks", "exec", "--", "accelerate", "launch", "t.py", nodes=4, gpus=1, batch=("--time=90",)),),
}


@pytest.mark.parametrize("name", BATCHES)
def test_scripts(name: str) -> None:
    """SAFELAUNCH_GOLDEN=1 writes the files anew; read their diff."""
    needs = ("12", "13_0") if name == "nodes" else ()
    batch = Batch(f"train.0123456789-{len(name)}", tuple(Attempt(each, 1) for each in BATCHES[name]), needs)
    found = f"# {' '.join(command(batch, 'PLACE'))}\n{script(batch, PATHS, PROGRAMS)}"
    place = GOLDEN / f"slurm-{name}.sh"
    if os.environ.get("SAFELAUNCH_GOLDEN"):
        place.write_text(found)
    assert found == place.read_text()


@pytest.mark.parametrize("name", BATCHES)
def test_a_script_says_the_same_to_a_shell(name: str, tmp_path: Path) -> None:
    """With the task replaced by a program that shows its words: no value of a job is read by the shell."""
    show = tmp_path / "show"
    show.write_text(f"#!{sys.executable}\nimport os, sys\nprint(ascii([sys.argv[1:], os.environ.get('NAME')]))\n")
    show.chmod(0o755)
    group = tuple(Attempt(each, 1) for each in BATCHES[name])
    text = script(Batch("b", group), PATHS, replace(PROGRAMS, task=(os.fspath(show),)))
    for index, each in enumerate(group):
        said = subprocess.run(
            ["/bin/bash", "-c", text],
            capture_output=True,
            text=True,
            env={"SLURM_ARRAY_TASK_ID": str(index)},
            check=True,
        )
        assert ascii(dict(each.job.env).get("NAME")) in said.stdout
        assert ascii(each.job.cwd) in said.stdout
        assert ascii(each.job.words[-1]) in said.stdout or each.job.ports


def test_jobs_that_are_alike_become_arrays_of_a_size() -> None:
    jobs = [job(f"a{number}") for number in range(5)] + [job("b", gpus=4), job("c", needs=("a0",))]
    found = alike([Attempt(each, 1) for each in jobs], at_most=3)
    assert [[each.job.name for each in group] for group in found] == [["a0", "a1", "a2"], ["a3", "a4"], ["b"], ["c"]]


def test_the_name_of_a_batch_is_one_that_squeue_gives_back() -> None:
    assert batch_name("", "1f", 3) == "colaunch.1f-3"
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,60}", batch_name("é|" * 60, "1f", 3))


# --- the words of the file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--cpus-per-tsk=4", "did you mean"),
        ("--partition=x", "cannot be given here"),
        ("--dependency=afterok:1", "cannot be given here"),
        ("-c", "long form"),
        ("rm -rf", "long form"),
        ("--mem=1\n#SBATCH --wrap=x", "cannot be printed"),
    ],
)
def test_words_that_are_refused(word: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as error:
        words.checked([Text(word, "s.yaml:7")])
    assert str(error.value).startswith("s.yaml:7: ")


@pytest.mark.parametrize(("key", "value", "fine"), [("time", "1-12", 1), ("time", "90", 1), ("time", "2h", 0),
                                                    ("partition", "a,b", 1), ("account", "x y", 0)])  # fmt: skip
def test_keys(key: str, value: str, fine: int) -> None:
    if fine:
        assert words.key_word(key, Text(value, "s:1")) == f"--{key}={value}"
    else:
        with pytest.raises(SpecError):
            words.key_word(key, Text(value, "s:1"))


def test_every_option_is_known_or_ours_and_not_both() -> None:
    assert not set(words.KNOWN.split()) & set(words.OURS)
    assert words.checked([Text("--mem=4G", ""), Text("--exclusive", "")]) == ("--mem=4G", "--exclusive")


# --- what squeue lists ------------------------------------------------------------------------------------------------


def test_lines_of_squeue() -> None:
    text = "12|12|N/A|RUNNING|n1|None|a.1f-1\n14|13|0|RUNNING|n[1-2]|None|b.1f-2\n13|13|1|PENDING||Priority|x|y\nwhat\n"
    assert queue.parse(text) == [
        Listed("a.1f-1", 0, "12", "12", "RUNNING", "None", "n1"),
        Listed("b.1f-2", 0, "14", "13_0", "RUNNING", "None", "n[1-2]"),
        Listed("x|y", 1, "13", "13_1", "PENDING", "Priority", ""),
    ]


def test_what_of_the_environment_reaches_sbatch() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SBATCH_JOB_NAME": "x", "SBATCH_PARTITION": "p",
             "SBATCH_TIMELIMIT": "9", "CUDA_VISIBLE_DEVICES": "3", "SQUEUE_FORMAT": "%i"}  # fmt: skip
    assert queue.clean(given, ["time"]) == {"PATH": "/bin", "SLURM_CONF": "/c", "SBATCH_PARTITION": "p"}


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
def test_what_an_error_of_slurms_means(text: str, passing: int, full: int) -> None:
    error = SlurmError(text)
    assert (error.passing, error.full) == (bool(passing), bool(full))


# --- claims -----------------------------------------------------------------------------------------------------------


def test_one_claim_wins_and_the_same_job_comes_back(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 1)
    first, other = Claim("12", 0, "n1", 1.0), Claim("13", 0, "n2", 2.0)
    assert files.claim(first) is None
    assert files.claim(other) == first
    assert files.claim(replaced := Claim("12", 1, "n3", 3.0)) is None, "requeued"
    assert files.claim(first) == replaced, "a requeued job's first run, on a node that was lost"
    assert files.claimed() == replaced
    assert [each.name for each in tmp_path.iterdir()] == ["attempt-1.claim"]


def test_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*places: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_one_claim_wins_and_the_same_job_comes_back(tmp_path)


def run_task(place: Path, job_id: str, *command: str, restart: int = 0, options: Sequence[str] = ()) -> int:
    env = {**os.environ, "SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": str(restart)}
    script = [sys.executable, "-m", task.__name__, os.fspath(place), "1", "--cwd", os.fspath(place), *options, "--"]
    return subprocess.run([*script, *command], env=env, capture_output=True).returncode


def test_a_task_runs_once_and_leaves_its_end(tmp_path: Path) -> None:
    place = tmp_path / "jobs" / "a"
    place.mkdir(parents=True)
    shell = ("/bin/sh", "-c", "echo ran >> ran; echo out; exit 3")
    assert run_task(place, "12", *shell) == 3
    assert run_task(place, "13", *shell) == task.EXIT_SPARE, "a double submission"
    assert run_task(place, "12", *shell, restart=1) == 3, "requeued"
    end = AttemptFiles(place, 1).end()
    assert end is not None and (end.exit_code, end.restart, end.signalled) == (3, 1, False)
    AttemptFiles(place, 1).close()
    assert run_task(place, "12", *shell, restart=2) == 3, "its end has been recorded: it must not run again"
    assert (place / "ran").read_text() == "ran\nran\n"
    assert (place / "attempt-1.log").read_text() == "out\nout\n"


def test_a_task_over_its_time_and_one_that_cannot_start(tmp_path: Path) -> None:
    place = tmp_path / "jobs" / "a"
    place.mkdir(parents=True)
    assert run_task(place, "12", "/bin/sleep", "600", options=["--timeout", "0.1"]) == 143
    end = AttemptFiles(place, 1).end()
    assert end is not None and end.over_limit and not end.signalled
    (place / "attempt-1.claim").unlink()
    assert run_task(place, "12", "/no/such/program") == 127


# --- how a job stands -------------------------------------------------------------------------------------------------

CLAIM = Claim("12", 0, "n1", 1.0)
END = End("12", 0, 0, 1.0)


def replace_end(**more: Any) -> End:
    return End(**{"job_id": "12", "restart": 0, "duration_s": 1.0, **more})


SIGNALLED = replace_end(exit_code=143, signalled=True)


def listed(state: str, job_id: str = "12", reason: str = "None") -> Listed:
    return Listed("a", 0, job_id, job_id, state, reason, "n1")


@pytest.mark.parametrize(
    ("jobs", "claim", "end", "stands"),
    [
        ([listed("PENDING")], None, None, "queued"),
        ([listed("RUNNING")], None, None, "running"),
        ([listed("RUNNING")], CLAIM, None, "running"),
        ([listed("RUNNING")], CLAIM, END, "ended"),  # Slurm has yet to hear of it
        ([listed("RUNNING")], CLAIM, replace_end(exit_code=3), "ended"),
        ([listed("COMPLETING")], CLAIM, SIGNALLED, "running"),
        ([listed("PENDING", reason="BeginTime")], CLAIM, SIGNALLED, "queued"),  # preempted: it comes back
        ([listed("PREEMPTED")], CLAIM, SIGNALLED, "ended"),
        ([listed("COMPLETED")], CLAIM, END, "ended"),
        ([], CLAIM, END, "ended"),  # Slurm has forgotten it
        ([], CLAIM, None, "unsettled"),
        ([listed("NODE_FAIL")], CLAIM, None, "unsettled"),
        ([listed("RUNNING")], Claim("12", 1, "n1", 1.0), END, "running"),
        ([], Claim("12", 1, "n1", 1.0), END, "unsettled"),  # the end is of the run before
        ([], None, None, "absent"),
        ([listed("CANCELLED", reason="DependencyNeverSatisfied")], None, None, "never-satisfied"),
        ([listed("CANCELLED")], None, None, "ended"),
        ([listed("FAILED")], None, None, "unsettled"),
        ([listed("FAILED", "13"), listed("RUNNING")], CLAIM, None, "running"),  # 13 was the spare one
        ([listed("PENDING", "13")], CLAIM, END, "ended"),
    ],
)
def test_how_a_job_stands(jobs: list[Listed], claim: Claim | None, end: End | None, stands: str) -> None:
    assert judge(jobs, claim, end).stands == stands


def test_spare_submissions_are_those_that_wait_for_nothing() -> None:
    assert spare([listed("RUNNING"), listed("PENDING", "13")], CLAIM) == [listed("PENDING", "13")]
    assert spare([listed("PENDING", "13")], None) == []


def test_a_task_of_an_array_has_a_number_of_its_own_only_once_it_runs() -> None:
    """A listing from before its begin is no reason to cancel it."""
    claim = Claim("14", 0, "n1", 1.0, "12_1")
    waiting = Listed("a", 1, "12", "12_1", "PENDING")
    assert spare([waiting], claim) == []
    assert spare([waiting, Listed("b", 0, "15", "15", "PENDING")], claim) == [Listed("b", 0, "15", "15", "PENDING")]
    assert judge([replace(waiting, job_id="14", state="RUNNING")], claim, None).stands == "running"


def ended(code: int | None, state: str = "", **more: Any) -> Standing:
    end = None if code is None else replace_end(exit_code=code, **more)
    return Standing("ended", listed(state) if state else None, end)


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
        (ended(143, "", signalled=True, told="TIMEOUT"), "", ("timed-out", "time limit")),
        (ended(143, "CANCELLED", signalled=True), "", ("cancelled", "scancel")),
        (ended(143, "", signalled=True, told="PREEMPTED"), "", ("cancelled", "preempted")),
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
def test_what_an_end_means(standing: Standing, verdict: str, expected: tuple[str, str]) -> None:
    assert state_of(standing, verdict, asked_by_us=False) == expected


def test_what_we_cancelled_is_cancelled() -> None:
    assert state_of(ended(143, "CANCELLED", signalled=True), "", asked_by_us=True) == ("cancelled", "")
    assert state_of(ended(0, "COMPLETED"), "", asked_by_us=True) == ("succeeded", "")


def test_a_job_whose_task_never_began() -> None:
    never = state_of(ended(None, "FAILED"), "", asked_by_us=False, claimed=False)
    assert never == ("failed", "never began")


# --- the journal ------------------------------------------------------------------------------------------------------


def test_what_was_handed_over_is_known_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    a, b, gone = job("a"), job("b"), job("gone")
    journal.begun(3, "1f")
    journal.handed("x.1f-1", [(a, 1), (b, 1), (gone, 1)])
    journal.handed("x.1f-2", [(b, 1)])
    journal.close()
    found = attempts(parse((tmp_path / "j").read_bytes(), "")[0])
    assert [each.handed for each in found[:2]] == [
        (Handed("x.1f-1", 0, 3),),
        (Handed("x.1f-1", 1, 3), Handed("x.1f-2", 0, 1)),
    ]
    changed = replace(b, env=(("X", "1"),))
    before, going_on, others = adopted(history(found, [a, changed]), [a, changed])
    assert list(going_on) == ["a"] and before["a"].with_engine and not before["b"].with_engine
    assert [each.job for each in others] == ["b", "gone"]


def test_a_local_attempt_is_none_of_slurms() -> None:
    past = Past("a", 1, job().fingerprint, ProcessId(1, 1))
    assert adopted(history([past], [job()]), [job()])[1:] == ({}, [])


# --- the engine, with answers in place of Slurm ----------------------------------------------------------------------


class Answers:
    """Stands for Slurm: what it is asked is kept, what it lists is ``jobs``."""

    def __init__(self) -> None:
        self.jobs: list[Listed] = []
        self.asked: list[tuple[str, ...]] = []
        self.errors: list[str] = []

    def later(self, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(work())
        except SlurmError as error:
            future.set_exception(error)
        return future

    def submit(self, words: Sequence[str], given: Sequence[str] = ()) -> str:
        self.asked.append(tuple(words[:-1]))
        if self.errors:
            raise SlurmError(self.errors.pop(0))
        return str(100 + len(self.asked))

    def cancel(self, addresses: Sequence[str], *, kill: bool) -> None:
        self.asked.append(("scancel", *addresses))

    def listed(self) -> list[Listed]:
        if self.errors:
            raise SlurmError(self.errors.pop(0))
        return self.jobs


class Scene:
    def __init__(self, tmp_path: Path, *jobs: Job) -> None:
        self.slurm, self.said, self.now = Answers(), list[str](), 0.0
        self.paths = SweepPaths(tmp_path / "s")
        self.journal = Journal(self.paths.journal)
        self.sweep = Sweep(jobs, Rules(1 << 30, 1 << 30, ahead=True))
        site = Site(self.paths, self.journal, self.slurm, PROGRAMS, "1f", largest_array=1000)  # type: ignore[arg-type]
        self.engine = SlurmEngine(self.sweep, site, self.said.append, {}, lambda: self.now)

    def turn(self, seconds: float = 0.0) -> None:
        for _ in range(4):
            self.now += seconds / 4
            for each in self.engine.poll():
                self.journal.ended(each.job.name, each.attempt, each.outcome)
                self.sweep.ended(each.job.name, each.outcome)
            self.engine.submit()

    def states(self) -> list[str]:
        return [track.state for track in self.sweep.tracks.values()]


def test_jobs_are_written_down_before_sbatch_and_needs_become_dependencies(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"), job("b"), job("c", needs=("a", "b")))
    scene.turn()
    assert scene.slurm.asked == [
        ("sbatch", "--parsable"),
        ("sbatch", "--parsable", "--dependency=afterok:101_0:101_1", "--kill-on-invalid-dep=yes"),
    ]
    names = [each.handed[0].batch for each in attempts(parse(scene.paths.journal.read_bytes(), "")[0])]
    assert names == ["colaunch.1f-1", "colaunch.1f-1", "colaunch.1f-2"]
    assert all((scene.paths.batch_script(name).stat().st_mode & 0o777) == 0o600 for name in names)


def test_an_unclear_answer_is_looked_up_before_the_job_is_submitted_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.slurm.errors = ["Socket timed out on send/recv operation"]
    scene.slurm.jobs = [Listed("colaunch.1f-1", 0, "7", "7", "PENDING")]
    scene.turn(3600.0)
    assert len(scene.slurm.asked) == 1, "it is there: Slurm had taken it"
    scene.slurm.jobs = []
    scene.turn(10.0)
    assert len(scene.slurm.asked) == 1, "not at once: a listing may lag behind"
    scene.turn(100.0)
    scene.turn()
    assert len(scene.slurm.asked) == 2
    assert scene.sweep.tracks["a"].attempts == 1, "the same attempt, which only one of both can claim"


def test_a_refusal_fails_the_jobs(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"), job("b"))
    scene.slurm.errors = ["Batch job submission failed: Invalid partition name specified"]
    scene.turn()
    assert scene.states() == ["failed", "failed"]
    assert any("Invalid partition" in text for text in scene.said)


def test_an_array_that_is_too_large_for_a_limit_is_halved(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *(job(f"a{number}") for number in range(4)))
    scene.slurm.errors = ["Job violates accounting/QOS policy (job submit limit)"]
    scene.turn(100.0)
    assert len(scene.slurm.asked) == 3
    assert sum("takes no more" in text for text in scene.said) == 1


def test_silence_is_said_once_and_loses_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.turn()
    scene.slurm.errors = ["Unable to contact slurm controller"] * 3
    for _ in range(4):
        scene.turn(20.0)
    assert sum("does not answer" in text for text in scene.said) == 1
    assert sum("answers again" in text for text in scene.said) == 1


def test_a_stop_cancels_what_is_there_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, job("a"))
    scene.turn()
    scene.slurm.jobs = [Listed("colaunch.1f-1", 0, "101", "101", "PENDING")]
    scene.turn(5.0)
    scene.sweep.stop("stopped by SIGINT")
    scene.engine.cancel(kill=False)
    scene.turn(5.0)
    scene.turn(5.0)
    assert scene.slurm.asked[1:] == [("scancel", "101")]
    scene.slurm.jobs = [Listed("colaunch.1f-1", 0, "101", "101", "CANCELLED")]
    scene.turn(20.0)
    assert scene.states() == ["cancelled"] and not scene.engine.unfinished
