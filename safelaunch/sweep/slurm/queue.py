"""Asks Slurm: sbatch, squeue, scancel and scontrol, one at a time, in a thread, so that nobody waits for slurmctld."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from safelaunch.sweep.slurm.judge import Listed
from safelaunch.system.errors import SafelaunchError

T = TypeVar("T")
PATIENCE_S = 120.0
FORMAT = "%A|%F|%K|%T|%N|%r|%j"
# An answer of sbatch or squeue that says nothing about the request: slurmctld restarts, is busy, cannot be reached.
PASSING = re.compile(
    r"unable to contact|connect|communication|timed out|time-out|temporar|try again|zero bytes|socket|stand-?by"
    r"|backup controller|munge|credential|incompatible|retry|not responding|transition|database",
    re.IGNORECASE,
)
# More jobs than the user may have at a time: there is room once some have ended.
FULL = re.compile(r"accounting/QOS policy|submit limit|MaxSubmit|too many|MaxJobCount|maximum number of jobs", re.I)
# Variables of a job in which colaunch may run, and defaults of sbatch that would change which jobs are ours.
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT", "SLURM_CONF_SERVER")
SITE = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ACCOUNT",
        "CONSTRAINT",
        "CLUSTERS",
        "EXCLUSIVE",
        "MEM_PER_CPU",
        "MEM_PER_GPU",
        "NO_REQUEUE",
        "PARTITION",
        "QOS",
        "REQUEUE",
        "RESERVATION",
        "TIMELIMIT",
        "WCKEY",
    )
)


class SlurmError(SafelaunchError):
    """Slurm refused a request, or did not answer. ``passing``: another try may succeed; ``full``: once jobs end."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix)
        self.full = bool(FULL.search(message))
        self.passing = bool(PASSING.search(message))


class Slurm:
    """Runs Slurm's commands. ``environ``: of colaunch."""

    def __init__(self, environ: Mapping[str, str], uid: int | None = None) -> None:
        self._env = clean(environ)
        self._uid = os.getuid() if uid is None else uid
        self._thread = ThreadPoolExecutor(1, "slurm")

    def later(self, work: Callable[[], T]) -> Future[T]:
        """Does ``work`` in the thread."""
        return self._thread.submit(work)

    def listed(self) -> list[Listed]:
        """All jobs of this user that Slurm knows, ended ones for a while. Raises SlurmError."""
        return parse(self._run("squeue", "-h", "-r", "-a", "--states=all", "-u", str(self._uid), "-o", FORMAT))

    def submit(self, words: Sequence[str], given: Sequence[str] = ()) -> str:
        """Runs ``sbatch``; returns the job's number. ``given``: options that the script sets. Raises SlurmError."""
        said = self._run(*words, env=clean(self._env, given))
        return said.strip().partition(";")[0]

    def cancel(self, addresses: Sequence[str], *, kill: bool) -> None:
        """Ends jobs: SIGTERM, SIGKILL after Slurm's KillWait; ``kill``: SIGKILL. Raises SlurmError.

        A job that has ended is no error.
        """
        how = ["--signal=KILL", "--full"] if kill else []
        for first in range(0, len(addresses), 200):
            self._run("scancel", "--quiet", *how, *addresses[first : first + 200])

    def largest_array(self) -> int:
        """How many tasks an array may have; 0 without arrays. Raises SlurmError."""
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", self._run("scontrol", "show", "config"), re.MULTILINE)
        return max(0, int(found[1]) - 1) if found else 0

    def _run(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                words,
                env=self._env if env is None else env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PATIENCE_S,
                start_new_session=True,  # Ctrl-C is ours: it must not cut a submission off
            )
        except FileNotFoundError:
            raise SlurmError(f"{words[0]} is not installed here", "run colaunch where you would run sbatch") from None
        except OSError as error:
            raise SlurmError(f"{words[0]} could not be started (temporary): {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{words[0]} timed out after {PATIENCE_S:g} s") from None
        if done.returncode:
            raise SlurmError(_said(words[0], done.stderr, done.returncode))
        return done.stdout


def _said(program: str, text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-2:]) or f"{program} ended with exit code {code}"


# --- pure -------------------------------------------------------------------------------------------------------------


def parse(text: str) -> list[Listed]:
    """What squeue lists in ``FORMAT``. Other lines are left out."""
    found = []
    for line in text.splitlines():
        words = line.split("|", 6)
        if len(words) != 7 or not words[0].strip().isdecimal():
            continue
        job_id, array, task, state, nodes, reason, name = (word.strip() for word in words)
        is_task = task.isdecimal()
        address = f"{array}_{task}" if is_task else job_id
        found.append(Listed(name, int(task) if is_task else 0, job_id, address, state, reason, nodes))
    return found


def clean(environ: Mapping[str, str], file_sets: Sequence[str] = ()) -> dict[str, str]:
    """The environment for Slurm's commands, and so for the jobs.

    Without the variables of a job around us, and without defaults that the file (``file_sets``) or the engine sets.
    """
    dropped = {f"SBATCH_{'TIMELIMIT' if word == 'time' else word.upper().replace('-', '_')}" for word in file_sets}
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped
        and name != "CUDA_VISIBLE_DEVICES"
        and (
            not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "SQUEUE_", "SCANCEL_"))
            or name in KEPT
            or name in SITE
        )
    }
