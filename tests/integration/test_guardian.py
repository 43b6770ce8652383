"""kill -9 of the supervisor, of torchrun, or of both: nothing of the job is left, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import PROGRAMS, TAG, Job

from safelaunch.capture.proc import state_letter
from safelaunch.launch.paths import run_root

pytestmark = pytest.mark.torch


def agent_of(job: Job) -> int:
    """torchrun's pid: the child of safelaunch that leads a session and is no fork of it."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    own = Path(f"/proc/{job.process.pid}/cmdline").read_bytes()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() != own)


def started(job: Job, ranks: int) -> None:
    job.until(lambda: len(list(job.scratch.glob("ready-*"))) == ranks, "the ranks' relatives")
    # The guardian looks every two seconds; what has just lost its parent has to be seen once.
    time.sleep(3.0)


@pytest.mark.parametrize("killed", ["supervisor", "torchrun", "both"])
def test_nothing_is_left(tmp_path: Path, killed: str) -> None:
    decoy = subprocess.Popen(["sleep", "3600"], env={"PATH": os.environ["PATH"], "SAFELAUNCH_RUN_DIR": "/tmp/x"})
    try:
        with Job(["--nproc-per-node=2", PROGRAMS / "family.py", tmp_path], tmp_path) as job:
            started(job, 2)
            assert len(job.pids()) >= 9, "torchrun, and for each rank itself, a worker, and two others"
            pids = {"supervisor": [job.process.pid], "torchrun": [agent_of(job)]}
            pids["both"] = pids["supervisor"] + pids["torchrun"]
            for pid in pids[killed]:
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while job.pids() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not job.left_behind()
            job.process.wait(30)
            assert job.process.returncode == -signal.SIGKILL
        assert decoy.poll() is None, "a process that only carries our variables was ended"
    finally:
        decoy.kill()
        decoy.wait()


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_rank_in_uninterruptible_sleep_goes_when_the_kernel_lets_go(tmp_path: Path) -> None:
    """SIGKILL is pending while the rank is in state D; its end comes with the end of what it waits for."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libdisk.so", PROGRAMS / "libdisk.c"], check=True)
    mine = ["--culprit=1", "--how=disk", f"--scratch={tmp_path}"]
    with Job(["--nproc-per-node=2", PROGRAMS / "blocked.py", *mine], tmp_path) as job:
        job.until(lambda: any(state_letter(pid) == "D" for pid in job.pids()), "a rank in state D")
        time.sleep(2.5)  # the guardian looks every two seconds
        os.kill(job.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while job.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not job.left_behind()


def test_a_daemon_left_after_a_normal_end_stays(tmp_path: Path) -> None:
    script = tmp_path / "uploader.py"
    script.write_text(
        "import subprocess\n"
        "p = subprocess.Popen(['sleep', '3603'], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\n"
        "open('daemon', 'w').write(str(p.pid))\n"
    )
    with Job(["--nproc-per-node=1", script], tmp_path) as job:
        result = job.wait()
        assert result.code == 0, result.stderr
        daemon = int((tmp_path / "daemon").read_text())
        assert f"{TAG}={job.tag}".encode() in Path(f"/proc/{daemon}/environ").read_bytes()


def test_the_directories_of_dead_runs_are_swept_by_the_next(tmp_path: Path) -> None:
    runtime = Path("/tmp") / f"sl-sweep-{os.getpid()}"
    dead = runtime / "safelaunch" / "r999999999"
    dead.mkdir(parents=True)
    runtime.chmod(0o700)
    (runtime / "safelaunch").chmod(0o700)
    (dead / "owner").write_text("999999999 1\n")
    unfinished = run_root({}, os.getuid()) / "bundles" / f".r999999999-{os.getpid()}-hang-1"
    unfinished.mkdir(parents=True)
    script = tmp_path / "nothing.py"
    script.write_text("")
    with Job(["--nproc-per-node=1", script], tmp_path, runtime=runtime) as job:
        assert job.wait().code == 0
    assert not dead.exists()
    assert not unfinished.exists()
    (runtime / "safelaunch").rmdir()
    runtime.rmdir()
