"""Adopts attempts that earlier invocations submitted to a scheduler, and cancels those that are out of date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from safelaunch.addons.sweep.attempt_files import AttemptFiles
from safelaunch.addons.sweep.batch import LIST_EVERY_S
from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.journal import Attempt, Journal, JournalHistory
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.scheduler import Scheduler
from safelaunch.addons.sweep.sweep import JobHistory
from safelaunch.system.errors import SafelaunchError

GIVE_UP_AFTER_S = 120.0  # Slurm's KillWait is 30 s by default


def adopt(
    history: JournalHistory, jobs: Sequence[SweepJob]
) -> tuple[dict[str, JobHistory], dict[str, Attempt], list[Attempt]]:
    """Returns each job's history, the attempts to adopt (by job), and the attempts to cancel.

    An attempt is adopted if it is the last one of its job, hasn't ended, and does the same work as the job would now.
    """
    works = {job.name: job.fingerprint for job in jobs}
    left = [attempt for attempt in history.unfinished if attempt.handed]
    going_on = {
        attempt.job: attempt
        for attempt in left
        if works.get(attempt.job) == attempt.fingerprint
        and history.before[attempt.job].attempts == attempt.number
        and history.before[attempt.job].outcome is None
    }
    before = {
        name: replace(each, with_engine=True) if name in going_on else each for name, each in history.before.items()
    }
    return before, going_on, [attempt for attempt in left if going_on.get(attempt.job) is not attempt]


def end_strays(
    strays: Sequence[Attempt], queue: Scheduler, journal: Journal, paths: SweepPaths, say: Callable[[str], None]
) -> None:
    """Cancels these attempts and waits until they have ended. Raises SafelaunchError if some don't end."""
    if not strays:
        return
    jobs = ", ".join(sorted({stray.job for stray in strays}))
    say(f"cancelling {jobs} in {queue.name}: their definitions changed")
    begin_s = time.monotonic()
    for each in strays:
        paths.job(each.job).mkdir(parents=True, exist_ok=True)
        AttemptFiles(paths.job(each.job), each.number).close()  # if it hasn't started yet, it does nothing
    names = {name for stray in strays for name in stray.handed}
    while alive := [each.number for each in queue.list() if each.name in names and each.stage != "ended"]:
        queue.cancel(alive, kill=False)
        if time.monotonic() - begin_s > GIVE_UP_AFTER_S:
            raise SafelaunchError(
                f"jobs {' '.join(alive)} of {queue.name} didn't end after they were cancelled.",
                "end them, then use --resume again",
            )
        time.sleep(LIST_EVERY_S)
    for each in strays:
        journal.record_end(each.job, each.number, AttemptOutcome("cancelled"))
