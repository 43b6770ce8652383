"""What can be seen of a sweep before anything starts: resources, and whether safelaunch would take each job's words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from safelaunch.colaunch.jobs import Job
from safelaunch.colaunch.pool import Gpus, Pool, Slots, by_topology, check_fits, default_slots
from safelaunch.console import say
from safelaunch.errors import SpecError, UsageError
from safelaunch.launch import torchrun
from safelaunch.launch.argv import split
from safelaunch.launch.paths import working_directory
from safelaunch.leases.gpus import NodeGpus
from safelaunch.settings.config import options_of, resolve

# What colaunch says itself, and where it is said instead.
OURS = {
    "--run-name": "a job's name is the run's; see 'name'",
    "--bundle-dir": "bundles go into the job's directory of the sweep",
    "--gpus": "colaunch hands the GPUs out: say 'gpus: N' or --gpus-per-job N",
    "--wait": "colaunch waits by itself",
    "--wait-timeout": "colaunch waits by itself",
    "--no-lease": "colaunch leases the GPUs that it hands out",
    "--gpu-busy-memory": "it is the same for all jobs: set SAFELAUNCH_GPU_BUSY_MEMORY, or say it in safelaunch.yaml",
    "--dry-run": "give it to colaunch",
}


def make_pool(jobs: Sequence[Job], slots: int | None, at_most: int | None, environ: Mapping[str, str]) -> Pool:
    """The node's GPUs (those in CUDA_VISIBLE_DEVICES where it is set), else slots. Raises ResourceError."""
    pool: Pool | None = None
    if slots is None:
        node = NodeGpus(environ, resolve((), environ, working_directory(), lambda: None).gpu_busy_memory_bytes)
        pool = Gpus(node) if node.pool.gpus else None
        if pool is None:
            say(f"no GPUs to give out ({node.missing or node.pool.origin}): each job gets a share of the CPU cores")
    if pool is None:
        cores = by_topology(sorted(os.sched_getaffinity(0)))
        units = [max(1, job.gpus) for job in jobs]
        pool = Slots(slots or default_slots(len(cores), units, at_most), cores)
    check_fits({job.name: pool.units(job.gpus) for job in jobs}, pool)
    return pool


def check_jobs(jobs: Sequence[Job], pool: Pool, environ: Mapping[str, str]) -> None:
    """Raises SpecError for a job that safelaunch would reject, or whose working directory is not there."""
    try:
        torch: torchrun.Torch | None = torchrun.find(environ)
    except UsageError:
        if not all(job.words[:1] == ("exec",) for job in jobs):
            raise
        torch = None  # an exec may bring its own
    table = torchrun.LazyOptions(torch.package) if torch is not None else {}
    seen: set[object] = set()
    for job in jobs:
        try:
            _check(job.with_ports(range(20000, 20000 + job.ports)), pool, table, torch, environ, seen)
        except UsageError as error:
            raise SpecError(f"{job.where}: job {job.name}: {error.message}", error.fix) from error


def _check(
    job: Job,
    pool: Pool,
    table: Mapping[str, bool],
    torch: torchrun.Torch | None,
    environ: Mapping[str, str],
    seen: set[object],
) -> None:
    kind, words = ("exec", job.words[1:]) if job.words[0] == "exec" else ("run", job.words)
    own = {option.flag: option.takes_value for option in options_of(kind)}
    command = split(words, own, table if kind == "run" else {})
    for flag, _ in command.own:
        if flag in OURS:
            raise UsageError(f"{flag} cannot be given here", OURS[flag])
    if not command.script:
        raise UsageError("there is no script to run", "the command is what one would give safelaunch")
    if pool.kind == "GPU" and "CUDA_VISIBLE_DEVICES" in dict(job.env):
        raise UsageError("env: CUDA_VISIBLE_DEVICES cannot be set here", OURS["--gpus"])
    if not Path(job.cwd).is_dir():
        raise UsageError(f"cwd: there is no directory {job.cwd}", "check the path; it is relative to where you are")
    key = (command.own, job.env, job.cwd)
    if key not in seen:
        seen.add(key)
        version = torch.version if torch else None
        settings = resolve(command.own, {**environ, **dict(job.env)}, Path(job.cwd), lambda: version)
        for name in ("gpus", "wait", "dry-run"):
            if settings.is_explicit(name):
                raise UsageError(f"{name} is set ({settings.origin(name)})", OURS[f"--{name}"])
