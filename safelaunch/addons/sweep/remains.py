"""Handles the processes and results of jobs whose colaunch was killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from safelaunch.addons.sweep import metrics
from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.journal import Attempt
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.spawn import exit_code_in, is_held
from safelaunch.job import process
from safelaunch.job.process import ProcessId
from safelaunch.system.errors import SafelaunchError

REMAINS_KILL_S = 45.0  # jobs get SIGTERM when colaunch is killed; torchrun can take 30 s to exit
REMAINS_GIVE_UP_S = 65.0


def wait_for_remains(
    unfinished: Sequence[Attempt],
    paths: SweepPaths,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all processes of these attempts have ended, and kills them if that takes too long.

    Raises SafelaunchError if some survive, because a job must not run twice at the same time.
    """
    alive = [attempt for attempt in unfinished if _lives(attempt, paths)]
    if not alive:
        return
    names = ", ".join(attempt.job for attempt in alive)
    say(f"colaunch was killed; waiting for the processes of its jobs to end: {names}")
    begin, killed = clock(), False
    below: list[ProcessId] = []
    for attempt in alive:
        attempt.process.send(signal.SIGTERM)
    while alive:
        sleep(0.1)
        alive = [attempt for attempt in alive if _lives(attempt, paths)]
        if clock() - begin > REMAINS_KILL_S and not killed:
            killed = True
            for attempt in alive:
                below += process.descendants([attempt.process.pid]) if attempt.process.is_alive() else []
                attempt.process.send(signal.SIGKILL)
        if clock() - begin > REMAINS_GIVE_UP_S - 5.0:
            for each in below:
                each.send(signal.SIGKILL)
        if clock() - begin > REMAINS_GIVE_UP_S and alive:
            logs = ", ".join(str(paths.log(attempt.job, attempt.number)) for attempt in alive)
            raise SafelaunchError(
                f"processes of {', '.join(a.job for a in alive)} are still alive after {REMAINS_GIVE_UP_S:g} s.",
                f"end the processes that write to {logs} (fuser shows them), then use --resume again",
            )


def recovered(attempt: Attempt, jobs: Sequence[SweepJob], paths: SweepPaths) -> AttemptOutcome | None:
    """Returns the outcome of an attempt that succeeded while its colaunch was being killed; None for any other."""
    job = next((job for job in jobs if job.name == attempt.job), None)
    exit_file = paths.exit_file(attempt.job, attempt.number)
    if job is None or exit_code_in(exit_file) != 0:
        return None
    return AttemptOutcome(
        "succeeded",
        exit_code=0,
        duration_s=round(max(0.0, exit_file.stat().st_mtime - attempt.began_unix_s), 3),
        gpus=attempt.gpus,
        metrics=metrics.from_log(paths.log(job.name, attempt.number), job.metrics),
    )


def _lives(attempt: Attempt, paths: SweepPaths) -> bool:
    return attempt.process.is_alive() or is_held(paths.log(attempt.job, attempt.number))
