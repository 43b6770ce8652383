"""The state of a sweep: what may start, what is skipped, what is tried again. No clock, no process, no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from safelaunch.colaunch import scheduler
from safelaunch.colaunch.jobs import WORTH_ANOTHER_ATTEMPT, Job, Outcome, Track
from safelaunch.colaunch.scheduler import Queue


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of a job from earlier invocations: its attempts, and how it ended if it need not run again."""

    attempts: int = 0
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """``capacity`` units, ``at_most`` jobs at a time; ``fail_fast``: the first job that fails stops the others."""

    capacity: int
    at_most: int
    fail_fast: bool = False
    units: Mapping[str, int] = field(default_factory=dict)


class Sweep:
    """All jobs on their way. Methods tell what happened; ``next`` says what to start."""

    def __init__(self, jobs: Sequence[Job], rules: Rules, before: Mapping[str, Before] | None = None) -> None:
        self._rules = rules
        self._queue = Queue(rules.capacity, rules.at_most)
        self._next: scheduler.Start | None = None
        self._queued: set[str] = set()
        self.stopped = ""
        self.tracks = {job.name: Track(job) for job in jobs}
        for name, known in (before or {}).items():
            track = self.tracks[name]
            track.attempts = known.attempts
            if known.outcome is not None:
                track.state, track.outcome = known.outcome.state, known.outcome
        self._settle()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(job.name for job in self._queue.running)

    @property
    def finished(self) -> bool:
        return all(track.is_final for track in self.tracks.values())

    def next(self, free: int | None = None) -> Job | None:
        """The next job to start, with ``free`` units to be had (None: all that our own jobs leave)."""
        self._next = scheduler.next_start(self._queue, free)
        return self.tracks[self._next.name].job if self._next is not None else None

    def began(self, job: Job) -> None:
        """``job``, which ``next`` has named last, runs."""
        assert self._next is not None and self._next.name == job.name
        self._queue, self._next = self._next.queue, None
        track = self.tracks[job.name]
        track.state, track.attempts, track.tries = "running", track.attempts + 1, track.tries + 1

    def ended(self, name: str, outcome: Outcome) -> None:
        """An attempt has ended: the job is done, or waits for its next one."""
        track = self.tracks[name]
        track.outcome = outcome
        self._queue = scheduler.end(self._queue, name)
        again = outcome.state in WORTH_ANOTHER_ATTEMPT and track.tries <= track.job.retries and not self.stopped
        if again:
            track.state = "waiting"
            self._queue = scheduler.add(self._queue, name, self._units(track.job))
        else:
            track.state = outcome.state
            if self._rules.fail_fast and outcome.state in WORTH_ANOTHER_ATTEMPT:
                self.stop(f"--fail-fast: {name} {outcome.state}")
        self._settle()

    def stop(self, why: str) -> None:
        """Nothing more is started; what has not been is cancelled."""
        self.stopped = self.stopped or why
        self._queue = scheduler.clear(self._queue)
        for track in self.tracks.values():
            if track.state == "waiting":
                track.state, track.why = "cancelled", why

    def _units(self, job: Job) -> int:
        return self._rules.units.get(job.name, job.gpus)

    def _settle(self) -> None:
        """Queues jobs whose needs have succeeded; skips those whose needs have not, and what needs these in turn."""
        changed = True
        while changed:
            changed = False
            for name, track in self.tracks.items():
                if track.state != "waiting" or name in self._queued:
                    continue
                needs = [self.tracks[need] for need in track.job.needs]
                lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
                if lost is not None:
                    track.state, track.why, changed = "skipped", f"needs {lost.job.name}, which {_was(lost)}", True
                elif all(need.state == "succeeded" for need in needs):
                    self._queued.add(name)
                    self._queue = scheduler.add(self._queue, name, self._units(track.job))


def _was(track: Track) -> str:
    return {"hung": "hung", "failed": "failed", "timed-out": "timed out"}.get(track.state, f"was {track.state}")


def cancelled(outcome: Outcome) -> Outcome:
    """The same end of a job that was asked to stop: nothing is said about the job by it."""
    return outcome if outcome.state == "succeeded" else replace(outcome, state="cancelled")
