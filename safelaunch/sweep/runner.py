"""The loop that runs a sweep on an engine: signals, ends, starts, the display, the summary.

It never waits for a job, and never for long for a terminal.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from safelaunch.job.paths import seen_from_here
from safelaunch.sweep import summary
from safelaunch.sweep.engine import Ended, Engine
from safelaunch.sweep.journal import Journal
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.signals import Signals
from safelaunch.sweep.sweep import Sweep
from safelaunch.sweep.view import Screen, Snapshot

SUMMARY_EVERY_S = 2.0


class Runner:
    """Runs ``sweep`` on ``engine`` until its end or until it is stopped."""

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
        self._seeing = True
        self._summary_due_s = 0.0
        self.stopped_by = 0
        self._stops = 0

    def run(self, signals: Signals) -> None:
        """Returns when every job is final and has no processes left; after a third stop, at once."""
        while True:
            self._on_signals(signals.taken())
            for ended in self._engine.poll():
                self._record(ended)
            self._engine.submit()
            self._see()
            self._summarize()
            if (self._sweep.finished and not self._engine.unfinished) or self._stops > 2:
                break
            signals.wait(self._engine.tick_s)
        self._engine.close()
        if not self._journal.catch_up():
            self._screen.note(f"{self._journal.path} cannot be written: --resume will run some jobs again")

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

    def _record(self, ended: Ended) -> None:
        job, outcome = ended.job, ended.outcome
        self._journal.ended(job.name, ended.attempt, outcome)
        self._sweep.ended(job.name, outcome)
        again = " (will run again)" if self._sweep.tracks[job.name].state == "waiting" else ""
        code = "" if outcome.state == "succeeded" else f" (exit code {outcome.exit_code})"
        bundle = f"; bundle: {seen_from_here(outcome.bundle)}" if outcome.bundle else ""
        self._screen.ended(f"{job.name}: {outcome.state} after {outcome.duration_s:.1f} s{code}{bundle}{again}")

    # --- what is seen of it -----------------------------------------------------------------------------------------

    def _see(self) -> None:
        """Updates the display. An error in it ends the display, never the jobs."""
        if not self._seeing:
            return
        try:
            self._engine.look()
            self._screen.show(self.snapshot)
        except Exception as error:  # noqa: BLE001
            self._seeing = False
            self._screen.note(
                f"an internal error ended the display ({type(error).__name__}: {error}). The sweep continues."
            )

    def _summarize(self) -> None:
        """Writes the CSV now and then, for a few percent of the time at most."""
        now = self._clock()
        if now < self._summary_due_s:
            return
        with suppress(OSError):  # at the end, a failure is reported
            summary.write_csv(tuple(self._sweep.tracks.values()), self._paths, self._engine.so_far())
        self._summary_due_s = now + max(SUMMARY_EVERY_S, 20 * (self._clock() - now))

    def snapshot(self) -> Snapshot:
        """The current state of every job."""
        return Snapshot(tuple(map(self._engine.view, self._sweep.tracks)), self._engine.kind, self._sweep.stopped)
