"""``status``, ``dump`` and ``doctor`` beside real jobs, which go on as if nobody had asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from safelaunch.supervise import health
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.stall import Policy
from tests.support.asking import asked, asking, status
from tests.support.jobs import Bundle, Job
from tests.support.nvml import stub
from tests.support.nvml.stub import GIB
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch
TWO = ["--nproc-per-node=2"]


def steps(job: Job) -> list[int]:
    """The step of every rank, the youngest value of each; empty before both have stepped."""
    found = status(job)
    known = [rank.get("step") for rank in found["ranks"]] if found and "ranks" in found else []
    return [step for step in known if step] if len(known) == 2 and all(known) else []


def until(job: Job, reached: Callable[[], object], what: str) -> None:
    """For questions that start a process each: not without a pause, on cores that the job needs."""
    job.until(reached, what, every_s=0.5)


def is_sampling(job: Job) -> bool:
    """Whether the supervisor, not the one who asks it, has a py-spy that samples."""
    children = Path(f"/proc/{job.process.pid}/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    return any(b"record" in command_of(pid).split(b"\0") for pid in pids)


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def live(scratch: Path, *words: str, how: str = "") -> Job:
    stop = scratch / "stop"
    program = [PROGRAMS / "live.py", f"--until={stop}", *([f"--how={how}"] if how else [])]
    return Job([*words, *TWO, *program], scratch)


def finish(job: Job) -> None:
    """Lets the job train to its end, which has to be that of a job nobody ever looked at."""
    (job.scratch / "stop").touch()
    result = job.wait()
    assert result.code == 0, result.stderr
    assert sorted(result.stdout.split()) == sorted(["rank", "0", "finished", "rank", "1", "finished"])
    assert not result.leftovers


@pytest.mark.nightly
def test_status_and_dump_of_a_job_that_moves_and_while_its_supervisor_is_stopped(tmp_path: Path) -> None:
    with live(tmp_path, "--run-name=moving") as job:
        until(job, lambda: steps(job), "steps in the status")
        first = steps(job)
        until(job, lambda: all(now > then + 5 for now, then in zip(steps(job), first, strict=False)), "more steps")

        run = status(job)
        assert run is not None
        assert (run["name"], run["world_size"], run["watch"], run["problem"]) == ("moving", 2, "watching", "")
        assert run["threshold_s"] in (600.0, 60.0) and run["threshold_why"].startswith(
            "auto: "
        )  # learned by now, or not
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        assert {rank["pid"] for rank in run["ranks"]} == set(job.ranks().values())
        assert all("safelaunch.step()" in rank["signals"] and rank["age_s"] < 60 for rank in run["ranks"])

        shown = asked(job, "status", f"r{job.process.pid}")
        assert shown.returncode == 0 and f"r{job.process.pid}  moving  watching" in shown.stdout
        missing = asked(job, "status", "nothing-of-that-name")
        assert missing.returncode == 2 and "moving" in missing.stderr and "Traceback" not in missing.stderr

        before = steps(job)
        dump = asked(job, "dump", str(job.process.pid))
        assert dump.returncode == 0, dump.stderr
        bundle = Bundle(Path(dump.stdout.removesuffix("\n")))
        assert bundle.path.name.startswith("moving-") and bundle.path.name.endswith("-dump")
        assert (bundle.verdict["outcome"], bundle.verdict["cause"]) == ("dump", "slow-not-stuck")
        assert not bundle.verdict["culprits"] and not bundle.problems()
        assert "live.py" in bundle.text("ranks/0/stack.txt")
        until(job, lambda: all(now > then for now, then in zip(steps(job), before, strict=False)), "steps after it")

        elsewhere = tmp_path / "else where"
        as_json = asked(job, "dump", "moving", "--json", "--bundle-dir", str(elsewhere))
        assert as_json.returncode == 0
        assert Path(json.loads(as_json.stdout)["bundle"]).parent == elsewhere

        # Ctrl-Z and fg: CPython (3.11 at least) fills no siginfo in when a stop uses up the rest of the timeout.
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            shown = asked(job, "status", str(job.process.pid))
            dump = asked(job, "dump", str(job.process.pid))
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        assert shown.returncode == 0 and f"kill -CONT {job.process.pid}" in shown.stdout
        assert dump.returncode == 1 and "stopped" in dump.stderr and not dump.stdout
        until(job, lambda: steps(job), "an answer once it runs again")
        finish(job)
        assert status(job) is None, "after the end there is nothing to see"
        gone = asked(job, "status", f"r{job.process.pid}")
        assert gone.returncode == 2 and "no run" in gone.stderr
        assert asked(job, "dump", f"r{job.process.pid}").returncode == 2


@pytest.mark.nightly
def test_a_job_that_moves_by_its_collectives_alone(tmp_path: Path) -> None:
    script = tmp_path / "inference.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "over = torch.zeros(1)\n"
        "while not over:\n"
        "    over.fill_(os.path.exists('stop'))\n"
        "    dist.all_reduce(over)\n"
        "    time.sleep(0.05)\n"
        "dist.destroy_process_group()\n"
    )
    with Job(["--stall-floor=1", *TWO, script], tmp_path) as job:
        until(job, lambda: (status(job) or {}).get("threshold_s") == 10, "that the loop is known")
        run = status(job)
        assert run is not None
        assert "at least one collective every" in run["threshold_why"]
        assert all("collectives" in rank["signals"] for rank in run["ranks"])
        dump = asked(job, "dump", str(job.process.pid))
        assert dump.returncode == 0, dump.stderr
        bundle = Bundle(Path(dump.stdout.removesuffix("\n")))
        assert (bundle.verdict["outcome"], bundle.verdict["cause"]) == ("dump", "slow-not-stuck")
        (tmp_path / "stop").touch()
        result = job.wait()
    assert (result.code, len(result.bundles)) == (0, 1), result.stderr


def test_a_dump_of_a_job_that_hangs_names_the_sleeper_and_leaves_it_alone(tmp_path: Path) -> None:
    with live(tmp_path, how="sleep") as job:
        until(job, lambda: steps(job), "steps in the status")
        until(job, lambda: min(steps(job), default=0) >= 9, "rank 1 to fall asleep")
        time.sleep(1.0)  # rank 0 goes on into the collective
        dumps = []

        def names_the_sleeper() -> bool:
            dumps.append(asked(job, "dump", f"r{job.process.pid}"))
            assert dumps[-1].returncode == 0, dumps[-1].stderr
            return str(Bundle(Path(dumps[-1].stdout.strip())).verdict["cause"]) == "stuck-in-user-code"

        job.until(names_the_sleeper, "rank 0 to be in the collective")
        stuck, dump = steps(job), dumps[-1]
        verdict = Bundle(Path(dump.stdout.strip())).verdict
        assert verdict["outcome"] == "dump"
        (culprit,) = verdict["culprits"]
        assert (culprit["rank"], culprit["frame"]["function"]) == (1, "rest_for_a_while")
        assert "Rank 1" in dump.stderr
        assert steps(job) == stuck and set(job.ranks()) == {0, 1}, "nothing was ended, nothing was moved"


@pytest.mark.nightly
def test_a_straggler_is_seen_in_the_table_and_a_killed_supervisor_is_gone(tmp_path: Path) -> None:
    with live(tmp_path, how="lag") as job:
        until(job, lambda: len(steps(job)) == 2 and steps(job)[0] > 10, "rank 0 to be ahead")
        shown = asked(job, "status", str(job.process.pid)).stdout
        assert "behind the others: rank 1" in shown
        (line,) = [line for line in shown.splitlines() if line.split()[:2] == ["1", str(job.ranks()[1])]]
        assert "steps behind" in line
        recorded = asked(job, "record", str(job.process.pid), "--duration", "2", "--json")
        assert recorded.returncode == 0, recorded.stderr
        document = json.loads(recorded.stdout)
        assert sorted(one["rank"] for one in document["ranks"]) == [0, 1] and document["missing"] == []
        folder = Path(document["folder"])
        assert folder.name.endswith("-record") and (folder / "record.html").stat().st_size > 20_000
        job.process.kill()
        job.process.wait()
        found = status(job)
        assert found is None or (not found["alive"] and "gone" in found["problem"])
        assert asked(job, "dump", f"r{job.process.pid}").returncode == 2


@pytest.mark.nightly
def test_a_hang_during_a_recording_is_diagnosed_as_without(tmp_path: Path) -> None:
    with live(tmp_path, "--stall-timeout=3", "--max-stall=120", how="later") as job:
        until(job, lambda: steps(job), "steps in the status")
        with asking(job, "record", str(job.process.pid), "--duration", "300") as record:
            job.until(
                lambda: is_sampling(job), "py-spy to be a child of the supervisor, which Yama lets read its ranks"
            )
            (tmp_path / "rest").touch()
            result = job.wait()
            said = record.communicate(timeout=60.0)[1]
        assert record.returncode == 1 and "ended before it answered" in said, said
        assert result.code == 124, result.stderr
        assert not result.leftovers, "py-spy has ended with the job"
        (bundle,) = result.bundles
        assert bundle.problems() == [] and bundle.verdict["cause"] == "stuck-in-user-code"
        (culprit,) = bundle.verdict["culprits"]
        assert (culprit["rank"], culprit["frame"]["function"]) == (1, "rest_for_a_while")


@pytest.mark.nightly
def test_what_slows_a_job_down_is_seen_from_outside(
    tmp_path: Path, node: stub.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks have the same step at any time; rank 1 makes rank 0 wait. Which GPUs they use is what NVML says."""
    with live(tmp_path, *TWO, how="slow") as job, subprocess.Popen(["sleep", "1000"]) as stranger:
        until(job, lambda: min(steps(job), default=0) > 80 and len(job.ranks()) == 2, "80 steps")
        first, second = (job.ranks()[rank] for rank in (0, 1))
        roster = Roster(RunPaths(job.runtime / "safelaunch" / f"r{job.process.pid}"))
        watch = Watch(roster, Policy(60, 60, 60, 60), time.monotonic())
        watch.tick(time.monotonic())
        assert health.read_gpus() == ()

        def seen() -> list[str]:
            ranks = {target.rank: target.pid for target in watch.targets()}
            return [note.words for note in health.notes_on_gpus(health.read_gpus(), ranks, {first, second})]

        for name, value in node.environ.items():
            monkeypatch.setenv(name, value)
        node.write(f"process 0 {first} {GIB}", f"process 1 {second} {GIB}", f"process 3 {stranger.pid} {GIB}")
        assert seen() == []
        node.write(
            f"process 0 {first} {GIB}",
            f"process 0 {second} {GIB}",
            f"process 0 {stranger.pid} {GIB}",
            f"process 1 1 {GIB}",
        )
        assert seen() == [
            "ranks 0, 1 are on the same GPU 0: does each call torch.cuda.set_device(LOCAL_RANK)?",
            f"pid {stranger.pid}, not of this job, holds 1.0 GiB of GPU 0, which rank 0 uses",
        ]
        stranger.kill()
        (tmp_path / "stop").touch()
        assert job.wait().code == 0
