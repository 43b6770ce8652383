"""Runs many independent safelaunch processes that compete for eight GPUs, kills some, and checks the outcome.

It is also a program: ``python -m tests.qa.crowd --jobs 50``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.leases.store import LeaseStore
from tests.support.nvml import stub
from tests.support.paths import PROGRAMS

PROGRAM = PROGRAMS / "gpu_user.py"
OTHER_USER = 65533
KILLED_EVERY = 5


@dataclass
class Member:
    """One safelaunch process. ``doomed`` is the target of SIGKILL, and its time."""

    number: int
    gpus: int
    process: subprocess.Popen[bytes]
    stderr: Path
    doomed: str = ""
    at_s: float = 0.0
    killed: bool = False


@dataclass
class Outcome:
    """The problems, if any, and what happened."""

    problems: list[str] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
    served: int = 0
    seconds: float = 0.0
    most_at_once: int = 0


class Crowd:
    """``jobs`` jobs on eight simulated GPUs. With ``torchrun``, each runs torchrun with a leased port."""

    def __init__(self, place: Path, jobs: int, *, torchrun: bool, seed: int, hold_s: float, users: int = 1) -> None:
        self.place = place
        self.witnesses = place / "witnesses"
        for shared in (self.witnesses, place / "bundles"):
            shared.mkdir()
            shared.chmod(0o1777)
        self.node = stub.Node(place / "state", place / "leases")
        self.node.write()
        self.torchrun = torchrun
        self.random = random.Random(seed)
        self.hold_s = hold_s
        self.users = users
        self.spread_s = jobs * (0.6 if torchrun else 0.12)
        self.members = [self._start(number) for number in range(jobs)]

    def _start(self, number: int) -> Member:
        gpus = self.random.choice([1, 1, 1, 2, 4])
        own = [f"--gpus={gpus}", "--wait", f"--run-name=job-{number}", f"--bundle-dir={self.place / 'bundles'}"]
        job = [os.fspath(PROGRAM), os.fspath(self.witnesses), str(self.hold_s * self.random.uniform(0.5, 1.5))]
        if self.torchrun:
            words = [*own, "--master-port=auto", "--nproc-per-node=1", *job]
            extra = {"WITNESS_PORT": "1"}
        else:
            words = ["exec", *own, "--", sys.executable, *job]
            extra = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAFELAUNCH_", "PET_", "SLURM_", "CUDA_"))}
        environ |= {**self.node.environ, "OMP_NUM_THREADS": "1", "CROWD": str(self.place), **extra}
        stderr = self.place / f"stderr-{number}"
        user = OTHER_USER if self.users > 1 and number % 2 else None
        with stderr.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "safelaunch", *words],
                env=environ,
                cwd="/tmp",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                user=user,
                group=user,
                extra_groups=[] if user else None,
            )
        member = Member(number, gpus, process, stderr)
        if number % KILLED_EVERY == KILLED_EVERY - 1:
            member.doomed = self.random.choice(["supervisor", "rank", *(["torchrun"] if self.torchrun else [])])
            member.at_s = time.monotonic() + self.random.uniform(0.0, self.spread_s)
        return member

    def run(self, patience_s: float) -> Outcome:
        """Runs until all jobs have ended or ``patience_s`` seconds have passed."""
        outcome = Outcome()
        begin = time.monotonic()
        decoy = self._decoy()
        while any(member.process.poll() is None for member in self.members):
            if time.monotonic() - begin > patience_s:
                late = [member.number for member in self.members if member.process.poll() is None]
                outcome.problems.append(f"jobs {late} did not end within {patience_s:g} s")
                break
            for member in self.members:
                if member.doomed and not member.killed and time.monotonic() > member.at_s:
                    self._kill(member, outcome)
            time.sleep(0.02)
        outcome.seconds = time.monotonic() - begin
        if decoy.poll() is not None:
            outcome.problems.append("a decoy that carries a job's environment was ended")
        decoy.kill()
        decoy.wait()
        self._judge(outcome)
        return outcome

    def _decoy(self) -> subprocess.Popen[bytes]:
        # An unrelated process with the environment of a job, like a shell started from it.
        first = self.members[0]
        environ = {**self.node.environ, "PATH": os.environ["PATH"], "SAFELAUNCH_SUPERVISOR_PID": str(first.process.pid)}
        environ |= {"SAFELAUNCH_RUN_DIR": f"/tmp/safelaunch-{os.getuid()}/r{first.process.pid}", "RANK": "0"}
        return subprocess.Popen(["sleep", "3600"], env=environ, start_new_session=True)

    def _kill(self, member: Member, outcome: Outcome) -> None:
        pid = self._victim(member)
        if member.process.poll() is not None:
            member.killed = True  # too late: it has ended normally
            member.doomed = ""
        elif pid is not None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
            member.killed = True
            outcome.killed[member.doomed] = outcome.killed.get(member.doomed, 0) + 1

    def _victim(self, member: Member) -> int | None:
        if member.doomed == "supervisor":
            return member.process.pid
        below = [pid for pid in _below(member.process.pid) if _runs(pid, member.doomed)]
        return below[-1] if below else None

    def _judge(self, outcome: Outcome) -> None:
        log = (self.witnesses / "log").read_text().splitlines() if (self.witnesses / "log").exists() else []
        outcome.problems += [line for line in log if line.split()[1] in ("CONFLICT", "NOTHING")]
        outcome.served = sum(1 for line in log if line.split()[1] == "done")
        for member in self.members:
            code = member.process.poll()
            if not member.killed and code != 0:
                outcome.problems.append(f"job {member.number} ended with {code}: {member.stderr.read_text()[-500:]}")
            if "already in use" in member.stderr.read_text(errors="replace"):
                outcome.problems.append(f"job {member.number}: Address already in use")
        outcome.problems += self._left()
        outcome.most_at_once = _most_at_once(log)

    def _left(self) -> list[str]:
        """Returns leases, tickets and processes that remain. Guardians of killed supervisors get some seconds."""
        store = LeaseStore(os.fspath(self.node.lease_dir))
        things = [*(stub.uuid(n) for n in range(8)), *(path.name for path in self.witnesses.glob("port-*"))]
        deadline = time.monotonic() + 40.0
        while True:
            left = [f"{thing} is still held by {holder}" for thing, holder in store.look(things).items()]
            left += [f"still waiting: {one}" for one in store.waiting()]
            left += [f"pid {pid} still runs" for pid in self._pids()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def _pids(self) -> list[int]:
        mark = f"CROWD={self.place}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def clean_up(self) -> None:
        """Ends the processes that a failed test leaves: only those with this crowd's mark."""
        for pid in self._pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for member in self.members:
            member.process.wait(60)


def may_be_two_users() -> bool:
    """Returns whether this process can act as another user that can read this installation."""
    if os.getuid() != 0:
        return False
    command = [sys.executable, "-c", "import safelaunch.cli, msgspec, pynvml"]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, user=OTHER_USER, group=OTHER_USER, extra_groups=[])
    except PermissionError:
        return False
    return done.returncode == 0


def _below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in children for one in (int(child), *_below(int(child)))]


def _runs(pid: int, what: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    if b"safelaunch" in words[:4] or words[0] == b"sl-guardian":
        return False
    return any(word.endswith(b"torchrun") for word in words[:3]) == (what == "torchrun")


def _most_at_once(log: list[str]) -> int:
    """Returns how many GPUs the jobs used at once. The other checks prove nothing unless some were in use."""
    now: set[tuple[str, str]] = set()
    most = 0
    for line in sorted(log):
        _, word, pid, what = line.split(" ", 3)
        if word == "got" and what.startswith("GPU-"):
            now.add((pid, what))
        elif word == "done":
            now = {item for item in now if item[0] != pid}
        most = max(most, len(now))
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--torchrun", action="store_true", help="run torchrun with a leased port (slower)")
    parser.add_argument("--users", type=int, default=2 if may_be_two_users() else 1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crowd") as place:
        Path(place).chmod(0o1777)  # like /tmp: any of them can create the lease directory
        crowd = Crowd(
            Path(place), options.jobs, torchrun=options.torchrun, seed=options.seed, hold_s=0.3, users=options.users
        )
        try:
            outcome = crowd.run(patience_s=60 + 12 * options.jobs)
        finally:
            crowd.clean_up()
    print(
        f"seed {options.seed}: {options.jobs} jobs of {options.users} user(s), {outcome.served} served to the end, "
        f"killed {outcome.killed}, at most {outcome.most_at_once} GPUs in use at once, {outcome.seconds:.1f} s"
    )
    for problem in outcome.problems:
        print("PROBLEM", problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
