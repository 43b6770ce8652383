"""Writes the scripts for sbatch. Pure.

One script is one job of Slurm, or one array of jobs that are alike. It only sets up words and variables: the claim, the
log and the end are the business of ``task``, which it becomes.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safelaunch.sweep.jobs import Job
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.slurm.task import FIRST_HOST, JOB_ID, RENDEZVOUS_PORT, port_token

# Where only 'timeout' is given: the time that the job has to end after it, before Slurm ends it.
TIME_TO_END_S = 120.0
# MaxArraySize is 1001 by default; a script with the words of all tasks must stay below 4 MB.
LARGEST_ARRAY = 500


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job, and the number of the attempt."""

    job: Job
    number: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one sbatch submits: one job, or an array. ``name`` is unique: it finds the batch again in squeue.

    ``needs``: what Slurm calls the jobs that it waits for.
    """

    name: str
    attempts: tuple[Attempt, ...]
    needs: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        return len(self.attempts) > 1


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands that start safelaunch, and what runs it inside a job."""

    safelaunch: Sequence[str]
    task: Sequence[str]


def alike(attempts: Sequence[Attempt], at_most: int = LARGEST_ARRAY) -> list[tuple[Attempt, ...]]:
    """The attempts in groups whose members ask Slurm for the same, in order of their first members."""
    groups: dict[object, list[list[Attempt]]] = {}
    for each in attempts:
        job = each.job
        asked = (job.group, job.gpus, job.nodes, job.batch, job.timeout_s, job.needs)
        parts = groups.setdefault(asked, [[]])
        if len(parts[-1]) >= at_most:
            parts.append([])
        parts[-1].append(each)
    return [tuple(part) for parts in groups.values() for part in parts]


def batch_name(group: str, sweep_id: str, number: int) -> str:
    """``train.3f9a2c1b44-1``: what people read in squeue, and what makes it unique."""
    return f"{re.sub('[^A-Za-z0-9._-]', '-', group)[:40] or 'colaunch'}.{sweep_id}-{number}"


def command(batch: Batch, place: str) -> list[str]:
    """The words of sbatch for the script at ``place``."""
    waits = [f"--dependency=afterok:{':'.join(batch.needs)}", "--kill-on-invalid-dep=yes"] if batch.needs else []
    return ["sbatch", "--parsable", *waits, place]


def script(batch: Batch, paths: SweepPaths, programs: Programs) -> str:
    """The script of a batch, whose jobs are alike."""
    job = batch.attempts[0].job
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(word)}" for word in _asked(batch, job, paths)), ""]
    if not batch.is_array:
        lines += _task(batch.attempts[0], paths, programs, "")
        return "\n".join(lines) + "\n"
    lines.append("case $SLURM_ARRAY_TASK_ID in")
    for index, attempt in enumerate(batch.attempts):
        lines += [f"{index})", *_task(attempt, paths, programs, "  "), "  ;;"]
    return "\n".join([*lines, "esac"]) + "\n"


def _asked(batch: Batch, job: Job, paths: SweepPaths) -> list[str]:
    """What the script asks Slurm for, as options of sbatch."""
    out = paths.batch_output(batch.name)
    words = [f"--job-name={batch.name}", "--open-mode=append"]
    words += [f"--output={_pattern(out)}" + (".%a" if batch.is_array else "")]
    words += [f"--array=0-{len(batch.attempts) - 1}"] if batch.is_array else []
    words += [f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    given = {word.partition("=")[0] for word in job.batch}
    if job.gpus and "--gres" not in given:
        words.append(f"--gres=gpu:{job.gpus}")
    if job.timeout_s is not None and "--time" not in given:
        words.append(f"--time={math.ceil((job.timeout_s + TIME_TO_END_S) / 60)}")
    return [*words, *job.batch]


def _pattern(path: os.PathLike[str]) -> str:
    """A path without the characters that sbatch would replace."""
    return os.fspath(path).replace("%", "%%")


def _task(attempt: Attempt, paths: SweepPaths, programs: Programs, indent: str) -> list[str]:
    """The lines that become one job's task."""
    job = attempt.job.with_ports([port_token(index) for index in range(attempt.job.ports)])
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _environment(job).items()]
    lines.append(f"set -- {shlex.join(_started(job, paths, programs))}")
    task = [*programs.task, os.fspath(paths.job(job.name)), str(attempt.number), "--cwd", job.cwd]
    task += ["--timeout", f"{job.timeout_s:g}"] if job.timeout_s is not None else []
    task += ["--ports", str(job.ports)] if job.ports else []
    lines.append(f'exec {shlex.join(task)} -- "$@"')
    return [indent + line for line in lines]


def _environment(job: Job) -> Mapping[str, str]:
    own = dict(job.env)
    if not job.gpus and not any(word.startswith(("--gres=", "--gpus", "--tres")) for word in job.batch):
        own.setdefault("CUDA_VISIBLE_DEVICES", "")
    if job.nodes > 1 and job.words[:1] == ("exec",):
        own.setdefault("MASTER_ADDR", FIRST_HOST)
    return own


def _started(job: Job, paths: SweepPaths, programs: Programs) -> list[str]:
    """The command that the task starts: safelaunch, on several nodes once on each."""
    words = job.arguments(os.fspath(paths.bundles(job.name)))
    if job.nodes == 1:
        return [*programs.safelaunch, *words]
    if words[0] == "exec":
        words = ("exec", f"--cluster-store={RENDEZVOUS_PORT}", *words[1:])
    else:
        place = f"--rdzv-endpoint={FIRST_HOST}:{RENDEZVOUS_PORT}"
        words = (f"--nnodes={job.nodes}", f"--rdzv-id={JOB_ID}", "--rdzv-backend=c10d", place, *words)
    nodes = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1"]
    # One node's end must not stop the others: they write their half of the evidence.
    return ["srun", *nodes, "--kill-on-bad-exit=0", *programs.safelaunch, *words]
