"""The supervisor's loop: signals, the job's end, the watch, and what is done about a stall or a crash.

Nothing here blocks for longer than a tick: closer looks, bundles and the ending of a job run in threads (``Task``).
A fault of safelaunch's own never costs the job: the watch ends, the job goes on.
"""

from __future__ import annotations

import os
import time

from . import process
from .config import Settings
from .console import say
from .crash_case import CrashCase
from .forward import Forwarder
from .guardian import Guardian
from .incident import Report
from .launchinfo import circumstances
from .live import Live
from .model import RankExit
from .paths import sweep
from .progress import AgentEvent, Roster
from .session import EXIT_HUNG, Job
from .stall import Policy
from .stall_case import StallCase
from .task import Task
from .watch import Glance, Watch

TICK_S = 0.25
BUSY_TICK_S = 0.05
GRACE_S = 5.0
BEACON_PATIENCE_S = 20.0
ORPHANS_EVERY_S = 1.0
WRITE_PATIENCE_S = 90.0


def policy_of(settings: Settings) -> Policy:
    """The thresholds of a run; the closer look's two samples lie further apart where steps are slow."""
    stall_s = settings.effective_stall_timeout_s
    explicit = settings.is_explicit("max-stall") or settings.is_explicit("startup-timeout")
    return Policy(
        stall_s=stall_s,
        startup_s=settings.startup_timeout_s,
        max_stall_s=max(settings.effective_max_stall_s, stall_s),
        startup_max_s=max(settings.effective_max_stall_s, settings.startup_timeout_s) if explicit else None,
        confirm_s=min(10.0, max(2.0, 0.02 * stall_s)),
    )


class Supervisor:
    """Watches one started job. ``run`` returns the wait status to end with."""

    def __init__(self, job: Job, watcher: Guardian | None) -> None:
        assert job.run is not None
        self._job = job
        self._guardian = watcher
        self._orphans: set[process.ProcessId] = set()
        self._orphans_s = 0.0
        self._forwarder = Forwarder(job.agent.pid)
        self._watch = Watch(Roster(job.run), policy_of(job.plan.settings), time.monotonic())
        about = circumstances(job)
        self._stall = StallCase(self._watch, about, self._exits)
        self._crash = CrashCase(self._watch, about, self._exits)
        self._live = Live(job, self._watch, about, self._exits)
        self._exit_events: dict[int, RankExit] = {}
        self._hung: Report | None = None
        self._ending: Task[tuple[process.ProcessId, ...]] | None = None
        self._beacons_checked = False
        self._started_s = time.monotonic()
        self._watching = True

    def run(self) -> int:
        """Runs until the job has ended and everything about it is written; returns its wait status."""
        agent = self._job.agent.pid
        sweep(self._job.plan.run_dir.parent)
        while (status := process.reap(agent)) is None:
            busy = self._stall.busy or self._crash.busy or self._live.busy or self._ending is not None
            self._forwarder.wait(BUSY_TICK_S if busy else TICK_S)
            self._guarded_tick()
            self._look_for_orphans(time.monotonic())
        stopped_by_us = self._ending is not None
        if os.WIFSIGNALED(status) and not stopped_by_us:
            self._end_survivors(status)
        self._finish(status)
        if stopped_by_us:
            self._say_ended()
            return EXIT_HUNG << 8
        return status

    def _guarded_tick(self) -> None:
        if not self._watching:
            return
        try:
            self._tick(time.monotonic())
        except Exception as error:  # noqa: BLE001 - no fault of the watch may cost the job
            self._watching = False
            self._watch.acknowledge()
            say(f"a fault of safelaunch's own ended the watch; the job goes on ({type(error).__name__}: {error})")

    def _tick(self, now: float) -> None:
        glance = self._watch.tick(now)
        for event in glance.agent:
            self._note_exits(event)
            if not (self._forwarder.stop_requested or self._ending):
                self._crash.on_agent(event)
        if self._forwarder.stop_requested or self._ending is not None:
            # A user or a scheduler stops the job, or we do: nobody is accused, and nobody is kept waiting.
            self._watch.acknowledge()
            return
        self._on_crash(glance)
        self._on_stall(glance, now)
        self._live.tick(now)
        self._check_beacons(now)

    def _note_exits(self, event: AgentEvent) -> None:
        if event.event == "started":
            self._exit_events.clear()
        for rank, code in event.exits.items():
            first = event.event == "failing"
            self._exit_events.setdefault(int(rank), RankExit(code, event.time_unix_s, before_close=first))

    def _exits(self) -> dict[int, RankExit]:
        """What the agent told, and ranks that ended without failing: else it would have ended the others."""
        known = dict(self._exit_events)
        for rank in self._watch.ended():
            known.setdefault(rank, RankExit(0, time.time(), before_close=True))
        return known

    def _look_for_orphans(self, now: float) -> None:
        """Processes of the job that lost their parent are ours now; the guardian has to know them by name."""
        if now < self._orphans_s:
            return
        self._orphans_s = now + ORPHANS_EVERY_S
        for orphan in process.adopted(self._not_the_jobs()):
            if orphan not in self._orphans and self._guardian is not None:
                self._orphans.add(orphan)
                self._guardian.adopt(orphan)

    def _not_the_jobs(self) -> list[int]:
        return [self._job.agent.pid, *([self._guardian.pid] if self._guardian is not None else [])]

    def _below_us(self) -> tuple[process.ProcessId, ...]:
        """Everything of the job: what is below the agent, and orphans that have become our own children."""
        guardian = [self._guardian.pid] if self._guardian is not None else []
        return process.descendants([os.getpid()], exclude=guardian)

    def _end_survivors(self, status: int) -> None:
        """torchrun was killed: without it nobody would ever end its ranks."""
        survivors = self._below_us()
        if survivors:
            say(
                f"the launcher was ended by signal {os.WTERMSIG(status)}: ending the {len(survivors)} processes it left"
            )
            process.end_all(self._job.agent, self._below_us, grace_s=GRACE_S)

    # --- a crash, a stall -------------------------------------------------------------------------------------------

    def _on_crash(self, glance: Glance) -> None:
        report = self._crash.advance(glance)
        if self._crash.begun and self._stall.looking:
            self._stall.abandon()
        if report is not None:
            self._show(report)

    def _on_stall(self, glance: Glance, now: float) -> None:
        report = self._stall.advance(glance, now)
        if report is None:
            return
        if self._job.plan.settings.on_stall == "dump" or not self._agent_lives():
            self._show(report)
            return
        self._hung = report
        if self._watch.roster.agent_page is not None:
            self._watch.roster.agent_page.announce_end()
        agent = self._job.agent
        self._ending = Task("end", lambda: process.end_all(agent, self._below_us, grace_s=GRACE_S))

    def _agent_lives(self) -> bool:
        return self._job.agent.is_alive()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, status: int) -> None:
        """The agent has ended: its last words are read, and what is being written is finished."""
        deadline = time.monotonic() + WRITE_PATIENCE_S
        self._guarded_tick()
        if self._watching and not self._forwarder.stop_requested and self._ending is None:
            self._note_end(status)
        while self._watching and not self._forwarder.stop_requested and self._ending is None:
            if not (self._crash.busy or self._stall.writing) or time.monotonic() > deadline:
                break
            self._forwarder.wait(BUSY_TICK_S)
            self._guarded_tick()

    def _note_end(self, status: int) -> None:
        """How the job ended says how its rank did, where the command is the rank (``exec -- python train.py``)."""
        if not self._job.plan.by_torchrun:
            code = os.waitstatus_to_exitcode(status)
            for rank, progress in self._watch.last_progress.items():
                if progress.pid == self._job.agent.pid:
                    self._exit_events.setdefault(rank, RankExit(code, time.time()))
            if code and self._watch.last_progress and not self._crash.begun:
                self._crash.begin_late()
        self._crash.on_end()

    def _say_ended(self) -> None:
        assert self._hung is not None and self._ending is not None
        self._ending.wait(3 * GRACE_S)
        left = self._ending.result() if self._ending.done else self._below_us()
        if left:
            say(f"still there, in the kernel's hands: pid {', '.join(str(p.pid) for p in left)}")
        self._show(self._hung)

    def _show(self, result: Report) -> None:
        from . import report, sources

        published = result.published
        say(report.screen(result.verdict, bundle_path=str(published.path), read_line=sources.line))
        if published.problem:
            say(f"the bundle is not where it was wanted: {published.problem}")

    def _check_beacons(self, now: float) -> None:
        if self._beacons_checked or now - self._started_s < BEACON_PATIENCE_S or not self._watch.roster.workers:
            return
        self._beacons_checked = True
        silent = self._watch.without_beacon()
        if silent:
            ranks = ", ".join(f"{worker.rank} (pid {worker.pid})" for worker in silent)
            say(f"no beacon in rank {ranks}: its steps are not counted (python -I or -E, or PYTHONPATH was replaced)")
            if len(silent) == len(self._watch.roster.workers):
                say("no rank has one: safelaunch CANNOT WATCH this job; it runs on as under torchrun")
            else:
                say("its stacks are still collected when the job hangs")
