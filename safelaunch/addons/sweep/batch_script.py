"""Writes the scripts that a scheduler runs, one for each attempt."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.addons.sweep.jobs import SweepJob
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.scheduler import Scheduler
from safelaunch.addons.sweep.task import FIRST_HOST, JOB_ID, RENDEZVOUS_PORT, port_token


@dataclass(frozen=True, slots=True)
class SweepPrograms:
    safelaunch: Sequence[str]
    task: Sequence[str]


def work_name(group: str, sweep_id: str, number: int) -> str:
    """Returns a unique name for the scheduler's list, such as ``train.3f9a2c1b44-1``."""
    return f"{re.sub('[^A-Za-z0-9._-]', '-', group)[:40] or 'colaunch'}.{sweep_id}-{number}"


def script(name: str, job: SweepJob, attempt: int, paths: SweepPaths, programs: SweepPrograms, queue: Scheduler) -> str:
    job = job.with_ports([port_token(index) for index in range(job.ports)])
    env = dict(job.env)
    if not job.gpus and not any(word.startswith(("--gres=", "--gpus", "--tres")) for word in job.batch):
        env.setdefault("CUDA_VISIBLE_DEVICES", "")
    if job.nodes > 1 and job.words[:1] == ("exec",):
        env.setdefault("MASTER_ADDR", FIRST_HOST)
    task = [*programs.task, name, os.fspath(paths.job(job.name)), str(attempt), "--cwd", job.cwd]
    task += ["--timeout", f"{job.timeout_s:g}"] if job.timeout_s is not None else []
    task += ["--ports", str(job.ports)] if job.ports else []
    lines = ["#!/bin/bash", *(f"export {name}={shlex.quote(value)}" for name, value in env.items())]
    return "\n".join([*lines, f"exec {shlex.join([*task, '--', *_started(job, paths, programs, queue)])}", ""])


def _started(job: SweepJob, paths: SweepPaths, programs: SweepPrograms, queue: Scheduler) -> list[str]:
    words = job.arguments(os.fspath(paths.bundles(job.name)))
    if job.nodes == 1:
        return [*programs.safelaunch, *words]
    if words[0] == "exec":
        words = ("exec", f"--cluster-store={RENDEZVOUS_PORT}", *words[1:])
    else:
        place = f"--rdzv-endpoint={FIRST_HOST}:{RENDEZVOUS_PORT}"
        words = (f"--nnodes={job.nodes}", f"--rdzv-id={JOB_ID}", "--rdzv-backend=c10d", place, *words)
    return [*(queue.across(job.nodes) or ()), *programs.safelaunch, *words]
