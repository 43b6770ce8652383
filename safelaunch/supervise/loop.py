"""The supervisor's loop: signals, the watch, the response to a stall or a crash, and the job's end.

The loop never blocks for longer than a tick, because slow work runs in threads. An internal error ends the watch, never
the job.
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
from safelaunch.supervise import failed_rendezvous, publishing
from safelaunch.supervise.council import Council
from safelaunch.supervise.crash import CrashCase
from safelaunch.supervise.device_notice import DeviceNotice
from safelaunch.supervise.early import EarlyLooks
from safelaunch.supervise.failed_rendezvous import advice_on, is_failed_rendezvous
from safelaunch.supervise.health import HealthPoller, LinkPoller
from safelaunch.supervise.job_context import job_context
from safelaunch.supervise.live import ControlServer
from safelaunch.supervise.monitors import MonitorActions, Monitors
from safelaunch.supervise.notices import Notices
from safelaunch.supervise.pollers import BackgroundPoller, GroupTimeoutPoller, Poller, PulsePoller, TracingPoller
from safelaunch.supervise.publishing import Report
from safelaunch.supervise.reminders import Reminders
from safelaunch.supervise.respond import Incident, JobView, interrupt
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
LATE_S = 0.001  # wakes this long after a deadline, never before it
WRITE_PATIENCE_S = 90.0
CAPTURE_PATIENCE_S = 20.0
SUSPECT_PATIENCE_S = 5.0
TOUCH_EVERY_S = 3600.0
SAME_SIGNAL_S = 1.0  # a rank that fails this shortly before a stop request might have received that request too
OTHERS_END_S = 2.5  # for other nodes to learn that the job ends, as the store can end with this node
READ_S = 0.5  # usual time until they have
QUIET_END_S = 1.5
SHOWN_AFTER_S = 10.0  # a verdict waits this long for the job's end, as the last output would push it off the screen
LAST_WORDS_S = 60.0  # the same once the ranks have ended: torchrun prints its traceback next
STOP_S = 60.0  # a job that still runs so long after a stop request is watched again
RESTART_S = 120.0  # time for torchrun to restart ranks that were ended for a hang
RESTART_OF_SEVERAL_S = 900.0  # on several nodes, whose rendezvous times out after 600 s


@dataclass(frozen=True, slots=True)
class _StopReason:
    report: Report | None
    code: int
    shown: bool


class Supervisor:
    def __init__(
        self,
        job: Job,
        processes: JobProcesses,
        touch: Callable[[], None] = lambda: None,
        forwarder: Forwarder | None = None,
    ) -> None:
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
        self._contracts = DeviceNotice(job.run, self._watch)
        self._interrupt: Incident[Report | None] | None = None
        self._live = ControlServer(job, view)
        actions = MonitorActions(
            write_bundle=lambda then, ends: self._live.dump_here(then, ends=ends),
            write_last_bundle=self._live.dump_late,
            show=self._show,
            end=self._end_for_monitor,
            is_ending=lambda: self._ending is not None or self._verdict is not None,
            has_ended=lambda: self._has_ended,
            ask_nodes=self._live.ask_nodes,
        )
        self._monitors = Monitors(job, view, actions)
        self._exit_events: dict[int, RankExit] = {}
        self._verdict: _StopReason | None = None
        self._stop_s = 0.0
        self._unshown: list[Report] = []
        self._shown_at_stop = False
        self._pushed_off: Report | None = None  # that torchrun's last output pushed off the screen
        self._newest = ""
        self._failures: tuple[AttemptFailure, ...] = ()
        self._owes_hint = False  # until a message says that a second Ctrl-C ends the job
        self._restarting = -1  # attempt ended for a hang
        self._restarting_s = 0.0
        self._outlives_stop = False
        self._ending: BackgroundTask[tuple[process.ProcessId, ...]] | None = None
        self._pollers: list[Poller[Any]] = (
            [GroupTimeoutPoller(self._watch, bounds.floor_s)] if bounds is not None else []
        )
        self._pollers.append(HealthPoller(self._watch, lambda: [process.pid for process in self._processes.all()]))
        self._pollers += PulsePoller(self._watch), BackgroundPoller(self._watch), TracingPoller(self._watch)
        self._pollers.append(LinkPoller(self._watch))
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
        self._raised: AgentEvent | None = None
        self._watching = True
        self._has_ended = False
        self.shown: Report | None = None
        self._touch = touch
        self._touch_at_s = time.monotonic() + TOUCH_EVERY_S

    def run(self) -> int:
        """Returns the job's wait status once it has ended and all bundles are written."""
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
                # Nodes that agree on a verdict must not drop it because of a stop.
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
            return signal.SIGINT  # the status after Ctrl-C, whichever signal ended the job
        # We ended the ranks and torchrun had no restart left, or the failed attempt was never reported.
        return EXIT_HUNG << 8 if status and self._restarting == self._watch.roster.attempt else status

    def _end_if_insisted(self) -> None:
        # torchrun alone would survive a second Ctrl-C for half a minute.
        if self._forwarder.insists and self._ending is None:
            say("ending the job now")
            self._ending = BackgroundTask("end now", lambda: self._processes.end_all(NOW_GRACE_S))

    def _cannot_end(self) -> bool:
        # The first process survived SIGKILL: it is stuck in the kernel.
        ending = self._ending
        return ending is not None and ending.done and self._job.agent in ending.result()

    def _until_due_s(self, now: float) -> float:
        due_s = self._watch.state.due_s - now
        return min(TICK_S, due_s + LATE_S) if due_s > 0 else TICK_S

    @property
    def started_no_rank(self) -> bool:
        return not (self._watch.roster.workers or self._forwarder.stop_requested or self._verdict)

    def _keep_leases_young(self, now: float) -> None:
        # Cleaners of /tmp remove files that haven't been touched for days.
        if now > self._touch_at_s:
            self._touch_at_s = now + TOUCH_EVERY_S
            self._touch()

    def _wait_while(self, waits: Callable[[], bool], patience_s: float, *, ticks: bool = False) -> None:
        until = time.monotonic() + patience_s
        while waits() and time.monotonic() < until:
            self._forwarder.wait(BUSY_TICK_S)
            if ticks:
                self._guarded_tick()

    def _end_survivors(self, status: int) -> None:
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
            self._council.close(at_once=True)  # other nodes must know it
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
            # A user, a scheduler or safelaunch is stopping the job: don't blame a rank, and don't delay the end.
            self._watch.acknowledge(agent=self._ending is not None or self._council.has_announced_stop(now))
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
        if not self._forwarder.stop_requested or self._outlives_stop:
            return False
        return self._has_ended or now - (self._stop_s or now) < STOP_S

    def _watch_again(self, now: float) -> None:
        if self._outlives_stop:
            return
        self._outlives_stop = True
        self._stall.abandon()
        self._show_pending()
        say(f"the job was asked to stop {now - self._stop_s:.0f} s ago, and still runs: safelaunch watches it again")

    def _is_restart_overdue(self, now: float) -> bool:
        """Returns whether torchrun hasn't restarted, in time, ranks that were ended for a hang. If so, ends the job."""
        patience_s = RESTART_S if self._view.is_whole else RESTART_OF_SEVERAL_S
        if now - self._restarting_s < patience_s or self._ending is not None:
            return False
        say(f"torchrun has not started the ranks again for {now - self._restarting_s:.0f} s: ending the job")
        self._end(self.shown, EXIT_HUNG, shown=True)
        return True

    def _is_a_crash(self, event: AgentEvent) -> bool:
        if event.event == "started":
            return True
        # Another node's action can show here before this node acts.
        ours = self._stall.agreed or self._ending or event.attempt == self._restarting
        return not (ours or (self._forwarder.stop_requested and not self._failed_before_stop))

    def _note_exits(self, event: AgentEvent) -> None:
        if event.event == "started":
            self._exit_events.clear()
        for rank, code in event.exits.items():
            first = event.event == "failing"
            self._exit_events.setdefault(rank, RankExit(code, event.time_unix_s, before_close=first))

    def _exits(self) -> dict[int, RankExit]:
        exits = dict(self._exit_events)
        for rank in self._watch.ended():  # a failure would have ended the others
            exits.setdefault(rank, RankExit(0, time.time(), before_close=True))
        return exits

    # --- Ctrl-C, Ctrl-\ or a scheduler's signal ---------------------------------------------------------------------

    def _on_quit(self) -> None:
        if self._watching:
            self._live.dump_here(self._show)

    def _hold(self) -> bool:
        """Decides, at the first SIGINT, whether ranks must live until evidence is collected."""
        self._owes_hint = True
        try:
            return self._watching and self._ending is None and self._is_worth_evidence(time.monotonic())
        except Exception as error:  # noqa: BLE001 - the user wants the job to stop in any case
            say(f"no evidence could be taken ({type(error).__name__}: {error})")
            return False

    def _say_wait(self, what: str) -> None:
        self._owes_hint = False
        say(f"{what}; press Ctrl-C again to end the job now")

    def _is_worth_evidence(self, now: float) -> bool:
        if self._stall.needs_ranks:
            self._say_wait(f"finishing the evidence first (up to {HOLD_S:g} s), then ending the ranks")
            return True
        outlived = self._crash.has_failed and not self._crash.holds(now)
        failed = self._crash.failed_before(now - SAME_SIGNAL_S) and self._crash.unfinished and not outlived
        if self._stall.writing or self._live.writing or failed:
            self._owes_hint = False
            say("stopping; the verdict follows; press Ctrl-C again to skip it")
            return False
        if self._newest and self._watch.state.status is Status.HUNG:
            say(f"stopping; the bundle of this hang is {self._newest}")
            return False
        spell = self._watch.spell(now)
        frozen_s = frozen_s_of(self._early.quiet if self._early is not None else None, spell, now)
        seems_stuck = frozen_s or self._stall.looking or outlived or self._was_seen_still()
        if spell is None or not seems_stuck:
            return False
        if outlived:
            self._crash.yield_to_hang()
        times = f" ({frozen_s / spell.usual_s:.0f} x the usual step)" if frozen_s else ""
        quiet_s = frozen_s or now - spell.since_s
        first = f"collecting evidence first (up to {HOLD_S:g} s), then ending the ranks"
        self._say_wait(f"no step for {quiet_s:.0f} s{times}: {first}")
        self._interrupt = interrupt(self._view, quiet_s, spell.usual_s if frozen_s else 0.0, now)
        return True

    def _was_seen_still(self) -> bool:
        early = self._watch.early
        return bool(early) and early[-1].movement == "still" and not early[-1].lasted_s

    @property
    def _failed_before_stop(self) -> bool:
        return self._crash.failed_before(self._stop_s - SAME_SIGNAL_S)

    def _on_stop(self, glance: Glance, now: float) -> None:
        interrupt = self._interrupt
        needs_ranks = self._stall.needs_ranks or (interrupt is not None and interrupt.needs_ranks)
        if self._forwarder.holding and not needs_ranks:
            self._forwarder.release()
        self._live.finish()
        reports = [self._stall.take_report(now)]
        if interrupt is not None:
            if not self._forwarder.holding:
                interrupt.cancel()  # later looks would mean nothing
            if interrupt.done:
                self._interrupt = None
                reports.insert(0, interrupt.result)
        if self._failed_before_stop:
            reports.append(self._crash.advance(glance))
        self._unshown += [report for report in reports if report is not None]
        if now - self._stop_s > (LAST_WORDS_S if self._watch.has_ended else SHOWN_AFTER_S):
            self._show_pending()
        if self._owes_hint and now - self._stop_s > QUIET_END_S:
            self._say_wait("waiting for the ranks to end (up to 30 s under torchrun)")

    @property
    def _is_unfinished(self) -> bool:
        """True while the job's end waits for a bundle; after a stop request, only for a bundle that began before it."""
        if not self._watching or self._ending is not None:
            return False
        if not self._forwarder.stop_requested:
            return self._crash.busy or self._stall.writing or self._live.has_unshown_bundle
        crash = self._failed_before_stop and self._crash.unfinished
        writing = self._interrupt is not None or self._stall.writing or self._live.writing
        return self._forwarder.stops == 1 and (crash or writing)

    def _show_pending(self) -> None:
        reports, self._unshown = self._unshown, []
        if self._pushed_off is not None and self._has_ended and not reports:
            publishing.repeat_summary(self._pushed_off)
        for report in reports:
            self._show(report)
            self._shown_at_stop = True
            self._pushed_off = None if self._has_ended else report

    # --- crash and stall --------------------------------------------------------------------------------------------

    def _on_crash(self, glance: Glance) -> None:
        report = self._crash.advance(glance)
        if report is None:
            return
        self._show(report)
        if self._agent_lives() and self._on_stall_is("restart"):
            self._may_continue(report)

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
                self._stall.note_continues(report)
        elif self._stall.attempt != self._watch.attempt:
            self._show(report)
            say("torchrun restarted the ranks: the job continues")
        elif self._on_stall_is("restart"):
            self._show(report)
            if self._may_continue(report):
                self._restart()
        else:
            self._council.rounds.report_trouble(f"the job hangs; ending it: {report.verdict.summary}")
            self._end(report, EXIT_HUNG)

    def _act_with_all(self, report: Report) -> None:
        """Acts as the nodes agreed, regardless of this node's policy."""
        if report.action == "kill":
            self._end(report, EXIT_HUNG)
            return
        self._show(report)
        if report.action == "dump":
            self._stall.note_continues(report)
        if report.action == "restart" and self._may_continue(report) and self._agent_lives():
            if self._stall.attempt != self._watch.attempt:
                return  # after another node's action, torchrun has restarted all
            self._restart()

    def _restart(self) -> None:
        again = "torchrun starts the script from its beginning, which must load its own checkpoint"
        say(f"ending the ranks of this attempt; if --max-restarts allows it, {again}")
        self._restarting, self._restarting_s = self._watch.roster.attempt, time.monotonic()
        BackgroundTask("end ranks", self._processes.end_ranks)

    def _on_stall_is(self, policy: str) -> bool:
        return self._job.plan.settings.on_stall == policy

    def _may_continue(self, report: Report) -> bool:
        """Returns whether the job continues under --on-stall restart. Ends it if the same failure recurred."""
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
        # after_s: for other nodes to end their processes
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
        # Another node decided, and ends the job, too.
        if report is None:
            after_s = OTHERS_END_S - READ_S
        else:
            after_s = OTHERS_END_S if self._watch.unseen else 0.0
        self._end(report, code, shown=True, after_s=after_s)

    # --- end of the job ---------------------------------------------------------------------------------------------

    def _finish(self, status: int) -> None:
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
            self._show_pending()

    def _finish_writing(self) -> None:
        # The job can end for a hang while a crash's bundle is being written.
        self._wait_while(lambda: self._crash.writing and not self._forwarder.stop_requested, WRITE_PATIENCE_S)
        if self._crash.writing or self._stall.writing or self._interrupt is not None:
            self._context.unfinished.discard()
        self._stall.abandon()

    def _note_end(self, status: int) -> None:
        """If the command is the rank (``exec -- python train.py``), records the job's exit code as the rank's."""
        if not self._job.plan.by_torchrun:
            code = os.waitstatus_to_exitcode(status)
            for rank, progress in self._watch.last_progress.items():
                if progress.pid == self._job.agent.pid:
                    self._exit_events.setdefault(rank, RankExit(code, time.time()))
            if code and self._watch.last_progress and not self._crash.has_failed:
                self._crash.begin()
        self._crash.on_end()

    def _note_rendezvous(self) -> None:
        rendezvous, raised = self._council.rendezvous, self._raised
        if raised is None or not self.started_no_rank:
            return
        if advice := advice_on(raised):
            say(advice)
        if rendezvous is None or not is_failed_rendezvous(raised):
            return
        nodes, error = self._council.nodes(probing=False), f"{raised.error}: {raised.message}"
        writing = BackgroundTask(
            "bundle", lambda: failed_rendezvous.write_failed_rendezvous(rendezvous, error, nodes, self._context)
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
        """Waits for the --on-bundle command until its deadline or Ctrl-C; for --on-suspect, only briefly."""
        begin, stops = time.monotonic(), self._forwarder.stops

        def runs() -> bool:
            suspect = self._suspects.busy and time.monotonic() - begin < SUSPECT_PATIENCE_S
            return self._forwarder.stops == stops and (self._notifier.busy or suspect)

        if stops == 0 or (stops == 1 and self._shown_at_stop):
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
        whole = result.verdict.bundle or None
        place = "bundle"
        if whole is not None and not whole.whole and Path(whole.path).name != published.path.name:
            place = "bundle of this node"
            say(f"the bundle with the evidence of all nodes is on {whole.host}: {whole.path}")
        publishing.show(result, self._job.plan.env, place)
