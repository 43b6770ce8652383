"""One job, end to end: run directory, start, watch, and the way it ends. What comes before the start is kept light."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safelaunch.console import say
from safelaunch.launch import guardian, process
from safelaunch.launch.job import Job
from safelaunch.launch.paths import RunPaths, create_run
from safelaunch.launch.plan import Plan
from safelaunch.session.resources import Resources

MORE_PORTS = 3

Again = Callable[[Resources], tuple[Plan, Resources]]


@dataclass(frozen=True, slots=True)
class _End:
    """The wait status to end with; ``for_nothing``: the launcher failed by itself, before it had started any rank."""

    status: int
    for_nothing: bool = False


def run(plan: Plan, given: Resources, again: Again | None = None) -> int:
    """Starts the job of ``plan`` and sees it to its end; returns the exit code. Raises OSError when it cannot start.

    What the job was ``given`` is held until nothing of it is left, and freed then. ``again`` gives it another port
    instead of the one that was leased for it, and that somebody took who knows nothing of leases.
    """
    mask = process.block_signals()
    try:
        end = _run(plan, given, mask)
        for _ in range(MORE_PORTS):
            if again is None or not end.for_nothing or not (lost := given.lost_ports()):
                break
            plan, given = again(given)
            words = f"port {lost[0]} was taken, by somebody without a lease, before torchrun could listen on it"
            say(f"{words}; starting again with port {given.port}")
            end = _run(plan, given, mask)
    finally:
        given.release()
    return process.end_as(end.status)


def _run(plan: Plan, given: Resources, mask: frozenset[signal.Signals]) -> _End:
    """As ``run``, once. ``mask``: the signals that the job starts with blocked."""
    directory = _prepare(plan)
    env = plan.env if directory is not None else _without_beacon(plan)
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
        return _End(_only_forward(pid))
    process.become_subreaper()
    job = Job(plan, identity, directory, time.time())
    try:
        from safelaunch.session.supervise import Supervisor

        supervisor = Supervisor(job, watcher, given.touch)
        status = supervisor.run()
        return _End(status, for_nothing=status != 0 and supervisor.began_nothing)
    except Exception as error:  # noqa: BLE001 - no fault of the watch may cost the job
        say(f"a fault of safelaunch's own ended the watch; the job goes on ({type(error).__name__}: {error})")
        return _End(_only_forward(pid))
    finally:
        _leave(directory, watcher)


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
