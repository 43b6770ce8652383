"""Resumes a sweep: finds out which jobs are done, and waits until no process of the others is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.job.process import ProcessId, descendants
from safelaunch.sweep import metrics, spawn
from safelaunch.sweep.jobs import Job, Outcome, SweepPaths
from safelaunch.sweep.journal import Attempt
from safelaunch.sweep.sweep import Before
from safelaunch.system.errors import SafelaunchError

KILL_AFTER_S = 45.0  # the job got SIGTERM when its colaunch was killed; torchrun may take 30 s
GIVE_UP_AFTER_S = 65.0


@dataclass(frozen=True, slots=True)
class History:
    """``before``: the known state of each job; ``changed``: jobs that were done but have changed since."""

    before: Mapping[str, Before]
    changed: tuple[str, ...] = ()
    unfinished: tuple[Attempt, ...] = ()

    @property
    def done(self) -> int:
        return sum(known.outcome is not None for known in self.before.values())


def history(attempts: Sequence[Attempt], jobs: Sequence[Job]) -> History:
    """The state of these jobs according to the journal's attempts. Pure.

    A job is done if an attempt at exactly this work succeeded; all others run again.
    """
    before: dict[str, Before] = {}
    changed = []
    for job in jobs:
        own = [attempt for attempt in attempts if attempt.job == job.name]
        if not own:
            continue
        succeeded = [attempt for attempt in own if attempt.outcome and attempt.outcome.state == "succeeded"]
        same = [attempt for attempt in succeeded if attempt.fingerprint == job.fingerprint]
        if succeeded and not same:
            changed.append(job.name)
        before[job.name] = Before(max(attempt.number for attempt in own), same[-1].outcome if same else None)
    return History(before, tuple(changed), tuple(attempt for attempt in attempts if attempt.outcome is None))


def wait_for_remains(
    unfinished: Sequence[Attempt],
    paths: SweepPaths,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all processes of these attempts have ended, and kills them if that takes long.

    Raises SafelaunchError if some survive: running their job again would run it twice at once.
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
        if clock() - begin > KILL_AFTER_S and not killed:
            killed = True
            for attempt in alive:
                below += descendants([attempt.process.pid]) if attempt.process.is_alive() else []
                attempt.process.send(signal.SIGKILL)
        if clock() - begin > GIVE_UP_AFTER_S - 5.0:
            for each in below:
                each.send(signal.SIGKILL)
        if clock() - begin > GIVE_UP_AFTER_S and alive:
            logs = ", ".join(str(paths.log(attempt.job, attempt.number)) for attempt in alive)
            raise SafelaunchError(
                f"processes of {', '.join(a.job for a in alive)} are still alive after {GIVE_UP_AFTER_S:g} s.",
                f"end the processes that write to {logs} (fuser shows them), then use --resume again",
            )


def recovered(attempt: Attempt, jobs: Sequence[Job], paths: SweepPaths) -> Outcome | None:
    """The outcome of an attempt that succeeded while its colaunch was being killed; None for any other."""
    job = next((job for job in jobs if job.name == attempt.job), None)
    exit_file = paths.exit_file(attempt.job, attempt.number)
    if job is None or spawn.exit_code_in(exit_file) != 0:
        return None
    return Outcome(
        "succeeded",
        exit_code=0,
        duration_s=round(max(0.0, exit_file.stat().st_mtime - attempt.began_unix_s), 3),
        gpus=attempt.gpus,
        metrics=metrics.from_log(paths.log(job.name, attempt.number), job.metrics),
    )


def _lives(attempt: Attempt, paths: SweepPaths) -> bool:
    return attempt.process.is_alive() or spawn.is_held(paths.log(attempt.job, attempt.number))
