"""Adopts the attempts that earlier invocations handed to a scheduler, and cancels those that are out of date."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from safelaunch.addons.sweep.attempt_files import AttemptFiles
from safelaunch.addons.sweep.batch import GIVE_UP_AFTER_S, LOOK_EVERY_S
from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob
from safelaunch.addons.sweep.journal import Attempt, Journal, JournalHistory
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.scheduler import Scheduler
from safelaunch.addons.sweep.sweep import Before
from safelaunch.system.errors import SafelaunchError


def adopted(
    known: JournalHistory, jobs: Sequence[SweepJob]
) -> tuple[dict[str, Before], dict[str, Attempt], list[Attempt]]:
    """What is known of each job; by job, the attempt that may still be with the scheduler; and what must not go on.

    Pure. An attempt goes on if it is a job's last, has not ended, and does the work that the job does now.
    """
    works = {job.name: job.fingerprint for job in jobs}
    left = [attempt for attempt in known.unfinished if attempt.handed]
    going_on = {
        attempt.job: attempt
        for attempt in left
        if works.get(attempt.job) == attempt.fingerprint
        and known.before[attempt.job].attempts == attempt.number
        and known.before[attempt.job].outcome is None
    }
    before = {
        name: replace(each, with_engine=True) if name in going_on else each for name, each in known.before.items()
    }
    return before, going_on, [attempt for attempt in left if going_on.get(attempt.job) is not attempt]


def end_strays(
    strays: Sequence[Attempt], queue: Scheduler, journal: Journal, paths: SweepPaths, say: Callable[[str], None]
) -> None:
    """Cancels these attempts and waits until they have ended. Raises SafelaunchError if some do not end."""
    if not strays:
        return
    jobs = ", ".join(sorted({stray.job for stray in strays}))
    say(f"their jobs have changed, so {queue.name} ends them: {jobs}")
    begin_s = time.monotonic()
    for each in strays:
        paths.job(each.job).mkdir(parents=True, exist_ok=True)
        AttemptFiles(paths.job(each.job), each.number).close()  # one that has yet to start does nothing
    names = {name for stray in strays for name in stray.handed}
    while alive := [each.number for each in queue.list() if each.name in names and each.stage != "ended"]:
        queue.cancel(alive, kill=False)
        if time.monotonic() - begin_s > GIVE_UP_AFTER_S:
            raise SafelaunchError(
                f"jobs {' '.join(alive)} of {queue.name} do not end.", "end them, then use --resume again"
            )
        time.sleep(LOOK_EVERY_S)
    for each in strays:
        journal.ended(each.job, each.number, AttemptOutcome("cancelled"))
