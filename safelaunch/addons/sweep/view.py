"""Defines the state of a sweep for display, and the interface of screens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from safelaunch.addons.sweep.engine import RunningAttempt
from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, SweepJob, Track


@dataclass(frozen=True, slots=True)
class JobStatus:
    job: SweepJob
    state: JobState
    attempts: int = 0
    why: str = ""
    outcome: AttemptOutcome | None = None  # outcome of the last ended attempt
    live: RunningAttempt | None = None  # None unless it runs or waits in a scheduler's queue

    @staticmethod
    def of(track: Track, live: RunningAttempt | None) -> JobStatus:
        if live is None:
            return JobStatus(track.job, track.state, track.attempts, track.why, track.outcome)
        state: JobState = "running" if live.queued_for is None else "waiting"
        why = "stopping" if live.stopping else "" if state == "running" else "queued"
        return JobStatus(track.job, state, track.attempts, why, track.outcome, live)

    @property
    def so_far(self) -> AttemptOutcome | None:
        if self.live is None or self.state == "waiting":
            return AttemptOutcome("waiting") if self.live is not None else None
        took_s = round(self.live.elapsed_s, 3)
        return AttemptOutcome("running", None, took_s, self.live.pace.step, self.live.gpus)


@dataclass(frozen=True, slots=True)
class Snapshot:
    jobs: tuple[JobStatus, ...]
    stopped: str = ""


class Screen(Protocol):
    """A display of a sweep. No method blocks for long if the terminal doesn't read."""

    def note(self, text: str) -> None:
        """Shows the text of an event."""

    def show_end(self, text: str) -> None:
        """Shows how a job ended, unless the display has its own line for each job."""

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Updates the display. Takes a snapshot only if it will be shown."""
