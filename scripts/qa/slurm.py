"""Runs sweeps of ``colaunch --engine slurm`` on a private Slurm, while faults happen, and prints a table.

    python -m scripts.qa slurm                 # all rows, about six minutes; needs root, slurm-wlm and munge
    python -m scripts.qa slurm --only kill     # rows whose names contain a word
    python -m scripts.qa slurm --jobs 3        # so many Slurms at a time (default 2)
    python -m scripts.qa slurm --bench         # 16 jobs of 1 s on 8 GPUs, against plain sbatch

Every job writes a line when it begins, which reveals a job that is lost or runs twice. Exit code 0 if every row passes,
or if Slurm isn't installed, which is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench import lib as benchlib
from tests.qa import slurm

ROOT = Path(__file__).resolve().parents[2]

# A job that says that it has begun; "slow" ones wait for the file "go".
SCRIPT = """\
echo $SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} >> ran/$1
[ "$2" = slow ] && until [ -e go ]; do sleep 0.1; done
[ "$2" = fail ] && exit 3
exit 0
"""
SPEC = """\
defaults: {gpus: 1, slurm: {partition: main, sbatch: --mem=10M}}
matrix: {x: 1..4}
jobs:
  many: {command: "exec -- bash job.sh {name} HOW", env: {X: "{x}"}}
  later: {command: "exec -- bash job.sh {name}", needs: many}
"""
NAMES = ("many_x-1", "many_x-2", "many_x-3", "many_x-4", "later")
# sbatch with a fault: before it submits, after it has, or an answer that is lost.
WRAPPER = """\
#!/bin/bash
[ -e "$FAULTS/hold" ] && { mv "$FAULTS/hold" "$FAULTS/held"; while [ -e "$FAULTS/held" ]; do sleep 0.1; done; }
[ -e "$FAULTS/before" ] && { rm "$FAULTS/before"; kill -9 $(cat "$FAULTS/pid"); sleep 1; }
[ -e "$FAULTS/slow" ] && { rm "$FAULTS/slow"; kill -9 $(cat "$FAULTS/pid"); sleep 4; }
said=$(REAL "$@"); code=$?
[ -e "$FAULTS/after" ] && { rm "$FAULTS/after"; kill -9 $(cat "$FAULTS/pid"); }
[ -e "$FAULTS/lost" ] && { rm "$FAULTS/lost"; echo "sbatch: error: Socket timed out on send/recv" >&2; exit 1; }
echo "$said"; exit $code
"""
# Training on two nodes. On the node zz2, the job "stuck" stops forever, and "broken" dies: at another line each time.
TRAIN = """\
import os
import signal
import socket
import time

import torch
import torch.distributed as dist

import safelaunch


def stop_here():
    time.sleep(86400)


def die_here():
    os.kill(os.getpid(), signal.SIGSEGV)


def or_there():
    os.kill(os.getpid(), signal.SIGSEGV)


name = os.environ["NAME"]
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    open("ran/" + name, "a").write(os.environ["SLURM_JOB_ID"] + ".0\\n")
for step in range(6 if name == "well" else 10**9):
    dist.all_reduce(torch.ones(1))
    safelaunch.step()
    time.sleep(0.02)
    if socket.gethostname() == "zz2" and step == 5 and name != "well":
        again = os.path.exists("died")
        open("died", "w").close()
        stop_here() if name == "stuck" else or_there() if again else die_here()
dist.destroy_process_group()
"""
PAIR = """\
defaults:
  command: OPTIONS --nproc-per-node=1 --stall-timeout=3 --startup-timeout=60 train.py
  gpus: 1
  nodes: 2
  env: {NAME: "{name}", GLOO_SOCKET_IFNAME: lo}
  slurm: {time: 5, sbatch: --mem=10M}
"""


class NotHere(Exception):
    """A row cannot run on this machine."""


class Row:
    """One sweep in a separate directory."""

    def __init__(self, cluster: slurm.Cluster, place: Path, spec: str) -> None:
        self.cluster, self.place = cluster, place
        self.faults = place / "faults"
        for each in (place / "ran", self.faults):
            each.mkdir(parents=True)
        (place / "job.sh").write_text(SCRIPT)
        (place / "sweep.yaml").write_text(spec)
        wrapper = self.faults / "sbatch"
        wrapper.write_text(WRAPPER.replace("REAL", str(shutil.which("sbatch"))))
        wrapper.chmod(0o755)
        self.said = place / "said"
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        env = self.cluster.environ({"FAULTS": os.fspath(self.faults)})
        env["PATH"] = f"{self.faults}:{env['PATH']}"
        command = [sys.executable, "-m", "safelaunch", "colaunch", "sweep.yaml", "--engine", "slurm", *words]
        with self.said.open("ab") as out:
            self.process = subprocess.Popen(
                command, cwd=self.place, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        (self.faults / "pid").write_text(str(self.process.pid))
        return self.process

    def until(self, reached: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 150.0
        while not reached():
            assert time.monotonic() < deadline, f"waited for {what}"
            time.sleep(0.05)

    def ran(self) -> dict[str, list[str]]:
        return {each.name: each.read_text().split() for each in (self.place / "ran").iterdir()}

    def states(self) -> dict[str, str]:
        found = json.loads((self.place / "safelaunch-sweeps/sweep/summary.json").read_text())
        return {job["name"]: job["state"] for job in found["jobs"]}

    def listed(self, what: str = "%T") -> list[str]:
        return self.cluster.run(["squeue", "-h", "-r", "-o", what]).stdout.split()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def finish(self, *words: str) -> int:
        (self.place / "go").touch()
        process = self.begin(*words) if words else self.process
        assert process is not None
        return process.wait(280)

    def all_once(self, *expected: str) -> None:
        """Every job has begun once and succeeded; nothing is left in the queue."""
        counted = {name: len(lines) for name, lines in self.ran().items()}
        assert counted == dict.fromkeys(expected or NAMES, 1), counted
        assert set(self.states().values()) == {"succeeded"}, self.states()
        self.until(lambda: self.listed() == [], "an empty queue")

    def job_of(self, name: str) -> str:
        return self.ran()[name][0].partition(".")[0]

    def outcomes(self) -> dict[str, dict[str, Any]]:
        found = json.loads((self.place / "safelaunch-sweeps/sweep/summary.json").read_text())
        return {job["name"]: job for job in found["jobs"]}

    def node_state(self, node: str) -> str:
        return self.cluster.run(["sinfo", "-hN", "-n", node, "-o", "%T"]).stdout.split()[0]

    def come_back(self, address: str) -> None:
        """Starts a requeued job now: Slurm would wait for two minutes."""
        self.until(lambda: any("BeginTime" in reason for reason in self.listed("%r")), "it to be queued again")
        self.cluster.run(["scontrol", "update", f"JobId={address}", "StartTime=now"])


# --- the rows ---------------------------------------------------------------------------------------------------------


def healthy(row: Row) -> None:
    row.begin()
    assert row.finish() == 0
    row.all_once()


def kill_before_sbatch(row: Row) -> None:
    killed_in_sbatch(row, "before")


def kill_after_sbatch(row: Row) -> None:
    killed_in_sbatch(row, "after")


def kill_and_a_late_sbatch(row: Row) -> None:
    """The sbatch of the killed colaunch goes through after --resume has looked: a double submission."""
    killed_in_sbatch(row, "slow")


def killed_in_sbatch(row: Row, when: str) -> None:
    (row.faults / when).touch()
    assert row.begin().wait(60) == -signal.SIGKILL
    assert row.finish("--resume") == 0
    row.until(lambda: row.listed() == [], "doubles to end")
    row.all_once()


def kill_while_running(row: Row) -> None:
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.kill()
    assert row.finish("--resume") == 0
    row.all_once()


def kill_and_all_end_meanwhile(row: Row) -> None:
    """And Slurm has forgotten them (MinJobAge) before --resume asks."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.kill()
    (row.place / "go").touch()
    row.until(lambda: len(row.ran()) == 5 and row.listed() == [], "all to end")
    row.until(lambda: not row.cluster.run(["squeue", "-h", "--states=all"]).stdout.strip(), "Slurm to forget")
    assert row.finish("--resume") == 0
    row.all_once()


def kill_every_second(row: Row) -> None:
    row.begin()
    for number in range(6):
        time.sleep(0.5 + 0.15 * number)
        row.kill()
        row.begin("--resume")
    row.until(lambda: len(row.ran()) == 4, "four to run")
    assert row.finish() == 0
    row.all_once()


def lost_answer_of_sbatch(row: Row) -> None:
    (row.faults / "lost").touch()
    row.begin()
    assert row.finish() == 0
    row.all_once()


def slurmctld_restarts(row: Row) -> None:
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.cluster.stop_controller()
    row.until(lambda: "doesn't respond" in row.said.read_text(), "it to be noticed")
    time.sleep(2.0)
    (row.place / "go").touch()
    row.cluster.start_controller()
    assert row.finish() == 0
    assert row.said.read_text().count("doesn't respond") == 1
    assert "responds again" in row.said.read_text()
    row.all_once()


def slurmctld_is_away_at_the_kill(row: Row) -> None:
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.cluster.stop_controller()
    row.kill()
    row.cluster.start_controller()
    row.until(lambda: row.cluster.run(["squeue", "-h"]).returncode == 0, "slurmctld")
    assert row.finish("--resume") == 0
    row.all_once()


def requeue(row: Row) -> None:
    """A job that comes back is the same job: the same attempt, begun again by the same job of Slurm."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    job_id = row.ran()["many_x-2"][0].partition(".")[0]
    row.cluster.run(["scontrol", "requeue", job_id])
    row.until(lambda: any("BeginTime" in reason for reason in row.listed("%r")), "it to be queued again")
    row.cluster.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])
    row.until(lambda: len(row.ran()["many_x-2"]) == 2, "it to run again")
    assert row.finish() == 0
    assert row.ran()["many_x-2"] == [f"{job_id}.0", f"{job_id}.1"]
    assert set(row.states().values()) == {"succeeded"}, row.states()
    assert len(row.ran()) == 5
    log = row.place / "safelaunch-sweeps/sweep/jobs/many_x-2/attempt-1.log"
    assert "crash" not in log.read_text()


def preempted(row: Row) -> None:
    """A job in a partition of higher priority takes all nodes; those that it preempts come back."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    urgent = row.cluster.run(["sbatch", "--parsable", "-p", "urgent", "-N4", "--gres=gpu:2", "--mem=10M",
                              "--output=/dev/null", "--wrap=sleep 1"]).stdout.strip()  # fmt: skip
    row.until(lambda: urgent not in row.listed("%A"), "the urgent one to end")
    (row.place / "go").touch()
    for address in row.listed("%A"):
        row.cluster.run(["scontrol", "update", f"JobId={address}", "StartTime=now"])
    assert row.finish() == 0
    assert set(row.states().values()) == {"succeeded"}, row.states()
    assert len(row.ran()) == 5
    for name, lines in row.ran().items():
        assert len({line.partition(".")[0] for line in lines}) == 1, (name, lines)
        assert len(set(lines)) == len(lines), (name, lines)
    assert any(len(lines) > 1 for lines in row.ran().values()), row.ran()


def ctrl_c(row: Row) -> None:
    process = row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert row.listed() == []
    assert set(row.states().values()) == {"cancelled"}, row.states()
    assert row.finish("--resume") == 0
    assert set(row.states().values()) == {"succeeded"}, row.states()


def scancel_by_somebody(row: Row) -> None:
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    job_id = row.ran()["many_x-3"][0].partition(".")[0]
    row.cluster.run(["scancel", job_id])
    row.until(lambda: "many_x-3: cancelled" in row.said.read_text(), "the report")
    assert row.finish() == 1
    states = row.states()
    assert states == {**dict.fromkeys(NAMES, "succeeded"), "many_x-3": "cancelled", "later": "skipped"}, states
    assert not list(row.place.glob("safelaunch-sweeps/sweep/jobs/*/bundles/*")), "a bundle names a rank"


def a_needed_job_fails(row: Row) -> None:
    row.begin()
    assert row.finish() == 1
    assert Counter(row.states().values()) == {"failed": 4, "skipped": 1}, row.states()
    assert "later" not in row.ran()


def killed_with_sigkill(row: Row) -> None:
    """kill -9 of a job's every process on its node: it has no end, and Slurm's word counts."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.cluster.run(["scancel", "--full", "--signal=KILL", row.job_of("many_x-1")])
    row.until(lambda: row.said.read_text().count("many_x-1: ") > 2, "its end")
    assert row.finish() == 1
    assert row.states()["many_x-1"] in ("failed", "cancelled"), row.states()
    assert row.states()["later"] == "skipped"


@contextmanager
def node_lost(row: Row) -> Iterator[str]:
    """SIGKILL for slurmd and all of the job many_x-1 on its node, which goes down. Yields the job's number."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    job_id = row.job_of("many_x-1")
    node = row.cluster.run(["squeue", "-h", "-r", "-j", job_id, "-o", "%N"]).stdout.split()[0]
    row.cluster.kill_node(node)
    try:
        row.until(lambda: "down" in row.node_state(node), f"{node} to be down")
        yield job_id
    finally:
        row.cluster.start_node(node)
        row.until(lambda: "down" not in row.node_state(node), f"{node} to be back")


def a_node_is_killed(row: Row) -> None:
    """Its jobs go back into the queue, and run again on another node: the same jobs, the same attempts."""
    with node_lost(row):
        row.until(lambda: any("BeginTime" in reason for reason in row.listed("%r")), "its jobs to be queued again")
        for address in row.listed("%A"):
            row.cluster.run(["scontrol", "update", f"JobId={address}", "StartTime=now"])
        row.until(lambda: len(row.ran()["many_x-1"]) == 2, "it to run again")
        assert row.finish() == 0
    counted = row.ran()
    assert set(row.states().values()) == {"succeeded"} and len(counted) == 5, (row.states(), counted)
    for name, lines in counted.items():
        numbers = {line.partition(".")[0] for line in lines}
        assert len(numbers) == 1 and len(set(lines)) == len(lines), (name, lines)
    assert {job["attempts"] for job in row.outcomes().values()} == {1}, row.outcomes()


def a_node_is_killed_and_requeue_is_off(row: Row) -> None:
    with node_lost(row):
        row.until(lambda: "many_x-1: failed" in row.said.read_text(), "the report")
        assert row.finish() == 1
    found = row.outcomes()
    lost = [name for name in NAMES if found[name]["state"] == "failed"]
    assert "many_x-1" in lost and found["later"]["state"] == "skipped", row.states()
    assert {found[name]["cause"] for name in lost} == {"node failed"}, found
    assert all(len(lines) == 1 for lines in row.ran().values()), row.ran()


def two_nodes(row: Row, jobs: str, options: str = "") -> dict[str, dict[str, Any]]:
    if not row.cluster.named:
        raise NotHere("nodes cannot have separate names here (unshare --uts --mount)")
    (row.place / "train.py").write_text(TRAIN)
    (row.place / "sweep.yaml").write_text(PAIR.replace("OPTIONS", options) + jobs)
    row.begin()
    row.finish()
    return row.outcomes()


def a_job_of_two_nodes_hangs(row: Row) -> None:
    """One safelaunch on each node, one verdict, found by colaunch; the nodes are free at once for the next job."""
    found = two_nodes(row, "jobs: {stuck: {}, well: {slurm: {sbatch: [--mem=10M, --exclusive]}}}\n")
    assert [found[name]["state"] for name in ("stuck", "well")] == ["hung", "succeeded"], row.states()
    assert found["stuck"]["exit_code"] == 124, found
    verdict = json.loads((Path(found["stuck"]["bundle"]) / "verdict.json").read_text())
    (culprit,) = verdict["culprits"]
    assert (verdict["outcome"], culprit["host"], culprit["frame"]["function"]) == ("hang", "zz2", "stop_here"), verdict
    assert verdict["bundle"]["whole"] is True, verdict["bundle"]
    both = sorted((row.place / "safelaunch-sweeps/sweep/jobs/stuck/bundles").glob("[!.]*-hang/verdict.json"))
    assert len({each.parent for each in both}) == 2, both
    assert [len(row.ran()[name]) for name in ("stuck", "well")] == [1, 1], row.ran()


def slurms_time_limit(row: Row) -> None:
    """One minute, the least that Slurm has; jobs within it are not touched."""
    (row.place / "sweep.yaml").write_text(SPEC.replace("HOW", "quick") + "  long:\n    gpus: 1\n    slurm: {time: 1}\n"
                                          "    command: exec -- bash job.sh {name} slow\n")  # fmt: skip
    process = row.begin()
    assert process.wait(150) == 1
    found = row.outcomes()
    assert (found["long"]["state"], found["long"]["cause"]) == ("timed-out", "time limit"), found["long"]
    assert all(found[name]["state"] == "succeeded" for name in NAMES), row.states()
    assert not list(row.place.glob("safelaunch-sweeps/sweep/jobs/*/bundles/*")), "a bundle names a rank"
    assert all(len(lines) == 1 for lines in row.ran().values()), row.ran()


def slurmctld_is_away_at_the_start(row: Row) -> None:
    row.cluster.stop_controller()
    try:
        assert row.begin().wait(120) == 2
        assert "nothing was started" in row.said.read_text(), row.said.read_text()
    finally:
        row.cluster.start_controller()
    row.until(lambda: row.cluster.run(["squeue", "-h"]).returncode == 0, "slurmctld")
    (row.place / "go").touch()
    assert row.begin().wait(150) == 0
    row.all_once()


def slurmctld_goes_away_at_sbatch(row: Row) -> None:
    """Between colaunch's first question and its sbatch."""
    (row.faults / "hold").touch()
    row.begin()
    row.until(lambda: (row.faults / "held").exists(), "sbatch")
    row.cluster.stop_controller()
    (row.faults / "held").unlink()
    row.until(lambda: "doesn't respond" in row.said.read_text(), "it to be noticed")
    row.cluster.start_controller()
    assert row.finish() == 0
    row.all_once()


def killed_together_with_sbatch(row: Row) -> None:
    """SIGKILL for colaunch and for the sbatch that it waits for, as when the login node restarts."""
    (row.faults / "hold").touch()
    process = row.begin()
    row.until(lambda: (row.faults / "held").exists(), "sbatch")
    children = Path(f"/proc/{process.pid}/task")
    found = [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]
    row.kill()
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    (row.faults / "held").unlink()
    assert row.finish("--resume") == 0
    row.all_once()


def two_resumes_at_once(row: Row) -> None:
    """One of them runs the sweep; the other says so and starts nothing."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.kill()
    both = [row.begin("--resume"), row.begin("--resume")]
    row.until(lambda: any(each.poll() is not None for each in both), "one of them to leave")
    (row.place / "go").touch()
    assert sorted(each.wait(150) for each in both) == [0, 2]
    assert "another safelaunch colaunch runs this sweep" in row.said.read_text()
    row.all_once()


def the_sweep_directory_is_read_only(row: Row) -> None:
    """While four jobs run and end, their outcome can't be written. Later, the directory is writable again."""
    place = row.place / "safelaunch-sweeps"
    place.mkdir()
    try:
        if read_only(place, on=True):
            raise NotHere("chattr +i does not work here")
        assert row.begin().wait(60) == 2
        assert "cannot write the sweep there" in row.said.read_text(), row.said.read_text()
        read_only(place, on=False)
        row.begin()
        row.until(lambda: len(row.ran()) == 4, "four to run")
        read_only(place, on=True)
        (row.place / "go").touch()
        time.sleep(5.0)
        assert row.process is not None and row.process.poll() is None
    finally:
        read_only(place, on=False)
    assert row.finish() == 0
    row.all_once()


def read_only(place: Path, *, on: bool) -> int:
    return subprocess.run(["chattr", "-R", f"{'+' if on else '-'}i", place], capture_output=True).returncode


def slurmctld_restarts_at_the_end(row: Row) -> None:
    """And is away while all jobs end and the next one should begin."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    row.cluster.stop_controller()
    (row.place / "go").touch()
    time.sleep(3.0)
    row.kill()
    row.cluster.start_controller()
    row.until(lambda: row.cluster.run(["squeue", "-h"]).returncode == 0, "slurmctld")
    assert row.finish("--resume") == 0
    row.all_once()


# The longest first.
ROWS: tuple[Callable[[Row], None], ...] = (
    slurms_time_limit,
    a_node_is_killed,
    a_node_is_killed_and_requeue_is_off,
    a_job_of_two_nodes_hangs,
    kill_and_all_end_meanwhile,
    ctrl_c,
    slurmctld_restarts,
    slurmctld_restarts_at_the_end,
    slurmctld_goes_away_at_sbatch,
    slurmctld_is_away_at_the_start,
    slurmctld_is_away_at_the_kill,
    the_sweep_directory_is_read_only,
    kill_every_second,
    kill_before_sbatch,
    kill_after_sbatch,
    kill_and_a_late_sbatch,
    kill_while_running,
    killed_together_with_sbatch,
    lost_answer_of_sbatch,
    two_resumes_at_once,
    requeue,
    preempted,
    scancel_by_somebody,
    a_needed_job_fails,
    killed_with_sigkill,
    healthy,
)
MORE = (
    "KillWait=5",
    "SlurmdTimeout=10",
    "MinJobAge=10",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL State=UP PriorityTier=10",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="Slurms at a time")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the rows")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in the background ignore it
    why_not = slurm.why_not()
    if options.bench and not why_not:
        return bench(options.json)
    rows = [result("all rows", 0.0, f"not run: {why_not}")] if why_not else check(options.only, options.jobs)
    if why_not:
        print(f"not run: {why_not}")
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": []} if options.bench else rows))
    broken = [row for row in rows if row["promise"].startswith("BROKEN")]
    print(f"{sum(row['promise'] == 'kept' for row in rows)} of {len(rows)} kept")
    return 1 if broken else 0


def result(name: str, seconds: float, promise: str) -> dict[str, Any]:
    return {"name": name, "seconds": round(seconds, 1), "promise": promise}


@contextmanager
def cluster_of(nodes: int, gpus: int) -> Iterator[tuple[slurm.Cluster, Path]]:
    root = Path(tempfile.mkdtemp(prefix="sl-check-", dir="/tmp"))
    try:
        (root / "c").mkdir()
        with slurm.Cluster(root / "c", nodes, gpus=gpus, more=MORE, named=slurm.can_name()) as cluster:
            yield cluster, root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def check(only: str, jobs: int) -> list[dict[str, Any]]:
    """Runs the rows, ``jobs`` at a time, each in a Slurm that serves one row after the other."""
    left = [work for work in ROWS if only in work.__name__]
    found: list[dict[str, Any]] = []
    lock = threading.Lock()

    def serve() -> None:
        with cluster_of(4, gpus=2) as (cluster, root):
            while True:
                with lock:
                    if not left:
                        return
                    work = left.pop(0)
                one = run(work, cluster, root)
                with lock:
                    found.append(one)
                    print(f"{one['name']:36} {one['seconds']:5.1f} s  {one['promise']}", flush=True)

    threads = [threading.Thread(target=serve) for _ in range(min(jobs, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found += [result(work.__name__, 0.0, "BROKEN no Slurm") for work in left]
    return found


def run(work: Callable[[Row], None], cluster: slurm.Cluster, root: Path) -> dict[str, Any]:
    how = "fail" if work is a_needed_job_fails else "slow"
    spec = SPEC.replace("HOW", how)
    if work is a_node_is_killed_and_requeue_is_off:
        spec = spec.replace("--mem=10M", "[--mem=10M, --no-requeue]")
    row, begin_s = Row(cluster, root / f"it's {work.__name__}", spec), time.monotonic()
    try:
        work(row)
        promise = "kept"
    except NotHere as error:
        promise = f"not run: {error}"
    except Exception as error:  # noqa: BLE001
        said = row.said.read_text() if row.said.exists() else ""
        logs = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(cluster.root.glob("slurm*.log")))
        promise = f"BROKEN {type(error).__name__} {str(error)[:600]}\n{said[-3000:]}\n{logs}"
    finally:
        if row.process is not None and row.process.poll() is None:
            row.kill()
        cluster.run(["scancel", "--user=root"])
        row.until(lambda: row.listed() == [], "an empty queue")
    return result(work.__name__.replace("_", " "), time.monotonic() - begin_s, promise)


# --- the cost ---------------------------------------------------------------------------------------------------------

ROUNDS = 5


def bench(json_file: Path | None) -> int:
    """16 jobs of 1 s on 8 GPUs, in three ways, in turn."""
    with cluster_of(4, gpus=2) as (cluster, root):
        took = [one_round(cluster, root, number) for number in range(ROUNDS)]
    plain, watched, ours = zip(*took, strict=True)
    about = "16 jobs of 1 s on 8 GPUs of Slurm"
    found = [
        benchlib.figure(f"{about}, `colaunch --engine slurm` / `sbatch` of the same safelaunch jobs",
                        [each / beside for each, beside in zip(ours, watched, strict=True)], "", "<= 1.2"),
        benchlib.figure("  colaunch", ours, "s"),
        benchlib.figure("  sbatch, safelaunch", watched, "s"),
        benchlib.figure("  sbatch alone", plain, "s"),
    ]  # fmt: skip
    benchlib.report("slurm", found, json_file)
    return 0


def one_round(cluster: slurm.Cluster, root: Path, number: int) -> tuple[float, float, float]:
    spec = "defaults: {gpus: 1, slurm: {sbatch: --mem=10M}}\n"
    spec += 'matrix: {x: 1..16}\njobs: {s: {command: "exec -- sleep 1", env: {X: "{x}"}}}\n'
    plain = array(cluster, "sleep 1")
    watched = array(cluster, f"{sys.executable} -P -m safelaunch exec -- sleep 1")
    row, begin_s = Row(cluster, root / f"bench-{number}", spec), time.monotonic()
    assert row.begin().wait(150) == 0, row.said.read_text()
    ours = time.monotonic() - begin_s
    row.until(lambda: row.listed() == [], "an empty queue")
    return plain, watched, ours


def array(cluster: slurm.Cluster, words: str) -> float:
    begin_s = time.monotonic()
    cluster.run(["sbatch", "--array=1-16", "--gres=gpu:1", "--mem=10M", "--output=/dev/null", f"--wrap={words}"])
    while cluster.run(["squeue", "-h"]).stdout.strip():  # sbatch --wait asks every 10 s only
        time.sleep(0.1)
    return time.monotonic() - begin_s


if __name__ == "__main__":
    sys.exit(main())
