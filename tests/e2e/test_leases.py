"""Independent safelaunch processes against the same GPUs: nobody gets what another has, everybody gets his turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.addons.sweep.jobs import SweepJob
from safelaunch.addons.sweep.pool import GpuPool
from safelaunch.leases.store import LeaseStore
from tests.qa.crowd import PROGRAM, Crowd, may_be_two_users
from tests.support.leasing import AS_A_RANK, log_of, safelaunch
from tests.support.nvml import stub
from tests.support.waiting import until

pytestmark = pytest.mark.torch


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1])
def test_a_crowd(node: stub.Node, tmp_path: Path, seed: int) -> None:
    """The short form of ``tests/qa/crowd.py``."""
    place = tmp_path / "crowd"
    place.mkdir()
    crowd = Crowd(place, 12, torchrun=False, seed=seed, hold_s=0.5)
    try:
        outcome = crowd.run(patience_s=150)
    finally:
        crowd.clean_up()
    assert not outcome.problems
    assert outcome.served >= 12 - sum(outcome.killed.values())
    assert outcome.most_at_once >= 2


def test_torchrun_ranks_hold_their_gpus_and_their_port(node: stub.Node, tmp_path: Path) -> None:
    """Two ranks, two GPUs that are free; what their environment says; and afterwards all is free."""
    node.write("process 0 1 7", "process 2 1 7")
    script = tmp_path / "script.py"
    script.write_text(
        "import fcntl, json, os, sys, time\n"
        "names = ('CUDA_VISIBLE_DEVICES', 'MASTER_PORT')\n"
        "with open(f\"{sys.argv[1]}/rank{os.environ['RANK']}.new\", 'w') as file:\n"
        "    json.dump({name: os.environ.get(name) for name in names}, file)\n"
        "os.rename(file.name, file.name[:-4])\n"
        "while not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.02)\n"
    )
    words = [f"--bundle-dir={tmp_path}", "--nproc-per-node=2", "--master-port=auto", script, tmp_path]
    with safelaunch(*words, env=node.environ) as process:
        until(lambda: len(list(tmp_path.glob("rank[01]"))) == 2 or process.poll() is not None, "two ranks")
        said = [json.loads(path.read_text()) for path in tmp_path.glob("rank[01]")]
        assert said, process.communicate()[1]
        port = f"port-{said[0]['MASTER_PORT']}"
        store = LeaseStore(os.fspath(node.lease_dir))
        assert {one["CUDA_VISIBLE_DEVICES"] for one in said} == {f"{stub.uuid(1)},{stub.uuid(3)}"}
        assert {holder.pid for holder in store.look([stub.uuid(1), stub.uuid(3), port]).values()} == {process.pid}
        assert len(store.look([stub.uuid(n) for n in range(8)])) == 2
        (tmp_path / "go").touch()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "safelaunch: GPUs of this job: 1, 3 (one for each of 2 ranks)" in stderr
    assert store.look([*(stub.uuid(n) for n in range(8)), port]) == {}


def test_a_killed_supervisor_frees_nothing_that_is_in_use(node: stub.Node, tmp_path: Path) -> None:
    """Supervisor and guardian killed together: a rank that goes on all the same keeps its GPU.

    The kernel ends the job's first process and its children then, and a beacon with torch the others; this is neither.
    """
    store = LeaseStore(os.fspath(node.lease_dir))
    shells = ["sh", "-c", 'sh -c "$0 $1 $2 60; true"; true', sys.executable, PROGRAM, tmp_path]
    words = ["exec", f"--bundle-dir={tmp_path}", "--gpus=1", "--", *shells]
    with safelaunch(*words, env={**node.environ, **AS_A_RANK}) as process:
        until(lambda: len(log_of(tmp_path)) == 1 or process.poll() is not None, "the job")
        rank = int(log_of(tmp_path)[0].split()[2])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid, signal.SIGSTOP)
        for pid in children:
            if int(pid) != rank:
                os.kill(int(pid), signal.SIGKILL)
        process.kill()
        process.wait(60)
        until(lambda: store.look([stub.uuid(0)])[stub.uuid(0)].by == "ranks", "the ranks' lock alone")
        with safelaunch("exec", "--gpus=0,", "--", "true", env=node.environ) as other:
            _, stderr = other.communicate(timeout=60)
        assert other.returncode == 2
        assert "GPU 0    still held by ranks of a run whose supervisor is gone" in stderr
        shown = subprocess.run(
            [sys.executable, "-m", "safelaunch", "gpus", "--json"],
            env={**os.environ, **node.environ},
            capture_output=True,
            check=True,
        )
        assert json.loads(shown.stdout)["gpus"][0]["state"] == "ranks only"
        os.kill(rank, signal.SIGKILL)
        until(lambda: not store.look([stub.uuid(0)]), "the GPU to be free")


def test_a_scheduler_hands_its_lease_over(node: stub.Node, tmp_path: Path) -> None:
    """As colaunch does: the safelaunch that runs the job holds it, asks the driver nothing, and frees it at its end."""
    taken = GpuPool({**os.environ, **node.environ}).take(SweepJob("job-1", (), "", gpus=2))
    assert taken is not None
    variables, descriptors = taken.lease.hand_over()
    node.write("hang nvmlInitWithFlags")
    own = ["exec", f"--bundle-dir={tmp_path}", "--", sys.executable, PROGRAM, tmp_path, "1"]
    env = {**node.environ, **AS_A_RANK, **variables, **taken.env}
    store = LeaseStore(os.fspath(node.lease_dir))
    with safelaunch(*own, env=env, pass_fds=descriptors) as process:
        taken.lease.forget()
        until(lambda: len(log_of(tmp_path)) == 2 or process.poll() is not None, "the job")
        held = store.look([stub.uuid(n) for n in range(8)])
        assert set(held) == {stub.uuid(0), stub.uuid(1)}
        assert {holder.pid for holder in held.values()} == {process.pid}, "and says so itself"
        rank = int(log_of(tmp_path)[0].split()[2])
        environ = Path(f"/proc/{rank}/environ").read_bytes()
        assert b"SAFELAUNCH_HELD" not in environ and b"SAFELAUNCH_LEASES=" in environ
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert store.look([stub.uuid(n) for n in range(8)]) == {}


def test_ctrl_c_ends_the_waiting(node: stub.Node, tmp_path: Path) -> None:
    node.write(used=range(8))
    with safelaunch("exec", "--gpus=1", "--wait", "--", "true", env=node.environ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("safelaunch: waiting for 1 of 8 GPUs")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "nothing was started" in rest and "Traceback" not in rest
    assert LeaseStore(os.fspath(node.lease_dir)).waiting() == []


def test_waiting_has_its_time(node: stub.Node) -> None:
    node.write(used=range(8))
    with safelaunch("exec", "--gpus=1", "--wait=1s", "--", "true", env=node.environ) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "invisible process (10240 MiB in use)" in stderr and "Wait longer" in stderr


def test_a_driver_that_hangs_does_not_keep_a_job_from_starting(node: stub.Node, tmp_path: Path) -> None:
    """Without a request for GPUs it starts as under torchrun, and says so; with one it is an error."""
    node.write("hang nvmlInitWithFlags")
    env = {**node.environ, "CUDA_VISIBLE_DEVICES": "0"}
    with safelaunch("exec", "--no-watch", "--", "true", env=env) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "GPUs are not leased, so other jobs may use them: the NVIDIA driver did not answer within 10 s" in stderr


def test_gpus_says_that_the_driver_hangs(node: stub.Node) -> None:
    node.write("hang nvmlDeviceGetCount_v2")
    with safelaunch("gpus", env=node.environ) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert "the NVIDIA driver did not answer within 10 s" in stderr


def test_a_dry_run_takes_nothing(node: stub.Node, tmp_path: Path) -> None:
    node.write("process 0 1 7")
    script = tmp_path / "train.py"
    script.touch()
    with safelaunch("--dry-run", "--nproc-per-node=3", os.fspath(script), env=node.environ) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert "GPUs          1, 2, 3 of 8 GPUs of this node, free now; leased when the job starts" in stdout
    assert f"CUDA_VISIBLE_DEVICES={stub.uuid(1)},{stub.uuid(2)},{stub.uuid(3)}   (--gpus (default))" in stdout
    assert not node.lease_dir.exists()


def test_one_process_for_all_gpus_is_said(node: stub.Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for words, said in (
        ([], "safelaunch: 1 process for 8 GPUs: --nproc-per-node=8 starts one for each\n"),
        (["--np=1"], ""),
    ):
        with safelaunch("--dry-run", *words, os.fspath(script), env=node.environ) as process:
            _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, said)


@pytest.mark.parametrize("watched", [True, False])
def test_a_lease_without_a_watch(node: stub.Node, tmp_path: Path, watched: bool) -> None:
    """The job's first process shares it where there is no guardian; released at the end, daemon or not."""
    store = LeaseStore(os.fspath(node.lease_dir))
    own = [] if watched else ["--no-watch"]
    shell = (
        f"sleep 3605 > {tmp_path}/out 2>&1 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/daemon; "
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    )
    words = ["exec", *own, f"--bundle-dir={tmp_path}", "--gpus=1", "--", "sh", "-c", shell]
    with safelaunch(*words, env=node.environ) as process:
        until((tmp_path / "daemon").exists, "the daemon")
        daemon = int((tmp_path / "daemon").read_text())
        assert set(store.look([stub.uuid(0)])) == {stub.uuid(0)}
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
        assert store.look([stub.uuid(0)]) == {}, "what the job left running on purpose holds nothing"
        os.kill(daemon, signal.SIGKILL)


def test_two_users_in_a_crowd(node: stub.Node) -> None:
    import tempfile

    if not may_be_two_users():
        pytest.skip("takes root, and an installation that other users can read")
    with tempfile.TemporaryDirectory(prefix="crowd") as place:
        Path(place).chmod(0o1777)  # as /tmp is: any of them may be the first to make the directory of leases
        crowd = Crowd(Path(place), 6, torchrun=False, seed=2, hold_s=0.3, users=2)
        try:
            outcome = crowd.run(patience_s=100)
        finally:
            crowd.clean_up()
    assert not outcome.problems and outcome.served >= 5
