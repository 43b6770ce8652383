"""One job, end to end: run directory, start, watch, and the way it ends. What comes before the start is kept light."""

from __future__ import annotations

import os
import time
from pathlib import Path

from safelaunch.console import say
from safelaunch.launch import guardian, process
from safelaunch.launch.job import Job
from safelaunch.launch.paths import RunPaths, create_run
from safelaunch.launch.plan import Plan
from safelaunch.session.resources import Resources


def run(plan: Plan, given: Resources) -> int:
    """Starts the job of ``plan`` and sees it to its end; returns the exit code. Raises OSError when it cannot start.

    What the job was ``given`` is held until nothing of it is left, and freed then.
    """
    try:
        status = _run(plan, given)
    finally:
        given.release()
    return process.end_as(status)


def _run(plan: Plan, given: Resources) -> int:
    """As ``run``, but returns the wait status to end with."""
    directory = _prepare(plan)
    env = plan.env if directory is not None else _without_beacon(plan)
    mask = process.block_signals()
    watcher = _guardian(directory, given)
    if watcher is None:
        for descriptor in given.descriptors:  # then the job itself is to hold what it was given when we are killed
            os.set_inheritable(descriptor, True)
    try:
        pid = process.start(plan.argv, env, mask, watcher.adopt if watcher is not None else None)
    except OSError:
        _leave(directory, watcher)
        raise
    # From here on everything that is imported costs the job nothing.
    identity = process.identify(pid) or process.ProcessId(pid, 0)
    if directory is None:
        return _only_forward(pid)
    process.become_subreaper()
    job = Job(plan, identity, directory, time.time())
    try:
        from safelaunch.session.supervise import Supervisor

        status = Supervisor(job, watcher, given.touch).run()
    except Exception as error:  # noqa: BLE001 - no fault of the watch may cost the job
        say(f"a fault of safelaunch's own ended the watch; the job goes on ({type(error).__name__}: {error})")
        status = _only_forward(pid)
    finally:
        _leave(directory, watcher)
    return status


def _leave(directory: RunPaths | None, watcher: guardian.Guardian | None) -> None:
    """Nothing of ours is left: neither the run directory nor the guardian."""
    from shutil import rmtree

    if directory is not None:
        rmtree(directory.root, ignore_errors=True)
    if watcher is not None:
        watcher.dismiss()


def _guardian(directory: RunPaths | None, given: Resources) -> guardian.Guardian | None:
    if directory is None:
        return None
    try:
        return guardian.start(directory.agent_events, directory.root, given.descriptors)
    except OSError as error:
        say(f"no guardian ({error.strerror or error}): if safelaunch is killed with kill -9, parts of the job may stay")
        return None


def _prepare(plan: Plan) -> RunPaths | None:
    """The run directory, or None when the job is not watched, by choice or because it cannot be."""
    if not plan.watched:
        return None
    try:
        return create_run(plan.run_dir.parent, os.getpid(), os.getuid())
    except OSError as error:
        say(f"cannot watch this job: no run directory in {plan.run_dir.parent}: {error.strerror or error}")
        say("it runs as under plain torchrun; free some space there, or remove what is in the way")
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


def _only_forward(pid: int) -> int:
    """A job that is not watched: signals are passed on, its end is ours. Returns its wait status."""
    from safelaunch.launch.forward import Forwarder

    forwarder = Forwarder(pid)
    while (status := process.reap(pid)) is None:
        forwarder.wait(1.0)
    return status
