"""Implements the scheduler interface for Slurm, using sbatch, squeue and scancel. Doesn't need Slurm's accounting."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from safelaunch.addons.sweep.errors import SpecError
from safelaunch.addons.sweep.scheduler import ListedJob, Meaning, QueueError, Scheduler, SubmittedWork
from safelaunch.settings.yamlfile import YamlNode, known_entries, scalar, texts_of

if TYPE_CHECKING:
    from safelaunch.addons.sweep.task import SchedulerJob

PATIENCE_S, ASK_S = 120.0, 5.0
FORMAT = "%i|%T|%N|%r|%j"
# Time between the job's 'timeout' and Slurm's time limit, if only 'timeout' is set.
TIME_TO_END_S = 120.0
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT"}  # fmt: skip
# Errors that don't concern the request: slurmctld restarts, is busy, or is unreachable.
PASSING = re.compile(
    r"unable to contact|connect|communication|timed out|time-out|temporar|try again|zero bytes|socket|stand-?by"
    r"|backup controller|munge|credential|incompatible|retry|not responding|transition|database",
    re.IGNORECASE,
)
FULL = re.compile(r"accounting/QOS policy|submit limit|MaxSubmit|too many|MaxJobCount|maximum number of jobs", re.I)
# Variables in our environment that choose the cluster or set site defaults; others would change our jobs.
KEPT = re.compile(
    "SLURM_(CONF|CLUSTERS|TIME_FORMAT|JWT|CONF_SERVER)|SBATCH_(ACCOUNT|CONSTRAINT|CLUSTERS|EXCLUSIVE|MEM_PER_CPU"
    "|MEM_PER_GPU|NO_REQUEUE|PARTITION|QOS|REQUEUE|RESERVATION|TIMELIMIT|WCKEY)"
)
OF_SLURM = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "SQUEUE_", "SCANCEL_")
KEYS = ("partition", "account", "time", "qos", "sbatch")
# Options that the engine sets, and alternatives.
OURS = {
    "array": "colaunch submits each job by itself",
    "chdir": "use 'cwd'",
    "dependency": "use 'needs'",
    "error": "the output goes to the job's log in the sweep directory",
    "output": "the output goes to the job's log in the sweep directory",
    "open-mode": "the output is always appended",
    "gpus": "use 'gpus': GPUs on each node",
    "gpus-per-node": "use 'gpus': GPUs on each node",
    "job-name": "colaunch finds its jobs by their names",
    "kill-on-invalid-dep": "colaunch sets it for jobs that need others",
    "nodes": "use 'nodes'",
    "ntasks": "each node runs one safelaunch",
    "ntasks-per-node": "each node runs one safelaunch",
    "wait": "colaunch does the waiting",
    "parsable": "colaunch reads sbatch's answer",
    "wrap": "use 'command'",
    "test-only": "use colaunch --dry-run",
    "hold": "colaunch would wait for it forever",
    **{key: f"use the key '{key}'" for key in KEYS[:-1]},
}
_MEANINGS = {
    "TIMEOUT": Meaning("timed-out", "time limit", asked=True),
    "DEADLINE": Meaning("timed-out", "deadline", asked=True),
    "CANCELLED": Meaning("cancelled", "scancel", asked=True),
    "PREEMPTED": Meaning("cancelled", "preempted", asked=True),
    "REVOKED": Meaning("cancelled", "revoked", asked=True),
    "NODE_FAIL": Meaning("failed", "node failed"),
    "BOOT_FAIL": Meaning("failed", "node failed"),
    "OUT_OF_MEMORY": Meaning("failed", "out of memory"),
}


class Slurm:
    name = "Slurm"
    keeps_order = True
    meanings: Mapping[str, Meaning] = _MEANINGS

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._env = clean(environ)

    def across(self, nodes: int) -> list[str]:
        """Returns the srun command. The end of one node's task doesn't stop the others, so they can write evidence."""
        return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]

    def submit_command(self, work: SubmittedWork) -> list[str]:
        """Returns the sbatch command. Its options override sbatch's variables; options in the script wouldn't."""
        job, out = work.job, os.fspath(work.output).replace("%", "%%")
        words = ["sbatch", "--parsable", f"--job-name={work.name}", "--open-mode=append", f"--output={out}"]
        words += [f"--dependency=afterok:{':'.join(work.after)}", "--kill-on-invalid-dep=yes"] if work.after else []
        words += [f"--nodes={job.nodes}", "--ntasks-per-node=1"]
        options = {word.partition("=")[0] for word in job.batch}
        words += [f"--gres=gpu:{job.gpus}"] if job.gpus and "--gres" not in options else []
        if job.timeout_s is not None and "--time" not in options:
            words.append(f"--time={math.ceil((job.timeout_s + TIME_TO_END_S) / 60)}")
        return [*words, *job.batch, os.fspath(work.script)]

    def submit(self, work: SubmittedWork) -> str:
        return self._run(*self.submit_command(work)).strip().partition(";")[0]

    def list(self) -> list[ListedJob]:
        return parse(self._run("squeue", "-h", "-a", "--states=all", "-u", str(os.getuid()), "-o", FORMAT))

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        """Cancels jobs with SIGTERM, and with SIGKILL after Slurm's KillWait; if ``kill``, with SIGKILL at once."""
        how = ["--signal=KILL", "--full"] if kill else []
        for first in range(0, len(numbers), 200):
            self._run("scancel", "--quiet", *how, *numbers[first : first + 200])

    def _run(self, *words: str) -> str:
        try:
            done = subprocess.run(
                words,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PATIENCE_S,
                start_new_session=True,  # Ctrl-C is for colaunch: it must not interrupt a submission
            )
        except FileNotFoundError:
            raise QueueError(f"{words[0]} is not installed here", "run colaunch where you would run sbatch") from None
        except OSError as error:
            raise slurm_error(f"{words[0]} could not be started (temporary): {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise slurm_error(f"{words[0]} timed out after {PATIENCE_S:g} s") from None
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise slurm_error("; ".join(lines[-2:]) or f"{words[0]} ended with exit code {done.returncode}")
        return done.stdout


class SlurmJob:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.restart = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.node = environ.get("SLURMD_NODENAME", "")
        self.gpus = tuple(each for each in environ.get("SLURM_JOB_GPUS", "").split(",") if each)
        cores = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE", "")
        self.cores = int(cores) if cores.isdecimal() else None

    def environment(self) -> dict[str, str]:
        """Returns default values of the job's variables: srun no longer inherits the number of cores per task."""
        cores = self._environ.get("SLURM_CPUS_PER_TASK")
        return {"SRUN_CPUS_PER_TASK": cores} if cores else {}

    def first_host(self) -> str:
        return next(iter(_ask("scontrol", "show", "hostnames", self._environ["SLURM_JOB_NODELIST"]).split()), "")

    def why_ended(self) -> str:
        text = _ask("scontrol", "show", "job", "-o", self._environ["SLURM_JOB_ID"])
        fields = dict(word.partition("=")[::2] for word in text.split())
        if int(fields.get("Restarts", "0")) > self.restart:
            return "REQUEUED"
        if fields.get("Reason") == "TimeLimit" or fields.get("JobState") == "TIMEOUT":
            return "TIMEOUT"
        return "PREEMPTED" if fields.get("PreemptTime", "None") != "None" else "CANCELLED"


def _ask(*words: str) -> str:
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def slurm_error(message: str) -> QueueError:
    error = QueueError(message)
    error.passing, error.full = bool(PASSING.search(message)), bool(FULL.search(message))
    return error


def parse(text: str) -> list[ListedJob]:
    """Parses the output of squeue in ``FORMAT``; ignores lines with another form."""
    jobs = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|", 4)]
        if len(words) == 5 and words[0][:1].isdigit():
            number, state, nodes, reason, name = words
            stage = "queued" if state in QUEUED else "ended" if state in ENDED else "running"
            hopeless = state == "CANCELLED" and reason == "DependencyNeverSatisfied"
            jobs.append(ListedJob(name, number, stage, state, "" if reason == "None" else reason, nodes, hopeless))  # type: ignore[arg-type]
    return jobs


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for Slurm's commands, and so for the jobs, without variables of an enclosing job."""
    return {
        name: value
        for name, value in environ.items()
        if name != "CUDA_VISIBLE_DEVICES" and (not name.startswith(OF_SLURM) or KEPT.fullmatch(name))
    }


def words_of(node: YamlNode) -> tuple[str, ...]:
    """Returns the sbatch options in a job's ``slurm`` section. sbatch rejects unknown ones. Raises SpecError."""
    options: list[str] = []
    for key, _, value in known_entries(node, KEYS, "slurm"):
        if key != "sbatch":
            options.append(f"--{key}={scalar(value, key)}")
        elif value.kind != "list" or value.items:
            options += [_checked(item) for item in texts_of(value, "sbatch")]
    return tuple(options)


def _checked(word: YamlNode) -> str:
    name = re.match(r"--([a-z][a-z-]*)(=|$)", word.text)
    if name is None:
        raise SpecError(
            f"{word.where}: sbatch: {word.text!r} is not an option in its long form", "write e.g. --cpus-per-task=8"
        )
    ours = next((key for key in OURS if key.startswith(name[1])), "")  # sbatch accepts abbreviations
    if ours:
        raise SpecError(f"{word.where}: sbatch: --{name[1]} cannot be given here", OURS[ours])
    return word.text


SCHEDULER: Callable[[Mapping[str, str]], Scheduler] = Slurm
SCHEDULER_JOB: Callable[[Mapping[str, str]], SchedulerJob] = SlurmJob
