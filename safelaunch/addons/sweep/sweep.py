"""The state of a sweep: which jobs may start, are skipped, or run again. Pure: no clock, process or file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from safelaunch.addons.sweep.jobs import WORTH_ANOTHER_ATTEMPT, AttemptOutcome, JobState, SweepJob, Track
from safelaunch.addons.sweep.lineup import Lineup, Running


@dataclass(frozen=True, slots=True)
class Before:
    """A job's history from earlier invocations: its attempts, and its outcome if it need not run again.

    ``with_engine``: its last attempt is still with the engine.
    """

    attempts: int = 0
    outcome: AttemptOutcome | None = None
    with_engine: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """``capacity`` units, ``at_most`` jobs at a time; ``fail_fast``: the first job that fails stops the others.

    ``ahead``: the engine keeps the order of jobs that need each other, so they may be handed over before that.
    """

    capacity: int
    at_most: int
    fail_fast: bool = False
    units: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = False


class Sweep:
    """All jobs of a sweep. Report events with its methods; ``next`` says which job to start."""

    def __init__(self, jobs: Sequence[SweepJob], rules: Rules, before: Mapping[str, Before] | None = None) -> None:
        self._rules = rules
        self._queue = Lineup(rules.capacity, rules.at_most)
        self._queued: set[str] = set()
        self.stopped = ""
        self.tracks = {job.name: Track(job) for job in jobs}
        for name, known in (before or {}).items():
            track = self.tracks[name]
            track.attempts = known.attempts
            if known.outcome is not None:
                track.state, track.outcome = known.outcome.state, known.outcome
            elif known.with_engine:
                self._adopt(track)
        self._settle()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(job.name for job in self._queue.running)

    @property
    def finished(self) -> bool:
        return all(track.is_final for track in self.tracks.values())

    def next(self, free: int | None = None) -> SweepJob | None:
        """The next job to start with ``free`` available units (None: all that our own jobs leave)."""
        name = self._queue.next(free)
        return self.tracks[name].job if name is not None else None

    def began(self, job: SweepJob) -> None:
        """Reports that ``job``, the last one from ``next``, is running."""
        self._queue.start(job.name)
        track = self.tracks[job.name]
        track.state, track.attempts, track.tries = "running", track.attempts + 1, track.tries + 1
        if self._rules.ahead:
            self._settle()

    def returned(self, name: str, state: JobState, why: str = "") -> None:
        """Reports that a job that was handed over has not begun, and will not: it is ``waiting`` again, or final."""
        track = self.tracks[name]
        track.attempts, track.tries = track.attempts - 1, track.tries - 1
        track.state, track.why = ("cancelled", self.stopped) if self.stopped else (state, why)
        self._queue.end(name)
        self._queued.discard(name)
        self._settle()

    def ended(self, name: str, outcome: AttemptOutcome) -> None:
        """Reports the end of an attempt: the job is done, or waits for its next attempt."""
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
        """Starts no more jobs, and cancels those that have not started."""
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
        """Queues jobs whose needs have succeeded; skips those whose needs have failed, and those that need them."""
        changed = True
        while changed:
            changed = False
            for name, track in self.tracks.items():
                if track.state != "waiting" or name in self._queued:
                    continue
                needs = [self.tracks[need] for need in track.job.needs]
                lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
                if lost is not None:
                    track.state, track.why, changed = "skipped", f"needs {lost.job.name}, which {was(lost)}", True
                elif all(need.state == "succeeded" or self._is_ahead(need) for need in needs):
                    self._queued.add(name)
                    self._queue.add(name, self._units(track.job))

    def _is_ahead(self, need: Track) -> bool:
        """Whether the engine may wait for ``need``: the present attempt is its last."""
        return self._rules.ahead and need.state == "running" and need.tries > need.job.retries


def was(track: Track) -> str:
    return {"hung": "hung", "failed": "failed", "timed-out": "timed out"}.get(track.state, f"was {track.state}")


def cancelled(outcome: AttemptOutcome) -> AttemptOutcome:
    """The outcome as cancelled, for a job that was asked to stop: its end says nothing about the job."""
    return outcome if outcome.state == "succeeded" else replace(outcome, state="cancelled")
