"""What goes wrong around a job must never cost the job, and never pass without a word."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import PROGRAMS, Bundle, Job, Result

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

BLOCKED, HEALTHY = PROGRAMS / "blocked.py", PROGRAMS / "healthy.py"
HANG = ("--stall-timeout=2", "--nproc-per-node=2")


def asleep(scratch: Path) -> list[str | Path]:
    """A job whose rank 1 hangs."""
    return [*HANG, BLOCKED, "--how=asleep", "--culprit=1", f"--scratch={scratch}"]


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


def test_a_bundle_directory_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    said = refused([], tmp_path, bundle_dir=file / "bundles")
    assert str(file) in said


def test_a_preset_that_does_not_exist(tmp_path: Path) -> None:
    said = refused(["--preset=hang-debugg"], tmp_path)
    assert "hang-debug" in said.replace("hang-debugg", "")


def test_a_preset_with_an_unknown_key(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("description: mine\nenv:\n  A:\n    value: '1'\n    why: because\nwatchdgo: {}\n")
    said = refused([f"--preset={preset}"], tmp_path)
    assert "mine.yaml:6" in said
    assert "watchdog" in said


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    assert "99" in refused(["--gpus=99"], tmp_path)


# --- py-spy -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An interpreter with everything that ours has installed but for the programs beside it, py-spy among them."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment to make another one like it")
    home = tmp_path / "bare"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (home / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (home / "lib").symlink_to(Path(sys.prefix) / "lib")
    return home / "bin"


def run_bare(bare: Path, scratch: Path) -> Result:
    interpreter = [str(bare / "python"), "-m", "safelaunch"]
    with Job(asleep(scratch), scratch, interpreter=interpreter, env={"PATH": "/usr/bin:/bin"}) as job:
        return job.wait()


def test_without_py_spy_the_other_evidence_decides(bare: Path, tmp_path: Path) -> None:
    if shutil.which("py-spy", path="/usr/bin:/bin"):
        pytest.skip("there is a py-spy in /usr/bin")
    result = run_bare(bare, tmp_path)
    names_rank_1(result)
    assert result.bundle.problems() == []
    artifacts = {a["path"]: a for a in result.bundle.json("manifest.json")["artifacts"]}
    assert "py-spy is not installed" in artifacts["ranks/1/stack.json"]["missing"]
    assert "no stack could be read" in result.said
    assert "-m pip install py-spy" in result.said


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("exec sleep 1000", "no answer within"),
        pytest.param("echo gibberish", "unreadable output", marks=pytest.mark.rare),
    ],
)
def test_a_py_spy_that_is_broken(does: str, reason: str, bare: Path, tmp_path: Path) -> None:
    (bare / "py-spy").write_text(f"#!/bin/sh\n{does}\n")
    (bare / "py-spy").chmod(0o755)
    result = run_bare(bare, tmp_path)
    names_rank_1(result)
    artifacts = {a["path"]: a for a in result.bundle.json("manifest.json")["artifacts"]}
    assert reason in artifacts["ranks/1/stack.json"]["missing"]


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A directory (0700, of a short name) on a file system of its own that holds 256 KB."""
    place = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        place.rmdir()
        pytest.skip("needs root to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False)
    place.rmdir()


def kept_locally(result: Result, wanted: Path) -> None:
    """The bundle is whole, in a place that was named, and so is the reason."""
    assert result.bundles == ()
    line = next(line for line in result.said.splitlines() if line.startswith("bundle: "))
    bundle = Bundle(Path(line.removeprefix("bundle: ")))
    try:
        assert bundle.problems() == []
        assert [culprit["rank"] for culprit in bundle.verdict["culprits"]] == [1]
        assert str(wanted) in result.said
    finally:
        shutil.rmtree(bundle.path)


@pytest.mark.rare  # a full one is kept locally in the same way
def test_a_bundle_directory_that_vanishes_during_the_run(tmp_path: Path) -> None:
    wanted = tmp_path / "bundles"
    wanted.mkdir()
    with Job(asleep(tmp_path), tmp_path, bundle_dir=wanted) as job:
        job.until(lambda: len(job.ranks()) == 2, "two ranks")
        wanted.rmdir()
        wanted.write_text("in the way")
        result = job.wait()
    assert result.code == 124, result.stderr
    assert result.leftovers == ()
    kept_locally(result, wanted)


def test_a_bundle_directory_that_is_full(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "data").write_bytes(b"x" * (200 << 10))
    with Job(asleep(tmp_path), tmp_path, bundle_dir=small_disk) as job:
        result = job.wait()
    assert result.code == 124, result.stderr
    assert [path.name for path in small_disk.iterdir()] == ["data"]  # no half of a bundle
    kept_locally(result, small_disk)


@pytest.mark.parametrize("left_kb", [0, *(pytest.param(kb, marks=pytest.mark.rare) for kb in (24, 160))])
def test_a_run_directory_that_is_full(left_kb: int, small_disk: Path, tmp_path: Path) -> None:
    """Room for nothing; for pages only; for pages and output: a hang is found or not, the job is never lost."""
    (small_disk / "data").write_bytes(b"x" * ((256 - left_kb) << 10))
    with Job([*HANG, HEALTHY, "--after=100", f"--scratch={tmp_path}"], tmp_path, runtime=small_disk) as job:
        (tmp_path / "finish").touch()
        result = job.wait()
    assert result.code == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 trained", "rank 1 trained"]
    assert result.leftovers == ()
    assert "Traceback" not in result.stderr


def test_a_hang_with_little_room_in_the_run_directory(small_disk: Path, tmp_path: Path) -> None:
    """Pages and rings fit, not the whole evidence: what does not fit is said to be missing, and the verdict stands."""
    (small_disk / "data").write_bytes(b"x" * (56 << 10))
    with Job(asleep(tmp_path), tmp_path, runtime=small_disk) as job:
        result = job.wait()
    names_rank_1(result)


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


def test_one_isolated_rank_is_still_looked_at(tmp_path: Path) -> None:
    script = isolated(tmp_path, BLOCKED, "1")
    words = [*HANG, "--no-python", "bash", script, "--how=asleep", "--culprit=1", f"--scratch={tmp_path}"]
    with Job(words, tmp_path) as job:
        result = job.wait()
    names_rank_1(result)
    assert result.verdict["cause"] == "stuck-in-user-code"
    assert result.verdict["culprits"][0]["frame"]["file"] == str(BLOCKED)


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


def test_a_long_evaluation_is_left_alone(tmp_path: Path) -> None:
    words = [*HANG, "--max-stall=120", HEALTHY, "--how=evaluates", "--culprit=0", f"--scratch={tmp_path}"]
    (tmp_path / "finish").touch()
    with Job(words, tmp_path) as job:
        job.until(lambda: "the job works" in job.stderr, "a closer look")
        (tmp_path / "enough").touch()
        result = job.wait()
    assert result.code == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 trained", "rank 1 trained"]
    assert result.bundles == ()


def test_a_job_that_is_stopped_and_continued(tmp_path: Path) -> None:
    with Job([*HANG, HEALTHY, f"--scratch={tmp_path}"], tmp_path) as job:
        job.until(lambda: all((tmp_path / f"training-{rank}").exists() for rank in (0, 1)), "training")
        pids = list(job.ranks().values())
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8.0)  # suspicion and both looks fall into it
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        (tmp_path / "finish").touch()
        result = job.wait()
    assert result.code == 0, result.stderr
    assert result.bundles == ()


@pytest.mark.rare  # the whole fault matrix has eight
def test_four_jobs_at_once(tmp_path: Path) -> None:
    jobs: list[Job] = []
    try:
        for number in range(4):
            scratch = tmp_path / str(number)
            scratch.mkdir()
            (scratch / "finish").touch()
            jobs.append(Job(["--nproc-per-node=1", HEALTHY, f"--scratch={scratch}"], scratch))
        for job in jobs:
            result = job.wait()
            assert (result.code, result.stdout, result.said) == (0, "rank 0 trained\n", ""), result.stderr
            assert result.leftovers == ()
            assert result.bundles == ()
    finally:
        for job in jobs:
            job.clean_up()
