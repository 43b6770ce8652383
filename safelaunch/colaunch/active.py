"""One job that runs, or whose remains are still being ended; what it amounts to, and what is shown of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safelaunch.colaunch import metrics, outcome, spawn
from safelaunch.colaunch.jobs import Job, Outcome, State, Track
from safelaunch.colaunch.paths import SweepPaths
from safelaunch.colaunch.pool import Share
from safelaunch.colaunch.steps import Pace
from safelaunch.colaunch.view import JobView
from safelaunch.launch.process import ProcessId

# What a killed supervisor leaves is ended by its guardian: SIGTERM, 5 s, SIGKILL.
LINGER_S = 8.0


@dataclass(frozen=True, slots=True)
class Before:
    """What was there before an attempt, and is not of its making."""

    bundles: set[str]
    metric_file: tuple[int, ...]


@dataclass(slots=True)
class Active:
    """One attempt. ``process`` is its safelaunch; times are of the monotonic clock.

    ``ended_by_us``: the state that it gets because we asked it to end; ``asked_s``: when, where it is killed if it does
    not; ``below``: what was below the process when it was killed. ``status``: its wait status once it has been reaped.
    """

    job: Job
    attempt: int
    share: Share
    process: ProcessId
    log: Path
    before: Before
    began_s: float
    ended_by_us: State | None = None
    asked_s: float | None = None
    killed_s: float | None = None
    status: int | None = None
    reaped_s: float = 0.0
    below: tuple[ProcessId, ...] = ()


def before_of(job: Job, paths: SweepPaths) -> Before:
    """To be taken before an attempt starts."""
    return Before(paths.bundles_of(job.name), metrics.stamp(Path(job.metric_file)))


def lingers(active: Active, now: float) -> bool:
    """Whether parts of a job whose supervisor was killed still live: its guardian is at them, then we are."""
    assert active.status is not None
    if not os.WIFSIGNALED(active.status) or not spawn.is_held(active.log):
        return False
    if now - active.reaped_s > LINGER_S:
        for each in active.below:
            each.send(signal.SIGKILL)
    return now - active.reaped_s <= LINGER_S + 1.0


def outcome_of(
    active: Active, paths: SweepPaths, last_step: int | None, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """How an attempt that has been reaped ended."""
    assert active.status is not None
    job = active.job
    bundle = outcome.newest(paths.bundles_of(job.name) - active.before.bundles)
    code = outcome.exit_code(active.status)
    written = job.metric_file and metrics.stamp(Path(job.metric_file)) != active.before.metric_file
    found = metrics.from_file(Path(job.metric_file)) if written else {}
    return Outcome(
        state=outcome.state_of(code, outcome.verdict_of(bundle), active.ended_by_us),
        exit_code=code,
        duration_s=round(active.reaped_s - active.began_s, 3),
        last_step=last_step,
        gpus=active.share.gpus,
        bundle=bundle,
        metrics={**metrics.from_log(active.log, job.metrics, say), **found},
    )


def view_of(active: Active, track: Track, pace: Pace, now: float) -> JobView:
    """A job that runs."""
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
    )


def view_without(track: Track) -> JobView:
    """A job that does not run now."""
    return JobView(track.job, track.state, track.attempts, track.why, outcome=track.outcome)
