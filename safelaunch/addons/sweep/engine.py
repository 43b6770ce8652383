"""What the runner asks of an engine, what a screen gets of it, and what ``BatchEngine`` asks of a scheduler's queue.

An engine is the place where the jobs of a sweep run: ``local.Local`` on this node, ``batch.BatchEngine`` on whatever
lies behind a ``Queue``. Another scheduler is another ``Queue``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Pace, SweepJob
from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt that runs, or that waits in a scheduler's queue.

    ``on``: its GPUs, slots or nodes; ``ports``: the ranks' master port, then the leased ones. ``queued_for``: why a
    scheduler lets it wait; None once it runs.
    """

    on: str = ""
    ports: str = ""
    gpus: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    pace: Pace = field(default_factory=Pace)
    stopping: bool = False
    queued_for: str | None = None


class Engine(Protocol):
    """Runs the jobs of one ``Sweep``, which says what may start. No method waits for a job."""

    @property
    def unfinished(self) -> int:
        """The number of attempts that ``poll`` has yet to report."""

    @property
    def tick_s(self) -> float:
        """How long the runner may wait before it polls again, in seconds."""

    def submit(self) -> None:
        """Starts, or hands over, the jobs that ``Sweep.next`` gives, and reports each with ``Sweep.began``."""

    def poll(self) -> Iterable[tuple[SweepJob, AttemptOutcome]]:
        """The jobs whose attempt has ended. The runner records each before it asks for the next."""

    def cancel(self, *, kill: bool) -> None:
        """Asks all jobs to end; with ``kill``, ends them."""

    def look(self) -> Mapping[str, RunningAttempt]:
        """The attempts that have begun or been handed over, as they are now, by job."""

    def close(self) -> None:
        """Lets go of what the engine holds, once the runner has finished."""


def state_of(code: int, verdict: str, ended_by_us: JobState | None = None) -> JobState:
    """The state of an attempt. ``verdict``: the outcome in the bundle's verdict, empty without one; it beats the code.

    ``ended_by_us``: why we asked the job to stop. A job that succeeded anyway has succeeded.
    """
    if code == 0:
        return "succeeded"
    if ended_by_us is not None:
        return ended_by_us
    if verdict in ("hang", "crash"):
        return "hung" if verdict == "hang" and code in (EXIT_HUNG, EXIT_GAVE_UP) else "failed"
    return "hung" if code == EXIT_HUNG else "failed"
