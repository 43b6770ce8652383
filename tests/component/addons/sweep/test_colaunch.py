"""Sweeps of real safelaunch runs: what they leave, how they are stopped, killed and resumed. Torch is not needed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.jobs import Result
from tests.support.sweeps import SWEPT, Sweep, several

LINES = 500


def run(scratch: Path, spec: str, *words: str, **more: Any) -> tuple[Sweep, Result]:
    """Runs a sweep to its end; no process of it must be left."""
    with Sweep(scratch, spec, *words, **more) as sweep:
        result = sweep.wait()
    assert result.leftovers == ()
    return sweep, result


def whole(log: str, name: str) -> bool:
    """Returns True if every line occurs once and complete."""
    numbers = [
        int(match[1]) for match in re.finditer(rf"^{re.escape(name)} line (\d+) of {LINES} loss=\d+$", log, re.M)
    ]
    return sorted(numbers) == list(range(LINES))


# --- what a sweep is --------------------------------------------------------------------------------------------------

ALL_KINDS = f"""
defaults:
  command: {SWEPT} {{name}} {{how}} 0.2
  env: {{EXTRA: "job {{name}}"}}
  metric: loss=([0-9]+)
matrix: {{how: [ok, flaky]}}
jobs:
  prepare: {{command: "{SWEPT} {{name}} ok 0"}}
  good: {{needs: prepare, retries: 1}}
  bad: {{needs: prepare, command: "{SWEPT} {{name}} fail 0.2", retries: 1}}
  report: {{needs: good, command: "{SWEPT} {{name}} ok 0"}}
  never: {{needs: [good, bad], command: "{SWEPT} {{name}} ok 0"}}
"""


def test_jobs_of_every_kind_run_together(tmp_path: Path) -> None:
    sweep, result = run(tmp_path, ALL_KINDS, "--slots", "2", env={"OMP_NUM_THREADS": None})
    assert result.code == 1, result.stderr
    assert sweep.states() == {
        "prepare": "succeeded",
        "good_how-ok": "succeeded",
        "good_how-flaky": "succeeded",
        "bad": "failed",
        "report": "succeeded",
        "never": "skipped",
    }
    attempts = {name: entry["attempts"] for name, entry in sweep.jobs.items()}
    assert list(attempts.values()) == [1, 1, 2, 2, 1, 0]
    assert sweep.jobs["bad"]["exit_code"] == 7
    assert sweep.jobs["report"]["metrics"] == {"loss": 1.0}
    assert sweep.jobs["good_how-ok"]["metrics"] == {"loss": 1.0}
    for name, entry in sweep.jobs.items():
        for attempt in range(1, entry["attempts"] + 1):
            assert whole(sweep.log(name, attempt), name), (name, attempt)
            assert f"visible job {name}" in sweep.log(name, attempt)
    assert Path(sweep.jobs["bad"]["bundle"], "verdict.json").is_file()
    assert sweep.jobs["bad"]["bundle"].startswith(os.fspath(tmp_path / "s/jobs/bad/bundles/bad-"))
    assert "6 jobs: 4 succeeded, 1 skipped, 1 failed" in result.stdout
    assert "needs bad, which failed" in result.stdout
    assert sweep.marks("twice") == {}


def test_slot_has_thread_for_each_core(tmp_path: Path) -> None:
    spec = f"jobs: {{a: {{command: '{SWEPT} a ok 0.5'}}, b: {{command: '{SWEPT} b ok 0.5'}}}}"
    sweep, result = run(tmp_path, spec, "--slots", "2", env={"OMP_NUM_THREADS": None})
    assert result.code == 0, result.stderr
    each = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [re.findall(r"^threads (\d+)$", sweep.log(name), re.M) for name in ("a", "b")] == [[each], [each]]


def test_thread_count_set_by_user_is_kept(tmp_path: Path) -> None:
    spec = f"jobs: {{a: {{command: '{SWEPT} a ok 0', env: {{OMP_NUM_THREADS: 5}}}}, b: {{command: '{SWEPT} b ok 0'}}}}"
    sweep, _ = run(tmp_path, spec, env={"OMP_NUM_THREADS": "3"})
    assert [re.findall(r"threads (\d+)", sweep.log(name)) for name in ("a", "b")] == [["5"], ["3"]]


def test_hung_or_slow_job_does_not_affect_others(tmp_path: Path) -> None:
    spec = f"""
defaults: {{stall-timeout: 2}}
jobs:
  stuck: {{command: "{SWEPT} stuck hang 1"}}
  slow: {{command: "{SWEPT} slow polite 600", timeout: 3}}
  fine: {{command: "{SWEPT} fine ok 4"}}
"""
    sweep, result = run(tmp_path, spec, "--slots", "3")
    assert result.code == 1
    assert sweep.states() == {"stuck": "hung", "slow": "timed-out", "fine": "succeeded"}
    assert sweep.jobs["stuck"]["exit_code"] == 124
    assert json.loads(Path(sweep.jobs["stuck"]["bundle"], "verdict.json").read_text())["outcome"] == "hang"
    for name in ("stuck", "fine"):
        assert sweep.jobs[name]["last_step"] == int(re.findall(r"^steps (\d+)$", sweep.log(name), re.M)[-1])
    assert sweep.jobs["slow"]["bundle"] is None
    assert "slow" in sweep.marks("left") or "slow" not in sweep.marks("begun")
    assert "the job hangs: " in sweep.log("stuck")


def test_fail_fast_stops_the_others(tmp_path: Path) -> None:
    spec = f"""
jobs:
  bad: {{command: "{SWEPT} bad fail marks/long.begun"}}
  long: {{command: "{SWEPT} long polite 600"}}
  later: {{command: "{SWEPT} later ok 0"}}
"""
    sweep, result = run(tmp_path, spec, "--slots", "2", "--fail-fast")
    assert result.code == 1
    assert sweep.states() == {"bad": "failed", "long": "cancelled", "later": "cancelled"}
    assert sweep.marks("left") == {"long": 1}


def test_job_larger_than_node_is_rejected(tmp_path: Path) -> None:
    sweep, result = run(tmp_path, f"jobs: {{a: {{gpus: 3, command: '{SWEPT} a ok 0'}}}}", "--slots", "2")
    assert result.code == 2
    assert "the job a needs 3 slots, but this node has 2" in result.said
    assert not (sweep.scratch / "s").exists()


# --- stopped, killed, resumed -----------------------------------------------------------------------------------------


def until_running(sweep: Sweep, count: int, done: int = 0) -> None:
    sweep.until(lambda: len(sweep.marks("begun")) >= count and len(sweep.recorded()) >= done, f"{count} jobs")


def test_first_interrupt_ends_jobs_and_resume_runs_the_rest(tmp_path: Path) -> None:
    spec = several("polite", "{name}.go")
    for name in ("j0", "j1"):
        (tmp_path / f"{name}.go").touch()
    with Sweep(tmp_path, spec, "--slots", "2") as sweep:
        until_running(sweep, 4, done=2)
        sweep.process.send_signal(signal.SIGINT)
        result = sweep.wait()
    assert result.leftovers == ()
    assert result.code == 130
    assert "stopping 2 running jobs; repeat to kill them" in result.said
    assert "continue with --resume" in result.said and "cancelled jobs: stopped by SIGINT" in result.stdout
    states = list(sweep.states().values())
    assert (states.count("succeeded"), states.count("cancelled")) == (2, 4)
    assert sum(sweep.marks("left").values()) == 2
    for name in ("j2", "j3", "j4", "j5"):
        (tmp_path / f"{name}.go").touch()
    refused = run(tmp_path, spec)[1]
    assert refused.code == 2
    assert "an earlier sweep (2 of 6 jobs have succeeded)" in refused.said
    again, result = run(tmp_path, spec, "--slots", "6", "--resume")
    assert result.code == 0, result.stderr
    assert set(again.states().values()) == {"succeeded"}
    assert sorted(again.marks("begun").values()) == [1, 1, 1, 1, 2, 2]
    assert again.marks("twice") == {}
    nothing, result = run(tmp_path, spec, "--resume")
    assert (result.code, nothing.marks("begun")) == (0, again.marks("begun"))


def test_second_interrupt_kills_jobs(tmp_path: Path) -> None:
    with Sweep(tmp_path, several("stubborn", 600, 2), "--slots", "2") as sweep:
        until_running(sweep, 2)
        sweep.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert sweep.process.poll() is None
        sweep.process.send_signal(signal.SIGTERM)
        result = sweep.wait()
    assert result.leftovers == ()
    assert result.code == 143
    assert set(sweep.states().values()) == {"cancelled"}


def test_killed_colaunch_leaves_no_job_and_resume_repeats_no_success(tmp_path: Path) -> None:
    spec = several("ok", 1.5)
    with Sweep(tmp_path, spec, "--slots", "2") as sweep:
        until_running(sweep, 4, done=2)
        sweep.process.kill()
        sweep.process.wait()
        done, begun = sweep.recorded(), sweep.marks("begun")
        again, result = run(tmp_path, spec, "--slots", "2", "--resume")
        assert sweep.left_behind() == []
    assert result.code == 0, result.stderr
    assert set(again.states().values()) == {"succeeded"}
    assert len(again.jobs) == 6
    assert {name: count for name, count in again.marks("begun").items() if name in done} == dict.fromkeys(done, 1)
    assert set(begun) <= set(again.marks("begun"))
    assert again.marks("twice") == {}
    already = re.search(r"(\d) of 6 jobs have already succeeded", result.said)
    assert already and int(already[1]) >= len(done), "one may have ended after the last record"


def test_resume_waits_for_stubborn_job_of_killed_colaunch(tmp_path: Path) -> None:
    """The job ignores the SIGTERM that it is sent at colaunch's death, and ends well: so it is not run again."""
    spec = several("stubborn", "go", 1)
    with Sweep(tmp_path, spec) as sweep:
        until_running(sweep, 1)
        sweep.process.kill()
        sweep.process.wait()
        with Sweep(tmp_path, spec, "--resume") as again:
            again.until(lambda: "waiting for the processes of its jobs to end: j0" in again.stderr, "word of the job")
            (tmp_path / "go").touch()
            result = again.wait()
    assert result.leftovers == ()
    assert result.code == 0, result.stderr
    assert again.marks("twice") == {}
    assert again.marks("begun") == {"j0": 1}
    assert (again.states(), again.jobs["j0"]["attempts"]) == ({"j0": "succeeded"}, 1)
    assert "1 of 1 jobs have already succeeded" in result.said


def test_second_colaunch_on_same_sweep_is_rejected(tmp_path: Path) -> None:
    with Sweep(tmp_path, several("polite", 600, 1)) as sweep:
        until_running(sweep, 1)
        pid = int((tmp_path / "marks" / "j0.begun").read_text())
        # Signals from the terminal reach jobs only through colaunch.
        assert os.getsid(pid) != os.getsid(sweep.process.pid)
        refused = run(tmp_path, several("polite", 600, 1), "--resume")[1]
        assert refused.code == 2
        assert f"another safelaunch colaunch runs this sweep (pid {sweep.process.pid})" in refused.said
        sweep.process.send_signal(signal.SIGINT)
        assert sweep.wait().code == 130
    assert sweep.marks("begun") == {"j0": 1}


def test_killed_colaunch_signals_its_jobs_at_once(tmp_path: Path) -> None:
    with Sweep(tmp_path, several("polite", 600, 2), "--slots", "2") as sweep:
        until_running(sweep, 2)
        sweep.process.kill()
        sweep.process.wait()
        assert sweep.left_behind(60) == []
        assert sweep.marks("left") == {"j0": 1, "j1": 1}


def test_terminal_shows_table_and_stopped_terminal_stops_no_job(tmp_path: Path) -> None:
    """Ctrl-S while it runs: all jobs run to their end, and the summary is written; then Ctrl-Q shows the rest."""
    master, slave = os.openpty()
    words = ["--slots", "1", "--sweep-dir", "s", "--grid", "n=1..4", "--", "exec", "--"]
    words += ["sh", "-c", "while [ ! -e go ]; do sleep 0.1; done", "sh", "{n}"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "safelaunch", "colaunch", *words]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while b"running" not in shown:
            shown += os.read(master, 65536)
        os.write(master, b"\x13")
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 120
        while not (tmp_path / "s" / "summary.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        entries = json.loads((tmp_path / "s" / "summary.json").read_text())["jobs"]
        assert [entry["state"] for entry in entries] == ["succeeded"] * 4
        os.write(master, b"\x11")
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:  # its other end is closed: it has ended
            pass
        assert process.wait(120) == 0
    os.close(master)
    last = shown[shown.rindex(b"\x1b[2K") :].decode()  # what stands after the table has been erased
    assert [last.count(f"n-{n} ") for n in (1, 2, 3, 4)] == [1] * 4 and "n-4: succeeded" not in shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"^n-1 +n=1 +running +0 ", text, re.M)
    assert text.count("4 jobs: 4 succeeded") == 1
