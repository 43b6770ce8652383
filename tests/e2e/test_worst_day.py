"""What goes wrong around a job must never cost the job, and never pass without a word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job, Result
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

BLOCKED, HEALTHY = PROGRAMS / "blocked.py", PROGRAMS / "healthy.py"
HANG = ("--stall-timeout=2", "--nproc-per-node=2")


def marks(scratch: Path) -> list[str | Path]:
    """A job that leaves a mark as soon as it runs."""
    script = scratch / "marks.py"
    script.write_text(f"open({str(scratch / 'started')!r}, 'w').close()\n")
    return [script]


def refused(words: list[str | Path], scratch: Path, **more: Path) -> str:
    """Runs what must be refused before anything starts; returns what was said."""
    with Job([*words, *marks(scratch)], scratch, **more) as job:
        result = job.wait()
    assert result.code == 2, result.stderr
    assert not (scratch / "started").exists()
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.said
    assert result.leftovers == ()
    return result.said


def names_rank_1(result: Result) -> None:
    assert result.code == 124, result.stderr
    assert [culprit["rank"] for culprit in result.verdict["culprits"]] == [1]
    assert result.verdict["victims"] == "0"
    assert result.leftovers == ()


# --- before anything is started ---------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    preset, file = tmp_path / "mine.yaml", tmp_path / "file"
    preset.write_text("description: mine\nenv:\n  A:\n    value: '1'\n    why: because\nwatchdgo: {}\n")
    file.touch()
    said = refused([f"--preset={preset}"], tmp_path)
    assert "mine.yaml:6" in said and "watchdog" in said
    assert "hang-debug" in refused(["--preset=hang-debugg"], tmp_path).replace("hang-debugg", "")
    assert "99" in refused(["--gpus=99"], tmp_path)
    assert str(file) in refused([], tmp_path, bundle_dir=file / "bundles")


# --- ranks that are out of reach --------------------------------------------------------------------------------------


def isolated(scratch: Path, program: Path, ranks: str) -> Path:
    """A shell script that runs ``program`` under ``python -I`` on the ranks of a shell pattern."""
    isolating = scratch / "isolated.py"
    isolating.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(PROGRAMS)!r})\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')\n"
    )
    script = scratch / "run.sh"
    script.write_text(
        f'case "$RANK" in\n {ranks}) exec {sys.executable} -I {isolating} "$@";;\n'
        f' *) exec {sys.executable} {program} "$@";;\nesac\n'
    )
    return script


@pytest.mark.nightly
def test_ranks_that_run_isolated_are_said_to_be_unwatched(tmp_path: Path) -> None:
    script = isolated(tmp_path, HEALTHY, "*")
    words = [*HANG, "--no-python", "bash", script, "--after=5", f"--scratch={tmp_path}"]
    with Job(words, tmp_path) as job:
        job.until(lambda: "CANNOT WATCH" in job.stderr, "word that the job is not watched")
        (tmp_path / "finish").touch()
        result = job.wait()
    assert result.code == 0, result.stderr
    assert "python -I" in result.said
    assert result.bundles == ()


@pytest.mark.nightly
def test_one_isolated_rank_is_still_looked_at(tmp_path: Path) -> None:
    script = isolated(tmp_path, BLOCKED, "1")
    words = [*HANG, "--no-python", "bash", script, "--how=asleep", "--culprit=1", f"--scratch={tmp_path}"]
    with Job(words, tmp_path) as job:
        result = job.wait()
    names_rank_1(result)
    assert result.verdict["cause"] == "stuck-in-user-code"
    assert result.verdict["culprits"][0]["frame"]["file"] == str(BLOCKED)


@pytest.mark.nightly
def test_a_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    with Job([*HANG, HEALTHY, "--how=deaf", "--culprit=1", f"--scratch={tmp_path}"], tmp_path) as job:
        names_rank_1(job.wait())


# --- jobs that are well -----------------------------------------------------------------------------------------------


def test_a_dump_lets_the_job_go_on(tmp_path: Path) -> None:
    words = ["--on-stall=dump", *HANG, BLOCKED, "--how=fifo", "--culprit=0", "--steps=20", f"--scratch={tmp_path}"]
    with Job(words, tmp_path) as job:
        job.until(lambda: job.bundles() and "bundle: " in job.stderr, "a bundle")
        verdict = job.bundles()[0].verdict
        assert job.process.poll() is None
        with open(tmp_path / "prompts", "w") as pipe:  # what rank 0 waits for comes after all
            pipe.write("go on\n")
        result = job.wait()
    assert (verdict["cause"], [culprit["rank"] for culprit in verdict["culprits"]]) == ("blocking-io", [0])
    assert result.code == 0, result.stderr
    assert result.bundle.problems() == []
