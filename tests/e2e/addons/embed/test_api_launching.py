"""Ranks started from Python: ``safelaunch.launch`` in place of torch's ``elastic_launch``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

PROGRAM = PROGRAMS / "launches.py"
LINES = {line.partition("  # ")[2]: number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)}


def caller(scratch: Path, *words: str) -> Job:
    return Job(words, scratch, interpreter=(sys.executable, os.fspath(PROGRAM)))


def told(stdout: str) -> dict[str, Any]:
    """Returns the program's output for each launch, by name."""
    return {line["name"]: line for line in map(json.loads, filter(None, stdout.splitlines()))}


@pytest.mark.nightly
def test_launch_returns_results_and_reports_hang(tmp_path: Path) -> None:
    """One process launches six times, as a notebook does."""
    with caller(tmp_path, "several") as job:
        result = job.wait()
    launches = told(result.stdout)
    assert launches["results"]["results"] == {"0": 30, "1": 31}
    assert launches["results"]["newest"] is None
    # The failure is the one that torch reports, and the bundle contains it as well.
    assert launches["failed"]["failed"] == launches["plain"]["failed"]
    assert "no such sample" in launches["failed"]["failed"][-1]
    crash, hang, stepless = result.bundles
    assert launches["failed"]["newest"] == os.fspath(crash.path)
    assert crash.verdict["cause"] == "rank-exception"
    assert [culprit["rank"] for culprit in crash.verdict["culprits"]] == [1]
    assert launches["refused"]["raised"] == "UsageError"
    # The hang.
    assert launches["hung"]["bundle"] == launches["hung"]["newest"] == os.fspath(hang.path)
    assert launches["hung"]["culprits"] == [[1, LINES["HANGS"]]]
    assert launches["hung"]["cause"] == "stuck-in-user-code"
    assert launches["hung"]["verdict"] == hang.verdict["summary"]
    assert launches["hung"]["bundle"] in launches["hung"]["said"]
    # One number suffices for what marks no step.
    assert launches["stepless"]["bundle"] == os.fspath(stepless.path)
    assert launches["stepless"]["culprits"] == [[1, LINES["NEVER COMES"]]]
    assert "no step seen so far" not in result.stderr
    assert [problem for bundle in result.bundles for problem in bundle.problems()] == []
    # Each leaves the environment as torch does, and no process.
    assert not [name for launch in launches.values() for name in launch["changed"] if "SAFELAUNCH" in name]
    assert result.leftovers == ()


@pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(method, marks=pytest.mark.nightly) for method in ("fork", "forkserver"))]
)
def test_function_that_returns_early_is_named(tmp_path: Path, method: str) -> None:
    with caller(tmp_path, "leave", method) as job:
        result = job.wait()
    launch = told(result.stdout)["leave"]
    assert launch["cause"] == "uneven-batches"
    assert [rank for rank, _ in launch["culprits"]] == [1]
    assert "its function has returned" in launch["verdict"]


@pytest.mark.nightly
def test_rank_that_outlives_its_function_hangs_the_job(tmp_path: Path) -> None:
    with caller(tmp_path, "outlives") as job:
        result = job.wait()
    launch = told(result.stdout)["outlives"]
    assert [rank for rank, _ in launch["culprits"]] == [1], result.said
    assert result.leftovers == ()


def stepping(job: Job) -> None:
    job.until(lambda: all((job.scratch / "signs" / f"stepped-{rank}").exists() for rank in (0, 1)), "the first steps")


@pytest.mark.nightly
def test_interrupt_blames_no_rank(tmp_path: Path) -> None:
    with caller(tmp_path, "steady") as job:
        stepping(job)
        job.process.send_signal(signal.SIGINT)
        result = job.wait()
    assert told(result.stdout)["steady"]["raised"] == "SignalException"
    assert result.bundles == ()
    assert result.leftovers == ()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_job_survives_its_supervisor(number: int, tmp_path: Path) -> None:
    with caller(tmp_path, "steady") as job:
        stepping(job)
        supervisor = int(next((job.runtime / "safelaunch").glob("r*/owner")).read_text().split()[0])
        os.kill(supervisor, number)
        (tmp_path / "signs" / "enough").touch()
        result = job.wait()
        assert not list((job.runtime / "safelaunch").glob("r*"))
    assert told(result.stdout)["steady"]["results"] == {"0": 0, "1": 1}
    assert ("the rest of the job ran unwatched" in result.stderr) is (number == signal.SIGKILL)
    assert result.leftovers == ()


@pytest.mark.nightly
def test_killed_caller_leaves_no_process(tmp_path: Path) -> None:
    with caller(tmp_path, "steady") as job:
        stepping(job)
        job.process.kill()
        result = job.wait()
    assert result.leftovers == ()
    assert result.bundles == ()
