"""Starts, reaps and stops jobs on this node, each on its own GPUs or CPU cores.

The engine has only one thread, because it forks, and because the kernel ends each job when the thread that started it
ends. It never waits for a job. ``spawn`` describes how a job is started.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safelaunch.addons.sweep import metrics
from safelaunch.addons.sweep.engine import RunningAttempt, state_of
from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, SweepJob, threads
from safelaunch.addons.sweep.journal import Journal
from safelaunch.addons.sweep.paths import SweepPaths, newest, verdict_of
from safelaunch.addons.sweep.pool import PROGRAM, Share, SharePool
from safelaunch.addons.sweep.spawn import JobCommand, is_held, spawn
from safelaunch.addons.sweep.steps import Steps
from safelaunch.addons.sweep.sweep import Sweep
from safelaunch.job import process
from safelaunch.job.process import ProcessId
from safelaunch.leases import ports
from safelaunch.leases.holder import ourselves
from safelaunch.leases.store import LeaseStore
from safelaunch.supervise.control.discover import our_roots
from safelaunch.system.errors import ResourceError, StoreError

TICK_S = 0.5
BUSY_TICK_S = 0.1
# torchrun kills ranks 30 s after SIGTERM.
STOP_PATIENCE_S = 45.0
# The guardian of a killed supervisor ends its job: SIGTERM, 5 s, SIGKILL.
LINGER_S = 8.0
CANNOT_START = 127

# Temporary failures, such as a full disk: the job isn't to blame, and starts later.
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class _Unrecorded(Exception):
    """The journal can't record the start of a job, so the job must not start."""


@dataclass(frozen=True, slots=True)
class SweepPlace:
    paths: SweepPaths
    pool: SharePool
    store: LeaseStore
    journal: Journal
    environ: Mapping[str, str]
    program: Sequence[str]


@dataclass(slots=True)
class Active:
    """An attempt that is running. Times are CLOCK_MONOTONIC, in seconds."""

    job: SweepJob
    share: Share
    process: ProcessId  # its safelaunch
    log: Path
    before: set[str]  # bundles that existed before
    began_s: float
    ended_by_us: JobState | None = None  # state if we asked it to end
    asked_s: float | None = None  # time of that request; it is killed if it doesn't end
    killed_s: float | None = None
    status: int | None = None  # wait status, once reaped
    reaped_s: float = 0.0
    below: tuple[ProcessId, ...] = ()  # descendants when it was killed

    def lingers(self, now: float) -> bool:
        """Returns whether a job still has processes after its supervisor was killed; ends them if no guardian does."""
        assert self.status is not None
        if not os.WIFSIGNALED(self.status) or not is_held(self.log):
            return False
        if now - self.reaped_s > LINGER_S:
            for each in self.below:
                each.send(signal.SIGKILL)
        return now - self.reaped_s <= LINGER_S + 1.0


class Local:
    def __init__(
        self,
        sweep: Sweep,
        place: SweepPlace,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweep = sweep
        self._place = place
        self._say = say
        self._clock = clock
        self._active: dict[str, Active] = {}
        self._steps = Steps(our_roots, clock)
        self._has_complained = False
        self._last_holders = ""
        self._not_started: list[SweepJob] = []

    @property
    def unfinished(self) -> int:
        return len(self._active) + len(self._not_started)

    @property
    def tick_s(self) -> float:
        busy = any(active.status is not None or active.asked_s for active in self._active.values())
        return 0.0 if self._not_started else BUSY_TICK_S if busy else TICK_S

    def close(self) -> None:
        self._place.pool.leave()

    def cancel(self, *, kill: bool) -> None:
        if not kill:
            self._ask_to_end(patience=False)
            return
        for active in self._active.values():
            self._kill(active)

    def _ask_to_end(self, *, patience: bool = True) -> None:
        for active in self._active.values():
            if active.ended_by_us is None and active.status is None:
                active.ended_by_us = "cancelled"
                active.asked_s = self._clock() if patience else None
                active.process.send(signal.SIGTERM)

    def _kill(self, active: Active) -> None:
        active.ended_by_us = active.ended_by_us or "cancelled"
        active.below = (*active.below, *process.descendants([active.process.pid]))
        active.killed_s = self._clock()
        active.process.send(signal.SIGKILL)

    def _enforce_limits(self) -> None:
        now = self._clock()
        if self._sweep.stopped:
            self._ask_to_end()
        for active in [active for active in self._active.values() if active.status is None]:
            limit_s = active.job.timeout_s
            if limit_s is not None and now - active.began_s > limit_s and active.ended_by_us is None:
                active.ended_by_us, active.asked_s = "timed-out", now
                active.process.send(signal.SIGTERM)
            if active.asked_s is not None and now - active.asked_s > STOP_PATIENCE_S and active.killed_s is None:
                self._kill(active)

    def poll(self) -> Iterator[tuple[SweepJob, AttemptOutcome]]:
        while self._not_started:
            yield self._not_started.pop(), AttemptOutcome("failed", CANNOT_START)
        now = self._clock()
        for active in list(self._active.values()):
            if active.status is None:
                active.status, active.reaped_s = process.reap(active.process.pid), now
            if active.status is not None and not active.lingers(now):
                del self._active[active.job.name]
                yield active.job, self._outcome(active)
                self._place.pool.release(active.share)  # once its end has been recorded
        self._enforce_limits()

    def _outcome(self, active: Active) -> AttemptOutcome:
        assert active.status is not None
        last_step, wrong = self._steps.last_of(active.process)
        bundle = newest(self._place.paths.bundles_of(active.job.name) - active.before)
        code = exit_code(active.status)
        verdict, cause = verdict_of(bundle)
        return AttemptOutcome(
            state=state_of(code, verdict, active.ended_by_us),
            exit_code=code,
            duration_s=round(active.reaped_s - active.began_s, 3),
            last_step=last_step,
            gpus=active.share.gpus,
            bundle=bundle,
            metrics=metrics.from_log(active.log, active.job.metrics, self._say),
            cause=cause or wrong,
        )

    def submit(self) -> None:
        if not self._place.journal.catch_up():
            self._complain(f"{self._place.journal.path} can't be written")
            return
        try:
            while (wanted := self._sweep.next()) is not None:  # don't survey the units if no job can start
                free = self._place.pool.free()
                if free is None:
                    return
                job = self._sweep.next(free)
                if job is None:
                    self._wait_for_others(wanted)
                    return
                if not self._try_to_start(job):
                    return
            self._place.pool.leave()
        except StoreError as error:
            self._complain(str(error))

    def _wait_for_others(self, job: SweepJob) -> None:
        holders = self._place.pool.wait(job, [active.process.pid for active in self._active.values()])
        if holders and holders != self._last_holders:
            self._last_holders = holders
            self._say(f"{job.name} waits for {self._place.pool.kind}s in use by others:\n{holders}")

    def _try_to_start(self, job: SweepJob) -> bool:
        share = self._place.pool.take(job)
        if share is None:
            return False
        if self._has_busy_gpus(share):  # record the previous job's end before the next start
            self._place.pool.release(share)
            return False
        try:
            self._launch(job, self._with_ports(job, share))
        except (ResourceError, _Unrecorded, OSError) as error:
            self._place.pool.release(share)
            if not isinstance(error, OSError):
                self._complain(str(error) if isinstance(error, _Unrecorded) else f"{job.name}: {error}")
                return False
            if error.errno in PASSING:
                self._complain(f"{job.name}: {error.strerror}")
                return False
            self._say(f"{job.name} could not be started: {error.strerror or error}")
            self._sweep.mark_started(job)
            self._not_started.append(job)
        return True

    def _has_busy_gpus(self, share: Share) -> bool:
        return any(not set(share.gpus).isdisjoint(active.share.gpus) for active in self._active.values())

    def _with_ports(self, job: SweepJob, share: Share) -> Share:
        if not job.ports:
            return share
        taken = ports.take(self._place.store, job.ports, ourselves(job.name, PROGRAM))
        numbers = taken.ports
        share.lease.add(taken)
        return replace(share, ports=numbers)

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"no job can start now; colaunch keeps trying ({why})")

    def _launch(self, job: SweepJob, share: Share) -> None:
        """Starts a job and hands over its lease, so that the job holds the lease from the start."""
        attempt, paths = self._sweep.tracks[job.name].attempts + 1, self._place.paths
        paths.bundles(job.name).mkdir(mode=0o700, parents=True, exist_ok=True)

        def record(started: ProcessId) -> None:
            try:
                self._place.journal.record_start(job, attempt, started, share.gpus)
            except OSError as error:
                raise _Unrecorded(f"{self._place.journal.path} can't be written: {error.strerror or error}") from error

        ready_job = job.with_ports(share.ports)
        variables, descriptors = share.lease.hand_over()
        command = JobCommand(
            argv=(*self._place.program, *ready_job.arguments(os.fspath(paths.bundles(job.name)))),
            env={**self._environment(ready_job, share), **variables},
            cwd=job.cwd,
            log=paths.log(job.name, attempt),
            exit_file=paths.exit_file(job.name, attempt),
            keep=descriptors,
        )
        before = paths.bundles_of(job.name)
        started = spawn(command, record)
        share.lease.forget()
        self._has_complained = False
        self._sweep.mark_started(job)
        self._active[job.name] = Active(job, share, started, command.log, before, self._clock())
        self._say(f"{job.name}: started on {self._place.pool.kind} {share.label}")

    def _environment(self, job: SweepJob, share: Share) -> dict[str, str]:
        own = {**self._place.environ, **dict(job.env), **share.env}
        if share.cores and "OMP_NUM_THREADS" not in own:
            own["OMP_NUM_THREADS"] = str(threads(job.words, share.cores))
        return own

    def look(self) -> dict[str, RunningAttempt]:
        running = [active for active in self._active.values() if active.status is None]
        self._steps.look([active.process for active in running])
        return {active.job.name: self._running(active) for active in running}

    def _running(self, active: Active) -> RunningAttempt:
        share, pace = active.share, self._steps.of(active.process)
        ports = ",".join(dict.fromkeys(filter(None, (pace.master_port, *map(str, share.ports)))))
        elapsed_s = self._clock() - active.began_s
        return RunningAttempt(share.label, ports, share.gpus, elapsed_s, pace, active.ended_by_us is not None)


def exit_code(status: int) -> int:
    """Converts a wait status to an exit code as a shell shows it: 128 plus the signal number after a signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
