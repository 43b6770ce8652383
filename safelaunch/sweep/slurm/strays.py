"""Ends what earlier invocations left in Slurm and no job of the sweep stands for any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from safelaunch.sweep.jobs import Outcome
from safelaunch.sweep.journal import Attempt, Journal
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.slurm.claims import AttemptFiles
from safelaunch.sweep.slurm.queue import Slurm
from safelaunch.system.errors import SafelaunchError

LOOK_EVERY_S = 1.0
GIVE_UP_AFTER_S = 120.0  # KillWait is 30 s by default


def end(
    strays: Sequence[Attempt],
    slurm: Slurm,
    journal: Journal,
    paths: SweepPaths,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Cancels these attempts and waits until Slurm has ended them. Raises SafelaunchError if some do not end."""
    if not strays:
        return
    say(f"their jobs have changed, so Slurm ends them: {', '.join(sorted({each.job for each in strays}))}")
    begin = clock()
    for each in strays:
        paths.job(each.job).mkdir(parents=True, exist_ok=True)
        AttemptFiles(paths.job(each.job), each.number).close()  # one that Slurm has yet to start does nothing
    places = {(handed.batch, handed.task) for each in strays for handed in each.handed}
    while alive := [each for each in slurm.listed() if (each.name, each.task) in places and not each.is_final]:
        slurm.cancel([each.address for each in alive], kill=False)
        if clock() - begin > GIVE_UP_AFTER_S:
            addresses = " ".join(each.address for each in alive)
            raise SafelaunchError(f"jobs {addresses} of Slurm do not end.", "end them, then use --resume again")
        sleep(LOOK_EVERY_S)
    for each in strays:
        journal.ended(each.job, each.number, Outcome("cancelled"))
