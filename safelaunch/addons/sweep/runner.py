"""Runs a sweep on an engine, without waiting for a job, or for long on a terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from safelaunch.addons.sweep.engine import Engine, RunningAttempt
from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.journal import Journal
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.stop_signals import Signals
from safelaunch.addons.sweep.summary import write_csv
from safelaunch.addons.sweep.sweep import Sweep
from safelaunch.addons.sweep.view import JobStatus, Screen, Snapshot
from safelaunch.job.paths import seen_from_here

SUMMARY_EVERY_S = 2.0


class Runner:
    def __init__(
        self,
        sweep: Sweep,
        engine: Engine,
        journal: Journal,
        paths: SweepPaths,
        screen: Screen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweep = sweep
        self._engine = engine
        self._journal = journal
        self._paths = paths
        self._screen = screen
        self._clock = clock
        self._has_display = True
        self._live: Mapping[str, RunningAttempt] = {}
        self._summary_due_s = 0.0
        self.stopped_by = 0
        self._stops = 0

    def run(self, signals: Signals) -> None:
        """Runs until every job has a final state and no processes left. After a third stop signal, returns at once."""
        while True:
            self._on_signals(signals.taken())
            for job, outcome in self._engine.poll():
                self._record(job, outcome)
            self._engine.submit()
            self._update_display()
            self._summarize()
            if (self._sweep.finished and not self._engine.unfinished) or self._stops > 2:
                break
            signals.wait(self._engine.tick_s)
        self._engine.close()
        if not self._journal.catch_up():
            self._screen.note(f"{self._journal.path} can't be written: --resume will run some jobs again")

    def _on_signals(self, taken: Sequence[int]) -> None:
        for signum in taken:
            self._stops += 1
            self.stopped_by = self.stopped_by or signum
            if self._stops == 1:
                self._sweep.stop(f"stopped by {signal.Signals(signum).name}")
                self._screen.note(f"stopping {self._engine.unfinished} running jobs; repeat to kill them")
            else:
                self._screen.note(f"killing {self._engine.unfinished} jobs")
            self._engine.cancel(kill=self._stops > 1)

    def _record(self, job: SweepJob, outcome: AttemptOutcome) -> None:
        self._journal.record_end(job.name, self._sweep.tracks[job.name].attempts, outcome)
        self._sweep.mark_ended(job.name, outcome)
        again = " (will run again)" if self._sweep.tracks[job.name].state == "waiting" else ""
        code = "" if outcome.state == "succeeded" else f" (exit code {outcome.exit_code})"
        bundle = f"; bundle: {seen_from_here(outcome.bundle)}" if outcome.bundle else ""
        self._screen.show_end(f"{job.name}: {outcome.state} after {outcome.duration_s:.1f} s{code}{bundle}{again}")

    def _update_display(self) -> None:
        if not self._has_display:
            return
        try:
            self._live = self._engine.look()
            self._screen.show(self.snapshot)
        except Exception as error:  # noqa: BLE001
            self._has_display = False
            self._screen.note(
                f"an internal error ended the display ({type(error).__name__}: {error}). The sweep continues."
            )

    def _summarize(self) -> None:
        """Writes the CSV from time to time, so rarely that it takes at most a few percent of the time."""
        now = self._clock()
        if now < self._summary_due_s:
            return
        so_far = {view.job.name: outcome for view in self.snapshot().jobs if (outcome := view.so_far) is not None}
        with suppress(OSError):  # the end reports a failure
            write_csv(tuple(self._sweep.tracks.values()), self._paths, so_far)
        self._summary_due_s = now + max(SUMMARY_EVERY_S, 20 * (self._clock() - now))

    def snapshot(self) -> Snapshot:
        views = [
            JobStatus.of(track, self._live.get(name) if track.state == "running" else None)
            for name, track in self._sweep.tracks.items()
        ]
        return Snapshot(tuple(views), self._sweep.stopped)
