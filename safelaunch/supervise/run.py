"""Runs one job from start to end. Code that runs before the job starts is kept light."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from safelaunch.job import controlgroup, process
from safelaunch.job.guardian import Guardian
from safelaunch.job.job import Job, JobProcesses
from safelaunch.job.paths import RunPaths, create_run
from safelaunch.job.plan import Plan, in_directory
from safelaunch.job.process import ProcessId
from safelaunch.leases.resources import JobResources
from safelaunch.system.console import fresh_line, say
from safelaunch.system.errors import internal_error

MORE_PORTS = 3

Again = Callable[[JobResources], tuple[Plan, JobResources]]


@dataclass(frozen=True, slots=True)
class _RunEnd:
    status: int
    without_rank: bool = False
    """the launcher failed before it started a rank"""


def run(plan: Plan, resources: JobResources, again: Again | None = None) -> int:
    """Runs the job of ``plan`` and returns its exit code. Raises OSError if it can't be started.

    Args:
        resources: GPUs and ports, leased until no process of the job is left.
        again: Function that leases another port, if a program without a lease took this one.
    """
    mask = process.block_signals()
    try:
        end = _run(plan, resources, mask)
        for _ in range(MORE_PORTS):
            if again is None or not end.without_rank or not (lost := resources.lost_ports()):
                break
            plan, resources = again(resources)
            words = f"another program, without a lease, took port {lost[0]} before torchrun could listen on it"
            say(f"{words}; restarting the job with port {resources.port}")
            end = _run(plan, resources, mask)
    finally:
        resources.release()
    return process.end_as(end.status)


def _run(plan: Plan, resources: JobResources, mask: frozenset[signal.Signals]) -> _RunEnd:
    directory = directory_for(plan)
    if directory is not None:
        plan = in_directory(plan, directory.root)
    env = plan.env if directory is not None else _without_beacon(plan)
    become = partial(process.become_job, plan.argv, env, mask)
    watcher = _guardian(directory, resources, become, at_once=not plan.by_torchrun)
    try:
        if watcher is not None:
            agent = watcher.start()
        else:
            agent = _start_without(plan, env, mask, resources)
    except OSError:
        _leave(directory, watcher)
        raise
    # From here on, imports don't delay the job.
    processes = JobProcesses(agent, watcher)
    if directory is None:
        return _RunEnd(_only_forward(processes))
    job = Job(plan, agent, directory, time.time())
    try:
        from safelaunch.capture.rank_output import UnfinishedLine
        from safelaunch.supervise.loop import Supervisor

        fresh_line.use(UnfinishedLine(directory.pages).line_feeds)
        supervisor = Supervisor(job, processes, resources.touch)
        status = supervisor.run()
        return _RunEnd(status, without_rank=status != 0 and supervisor.started_no_rank)
    except Exception as error:  # noqa: BLE001 - no fault of the watch may cost the job
        say(internal_error(error, "the watch", "The job continues, unwatched."))
        return _RunEnd(_only_forward(processes))
    finally:
        _leave(directory, watcher)


def _leave(directory: RunPaths | None, watcher: Guardian | None) -> None:
    from shutil import rmtree

    if directory is not None:
        rmtree(directory.root, ignore_errors=True)
        os.close(directory.lock)
    if watcher is not None:
        watcher.dismiss()


def _guardian(
    directory: RunPaths | None, resources: JobResources, become: Callable[[], NoReturn], *, at_once: bool
) -> Guardian | None:
    if directory is None:
        return None
    group = controlgroup.create(directory.root.name)
    try:
        watcher = Guardian(directory, (directory.lock, *resources.descriptors), group)
        watcher.fork(become, at_once=at_once)
    except OSError as error:
        if group is not None:
            group.dissolve()
        say(f"no guardian ({error.strerror or error}): after a kill -9 of safelaunch, processes of the job may survive")
        return None
    return watcher


def _start_without(
    plan: Plan, env: Mapping[str, str], mask: frozenset[signal.Signals], resources: JobResources
) -> ProcessId:
    """Starts the job without a guardian. The job itself keeps its leases if safelaunch is killed."""
    for descriptor in resources.descriptors:
        os.set_inheritable(descriptor, True)
    pid = process.start(plan.argv, env, mask)
    process.become_subreaper()
    return process.identify(pid) or ProcessId(pid, 0)


def directory_for(plan: Plan) -> RunPaths | None:
    """Creates the run directory. Returns None if the job isn't watched, or can't be."""
    if not plan.watched:
        return None
    try:
        return create_run(plan.run_dir.parent, os.getpid(), os.getuid())
    except OSError as error:
        say(f"cannot watch this job: no run directory in {plan.run_dir.parent}: {error.strerror or error}")
        say("it runs as under plain torchrun. Before the next run, free space there or remove the obstacle.")
        return None


def _without_beacon(plan: Plan) -> dict[str, str]:
    from safelaunch.settings.config import INTERNAL_ENV

    env = {name: value for name, value in plan.env.items() if name not in INTERNAL_ENV}
    inject = os.fspath(Path(__file__).parents[1] / "beacon" / "inject")
    if "PYTHONPATH" in env:
        parts = [part for part in env["PYTHONPATH"].split(os.pathsep) if part != inject]
        env["PYTHONPATH"] = os.pathsep.join(parts)
        if not env["PYTHONPATH"] and "SAFELAUNCH_PYTHONPATH" not in plan.env:
            del env["PYTHONPATH"]
    return env


def _only_forward(processes: JobProcesses) -> int:
    from safelaunch.job.job import Forwarder

    forwarder = Forwarder(processes.agent.pid)
    while (status := processes.ended()) is None:
        forwarder.wait(1.0)
    return status
