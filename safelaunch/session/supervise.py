"""The supervisor's loop: signals, the job's end, the watch, and what is done about a stall or a crash.

Nothing here blocks for longer than a tick: closer looks, bundles and the ending of a job run in threads (``Task``).
A fault of safelaunch's own never costs the job: the watch ends, the job goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.capture import command
from safelaunch.console import say
from safelaunch.launch import process
from safelaunch.launch.forward import Forwarder
from safelaunch.launch.guardian import Guardian
from safelaunch.launch.job import EXIT_GAVE_UP, EXIT_HUNG, Job
from safelaunch.launch.job_processes import GRACE_S, JobProcesses
from safelaunch.launch.paths import discard_unfinished, sweep, sweep_unfinished
from safelaunch.model import RankExit
from safelaunch.session.crash_case import CrashCase
from safelaunch.session.group_timeout import GroupTimeout
from safelaunch.session.health import Health
from safelaunch.session.incident import Report
from safelaunch.session.launchinfo import circumstances
from safelaunch.session.live import Live
from safelaunch.session.notices import Notices
from safelaunch.session.pulses import PulseTaker
from safelaunch.session.stall_case import StallCase
from safelaunch.settings.config import Settings
from safelaunch.task import Task
from safelaunch.watch.progress import AgentEvent, Roster
from safelaunch.watch.restart import Failure, failure_of, why_give_up
from safelaunch.watch.rhythm import Bounds
from safelaunch.watch.stall import Policy, confirm_after_s
from safelaunch.watch.watch import Glance, Watch

TICK_S = 0.25
BUSY_TICK_S = 0.05
WRITE_PATIENCE_S = 90.0
CAPTURE_PATIENCE_S = 20.0
TOUCH_EVERY_S = 3600.0


def policy_of(settings: Settings) -> Policy:
    """The thresholds of a run, until its rhythm is known."""
    stall_s = settings.effective_stall_timeout_s
    explicit = settings.is_explicit("max-stall") or settings.is_explicit("startup-timeout")
    return Policy(
        stall_s=stall_s,
        startup_s=settings.startup_timeout_s,
        max_stall_s=max(settings.effective_max_stall_s, stall_s),
        startup_max_s=max(settings.effective_max_stall_s, settings.startup_timeout_s) if explicit else None,
        confirm_s=confirm_after_s(stall_s),
    )


def bounds_of(settings: Settings) -> Bounds | None:
    """Within what the threshold is learned; None where one was given."""
    if settings.stall_timeout_s is not None:
        return None
    floor_s = settings.stall_floor_s
    ceiling_s = max(floor_s, settings.stall_ceiling_s)
    return Bounds(floor_s, ceiling_s, min(ceiling_s, max(floor_s, settings.effective_stall_timeout_s)))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why we end the job, the exit code that says so, and whether it is on the screen already."""

    report: Report
    code: int
    shown: bool


class Supervisor:
    """Watches one started job. ``run`` returns the wait status to end with."""

    def __init__(self, job: Job, watcher: Guardian | None, touch: Callable[[], None] = lambda: None) -> None:
        assert job.run is not None
        self._job = job
        self._processes = JobProcesses(job.agent, watcher)
        command.tell_guardian = self._processes.adopt_helper
        self._forwarder = Forwarder(job.agent.pid)
        settings = job.plan.settings
        self._watch = Watch(Roster(job.run), policy_of(settings), time.monotonic(), bounds_of(settings))
        self._cap = GroupTimeout(self._watch) if bounds_of(settings) else None
        about = self._about = circumstances(job)
        self._notifier = about.notifier
        self._stall = StallCase(self._watch, about, self._exits)
        self._crash = CrashCase(self._watch, about, self._exits)
        self._live = Live(job, self._watch, about, self._exits)
        self._exit_events: dict[int, RankExit] = {}
        self._verdict: _Verdict | None = None
        self._failures: tuple[Failure, ...] = ()
        self._restarting = -1  # the attempt whose ranks we ended for a hang
        self._ending: Task[tuple[process.ProcessId, ...]] | None = None
        self._health = Health(self._watch, lambda: [one.pid for one in self._processes.all()])
        self._pulse = PulseTaker(self._watch)
        self._notices = Notices(
            self._watch, settings.startup_timeout_s, time.monotonic(), by_torchrun=job.plan.by_torchrun
        )
        self._watching = True
        self._touch = touch
        self._touch_at_s = time.monotonic() + TOUCH_EVERY_S

    def run(self) -> int:
        """Runs until the job has ended and everything about it is written; returns its wait status."""
        agent = self._job.agent.pid
        sweep(self._job.plan.run_dir.parent)
        sweep_unfinished(self._about.fallback_dir)
        while (status := process.reap(agent)) is None:
            busy = self._stall.busy or self._crash.busy or self._live.busy or self._ending is not None
            self._forwarder.wait(BUSY_TICK_S if busy else TICK_S)
            self._guarded_tick()
            self._processes.look_for_orphans(time.monotonic())
            self._keep_leases_young(time.monotonic())
        if os.WIFSIGNALED(status) and self._ending is None:
            self._end_survivors(status)
        self._finish(status)
        if self._verdict is not None:
            self._say_ended(self._verdict)
        self._finish_writing()
        self._wait_for_notifier()
        if self._verdict is not None:
            return self._verdict.code << 8
        # torchrun had no restart left for the ranks that we ended, or nobody could tell us of the attempt that failed.
        return EXIT_HUNG << 8 if status and self._restarting == self._watch.roster.attempt else status

    @property
    def began_nothing(self) -> bool:
        """Whether the job ended by itself without having started a rank."""
        return not (self._watch.roster.workers or self._forwarder.stop_requested or self._verdict)

    def _keep_leases_young(self, now: float) -> None:
        """Cleaners of /tmp remove what nobody has touched for days; a training can take longer than that."""
        if now > self._touch_at_s:
            self._touch_at_s = now + TOUCH_EVERY_S
            self._touch()

    def _end_survivors(self, status: int) -> None:
        """torchrun was killed: without it nobody would ever end its ranks. They live until their evidence is taken."""
        deadline = time.monotonic() + CAPTURE_PATIENCE_S
        while self._watching and self._stall.writing and not self._forwarder.stop_requested:
            if time.monotonic() > deadline:
                break
            self._forwarder.wait(BUSY_TICK_S)
            self._guarded_tick()
        survivors = self._processes.all()
        if survivors:
            number = os.WTERMSIG(status)
            say(f"the launcher was ended by signal {number}: ending the {len(survivors)} processes it left")
            self._processes.end_all()

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
        for rank in glance.damaged:
            say(f"the progress page of rank {rank} was overwritten: its steps are no longer counted")
        for event in glance.agent:
            self._note_exits(event)
            if self._is_a_crash(event):
                self._crash.on_agent(event)
        if self._restarting == self._watch.roster.attempt:
            self._watch.acknowledge()
            return
        if self._forwarder.stop_requested or self._ending is not None:
            # A user or a scheduler stops the job, or we do: nobody is accused, and nobody is kept waiting.
            self._watch.acknowledge()
            return
        self._on_crash(glance)
        self._on_stall(glance, now)
        if self._cap is not None:
            self._cap.advance(now)
        self._health.advance(now)
        self._pulse.advance(now)
        self._live.tick(now)
        self._notices.tick(now)

    def _is_a_crash(self, event: AgentEvent) -> bool:
        """Whether the agent's news may be of a crash: not when a user, a scheduler or we ourselves end the ranks."""
        if event.event == "started":
            return True
        return not (self._forwarder.stop_requested or self._ending or event.attempt == self._restarting)

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

    # --- a crash, a stall -------------------------------------------------------------------------------------------

    def _on_crash(self, glance: Glance) -> None:
        report = self._crash.advance(glance)
        if self._crash.begun and self._stall.looking:
            self._stall.abandon()
        if report is None:
            return
        self._show(report)
        if self._on_stall_is("restart") and self._agent_lives():
            self._give_up_or_go_on(report)

    def _on_stall(self, glance: Glance, now: float) -> None:
        report = self._stall.advance(glance, now)
        if report is None:
            return
        if self._on_stall_is("dump") or not self._agent_lives():
            self._show(report)
        elif self._on_stall_is("restart"):
            self._show(report)
            if self._give_up_or_go_on(report):
                say("ending the ranks of this attempt; torchrun starts them again while --max-restarts allows it")
                self._restarting = self._watch.roster.attempt
                Task("end ranks", self._processes.end_ranks)
        else:
            self._end(report, EXIT_HUNG)

    def _on_stall_is(self, policy: str) -> bool:
        return self._job.plan.settings.on_stall == policy

    def _give_up_or_go_on(self, report: Report) -> bool:
        """Under --on-stall restart: ends the job when the same failure came back. Returns whether it may go on."""
        steps = tuple(rank.progress.step for rank in report.evidence.ranks if rank.progress and rank.progress.step)
        failure = failure_of(report.verdict, steps)
        why = why_give_up(self._failures, failure)
        self._failures += (failure,)
        if why:
            say(f"not starting again: {why}")
            self._end(report, EXIT_GAVE_UP, shown=True)
        return not why

    def _end(self, report: Report, code: int, *, shown: bool = False) -> None:
        """Ends every process of the job; ``code`` is what safelaunch will exit with."""
        self._verdict = _Verdict(report, code, shown)
        if self._watch.roster.agent_page is not None:
            self._watch.roster.agent_page.announce_end()
        self._ending = Task("end", self._processes.end_all)

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

    def _finish_writing(self) -> None:
        """A crash's bundle that is half written when the job has ended for a hang is finished, or not left behind."""
        deadline = time.monotonic() + WRITE_PATIENCE_S
        while self._crash.writing and not self._forwarder.stop_requested and time.monotonic() < deadline:
            self._forwarder.wait(BUSY_TICK_S)
        if self._crash.writing:
            discard_unfinished(self._about.run_dir.name)

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

    def _say_ended(self, verdict: _Verdict) -> None:
        assert self._ending is not None
        self._ending.wait(3 * GRACE_S)
        left = self._ending.result() if self._ending.done else self._processes.all()
        if left:
            say(f"still there, in the kernel's hands: pid {', '.join(str(p.pid) for p in left)}")
        if not verdict.shown:
            self._show(verdict.report)

    def _wait_for_notifier(self) -> None:
        """--on-bundle's command ends by its own deadline; somebody who stops the job meanwhile does not wait for it."""
        deadline = time.monotonic() + self._notifier.patience_s
        while self._notifier.busy and not self._forwarder.stop_requested and time.monotonic() < deadline:
            self._forwarder.wait(BUSY_TICK_S)
        self._notifier.end()

    def _show(self, result: Report) -> None:
        from safelaunch.bundle import report
        from safelaunch.session import sources

        published = result.published
        if result.without_stacks:
            say(f"no stack could be read, and the verdict does without: {result.without_stacks}")
            say("'safelaunch doctor' shows what keeps it from reading them")
        say(report.screen(result.verdict, bundle_path=str(published.path), read_line=sources.line))
        if published.problem:
            say(f"the bundle is not where it was wanted: {published.problem}")
