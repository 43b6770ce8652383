"""Supervises the ranks that the caller of ``safelaunch.launch`` starts.

The supervisor is a separate process, so it doesn't share the caller's GIL and survives if the caller crashes. It isn't
the parent of the ranks: the caller reports them to it, as torchrun's agent does, and it signals only these ranks and
their descendants. If the caller is killed, the supervisor ends the remaining ranks. If the supervisor is killed, the
job continues unwatched.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

from safelaunch.addons.embed.wire import (
    Connection,
    Done,
    FromCaller,
    LaunchRequest,
    RanksEnded,
    Ready,
    Refused,
    Stop,
    Stopping,
)
from safelaunch.capture.pages import EventReader
from safelaunch.job import process
from safelaunch.job.argv import CommandLine
from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG, GRACE_S, Forwarder, Job, JobProcesses
from safelaunch.job.paths import RunPaths, run_root, working_directory
from safelaunch.job.plan import Plan, Surroundings, build_beside, in_directory
from safelaunch.job.process import ProcessId
from safelaunch.job.torchrun import TorchInstallation
from safelaunch.leases.resources import JobResources, gather
from safelaunch.settings.config import resolve
from safelaunch.settings.options import Settings
from safelaunch.supervise.preflight import check
from safelaunch.supervise.run import directory_for
from safelaunch.system.console import redact, say
from safelaunch.system.errors import SafelaunchError, internal_error


class CallersProcesses(JobProcesses):
    """The ranks started by the caller, and their descendants. ``agent`` is the caller, which is never signalled."""

    def __init__(self, caller: ProcessId, line: Connection, run: RunPaths, forwarder: Forwarder) -> None:
        super().__init__(caller, None)
        self._line = line
        self._run = run
        self._forwarder = forwarder
        self._known: set[ProcessId] = set()
        self._status: int | None = None

    def ended(self) -> int | None:
        """Returns a wait status once the caller has no ranks left: they failed or succeeded, or the caller died."""
        for message in self._line.received():
            if isinstance(message, Stopping):
                self._forwarder.note_stop()
            elif isinstance(message, RanksEnded):
                self._status = int(message.failed) << 8
        if self._status is None and not (self._line.is_open and self.agent.is_alive()):
            self._status = signal.SIGKILL
            self._forwarder.note_stop()  # what its ranks do from now on isn't evidence
        return self._status

    def ranks(self) -> tuple[ProcessId, ...]:
        """Returns all live ranks that the caller reported, of any attempt, and their descendants."""
        events = EventReader(self._run.agent_events).read()
        workers = {ProcessId(pid, ticks) for event in events for _, pid, ticks in event.workers.values()}
        alive = {worker for worker in workers if worker.is_alive()}
        # A child stays in the set after its rank has ended.
        self._known = {child for child in self._known if child.is_alive()} | alive
        self._known |= set(process.descendants([child.pid for child in self._known]))
        return tuple(self._known)

    def all(self) -> tuple[ProcessId, ...]:
        return self.ranks()

    def end_all(self, grace_s: float = GRACE_S) -> tuple[ProcessId, ...]:
        """Asks the caller to end its ranks, and sends SIGTERM. After the grace period, sends SIGKILL."""
        self._line.send(Stop())
        return process.end_all(None, self.all, grace_s=grace_s)


def main() -> None:
    from safelaunch.system.redaction.redact import redact_text

    redact.use(redact_text)
    process.block_signals()
    line = Connection(socket.socket(fileno=int(sys.argv[1])), FromCaller)
    request = line.wait()
    if not isinstance(request, LaunchRequest):
        return
    try:
        _serve(request, line)
    except SafelaunchError as error:
        line.send(Refused(type(error).__name__, error.message, error.fix))


def _serve(request: LaunchRequest, line: Connection) -> None:
    plan, resources = _planned(request)
    try:
        directory = directory_for(plan)
        if directory is None:
            line.send(Ready(_changes(plan)))
            _wait_for_end(line)
            return
        try:
            plan = in_directory(plan, directory.root)
            line.send(Ready(_changes(plan), os.fspath(directory.root)))
            caller = ProcessId(request.pid, request.start_ticks)
            line.send(_supervise(Job(plan, caller, directory, time.time()), line, resources))
        finally:
            rmtree(directory.root, ignore_errors=True)
            os.close(directory.lock)
    finally:
        resources.release()


def _planned(request: LaunchRequest) -> tuple[Plan, JobResources]:
    environ = dict(os.environ)
    torch = TorchInstallation(request.python, Path(request.torch_package), request.torch_version)
    settings = from_the_start(resolve(request.own, environ, working_directory(), lambda: torch.version))
    check(settings)
    resources = gather(CommandLine((), request.torchrun, request.script), settings, environ, None)
    run_dir = run_root(environ, os.getuid()) / f"r{os.getpid()}"
    around = Surroundings(environ, run_dir, os.getpid(), resources.visible_gpus, resources.rank_locks, resources.note)
    return build_beside(resources.command, request.argv, settings, torch, around, request.pid), resources


def from_the_start(settings: Settings) -> Settings:
    """Applies the keyword ``stall_timeout`` to the first step, too, unless the startup timeout is set.

    A function might never call ``step``, for example in a test. Its modules are imported before the call, so it needs
    no additional time to start.
    """
    limit_given = settings.stall_timeout_s is not None and settings.origin("stall-timeout") == "command line"
    if not limit_given or settings.is_explicit("startup-timeout"):
        return settings
    origins = {**settings.origins, "startup-timeout": "stall-timeout"}
    return replace(settings, startup_timeout_s=settings.effective_stall_timeout_s, origins=origins)


def _changes(plan: Plan) -> dict[str, str]:
    return {name: value for name, value in plan.env.items() if os.environ.get(name) != value}


def _wait_for_end(line: Connection) -> None:
    while (message := line.wait()) is not None and not isinstance(message, RanksEnded):
        pass


def _supervise(job: Job, line: Connection, resources: JobResources) -> Done:
    assert job.run is not None
    try:
        from safelaunch.supervise.loop import Supervisor  # imports while the caller continues

        forwarder = Forwarder(None)
        processes = CallersProcesses(job.agent, line, job.run, forwarder)
        supervisor = Supervisor(job, processes, resources.touch, forwarder)
        code = os.waitstatus_to_exitcode(supervisor.run())
    except Exception as error:  # noqa: BLE001 - an error in the watch must not affect the job
        say(internal_error(error, "the watch", "The job continues, unwatched."))
        _wait_for_end(line)
        return Done()
    shown = supervisor.shown
    if shown is None:
        return Done(hung=code in (EXIT_HUNG, EXIT_GAVE_UP))
    place = "" if shown.published.lost else os.fspath(shown.published.path)
    return Done(code in (EXIT_HUNG, EXIT_GAVE_UP), shown.verdict, place)
