"""The supervisor's loop: signals, the job's end, the watch, and the response to a stall or a crash.

Nothing here blocks for longer than a tick: closer looks, bundles and the ending of a job run in threads (``Task``).
An internal error of safelaunch never costs the job: the watch ends and the job continues.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safelaunch.capture import command
from safelaunch.capture.pages import AgentEvent, Roster
from safelaunch.job import controlgroup, process
from safelaunch.job.job import (
    EXIT_GAVE_UP,
    EXIT_HUNG,
    GRACE_S,
    HOLD_S,
    NOW_GRACE_S,
    Forwarder,
    Job,
    JobProcesses,
)
from safelaunch.job.paths import sweep, sweep_unfinished
from safelaunch.model import RankExit
from safelaunch.supervise import publishing
from safelaunch.supervise.council import Council
from safelaunch.supervise.crash import CrashCase
from safelaunch.supervise.device_notice import Contracts
from safelaunch.supervise.early import EarlyLooks
from safelaunch.supervise.health import HealthPoller
from safelaunch.supervise.job_context import job_context
from safelaunch.supervise.live import ControlServer
from safelaunch.supervise.monitors import MonitorActions, Monitors
from safelaunch.supervise.notices import Notices
from safelaunch.supervise.pollers import BackgroundPoller, GroupTimeoutPoller, Poller, PulsePoller, TracingPoller
from safelaunch.supervise.publishing import Report
from safelaunch.supervise.reminders import Reminders
from safelaunch.supervise.respond import Incident, JobView, interrupted
from safelaunch.supervise.stall import StallCase
from safelaunch.supervise.watch.progress import Glance, Watch, bounds_of, policy_of
from safelaunch.supervise.watch.quiet import frozen_s as frozen_s_of
from safelaunch.supervise.watch.restart import AttemptFailure, failure_of, why_give_up
from safelaunch.supervise.watch.stall import Status
from safelaunch.system.console import redact, say
from safelaunch.system.errors import internal_error
from safelaunch.system.task import BackgroundTask

TICK_S = 0.25
BUSY_TICK_S = 0.02
LATE_S = 0.001  # never wakes before the moment that it waits for
WRITE_PATIENCE_S = 90.0
CAPTURE_PATIENCE_S = 20.0
SUSPECT_PATIENCE_S = 5.0
TOUCH_EVERY_S = 3600.0
SAME_SIGNAL_S = 1.0  # a rank that failed so shortly before we were asked to stop may have been asked as well
OTHERS_END_S = 2.5  # in which other nodes read that the job is ended: the store may end with this one
READ_S = 0.5  # until they have read it, as a rule: all end at about the same time
QUIET_END_S = 1.5  # a healthy job ends sooner
SHOWN_AFTER_S = 10.0  # a verdict waits so long for the end of the job, whose last words would push it off the screen
LAST_WORDS_S = 60.0  # and so long once the ranks have ended: torchrun's traceback comes next
STOP_S = 60.0  # for a job that was asked to stop: then it is watched again
RESTART_S = 120.0  # for torchrun to start the ranks again that were ended for a hang
RESTART_OF_SEVERAL_S = 900.0  # on several nodes, whose rendezvous has a timeout of 600 s


def is_of_rendezvous(raised: AgentEvent) -> bool:
    """Whether torchrun has given up waiting for other nodes. A port that is taken is no such matter."""
    of_store = raised.error in ("DistStoreError", "DistNetworkError", "TimeoutError")
    return raised.error.startswith("Rendezvous") or (of_store and "failed to listen" not in raised.message)


def advice_on(raised: AgentEvent) -> str:
    """What to do about an error of torchrun's that ended this node before it had a rank; empty for unknown ones."""
    from safelaunch.verdict.suggestions import LATE_JOIN, is_late_join

    return LATE_JOIN.shown if is_late_join(raised.message) else ""


@dataclass(frozen=True, slots=True)
class _StopReason:
    """Why safelaunch ends the job, its exit code, and whether the report is on the screen already."""

    report: Report | None
    code: int
    shown: bool


class Supervisor:
    """Watches one started job. ``run`` returns the wait status to end with."""

    def __init__(
        self,
        job: Job,
        processes: JobProcesses,
        touch: Callable[[], None] = lambda: None,
        forwarder: Forwarder | None = None,
    ) -> None:
        """``forwarder``: of the signals that this process gets; by default to the job's first process."""
        assert job.run is not None
        self._job = job
        self._processes = processes
        command.helper_reports.send_to(self._processes.adopt_helper)
        self._forwarder = forwarder or Forwarder(job.agent.pid, hold=self._hold, on_quit=self._on_quit)
        settings = job.plan.settings
        bounds = bounds_of(settings)
        self._watch = Watch(Roster(job.run), policy_of(settings), time.monotonic(), bounds)
        context = self._context = job_context(job)
        redact.use(context.redactor.text)
        self._notifier, self._suspects = context.notifier, context.suspects
        self._council = Council(job.plan, context, self._watch)
        view = self._view = JobView(self._watch, context, self._exits, self._council)
        self._stall = StallCase(view)
        self._crash = CrashCase(view)
        self._early = EarlyLooks(view) if settings.early_look else None
        self._contracts = Contracts(job.run, self._watch)
        self._interrupt: Incident[Report | None] | None = None
        self._live = ControlServer(job, view)
        actions = MonitorActions(
            write_bundle=lambda then, ends: self._live.dump_here(then, ends=ends),
            write_last_bundle=self._live.dump_late,
            show=self._show,
            end=self._end_for_monitor,
            is_ending=lambda: self._ending is not None or self._verdict is not None,
            has_ended=lambda: self._has_ended,
        )
        self._monitors = Monitors(job, view, actions)
        self._exit_events: dict[int, RankExit] = {}
        self._verdict: _StopReason | None = None
        self._stop_s = 0.0  # when somebody asked the job to stop
        self._unshown: list[Report] = []  # what was found before that, for the end
        self._found_at_stop = False  # a bundle was written after somebody asked the job to stop
        self._pushed_off: Report | None = None  # shown before torchrun's last words, which are long
        self._newest = ""  # the newest bundle of a hang
        self._failures: tuple[AttemptFailure, ...] = ()
        self._by_key = False  # somebody has pressed Ctrl-C, and does not know yet that a second one ends the job
        self._restarting = -1  # the attempt whose ranks we ended for a hang
        self._restarting_s = 0.0  # when
        self._outlives_stop = False  # asked to stop, and watched again
        self._ending: BackgroundTask[tuple[process.ProcessId, ...]] | None = None
        self._pollers: list[Poller[Any]] = (
            [GroupTimeoutPoller(self._watch, bounds.floor_s)] if bounds is not None else []
        )
        self._pollers.append(HealthPoller(self._watch, lambda: [process.pid for process in self._processes.all()]))
        self._pollers += PulsePoller(self._watch), BackgroundPoller(self._watch), TracingPoller(self._watch)
        self._notices = Notices(
            self._watch,
            self._watch.policy,
            time.monotonic(),
            self._council,
            by_torchrun=job.plan.by_torchrun,
        )
        launcher = job.agent.pid if job.plan.by_torchrun else None
        dump = lambda: self._live.dump_here(self._show)  # noqa: E731
        self._reminders = Reminders(self._watch, time.monotonic(), launcher, dump)
        self._raised: AgentEvent | None = None  # what has ended the agent itself
        self._watching = True
        self._has_ended = False
        self.shown: Report | None = None  # the newest report
        self._touch = touch
        self._touch_at_s = time.monotonic() + TOUCH_EVERY_S

    def run(self) -> int:
        """Runs until the job has ended and everything about it is written; returns its wait status."""
        try:
            return self._run()
        finally:
            self._council.close()
            command.helper_reports.close()

    def _run(self) -> int:
        sweep(self._job.plan.run_dir.parent)
        sweep_unfinished(self._context.fallback_dir)
        controlgroup.sweep()
        while (status := self._processes.ended()) is None and not self._cannot_end():
            busy = self._stall.busy or self._crash.busy or self._live.busy or self._ending is not None
            busy = busy or self._interrupt is not None
            self._forwarder.wait(BUSY_TICK_S if busy else self._until_due_s(time.monotonic()))
            self._guarded_tick()
            self._end_if_insisted()
            if self._watching:
                # Those who agree on a verdict must not take the stop for a reason to drop it.
                stopping = self._forwarder.stop_requested and not (self._stall.writing and self._stall.agreed)
                self._council.tick(time.monotonic(), stopping=stopping and self._is_stopping(time.monotonic()))
            self._processes.look_for_orphans()
            self._keep_leases_young(time.monotonic())
        status = signal.SIGKILL if status is None else status
        if os.WIFSIGNALED(status) and self._ending is None:
            self._end_survivors(status)
        self._finish(status)
        if self._ending is not None:
            self._say_ended(self._verdict)
        self._finish_writing()
        self._wait_for_notifier()
        if self._verdict is not None:
            return self._verdict.code << 8
        if self._ending is not None and os.WIFSIGNALED(status):
            return signal.SIGINT  # as a job that ends by Ctrl-C, whatever had to be sent to end it
        # torchrun had no restart left for the ranks that we ended, or nothing reported the attempt that failed.
        return EXIT_HUNG << 8 if status and self._restarting == self._watch.roster.attempt else status

    def _end_if_insisted(self) -> None:
        """Ends the job at the second Ctrl-C, which torchrun alone would survive for half a minute."""
        if self._forwarder.insists and self._ending is None:
            say("ending the job now")
            self._ending = BackgroundTask("end now", lambda: self._processes.end_all(NOW_GRACE_S))

    def _cannot_end(self) -> bool:
        """Returns whether the job's first process has survived SIGKILL: it is stuck in the kernel."""
        ending = self._ending
        return ending is not None and ending.done and self._job.agent in ending.result()

    def _until_due_s(self, now: float) -> float:
        """How long the loop may rest: a tick, or until the slowest rank's time is up."""
        due_s = self._watch.state.due_s - now
        return min(TICK_S, due_s + LATE_S) if due_s > 0 else TICK_S

    @property
    def began_nothing(self) -> bool:
        """Whether the job ended by itself before it had started a rank."""
        return not (self._watch.roster.workers or self._forwarder.stop_requested or self._verdict)

    def _keep_leases_young(self, now: float) -> None:
        """Touches the leases: cleaners of /tmp remove files that nobody has touched for days."""
        if now > self._touch_at_s:
            self._touch_at_s = now + TOUCH_EVERY_S
            self._touch()

    def _wait_while(self, waits: Callable[[], bool], patience_s: float, *, ticks: bool = False) -> None:
        """``ticks``: what the loop does goes on meanwhile."""
        until = time.monotonic() + patience_s
        while waits() and time.monotonic() < until:
            self._forwarder.wait(BUSY_TICK_S)
            if ticks:
                self._guarded_tick()

    def _end_survivors(self, status: int) -> None:
        """Ends the ranks of a torchrun that was killed, once their evidence is taken: nobody else would end them."""

        def is_writing() -> bool:
            return self._watching and self._stall.writing and self._forwarder.stops < 2

        self._wait_while(is_writing, CAPTURE_PATIENCE_S, ticks=True)
        survivors = self._processes.all()
        if survivors:
            number = os.WTERMSIG(status)
            left = "the process" if len(survivors) == 1 else f"the {len(survivors)} processes"
            say(f"signal {number} ended the launcher; ending {left} that it left behind")
            self._processes.end_all()

    def _guarded_tick(self) -> None:
        if not self._watching:
            return
        try:
            self._tick(time.monotonic())
        except Exception as error:  # noqa: BLE001 - no fault of the watch may cost the job
            self._watching = False
            self._forwarder.release()
            self._watch.acknowledge()
            self._council.close(at_once=True)  # the other nodes must not take these ranks for watched
            say(internal_error(error, "the watch", "The job continues, unwatched."))

    def _tick(self, now: float) -> None:
        if self._forwarder.stop_requested:
            self._stop_s = self._stop_s or now
        glance = self._watch.tick(now)
        for rank in glance.damaged:
            say(f"something overwrote the progress page of rank {rank}: safelaunch no longer counts its steps")
        for event in glance.agent:
            self._note_exits(event)
            if event.event == "started":
                self._restarting = -1
            if self._is_a_crash(event):
                self._crash.on_agent(event)
            if event.event == "raised":
                self._raised = event
        if self._restarting == self._watch.roster.attempt and not self._is_restart_overdue(now):
            self._watch.acknowledge()
            return
        if self._is_stopping(now) or self._ending is not None:
            # A user, a scheduler or safelaunch is stopping the job: blame nobody, keep nobody waiting.
            self._watch.acknowledge(agent=self._ending is not None or self._council.is_heard_stopping(now))
            if self._ending is None:
                self._on_stop(glance, now)
                self._watch.hold(self._stop_s + STOP_S)
            return
        if self._forwarder.stop_requested:
            self._watch_again(now)
        if self._forwarder.stop_requested and not self._failed_before_stop:
            self._watch.acknowledge()
        else:
            self._on_crash(glance)
        self._on_stall(glance, now)
        if self._early is not None:
            self._early.advance(now, free=not (self._stall.busy or self._crash.busy or self._crash.holds(now)))
        for poller in self._pollers:
            poller.advance(now)
        self._monitors.tick()
        self._live.tick(now)
        self._notices.tick(now)
        self._reminders.tick(now)
        self._contracts.tick(now)

    def _is_stopping(self, now: float) -> bool:
        """Returns whether a job that was asked to stop still has time for it."""
        if not self._forwarder.stop_requested or self._outlives_stop:
            return False
        return self._has_ended or now - (self._stop_s or now) < STOP_S

    def _watch_again(self, now: float) -> None:
        """Watches a job that was asked to stop and goes on: it finishes its work, or hangs."""
        if self._outlives_stop:
            return
        self._outlives_stop = True
        self._stall.abandon()
        self._show_what_was_found()
        say(f"the job was asked to stop {now - self._stop_s:.0f} s ago, and still runs: safelaunch watches it again")

    def _is_restart_overdue(self, now: float) -> bool:
        """Ends the job if torchrun never starts the ranks again that were ended for a hang."""
        patience_s = RESTART_S if self._view.is_whole else RESTART_OF_SEVERAL_S
        if now - self._restarting_s < patience_s or self._ending is not None:
            return False
        say(f"torchrun has not started the ranks again for {now - self._restarting_s:.0f} s: ending the job")
        self._end(self.shown, EXIT_HUNG, shown=True)
        return True

    def _is_a_crash(self, event: AgentEvent) -> bool:
        """Whether the event may belong to a crash. It doesn't if a user, a scheduler or safelaunch ends the ranks."""
        if event.event == "started":
            return True
        # What other nodes do about a hang may reach this one before it has done the same.
        ours = self._stall.agreed or self._ending or event.attempt == self._restarting
        return not (ours or (self._forwarder.stop_requested and not self._failed_before_stop))

    def _note_exits(self, event: AgentEvent) -> None:
        if event.event == "started":
            self._exit_events.clear()
        for rank, code in event.exits.items():
            first = event.event == "failing"
            self._exit_events.setdefault(rank, RankExit(code, event.time_unix_s, before_close=first))

    def _exits(self) -> dict[int, RankExit]:
        """The exits that the agent reported, and the ranks that ended with 0: a failure would have ended the others."""
        known = dict(self._exit_events)
        for rank in self._watch.ended():
            known.setdefault(rank, RankExit(0, time.time(), before_close=True))
        return known

    # --- a key is pressed, a scheduler stops the job ----------------------------------------------------------------

    def _on_quit(self) -> None:
        """Ctrl-\\: the user wants to know, and the job goes on."""
        if self._watching:
            self._live.dump_here(self._show)

    def _hold(self) -> bool:
        """Asked at the first SIGINT: whether the job is to live for a moment yet, for its evidence."""
        self._by_key = True
        try:
            return self._watching and self._ending is None and self._is_worth_evidence(time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever it is, the user wants the job to stop
            say(f"no evidence could be taken ({type(error).__name__}: {error})")
            return False

    def _say_of_end(self, what: str) -> None:
        """Tells whoever pressed Ctrl-C, once, what the end of the job waits for."""
        self._by_key = False
        say(f"{what}; press Ctrl-C again to end the job now")

    def _is_worth_evidence(self, now: float) -> bool:
        if self._stall.needs_ranks:
            self._say_of_end(f"finishing the evidence first (up to {HOLD_S:g} s), then ending the ranks")
            return True
        outlived = self._crash.begun and not self._crash.holds(now)  # a rank raised, and has not exited
        failed = self._crash.begun_before(now - SAME_SIGNAL_S) and self._crash.unfinished and not outlived
        if self._stall.writing or self._live.writing or failed:
            self._by_key = False
            say("stopping; the verdict follows; press Ctrl-C again to skip it")
            return False
        if self._newest and self._watch.state.status is Status.HUNG:
            say(f"stopping; the bundle of this hang is {self._newest}")
            return False
        spell = self._watch.spell(now)
        frozen_s = frozen_s_of(self._early.quiet if self._early is not None else None, spell, now)
        known = frozen_s or self._stall.looking or outlived or self._is_seen_to_stand()
        if spell is None or not known:
            return False
        if outlived:
            self._crash.yield_to_hang()
        times = f" ({frozen_s / spell.usual_s:.0f} x the usual step)" if frozen_s else ""
        quiet_s = frozen_s or now - spell.since_s
        first = f"collecting evidence first (up to {HOLD_S:g} s), then ending the ranks"
        self._say_of_end(f"no step for {quiet_s:.0f} s{times}: {first}")
        self._interrupt = interrupted(self._view, quiet_s, spell.usual_s if frozen_s else 0.0, now)
        return True

    def _is_seen_to_stand(self) -> bool:
        """Whether an early look has found that the ranks stand still, and they have not moved since."""
        early = self._watch.early
        return bool(early) and early[-1].movement == "still" and not early[-1].lasted_s

    @property
    def _failed_before_stop(self) -> bool:
        return self._crash.begun_before(self._stop_s - SAME_SIGNAL_S)

    def _on_stop(self, glance: Glance, now: float) -> None:
        """Finishes what was begun before somebody asked the job to stop. Nothing new begins."""
        interrupt = self._interrupt
        needs_ranks = self._stall.needs_ranks or (interrupt is not None and interrupt.needs_ranks)
        if self._forwarder.holding and not needs_ranks:
            self._forwarder.release()
        self._live.finish()
        found = [self._stall.written(now)]
        if interrupt is not None:
            if not self._forwarder.holding:
                interrupt.cancel()  # the ranks are being ended: what is seen of them from here on says nothing
            if interrupt.done:
                self._interrupt = None
                found.insert(0, interrupt.result)
        if self._failed_before_stop:
            found.append(self._crash.advance(glance))
        self._unshown += [report for report in found if report is not None]
        if now - self._stop_s > (LAST_WORDS_S if self._watch.has_ended else SHOWN_AFTER_S):
            self._show_what_was_found()
        if self._by_key and now - self._stop_s > QUIET_END_S:
            self._say_of_end("waiting for the ranks to end (up to 30 s under torchrun)")

    @property
    def _is_unfinished(self) -> bool:
        """Whether the end of the job waits for a bundle; where somebody stops it, for one that was begun before."""
        if not self._watching or self._ending is not None:
            return False
        if not self._forwarder.stop_requested:
            return self._crash.busy or self._stall.writing or self._live.has_unshown_bundle
        crash = self._failed_before_stop and self._crash.unfinished
        writing = self._interrupt is not None or self._stall.writing or self._live.writing
        return self._forwarder.stops == 1 and (crash or writing)

    def _show_what_was_found(self) -> None:
        found, self._unshown = self._unshown, []
        if self._pushed_off is not None and self._has_ended and not found:
            publishing.repeat_summary(self._pushed_off)
        for report in found:
            self._show(report)
            self._found_at_stop = True
            self._pushed_off = None if self._has_ended else report

    # --- a crash, a stall -------------------------------------------------------------------------------------------

    def _on_crash(self, glance: Glance) -> None:
        report = self._crash.advance(glance)
        if report is None:
            return
        self._show(report)
        if self._agent_lives() and self._on_stall_is("restart"):
            self._give_up_or_go_on(report)

    def _on_stall(self, glance: Glance, now: float) -> None:
        if self._crash.holds(now):
            self._stall.abandon()
            self._watch.hold(self._crash.due_s)
            is_suspicion = glance.event is not None and glance.event.kind == "suspect"
            glance = replace(glance, event=None) if is_suspicion else glance
        report = self._stall.advance(glance, now)
        if report is None:
            return
        if report.action:
            self._act_with_all(report)
        elif report.verdict.outcome in ("suspect", "dump") or self._on_stall_is("dump") or not self._agent_lives():
            self._show(report)
            if report.verdict.outcome == "hang" and self._agent_lives():
                self._stall.note_goes_on(report)
        elif self._stall.attempt != self._watch.attempt:
            self._show(report)
            say("torchrun restarted the ranks: the job continues")
        elif self._on_stall_is("restart"):
            self._show(report)
            if self._give_up_or_go_on(report):
                self._restart()
        else:
            self._council.rounds.trouble(f"the job hangs; ending it: {report.verdict.summary}")
            self._end(report, EXIT_HUNG)

    def _act_with_all(self, report: Report) -> None:
        """As the nodes have agreed, whatever this one's own policy is, and whatever has ended here meanwhile."""
        if report.action == "kill":
            self._end(report, EXIT_HUNG)
            return
        self._show(report)
        if report.action == "dump":
            self._stall.note_goes_on(report)
        if report.action == "restart" and self._give_up_or_go_on(report) and self._agent_lives():
            if self._stall.attempt != self._watch.attempt:
                return  # torchrun has started the ranks again: those of another node were ended before ours
            self._restart()

    def _restart(self) -> None:
        """Ends the ranks of this attempt, so that torchrun starts others."""
        again = "torchrun starts the script from its beginning, which must load its own checkpoint"
        say(f"ending the ranks of this attempt; if --max-restarts allows it, {again}")
        self._restarting, self._restarting_s = self._watch.roster.attempt, time.monotonic()
        BackgroundTask("end ranks", self._processes.end_ranks)

    def _on_stall_is(self, policy: str) -> bool:
        return self._job.plan.settings.on_stall == policy

    def _give_up_or_go_on(self, report: Report) -> bool:
        """Under --on-stall restart: ends the job if the same failure came back. Returns whether it may continue."""
        steps = tuple(rank.progress.step for rank in report.evidence.ranks if rank.progress and rank.progress.step)
        if report.step is not None:
            steps = (report.step,)
        failure = failure_of(report.verdict, steps)
        why = why_give_up(self._failures, failure)
        self._failures += (failure,)
        if why:
            say(f"not restarting: {why}")
            self._end(report, EXIT_GAVE_UP, shown=True)
        return not why

    def _end(self, report: Report | None, code: int, *, shown: bool = False, after_s: float = 0.0) -> None:
        """Ends every process of the job; ``code`` is safelaunch's exit code. ``after_s``: for other nodes to do it."""
        self._verdict = _StopReason(report, code, shown)

        def end() -> tuple[process.ProcessId, ...]:
            time.sleep(after_s)
            if self._watch.roster.agent_page is not None:
                self._watch.roster.agent_page.announce_end()
            return self._processes.end_all()

        self._ending = BackgroundTask("end", end)

    def _agent_lives(self) -> bool:
        return self._job.agent.is_alive()

    def _end_for_monitor(self, code: int, report: Report | None) -> None:
        """Ends the job for what a monitor found. Without a report, another node decided it and ends it as well."""
        if report is None:
            after_s = OTHERS_END_S - READ_S
        else:
            after_s = OTHERS_END_S if self._watch.unseen else 0.0
        self._end(report, code, shown=True, after_s=after_s)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, status: int) -> None:
        """After the agent's end: reads its last events, and finishes the bundle that is being written."""
        until = time.monotonic() + WRITE_PATIENCE_S
        self._has_ended = True
        self._guarded_tick()
        if status == 0:
            self._stall.note_recovery(time.monotonic())
        if self._watching:
            self._monitors.finish(succeeded=not (status or self._forwarder.stop_requested))
            self._contracts.finish()
        stopped = self._forwarder.stop_requested and not self._failed_before_stop
        if self._watching and not (stopped or self._ending or self._stall.agreed):
            self._note_end(status)
            self._note_rendezvous()
        self._wait_while(lambda: self._is_unfinished, until - time.monotonic(), ticks=True)
        if self._forwarder.stop_requested and self._watching:
            self._guarded_tick()
            self._show_what_was_found()

    def _finish_writing(self) -> None:
        """Finishes the half-written bundle of a crash when the job has ended for a hang, or removes it."""
        self._wait_while(lambda: self._crash.writing and not self._forwarder.stop_requested, WRITE_PATIENCE_S)
        if self._crash.writing or self._stall.writing or self._interrupt is not None:
            self._context.unfinished.discard()
        self._stall.abandon()

    def _note_end(self, status: int) -> None:
        """Takes the job's exit for its rank's if the command is the rank (``exec -- python train.py``)."""
        if not self._job.plan.by_torchrun:
            code = os.waitstatus_to_exitcode(status)
            for rank, progress in self._watch.last_progress.items():
                if progress.pid == self._job.agent.pid:
                    self._exit_events.setdefault(rank, RankExit(code, time.time()))
            if code and self._watch.last_progress and not self._crash.begun:
                self._crash.begin()
        self._crash.on_end()

    def _note_rendezvous(self) -> None:
        """Writes who has not come to a rendezvous that torchrun has given up; or what to do about a known error."""
        rendezvous, raised = self._council.rendezvous, self._raised
        if raised is None or not self.began_nothing:
            return
        if advice := advice_on(raised):
            say(advice)
        if rendezvous is None or not is_of_rendezvous(raised):
            return
        nodes, error = self._council.nodes(probing=False), f"{raised.error}: {raised.message}"
        writing = BackgroundTask(
            "bundle", lambda: publishing.write_failed_rendezvous(rendezvous, error, nodes, self._context)
        )
        self._wait_while(lambda: not (writing.done or self._forwarder.stop_requested), WRITE_PATIENCE_S)
        if writing.done:
            self._show(writing.result())
        else:
            self._context.unfinished.discard()

    def _say_ended(self, verdict: _StopReason | None) -> None:
        assert self._ending is not None
        self._ending.wait(3 * GRACE_S)
        left = self._ending.result() if self._ending.done else self._processes.all()
        if left:
            say(f"could not be killed (stuck in the kernel): pid {', '.join(str(p.pid) for p in left)}")
        if verdict is not None and not verdict.shown and verdict.report is not None:
            self._show(verdict.report)

    def _wait_for_notifier(self) -> None:
        """Waits for --on-bundle's command, which has its own deadline, unless somebody is in a hurry.

        And a moment for --on-suspect's: a job that ends well has not to wait for what was feared of it.
        """
        begin, stops = time.monotonic(), self._forwarder.stops

        def runs() -> bool:
            is_feared = self._suspects.busy and time.monotonic() - begin < SUSPECT_PATIENCE_S
            return self._forwarder.stops == stops and (self._notifier.busy or is_feared)

        if stops == 0 or (stops == 1 and self._found_at_stop):
            self._wait_while(runs, self._notifier.patience_s)
        self._notifier.end()
        self._suspects.end()

    def _show(self, result: Report) -> None:
        self.shown, published = result, result.published
        if result.repeats:
            say(result.repeats)
            return
        if result.verdict.outcome == "hang" and not published.lost:
            self._newest = published.shown
        if result.without_stacks:
            say(f"no stack could be read, so the verdict rests on other evidence: {result.without_stacks}")
            say("run 'safelaunch doctor' where the job runs: it shows the cause and the fix")
        judged = result.verdict.bundle or None  # unset where one node has reached it alone
        place = "bundle"
        if judged is not None and not judged.whole and Path(judged.path).name != published.path.name:
            place = "bundle of this node"
            say(f"the bundle with the evidence of all nodes is on {judged.host}: {judged.path}")
        publishing.show(result, self._job.plan.env, place)
