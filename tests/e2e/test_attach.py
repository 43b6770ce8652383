"""``safelaunch dump --pid`` on jobs that plain torchrun has started: they go on as if nobody had looked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safelaunch.bundle.reading import locate
from safelaunch.capture import jobs
from safelaunch.capture.stacks import find_py_spy
from safelaunch.supervise.attach import attach
from safelaunch.verdict.diagnose import diagnose
from tests.qa import zoo
from tests.support.jobs import Bundle, Job
from tests.support.nodes import free_port
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def plain(scratch: Path, *words: str | Path) -> Job:
    """Two ranks under torchrun alone."""
    return Job(["--nproc-per-node=2", *words], scratch, launcher=TORCHRUN)


def asked(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    """``safelaunch dump WORDS`` by the same user."""
    return subprocess.run(
        [sys.executable, "-m", "safelaunch", "dump", *words, f"--bundle-dir={job.bundle_dir}"],
        env={**os.environ, "XDG_RUNTIME_DIR": os.fspath(job.runtime)},
        cwd=job.scratch,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def dumped(job: Job, pid: int) -> Bundle:
    done = asked(job, f"--pid={pid}")
    assert done.returncode == 0, done.stderr
    bundle = Bundle(Path(done.stdout.removesuffix("\n")))
    assert bundle.path.parent == job.bundle_dir and not bundle.problems()
    assert "safelaunch: snapshot: " in done.stderr
    return bundle


def stack_of(pid: int) -> str:
    """As seen from outside."""
    read = [find_py_spy(), "dump", "--nonblocking", "--pid", str(pid)]
    return subprocess.run(read, capture_output=True, text=True, check=False).stdout


def stands_in(job: Job, *functions: str) -> Callable[[], bool]:
    """Whether each function is in the stack of some rank, as seen from outside."""

    def found() -> bool:
        stacks = list(map(stack_of, job.ranks().values()))
        return all(any(function in stack for stack in stacks) for function in functions)

    return found


def test_a_hung_job_by_its_launcher_by_a_rank_and_in_two_halves(tmp_path: Path) -> None:
    specimen = zoo.BY_NAME["asleep"]

    def is_right(verdict: dict[str, Any]) -> bool:
        assert (verdict["outcome"], verdict["cause"], verdict["victims"]) == ("dump", specimen.cause, "0")
        (culprit,) = verdict["culprits"]
        assert (culprit["rank"], culprit["pid"], culprit["step"]) == (1, ranks[1], None)
        assert (culprit["frame"]["file"], culprit["frame"]["line"] in specimen.lines()) == (str(specimen.script), True)
        assert verdict["confidence"] != "high"  # a sleep may end
        return True

    with plain(tmp_path, *zoo.script_of(specimen, 1, tmp_path)) as job:
        job.until(stands_in(job, "wait_for_licence", "_engine_run_backward"), "the hang", every_s=1.0)
        ranks = job.ranks()
        by_launcher = dumped(job, job.process.pid)
        assert is_right(by_launcher.verdict) and is_right(dumped(job, ranks[0]).verdict)
        assert any(what.startswith("steps: ") for what in by_launcher.verdict["missing"])
        assert by_launcher.json("launch.json")["agent_pid"] == job.process.pid
        host = by_launcher.json("manifest.json")["host"]
        assert (by_launcher.path / f"node/{host}/output.log").is_file()  # both ranks print into one file

        table = jobs.processes()
        found = jobs.job_of(ranks[1], table, jobs.jobs_in(table, jobs.packages_of))
        for rank, one in found.ranks.items():  # as on two nodes, each of which has one of them
            half = attach(replace(found, ranks={rank: one}), tmp_path / "halves")
            assert half.evidence.missing_ranks == (1 - rank,) and half.verdict.confidence != "high"
        merged = diagnose(locate.read(tmp_path / "halves").evidence)
        assert [one.rank for one in merged.culprits] == [1] and merged.victims == "0"

        assert job.process.poll() is None and job.ranks() == ranks


@pytest.mark.nightly
def test_a_healthy_job_ends_as_if_nobody_had_looked(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with plain(tmp_path, PROGRAMS / "live.py", f"--until={stop}") as job:
        job.until(stands_in(job, "all_reduce"), "the steps", every_s=1.0)
        verdict = dumped(job, job.ranks()[1]).verdict
        assert (verdict["cause"], verdict["culprits"]) == ("slow-not-stuck", [])
        stop.touch()
        result = job.wait()
        assert result.code == 0 and not result.leftovers
        assert sorted(result.stdout.split()) == sorted(["rank", "0", "finished", "rank", "1", "finished"])


@pytest.mark.nightly
def test_a_run_of_safelaunch_is_asked_itself(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    words = ["--nproc-per-node=2", "--run-name=own", PROGRAMS / "live.py", f"--until={stop}"]
    with Job(words, tmp_path) as job:
        job.until(stands_in(job, "all_reduce"), "the steps", every_s=1.0)
        bundle = dumped_by_its_run(job)
        assert bundle.path.name.startswith("own-") and bundle.json("ranks/0/progress.json")["step"] > 0
        stop.touch()
        assert job.wait().code == 0


def dumped_by_its_run(job: Job) -> Bundle:
    done = asked(job, f"--pid={job.ranks()[0]}")
    assert done.returncode == 0, done.stderr
    return Bundle(Path(done.stdout.removesuffix("\n")))


_TOLD_LATER = """
import asyncio, os, runpy, sys, threading
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE="2")
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}")
sys.argv = ["live.py", {words}]
run = lambda: runpy.run_path({program!r}, run_name="__main__")
async def chat():
    while worker.is_alive():
        await asyncio.sleep(0.002)
if {threaded}:
    worker = threading.Thread(target=run, name="trainer")
    worker.start()
    asyncio.run(chat())
else:
    run()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("hangs", [False, True])
def test_ranks_that_learn_who_they_are_after_their_start(hangs: bool, tmp_path: Path) -> None:
    """As Ray's workers do: what their processes were started with says nothing. Its first thread serves messages, and
    another one runs the script.
    """
    words, where = f"'--until={tmp_path / 'stop'}'", "rest_for_a_while" if hangs else "all_reduce"
    words += ", '--how=sleep'" if hangs else ""
    program = os.fspath(PROGRAMS / "live.py")
    told = _TOLD_LATER.format(port=free_port(), words=words, program=program, threaded=hangs)
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    workers = [subprocess.Popen([sys.executable, "-c", told, str(rank)], env=clean) for rank in range(2)]
    pids = {rank: worker.pid for rank, worker in enumerate(workers)}

    def found() -> bool:
        known = jobs.jobs_in(jobs.processes(), jobs.packages_of)
        here = any({rank: one.process.pid for rank, one in job.ranks.items()} == pids for job in known)
        return here and where in stack_of(pids[1])

    try:
        deadline = time.monotonic() + 120
        while not found():
            assert time.monotonic() < deadline
            time.sleep(0.5)
        done = subprocess.run(
            [sys.executable, "-m", "safelaunch", "dump", f"--pid={pids[1]}", f"--bundle-dir={tmp_path}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 and "ranks 0-1 of 2" in done.stderr, done.stderr
        verdict = Bundle(Path(done.stdout.removesuffix("\n"))).verdict
        culprits = [(one["rank"], one["frame"]["function"]) for one in verdict["culprits"]]
        assert (verdict["cause"], culprits) == (
            ("stuck-in-user-code", [(1, "rest_for_a_while")]) if hangs else ("slow-not-stuck", [])
        )
        assert verdict["confidence"] != "high" if hangs else "thread" not in done.stderr
        assert ("its thread 'trainer" in done.stderr) is hangs
        if not hangs:
            (tmp_path / "stop").touch()
            assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_process_of_no_job_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "safelaunch", "dump", f"--pid={os.getpid()}"],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "RANK and WORLD_SIZE" in done.stderr and not done.stdout
