"""Defines the interface of engines, which run jobs: ``local.Local``, and ``batch.BatchEngine`` (on a ``Scheduler``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Pace, SweepJob
from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    on: str = ""  # its GPUs, slots or nodes
    ports: str = ""  # ranks' master port, then the leased ports
    gpus: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    pace: Pace = field(default_factory=Pace)
    stopping: bool = False
    queued_for: str | None = None  # scheduler's reason to keep it waiting; None once it runs


class Engine(Protocol):
    """Runs the jobs of a ``Sweep``, which decides which job starts next. No method waits for a job to end."""

    @property
    def unfinished(self) -> int:
        """Number of attempts that ``poll`` hasn't reported yet."""

    @property
    def tick_s(self) -> float:
        """Seconds that the runner can wait before it polls again."""

    def submit(self) -> None:
        """Starts or submits the jobs that ``Sweep.next`` returns; reports each with ``Sweep.mark_started``."""

    def poll(self) -> Iterable[tuple[SweepJob, AttemptOutcome]]:
        """Yields attempts that have ended. The runner records each one before it asks for the next."""

    def cancel(self, *, kill: bool) -> None:
        """Asks all jobs to end; if ``kill`` is set, kills them instead."""

    def look(self) -> Mapping[str, RunningAttempt]:
        """Returns the state of each started or submitted attempt, by job."""

    def close(self) -> None:
        """Releases the engine's resources."""


def state_of(code: int, verdict: str, ended_by_us: JobState | None = None) -> JobState:
    """Returns the state of an attempt that has ended. Exit code 0 means success even if we asked the job to stop.

    Args:
        verdict: Outcome in the bundle's verdict, which takes precedence over the exit code; empty without a bundle.
        ended_by_us: State to return if we asked the job to stop.
    """
    if code == 0:
        return "succeeded"
    if ended_by_us is not None:
        return ended_by_us
    if verdict in ("hang", "crash"):
        return "hung" if verdict == "hang" and code in (EXIT_HUNG, EXIT_GAVE_UP) else "failed"
    return "hung" if code == EXIT_HUNG else "failed"
