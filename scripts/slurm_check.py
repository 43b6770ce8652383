"""Runs sweeps of ``colaunch --engine slurm`` on a Slurm of its own, while faults happen, and prints a table.

    python scripts/slurm_check.py                 # all rows, two minutes; needs root, slurm-wlm and munge
    python scripts/slurm_check.py --only kill     # rows whose names contain a word
    python scripts/slurm_check.py --bench         # 16 jobs of 1 s on 8 GPUs, against plain sbatch

Every job writes a line when it begins, so a job that is lost or runs twice is seen. Exit code 0 if every row is kept.
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
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [os.fspath(ROOT / "tests" / "integration")]
import slurm  # noqa: E402

# A job that says that it has begun; "slow" ones wait for the file "go".
SCRIPT = """\
echo $SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} >> ran/$1
[ "$2" = slow ] && until [ -e go ]; do sleep 0.1; done
[ "$2" = fail ] && exit 3
exit 0
"""
SPEC = """\
defaults: {gpus: 1, slurm: {partition: main, sbatch: --mem=10M}}
jobs:
  many: {command: "exec -- bash job.sh {name} HOW", matrix: {x: 1..4}, env: {X: "{x}"}}
  later: {command: "exec -- bash job.sh {name}", needs: many}
"""
NAMES = ("many_x-1", "many_x-2", "many_x-3", "many_x-4", "later")
# sbatch with a fault: before it submits, after it has, or an answer that is lost.
WRAPPER = """\
#!/bin/bash
[ -e "$FAULTS/before" ] && { rm "$FAULTS/before"; kill -9 $(cat "$FAULTS/pid"); sleep 1; }
[ -e "$FAULTS/slow" ] && { rm "$FAULTS/slow"; kill -9 $(cat "$FAULTS/pid"); sleep 4; }
said=$(REAL "$@"); code=$?
[ -e "$FAULTS/after" ] && { rm "$FAULTS/after"; kill -9 $(cat "$FAULTS/pid"); }
[ -e "$FAULTS/lost" ] && { rm "$FAULTS/lost"; echo "sbatch: error: Socket timed out on send/recv" >&2; exit 1; }
echo "$said"; exit $code
"""


class Row:
    """One sweep in a directory of its own."""

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
        deadline = time.monotonic() + 90.0
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
        return process.wait(150)

    def all_once(self, *expected: str) -> None:
        """Every job has begun once and succeeded; nothing is left in the queue."""
        counted = {name: len(lines) for name, lines in self.ran().items()}
        assert counted == dict.fromkeys(expected or NAMES, 1), counted
        assert set(self.states().values()) == {"succeeded"}, self.states()
        assert self.listed() == [], self.listed()


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
    row.until(lambda: "does not answer" in row.said.read_text(), "it to be noticed")
    time.sleep(2.0)
    (row.place / "go").touch()
    row.cluster.start_controller()
    assert row.finish() == 0
    assert row.said.read_text().count("does not answer") == 1
    assert "answers again" in row.said.read_text()
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
    row.cluster.run(["scancel", dict(each.split("|") for each in row.listed("%A|%F_%K"))[job_id]])
    row.until(lambda: "many_x-3: cancelled" in row.said.read_text(), "it to be told")
    assert row.finish() == 1
    states = row.states()
    assert states == {**dict.fromkeys(NAMES, "succeeded"), "many_x-3": "cancelled", "later": "skipped"}, states
    assert not list(row.place.glob("safelaunch-sweeps/sweep/jobs/*/bundles/*")), "a bundle accuses somebody"


def a_needed_job_fails(row: Row) -> None:
    row.begin()
    assert row.finish() == 1
    assert Counter(row.states().values()) == {"failed": 4, "skipped": 1}, row.states()
    assert "later" not in row.ran()


def a_node_is_killed(row: Row) -> None:
    """kill -9 of a job's every process on its node: it has no end, and Slurm's word counts."""
    row.begin()
    row.until(lambda: len(row.ran()) == 4, "four to run")
    job_id = row.ran()["many_x-1"][0].partition(".")[0]
    row.cluster.run(["scancel", "--full", "--signal=KILL", job_id])
    row.until(lambda: "many_x-1: " in row.said.read_text().partition("started on")[2].replace("many_x-1: started", ""),
              "its end")  # fmt: skip
    assert row.finish() == 1
    assert row.states()["many_x-1"] in ("failed", "cancelled"), row.states()
    assert row.states()["later"] == "skipped"


ROWS: dict[Callable[[Row], None], str] = {
    healthy: "slow",
    kill_before_sbatch: "slow",
    kill_after_sbatch: "slow",
    kill_and_a_late_sbatch: "slow",
    kill_while_running: "slow",
    kill_and_all_end_meanwhile: "slow",
    kill_every_second: "slow",
    lost_answer_of_sbatch: "slow",
    slurmctld_restarts: "slow",
    slurmctld_is_away_at_the_kill: "slow",
    requeue: "slow",
    preempted: "slow",
    ctrl_c: "slow",
    scancel_by_somebody: "slow",
    a_needed_job_fails: "fail",
    a_node_is_killed: "slow",
}
MORE = (
    "KillWait=5",
    "MinJobAge=10",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL State=UP PriorityTier=10",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--bench", action="store_true")
    options = parser.parse_args()
    if slurm.why_not():
        print(f"skipped: {slurm.why_not()}")
        return 0
    root = Path(tempfile.mkdtemp(prefix="sl-check-", dir="/tmp"))
    try:
        (root / "c").mkdir()
        with slurm.Cluster(root / "c", 4, gpus=2, more=MORE) as cluster:
            return bench(cluster, root) if options.bench else check(cluster, root, options.only)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def check(cluster: slurm.Cluster, root: Path, only: str) -> int:
    broken = 0
    for work, how in ROWS.items():
        if only not in work.__name__:
            continue
        row, begin_s = Row(cluster, root / f"it's {work.__name__}", SPEC.replace("HOW", how)), time.monotonic()
        try:
            work(row)
            said = "kept"
        except (AssertionError, subprocess.TimeoutExpired) as error:
            said, broken = f"BROKEN {str(error)[:300]}\n{row.said.read_text()[-3000:]}", broken + 1
        finally:
            if row.process is not None and row.process.poll() is None:
                row.kill()
            cluster.run(["scancel", "--user=root"])
            row.until(lambda row=row: row.listed() == [], "an empty queue")  # type: ignore[misc]
        print(f"{work.__name__.replace('_', ' '):34} {time.monotonic() - begin_s:5.1f} s  {said}", flush=True)
    return 1 if broken else 0


def bench(cluster: slurm.Cluster, root: Path) -> int:
    """16 jobs of 1 s on 8 GPUs, each way three times in turn."""
    spec = 'jobs: {s: {command: "exec -- sleep 1", matrix: {x: 1..16}, env: {X: "{x}"}}}\n'
    spec = "defaults: {gpus: 1, slurm: {sbatch: --mem=10M}}\n" + spec
    took: dict[str, list[float]] = {"sbatch": [], "sbatch, safelaunch": [], "colaunch": []}
    program = f"{sys.executable} -P -m safelaunch exec --"
    for number in range(3):
        for name, prefix in (("sbatch", ""), ("sbatch, safelaunch", program)):
            begin_s = time.monotonic()
            cluster.run(["sbatch", "--array=1-16", "--gres=gpu:1", "--mem=10M", "--output=/dev/null",
                         f"--wrap={prefix} sleep 1"])  # fmt: skip
            while cluster.run(["squeue", "-h"]).stdout.strip():  # sbatch --wait asks every 10 s only
                time.sleep(0.1)
            took[name].append(time.monotonic() - begin_s)
        row, begin_s = Row(cluster, root / f"bench-{number}", spec), time.monotonic()
        assert row.begin().wait(120) == 0
        took["colaunch"].append(time.monotonic() - begin_s)
    for name, times in took.items():
        print(f"{name:20} {' '.join(f'{each:5.1f} s' for each in times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
