"""kill -9 of the supervisor, of torchrun, or of both: nothing of the job is left, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from safelaunch.capture.proc import state_letter
from safelaunch.job import controlgroup
from safelaunch.job.paths import run_root
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch


def agent_of(job: Job) -> int:
    """torchrun's pid."""
    return next(pid for pid in job.pids() if b"torchrun" in cmdline(pid))


def guardian_of(job: Job) -> int:
    """Its pid; 0 while there is none."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    return next((int(pid) for pid in children if comm(pid) == "sl-guardian\n"), 0)


def comm(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def cmdline(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def kin(tmp_path: Path, kind: str) -> list[str | Path]:
    """Two ranks with relatives of one kind, see the program."""
    return ["--nproc-per-node=2", PROGRAMS / "kin.py", kind, tmp_path / "marker", "60"]


def started(job: Job) -> list[int]:
    """The pids of both ranks, once they have all their relatives."""
    files = [job.scratch / f"marker-ready-{rank}" for rank in range(2)]
    job.until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks' relatives")
    return [int(file.read_text()) for file in files]


def holders(job: Job) -> list[int]:
    """The processes that hold the job's file open, whatever has become of their environment, session and parents."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(link.readlink() == job.scratch / "marker" for link in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # whoever was killed before it may have taken it along
            os.kill(pid, signal.SIGKILL)


def kill_at_once(job: Job) -> None:
    """Kills supervisor and guardian. The guardian is stopped first: this process may wait long between two kills."""
    guardian = guardian_of(job)
    os.kill(guardian, signal.SIGSTOP)
    kill([job.process.pid, guardian])


def until_no_process_is_left(job: Job, patience_s: float = 90.0) -> None:
    deadline = time.monotonic() + patience_s
    while (left := {*job.pids(), *holders(job)} - {job.process.pid}) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = {pid: cmdline(pid)[:80] for pid in left if Path(f"/proc/{pid}").exists()}
    kill(holders(job))
    assert not commands


def until_nothing_is_left(job: Job) -> None:
    until_no_process_is_left(job)
    assert not job.left_behind()


def may_have_a_group() -> bool:
    group = controlgroup.create(f"test-{os.getpid()}")
    if group is not None:
        group.dissolve()
    return group is not None


def without_group(root_only: str = "takes root, to hide the control groups from one job") -> tuple[str, ...]:
    """An interpreter for a job that can have no control group of its own."""
    if os.geteuid():
        pytest.skip(root_only)
    hide = 'umount -l /sys/fs/cgroup/unified 2>/dev/null; umount -l /sys/fs/cgroup 2>/dev/null; exec "$0" "$@"'
    return ("unshare", "-m", "sh", "-c", hide, sys.executable, "-m", "safelaunch")


@pytest.mark.parametrize(
    ("kind", "killed"),
    [
        ("daemonizing", "supervisor and torchrun"),
        pytest.param("wiped", "torchrun", marks=pytest.mark.nightly),
        ("wiped", "supervisor and ranks"),
    ],
)
def test_nothing_is_left(tmp_path: Path, kind: str, killed: str) -> None:
    """Nobody waits for anybody's next look at what has just lost its parent."""
    decoy = subprocess.Popen(["sleep", "3600"], env={"PATH": os.environ["PATH"], "SAFELAUNCH_RUN_DIR": "/tmp/x"})
    interpreter = without_group() if kind == "daemonizing" else ()
    try:
        with Job(kin(tmp_path, kind), tmp_path, interpreter=interpreter) as job:
            pids = {"ranks": started(job), "supervisor": [job.process.pid], "torchrun": [agent_of(job)]}
            kill(pid for part in killed.split(" and ") for pid in pids[part])
            until_nothing_is_left(job)
            job.process.wait(60)
            assert job.process.returncode == -signal.SIGKILL
        assert decoy.poll() is None, "a process that only carries our variables was ended"
    finally:
        decoy.kill()
        decoy.wait()


def test_a_guardian_that_dies_is_replaced(tmp_path: Path) -> None:
    """It is said, the job goes on, and the next one does what the first would have done."""
    with Job(kin(tmp_path, "daemons"), tmp_path) as job:
        started(job)
        for dead in range(1, 3):
            first = guardian_of(job)
            kill([first])
            job.until(lambda first=first: guardian_of(job) not in (0, first), "another guardian")
            said = "safelaunch: the guardian of this job was ended by signal 9; starting a new one\n"
            assert job.stderr.count(said) == dead
        time.sleep(1.5)  # it is told, and looks, every second
        assert job.process.poll() is None
        kill([job.process.pid])
        until_nothing_is_left(job)


def test_who_kills_safelaunch_by_name_does_not_kill_the_guardian(tmp_path: Path) -> None:
    with Job(kin(tmp_path, "wiped"), tmp_path) as job:
        started(job)
        guardian = Path(f"/proc/{guardian_of(job)}")
        assert b"safelaunch" not in (guardian / "cmdline").read_bytes() + (guardian / "comm").read_bytes()
        named = [pid for pid in {job.process.pid, *job.pids()} if b"safelaunch" in cmdline(pid)]
        assert job.process.pid in named
        kill(named)
        until_nothing_is_left(job)


@pytest.mark.parametrize("group", [True, False], ids=["control group", "none"])
def test_supervisor_and_guardian_killed_at_once(tmp_path: Path, group: bool) -> None:
    """torchrun's beacon notices, and starts another guardian."""
    kind = "wiped" if group and may_have_a_group() else "session"
    with Job(kin(tmp_path, kind), tmp_path, interpreter=() if group else without_group()) as job:
        started(job)
        kill_at_once(job)
        until_nothing_is_left(job)


@pytest.mark.nightly
def test_guardian_killed_when_it_has_told_torchrun_to_end(tmp_path: Path) -> None:
    """torchrun, which is leaving, does not leave its ranks' relatives without a guardian."""
    with Job(kin(tmp_path, "session"), tmp_path, interpreter=without_group()) as job:
        started(job)
        agent = agent_of(job)
        kill_at_once(job)
        os.kill(agent, signal.SIGTERM)
        until_nothing_is_left(job)


@pytest.mark.nightly
def test_supervisor_guardian_and_torchrun_killed_at_once(tmp_path: Path) -> None:
    """Nobody is left to end the ranks but the kernel."""
    with Job(kin(tmp_path, "plain"), tmp_path) as job:
        started(job)
        kill([job.process.pid, guardian_of(job), agent_of(job)])
        until_no_process_is_left(job)


@pytest.mark.nightly
def test_supervisor_and_guardian_killed_under_exec(tmp_path: Path) -> None:
    """The first process of the job is a shell: a rank with torch acts in place of torchrun's beacon."""
    script = tmp_path / "train.py"
    script.write_text("import time, torch.optim; open('there', 'w').close(); time.sleep(3600)\n")
    with Job(["exec", "--", "sh", "-c", f"sleep 3600 & {sys.executable} {script}; true"], tmp_path) as job:
        job.until((tmp_path / "there").exists, "the rank")
        kill([job.process.pid, guardian_of(job)])
        until_nothing_is_left(job)


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_rank_in_uninterruptible_sleep_goes_when_the_kernel_lets_go(tmp_path: Path) -> None:
    """SIGKILL is pending while the rank is in state D; its end comes with the end of what it waits for."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libdisk.so", PROGRAMS / "libdisk.c"], check=True)
    mine = ["--culprit=1", "--how=disk", f"--scratch={tmp_path}"]
    with Job(["--nproc-per-node=2", PROGRAMS / "blocked.py", *mine], tmp_path) as job:
        job.until(lambda: any(state_letter(pid) == "D" for pid in job.pids()), "a rank in state D")
        os.kill(job.process.pid, signal.SIGKILL)
        until_nothing_is_left(job)


@pytest.mark.nightly
def test_after_a_normal_end_daemons_stay_and_the_directories_of_dead_runs_are_swept(tmp_path: Path) -> None:
    """Nobody is left to end a rank that goes on as a daemon, or a program it left, and that is as it should be."""
    runtime = Path("/tmp") / f"sl-sweep-{os.getpid()}"
    dead = runtime / "safelaunch" / "r999999999"
    dead.mkdir(parents=True)
    runtime.chmod(0o700)
    (runtime / "safelaunch").chmod(0o700)
    (dead / "owner").write_text("999999999 1\n")
    unfinished = run_root({}, os.getuid()) / "bundles" / f".r999999999-{os.getpid()}-hang-1"
    unfinished.mkdir(parents=True)
    os.utime(unfinished, (1, 1))  # a young one may be about to be locked
    script = tmp_path / "daemon.py"
    script.write_text(
        "import os, subprocess, time\nif not os.fork():\n    os.setsid()\n    os.fork()\n"
        "    open(f'd{os.getpid()}', 'w').close()\n    time.sleep(3600)\n"
        "subprocess.Popen(['sleep', '3603'], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\n"
        "while len([n for n in os.listdir('.') if n[0] == 'd' and n[1:].isdigit()]) < 2:\n    time.sleep(0.01)\n"
    )
    with Job(["--nproc-per-node=1", script], tmp_path, runtime=runtime) as job:
        result = job.wait(grace_s=0)
        assert result.code == 0, result.stderr
        time.sleep(0.5)
        assert len(job.pids()) == 3
    assert not dead.exists()
    assert not unfinished.exists()
    (runtime / "safelaunch").rmdir()
    runtime.rmdir()
