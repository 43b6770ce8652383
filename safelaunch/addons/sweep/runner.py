"""The loop that runs a sweep on an engine: signals, ends, starts, the display, the summary.

It never waits for a job, and never for long for a terminal. The summary is ``summary.json`` for programs, and
``summary.csv`` for spreadsheets and pandas.
"""

from __future__ import annotations

import csv
import io
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import msgspec

from safelaunch.addons.sweep.engine import Engine, JobStatus, RunningAttempt, Screen, Snapshot
from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Metric, SweepJob, Track
from safelaunch.addons.sweep.journal import Journal
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.sweep import Sweep
from safelaunch.job.paths import seen_from_here
from safelaunch.system.files import replace_file
from safelaunch.system.redaction.redact import redact_env

SUMMARY_EVERY_S = 2.0
NOTHING_RUNS: Mapping[str, AttemptOutcome] = {}
FIXED = ("state", "exit_code", "duration_s", "attempts", "last_step", "gpus", "bundle", "cause")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """Within ``with``, collects stopping signals instead of acting on them. Ignored ones (nohup) stay ignored."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._wake, self._woken = os.pipe()
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        self._fd_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for signum in (*STOPPING, signal.SIGCHLD):
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._wake)
        os.close(self._woken)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            self._taken.append(signum)

    def taken(self) -> list[int]:
        """The stopping signals since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def wait(self, timeout_s: float) -> None:
        """Waits for a signal, a child's end, or ``timeout_s`` seconds."""
        if self._taken:
            return
        if select.select([self._wake], [], [], timeout_s)[0]:
            try:
                os.read(self._wake, 4096)
            except BlockingIOError:
                return


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
        self._live: Mapping[str, RunningAttempt] = {}
        self._summary_due_s = 0.0
        self.stopped_by = 0
        self._stops = 0

    def run(self, signals: Signals) -> None:
        """Returns when every job is final and has no processes left; after a third stop, at once."""
        while True:
            self._on_signals(signals.taken())
            for job, outcome in self._engine.poll():
                self._record(job, outcome)
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

    def _record(self, job: SweepJob, outcome: AttemptOutcome) -> None:
        self._journal.ended(job.name, self._sweep.tracks[job.name].attempts, outcome)
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
            self._live = self._engine.look()
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
        so_far = {view.job.name: known for view in self.snapshot().jobs if (known := view.so_far) is not None}
        with suppress(OSError):  # at the end, a failure is reported
            write_csv(tuple(self._sweep.tracks.values()), self._paths, so_far)
        self._summary_due_s = now + max(SUMMARY_EVERY_S, 20 * (self._clock() - now))

    def snapshot(self) -> Snapshot:
        """The current state of every job."""
        views = [
            JobStatus.of(track, self._live.get(name) if track.state == "running" else None)
            for name, track in self._sweep.tracks.items()
        ]
        return Snapshot(tuple(views), self._sweep.stopped)


# --- the summary ------------------------------------------------------------------------------------------------------


class JobSummary(msgspec.Struct, frozen=True):
    """One job of a sweep. ``exit_code`` as a shell shows it; ``gpus`` are UUIDs; ``bundle`` is the newest one's path.

    ``cause``: by its verdict, or the scheduler's word (``time limit``, ``node failed``).
    What is not known, or not yet, is null.
    """

    name: str
    params: dict[str, str]
    state: JobState
    exit_code: int | None
    duration_s: float | None
    attempts: int
    last_step: int | None
    gpus: tuple[str, ...]
    bundle: str | None
    metrics: dict[str, Metric]
    cause: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """The document of ``summary.json``: every job of a sweep, in the sweep's order."""

    jobs: tuple[JobSummary, ...]


def document(tracks: Iterable[Track]) -> dict[str, Any]:
    """``{"jobs": [...]}``; missing values are null or empty."""
    found: dict[str, Any] = msgspec.to_builtins(Summary(tuple(_entry(track, track.outcome) for track in tracks)))
    return found


def _entry(track: Track, outcome: AttemptOutcome | None) -> JobSummary:
    shown = redact_env(dict(track.job.params))
    ended = outcome if outcome is not None else AttemptOutcome(track.state)
    return JobSummary(
        name=track.job.name,
        params={name: shown[name] for name, _ in track.job.params},
        state=outcome.state if track.state == "running" and outcome is not None else track.state,
        exit_code=ended.exit_code,
        duration_s=ended.duration_s if outcome is not None else None,
        attempts=track.attempts,
        last_step=ended.last_step,
        gpus=tuple(ended.gpus),
        bundle=ended.bundle or None,
        metrics=dict(ended.metrics),
        cause=ended.cause or None,
    )


def table(tracks: Sequence[Track], running: Mapping[str, AttemptOutcome] = NOTHING_RUNS) -> list[list[str]]:
    """Rows for CSV, the header first: the name, a column per parameter, the fixed columns, a column per metric.

    ``running``: what is known of jobs that run.

    A parameter or metric with the name of another column gets the prefix ``param.`` or ``metric.``.
    """
    params = list(dict.fromkeys(name for track in tracks for name, _ in track.job.params))
    known = [(track, running.get(track.job.name, track.outcome)) for track in tracks]
    metrics = list(dict.fromkeys(name for _, outcome in known if outcome for name in outcome.metrics))
    taken = {"name", *FIXED}
    param_titles = [f"param.{name}" if name in taken else name for name in params]
    metric_titles = [f"metric.{name}" if name in taken | set(param_titles) else name for name in metrics]
    rows = [["name", *param_titles, *FIXED, *metric_titles]]
    for track, outcome in known:
        entry = msgspec.structs.asdict(_entry(track, outcome))
        entry["gpus"] = " ".join(entry["gpus"])
        cells = [entry["name"], *(entry["params"].get(name) for name in params), *(entry[name] for name in FIXED)]
        rows.append([_cell(cell) for cell in [*cells, *(entry["metrics"].get(name) for name in metrics)]])
    return rows


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


def write_summary(tracks: Sequence[Track], paths: SweepPaths) -> None:
    """Writes both files, each whole or not at all. Raises OSError."""
    replace_file(paths.summary_json, json.dumps(document(tracks), indent=2) + "\n")
    write_csv(tracks, paths)


def write_csv(tracks: Sequence[Track], paths: SweepPaths, running: Mapping[str, AttemptOutcome] = NOTHING_RUNS) -> None:
    """Writes ``summary.csv``, whole or not at all; ``running``: what is known of running jobs. Raises OSError.

    While the sweep runs there is no ``summary.json`` of it: programs may wait for that.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(tracks, running))
    replace_file(paths.summary_csv, text.getvalue())
