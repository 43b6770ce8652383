"""One running job, or one whose processes are still being ended: its outcome and its view."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG
from safelaunch.job.process import ProcessId
from safelaunch.sweep import metrics, spawn
from safelaunch.sweep.bundles import newest, verdict_of
from safelaunch.sweep.jobs import Job, Metric, Outcome, Pace, State, Track
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.pool import Share
from safelaunch.sweep.view import JobView

# The guardian of a killed supervisor ends its job: SIGTERM, 5 s, SIGKILL.
LINGER_S = 8.0
# What a running job's metrics may cost: a search in the end of its output, every few seconds.
MEASURE_EVERY_S, NEWEST_BYTES, MEASURE_CPU_S = 5.0, 64 << 10, 0.1


@dataclass(slots=True)
class Active:
    """One attempt. ``process`` is its safelaunch; times are CLOCK_MONOTONIC, in seconds.

    ``ended_by_us``: its state because we asked it to end; ``asked_s``: when (it is killed if it doesn't end).
    ``below``: the processes below it when it was killed. ``status``: its wait status once it has been reaped.
    ``before``: the bundles that there were. ``metrics``: the newest ones, found at ``measured_s`` with ``patterns``.
    """

    job: Job
    attempt: int
    share: Share
    process: ProcessId
    log: Path
    before: set[str]
    began_s: float
    ended_by_us: State | None = None
    asked_s: float | None = None
    killed_s: float | None = None
    status: int | None = None
    reaped_s: float = 0.0
    below: tuple[ProcessId, ...] = ()
    patterns: tuple[str, ...] = ()
    metrics: dict[str, Metric] = field(default_factory=dict)
    measured_s: float = 0.0


# --- how an attempt ended: from its wait status, its bundle, and our own request to end it ---------------------------


def lingers(active: Active, now: float) -> bool:
    """Whether processes of a job with a killed supervisor are still alive: its guardian ends them, then we do."""
    assert active.status is not None
    if not os.WIFSIGNALED(active.status) or not spawn.is_held(active.log):
        return False
    if now - active.reaped_s > LINGER_S:
        for each in active.below:
            each.send(signal.SIGKILL)
    return now - active.reaped_s <= LINGER_S + 1.0


def outcome_of(
    active: Active,
    paths: SweepPaths,
    last_step: int | None,
    say: Callable[[str], None] = lambda text: None,
    wrong: str = "",
) -> Outcome:
    """The outcome of an attempt that has been reaped. ``wrong``: what --check-every had found, for want of a bundle."""
    assert active.status is not None
    job = active.job
    bundle = newest(paths.bundles_of(job.name) - active.before)
    code = exit_code(active.status)
    verdict, cause = verdict_of(bundle)
    return Outcome(
        state=state_of(code, verdict, active.ended_by_us),
        exit_code=code,
        duration_s=round(active.reaped_s - active.began_s, 3),
        last_step=last_step,
        gpus=active.share.gpus,
        bundle=bundle,
        metrics=metrics.from_log(active.log, job.metrics, say),
        cause=cause or wrong,
    )


def so_far(active: Active, pace: Pace, now: float) -> Outcome:
    """What is known of a running job, in the form of its outcome."""
    return Outcome(
        state="running",
        duration_s=round(now - active.began_s, 3),
        last_step=pace.step,
        gpus=active.share.gpus,
        metrics=metrics_now(active, now),
    )


def metrics_now(active: Active, now: float) -> dict[str, Metric]:
    """The newest metrics of a running job, looked for now and then, in the end of its output."""
    if now - active.measured_s < MEASURE_EVERY_S or not active.job.metrics:
        return active.metrics
    active.measured_s = now
    slow: list[str] = []
    found = metrics.from_log(active.log, active.patterns, slow.append, NEWEST_BYTES, MEASURE_CPU_S)
    if slow:
        active.patterns = ()  # at its end, it gets the time that it takes
    active.metrics = {**active.metrics, **found}
    return active.metrics


def view_of(active: Active, track: Track, pace: Pace, now: float) -> JobView:
    """The view of a running job."""
    ports = dict.fromkeys(filter(None, (pace.master_port, *map(str, active.share.ports))))
    return JobView(
        track.job,
        track.state,
        track.attempts,
        "stopping" if active.ended_by_us else "",
        active.share.label,
        ",".join(ports),
        pace.step,
        pace.steps_per_s,
        now - active.began_s,
        track.outcome,
        age_s=pace.age_s,
        quiet=pace.quiet,
        cause=pace.cause,
        metrics=metrics_now(active, now),
        wrong=pace.wrong,
    )


def view_without(track: Track) -> JobView:
    """The view of a job that is not running."""
    return JobView(track.job, track.state, track.attempts, track.why, outcome=track.outcome)


def exit_code(status: int) -> int:
    """The exit code for a wait status, as a shell shows it: 128 plus the number of a signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def state_of(code: int, verdict: str, ended_by_us: State | None) -> State:
    """The state of an attempt. ``verdict``: the outcome in the bundle's verdict, empty without one; it beats the code.

    ``ended_by_us``: why we asked the job to stop. A job that succeeded anyway has succeeded.
    """
    if code == 0:
        return "succeeded"
    if ended_by_us is not None:
        return ended_by_us
    if verdict in ("hang", "crash"):
        return "hung" if verdict == "hang" and code in (EXIT_HUNG, EXIT_GAVE_UP) else "failed"
    return "hung" if code == EXIT_HUNG else "failed"
