"""Tracks which jobs of a sweep can start, are skipped, or run again. Uses no clock, processes or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from safelaunch.addons.sweep.jobs import WORTH_ANOTHER_ATTEMPT, AttemptOutcome, JobState, SweepJob, Track
from safelaunch.addons.sweep.lineup import Lineup, Running


@dataclass(frozen=True, slots=True)
class JobHistory:
    attempts: int = 0
    outcome: AttemptOutcome | None = None  # None if the job must run again
    with_engine: bool = False  # its last attempt is still with the engine


@dataclass(frozen=True, slots=True)
class Rules:
    capacity: int
    at_most: int
    fail_fast: bool = False  # the first job that fails stops the others
    units: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = False  # the engine keeps the order of dependent jobs, so it can get them early


class Sweep:
    def __init__(self, jobs: Sequence[SweepJob], rules: Rules, before: Mapping[str, JobHistory] | None = None) -> None:
        self._rules = rules
        self._queue = Lineup(rules.capacity, rules.at_most)
        self._queued: set[str] = set()
        self.stopped = ""
        self.tracks = {job.name: Track(job) for job in jobs}
        for name, history in (before or {}).items():
            track = self.tracks[name]
            track.attempts = history.attempts
            if history.outcome is not None:
                track.state, track.outcome = history.outcome.state, history.outcome
            elif history.with_engine:
                self._adopt(track)
        self._settle()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(job.name for job in self._queue.running)

    @property
    def finished(self) -> bool:
        return all(track.is_final for track in self.tracks.values())

    def next(self, free: int | None = None) -> SweepJob | None:
        """Returns the next job to start; None if no job can start now.

        Args:
            free: Number of available units; None means all units that our jobs don't use.
        """
        name = self._queue.next(free)
        return self.tracks[name].job if name is not None else None

    def mark_started(self, job: SweepJob) -> None:
        """Records that ``job``, which ``next`` returned last, is running."""
        self._queue.start(job.name)
        track = self.tracks[job.name]
        track.state, track.attempts, track.tries = "running", track.attempts + 1, track.tries + 1
        if self._rules.ahead:
            self._settle()

    def put_back(self, name: str, state: JobState, why: str = "") -> None:
        """Records that a submitted job didn't start and won't: it is ``waiting`` again, or in a final state."""
        track = self.tracks[name]
        track.attempts, track.tries = track.attempts - 1, track.tries - 1
        track.state, track.why = ("cancelled", self.stopped) if self.stopped else (state, why)
        self._queue.end(name)
        self._queued.discard(name)
        self._settle()

    def mark_ended(self, name: str, outcome: AttemptOutcome) -> None:
        track = self.tracks[name]
        track.outcome = outcome
        self._queue.end(name)
        again = outcome.state in WORTH_ANOTHER_ATTEMPT and track.tries <= track.job.retries and not self.stopped
        if again:
            track.state = "waiting"
            self._queue.add(name, self._units(track.job))
        else:
            track.state = outcome.state
            if self._rules.fail_fast and outcome.state in WORTH_ANOTHER_ATTEMPT:
                self.stop(f"--fail-fast: {name} {outcome.state}")
        self._settle()

    def stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        self._queue.waiting.clear()
        for track in self.tracks.values():
            if track.state == "waiting":
                track.state, track.why = "cancelled", why

    def _adopt(self, track: Track) -> None:
        track.state, track.tries = "running", 1
        self._queued.add(track.job.name)
        self._queue.running.append(Running(track.job.name, self._units(track.job)))

    def _units(self, job: SweepJob) -> int:
        return self._rules.units.get(job.name, job.gpus)

    def _settle(self) -> None:
        """Queues jobs that needn't wait for others; skips jobs with a dependency that failed or was skipped."""
        changed = True
        while changed:
            changed = False
            for name, track in self.tracks.items():
                if track.state != "waiting" or name in self._queued:
                    continue
                needs = [self.tracks[need] for need in track.job.needs]
                lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
                if lost is not None:
                    track.state, track.why, changed = "skipped", f"needs {lost.job.name}, which {ending(lost)}", True
                elif all(need.state == "succeeded" or self._is_ahead(need) for need in needs):
                    self._queued.add(name)
                    self._queue.add(name, self._units(track.job))

    def _is_ahead(self, need: Track) -> bool:
        return self._rules.ahead and need.state == "running" and need.tries > need.job.retries


def ending(track: Track) -> str:
    return {"hung": "hung", "failed": "failed", "timed-out": "timed out"}.get(track.state, f"was {track.state}")


def cancelled(outcome: AttemptOutcome) -> AttemptOutcome:
    """Returns the outcome as cancelled unless it is a success, because how a stopped job ends says nothing about it."""
    return outcome if outcome.state == "succeeded" else replace(outcome, state="cancelled")
