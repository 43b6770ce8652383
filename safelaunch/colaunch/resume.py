"""What earlier invocations of a sweep left: which jobs are done, and that nothing of the others still runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.colaunch import metrics, spawn
from safelaunch.colaunch.jobs import Job, Outcome
from safelaunch.colaunch.journal import Attempt
from safelaunch.colaunch.paths import SweepPaths
from safelaunch.colaunch.sweep import Before
from safelaunch.errors import SafelaunchError
from safelaunch.launch.process import ProcessId, descendants

KILL_AFTER_S = 45.0  # the job was asked to end when its colaunch was killed; torchrun may take 30 s
GIVE_UP_AFTER_S = 65.0


@dataclass(frozen=True, slots=True)
class History:
    """``before``: what is known of each job of the sweep; ``changed``: done once, but they are other jobs by now."""

    before: Mapping[str, Before]
    changed: tuple[str, ...] = ()
    unfinished: tuple[Attempt, ...] = ()

    @property
    def done(self) -> int:
        return sum(known.outcome is not None for known in self.before.values())


def history(attempts: Sequence[Attempt], jobs: Sequence[Job]) -> History:
    """What the journal's attempts mean for these jobs. Pure.

    A job is done if an attempt of the very same work succeeded; everything else runs again.
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
    """Waits until nothing of these attempts lives any more; helps where that takes long.

    Raises SafelaunchError where something lives on all the same: running that job again would run it twice at once.
    """
    alive = [attempt for attempt in unfinished if _lives(attempt, paths)]
    if not alive:
        return
    names = ", ".join(attempt.job for attempt in alive)
    say(f"colaunch was killed while {len(alive)} jobs ran; waiting for what is left of them to end: {names}")
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
                f"parts of {', '.join(a.job for a in alive)} still live, {GIVE_UP_AFTER_S:g} s after they were to end.",
                f"end the processes that write to {logs} (fuser shows them), then --resume",
            )


def recovered(attempt: Attempt, jobs: Sequence[Job], paths: SweepPaths) -> Outcome | None:
    """The outcome of an attempt that ended, successfully, while its colaunch was being killed; None for any other."""
    job = next((job for job in jobs if job.name == attempt.job), None)
    exit_file = paths.exit_file(attempt.job, attempt.number)
    if job is None or spawn.exit_code_in(exit_file) != 0:
        return None
    found = metrics.from_file(Path(job.metric_file)) if job.metric_file else {}
    return Outcome(
        "succeeded",
        exit_code=0,
        duration_s=round(max(0.0, exit_file.stat().st_mtime - attempt.began_unix_s), 3),
        gpus=attempt.gpus,
        metrics={**metrics.from_log(paths.log(job.name, attempt.number), job.metrics), **found},
    )


def _lives(attempt: Attempt, paths: SweepPaths) -> bool:
    return attempt.process.is_alive() or spawn.is_held(paths.log(attempt.job, attempt.number))
