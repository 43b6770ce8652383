"""SIGKILL at any moment for any process of a run: no process of the job must remain, and no other must be touched.

The check does not rely on the product: every process of a job holds a marker file open (``kin.py``) or has the job's
tag in its environment. Several jobs run at once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.qa.attacks.attack import Attack
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

KINDS = ("plain", "forked", "session", "daemons", "daemonizing", "wiped", "workers")
VICTIMS = (
    "safelaunch",
    "torchrun",
    "guardian",
    "a rank",
    "all ranks",
    "safelaunch and guardian",
    "safelaunch and torchrun",
    "safelaunch and ranks",
    "all that is called safelaunch",
    "guardian, later safelaunch",
)
AT_ONCE = 4
RANKS = 2
RUNS_S = 4.0
LEAVES_S = 25.0
MOMENTS_S = {"start": 1.5, "ranks": 0.8}  # latest moment after the start, or after all ranks run
NO_GROUP = 'umount -l /sys/fs/cgroup/unified 2>/dev/null; umount -l /sys/fs/cgroup 2>/dev/null; exec "$0" "$@"'
UNKNOWABLE = "a process that has just lost parents, session and environment is unknown (see job/guardian.py)"


@dataclass(frozen=True)
class Kill:
    """One kill. ``moment``: seconds after ``since``, which is the start of safelaunch or of the ranks."""

    kind: str
    victims: str
    since: str
    moment_s: float
    group: bool

    @property
    def name(self) -> str:
        group = "" if self.group else ", no control group"
        return f"kill -9 {self.victims} {self.moment_s:.3f} s after {self.since}, {self.kind}{group}"

    def needs(self) -> str:
        if not self.group and os.geteuid():
            return "takes root, to hide the control groups from one job"
        both = self.victims in ("safelaunch and guardian", "guardian, later safelaunch")
        return UNKNOWABLE if both and self.kind == "wiped" and not self.group else ""


def attacks(count: int, chance: random.Random) -> Iterator[Attack]:
    """Yields ``count`` kills, cycling through all kinds of jobs and victims."""
    kills = [_draw(number, chance) for number in range(count)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [(kill, pool.submit(_run, kill)) for kill in kills]
        for kill, future in running:
            yield Attack(kill.name, lambda _, future=future: future.result(), kill.needs)  # type: ignore[misc]


def _draw(number: int, chance: random.Random) -> Kill:
    since = chance.choice(["start", "ranks", "ranks"])
    return Kill(
        KINDS[number % len(KINDS)],
        VICTIMS[number % len(VICTIMS)],
        since,
        chance.uniform(0, MOMENTS_S[since]),
        os.geteuid() != 0 or chance.random() < 0.5,
    )


def _run(kill: Kill) -> str:
    if kill.needs():
        return ""
    scratch = Path(tempfile.mkdtemp(prefix="kill-"))
    try:
        return _Attempt(kill, scratch).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Attempt:
    """One job, and the unrelated processes next to it."""

    def __init__(self, kill: Kill, scratch: Path) -> None:
        self._kill = kill
        self._marker = scratch / "marker"
        self._scratch = scratch
        self._strangers: list[subprocess.Popen[bytes]] = []

    def run(self) -> str:
        words = [f"--nproc-per-node={RANKS}", PROGRAMS / "kin.py", self._kill.kind, self._marker, str(RUNS_S)]
        hide = () if self._kill.group else ("unshare", "-m", "sh", "-c", NO_GROUP)
        interpreter = (*hide, sys.executable, "-m", "safelaunch")
        with Job(words, self._scratch, interpreter=interpreter) as self._job:
            try:
                return self._attack()
            finally:
                self._clean_up()

    def _attack(self) -> str:
        self._await_moment()
        self._stranger({"SAFELAUNCH_RUN_DIR": str(self._run_dir), "PATH": os.environ["PATH"]})
        if self._kill.victims == "guardian, later safelaunch":
            self._strike("guardian")
            time.sleep(1.5)
            self._strike("safelaunch")
        else:
            self._strike(self._kill.victims)
        wrong = self._await_end()
        dead = [str(one.pid) for one in self._strangers if one.poll() is not None]
        return wrong or (f"strangers were ended: {', '.join(dead)}" if dead else "")

    def _stranger(self, env: dict[str, str]) -> None:
        self._strangers.append(subprocess.Popen(["sleep", "3599"], env=env, start_new_session=True))

    @property
    def _run_dir(self) -> Path:
        return self._job.runtime / "safelaunch" / f"r{self._job.process.pid}"

    def _await_moment(self) -> None:
        if self._kill.since == "ranks":
            with suppress(AssertionError):  # it has failed already: nothing is left to kill
                self._job.until(lambda: len(self._ranks()) == RANKS, "the ranks", 120.0)
        time.sleep(self._kill.moment_s)

    # --- roles of processes
    # -----------------------------------------------------------------------------------------------

    def _ranks(self) -> list[int]:
        files = [Path(f"{self._marker}-ready-{rank}") for rank in range(RANKS)]
        texts = [file.read_text() for file in files if file.exists()]
        return [int(text) for text in texts if text]

    def _guardians(self) -> list[int]:
        return [pid for pid in self._family() if _comm(pid) == "sl-guardian"]

    def _family(self) -> list[int]:
        return [pid for pid in self._job.pids() if pid not in {one.pid for one in self._strangers}]

    def _torchrun(self) -> list[int]:
        return [pid for pid in self._family() if b"torchrun" in _command(pid)]

    def _victims(self, whom: str) -> list[int]:
        own = [self._job.process.pid]
        if whom == "all that is called safelaunch":
            return [pid for pid in [*own, *self._family(), *self._holders()] if b"safelaunch" in _command(pid)]
        by_name: dict[str, Callable[[], list[int]]] = {
            "safelaunch": lambda: own,
            "torchrun": self._torchrun,
            "guardian": self._guardians,
            "a rank": lambda: self._ranks()[:1],
            "all ranks": self._ranks,
            "ranks": self._ranks,
        }
        return [pid for part in whom.split(" and ") for pid in by_name[part]()]

    def _strike(self, whom: str) -> None:
        victims = self._victims(whom)
        random.shuffle(victims)
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- what is left -------------------------------------------------------------------------------------------------

    def _holders(self) -> list[int]:
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit() and self._holds(entry.path)]

    def _holds(self, process: str) -> bool:
        try:
            links = [Path(entry.path).readlink() for entry in os.scandir(f"{process}/fd")]
        except OSError:
            return False
        return self._marker in links

    def _left(self) -> list[int]:
        # A job that ended by itself is allowed to leave daemons, as under torchrun.
        if self._ended_by_itself():
            return [pid for pid in {*self._family(), *self._ranks()} if _is_ours(pid) or pid in self._live_ranks()]
        return sorted({*self._family(), *self._holders()})

    def _ended_by_itself(self) -> bool:
        return self._kill.victims in ("guardian", "a rank", "all ranks") or self._job.process.returncode == 0

    def _live_ranks(self) -> list[int]:
        return [pid for pid in self._ranks() if self._holds(f"/proc/{pid}")]

    def _await_end(self) -> str:
        deadline = time.monotonic() + LEAVES_S + RUNS_S
        while self._job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._job.process.poll() is None:
            return "safelaunch has not ended"
        if self._kill.victims == "guardian" and self._job.process.returncode != 0:
            return f"the job ended with {self._job.process.returncode}: {self._job.stderr[-300:]}"
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return f"left: {'; '.join(f'{pid} {_command(pid)[:80]!r}' for pid in left)}" if left else ""

    def _clean_up(self) -> None:
        for _ in range(100):
            if not (left := self._holders()):
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for one in self._strangers:
            one.kill()
            one.wait()


def _is_ours(pid: int) -> bool:
    return _comm(pid) == "sl-guardian" or b"torchrun" in _command(pid)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
