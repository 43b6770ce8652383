"""What the runner asks of an engine, what a screen gets of it, and what ``BatchEngine`` asks of a scheduler's queue.

An engine is the place where the jobs of a sweep run: ``local.Local`` on this node, ``batch.BatchEngine`` on whatever
lies behind a ``Queue``. Another scheduler is another ``Queue``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Pace, SweepJob, Track
from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG
from safelaunch.system.errors import SafelaunchError


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


# --- what is seen of a sweep ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job at one moment. ``outcome``: of its last attempt that ended.

    ``live``: None unless it runs, or waits in a scheduler's queue.
    """

    job: SweepJob
    state: JobState
    attempts: int = 0
    why: str = ""
    outcome: AttemptOutcome | None = None
    live: RunningAttempt | None = None

    @staticmethod
    def of(track: Track, live: RunningAttempt | None) -> JobStatus:
        if live is None:
            return JobStatus(track.job, track.state, track.attempts, track.why, track.outcome)
        state: JobState = "running" if live.queued_for is None else "waiting"
        why = "stopping" if live.stopping else "" if state == "running" else "queued"
        return JobStatus(track.job, state, track.attempts, why, track.outcome, live)

    @property
    def so_far(self) -> AttemptOutcome | None:
        """What is known of the attempt that goes on, in the form of its outcome."""
        if self.live is None or self.state == "waiting":
            return AttemptOutcome("waiting") if self.live is not None else None
        took_s = round(self.live.elapsed_s, 3)
        return AttemptOutcome("running", None, took_s, self.live.pace.step, self.live.gpus)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs. ``stopped``: why no more start, or empty."""

    jobs: tuple[JobStatus, ...]
    stopped: str = ""


class Screen(Protocol):
    """A display of a sweep. No method waits long for a terminal that does not read."""

    def note(self, text: str) -> None:
        """Shows an event."""

    def ended(self, text: str) -> None:
        """Shows how a job has ended; a display that has a line for each job does by itself."""

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Updates the display; takes a snapshot only if it will be shown."""


# --- a scheduler ------------------------------------------------------------------------------------------------------


class QueueError(SafelaunchError):
    """A scheduler refused a request, or did not answer.

    ``passing``: another try may succeed; ``full``: it takes no more jobs of this user until some have ended.
    """

    passing = False
    full = False


@dataclass(frozen=True, slots=True)
class SubmittedWork:
    """What is handed over. ``name`` is unique: it finds the job again in the scheduler's list.

    ``after``: the scheduler's numbers of the jobs that have to succeed first.
    """

    name: str
    job: SweepJob
    script: Path
    output: Path
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """A job as the scheduler lists it. ``number``: what it calls the job; ``word``: its own word for the state.

    ``reason``: why it waits. ``hopeless``: it was ended because a job that it needs did not succeed.
    """

    name: str
    number: str
    stage: Literal["queued", "running", "ended"]
    word: str = ""
    reason: str = ""
    nodes: str = ""
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a scheduler's word says about a job that did not succeed. ``asked``: only if a signal ended the job."""

    state: JobState
    cause: str
    asked: bool = False


class Scheduler(Protocol):
    """A scheduler. Its methods may take minutes, and are called one at a time, in a thread.

    Its module has it as ``SCHEDULER``, and as ``SCHEDULER_JOB`` what a job sees of itself (see ``task``).
    """

    name: str
    meanings: Mapping[str, Meaning]
    keeps_order: bool  # whether it heeds Work.after

    def across(self, nodes: int) -> Sequence[str] | None:
        """The words that run a command once on each of a job's nodes; None if a job has one node only."""

    def words(self, work: SubmittedWork) -> list[str]:
        """The command that submits ``work``."""

    def submit(self, work: SubmittedWork) -> str:
        """Submits it; returns its number. Raises QueueError."""

    def list(self) -> Iterable[Listed]:
        """The jobs of this user; those that have ended as long as the scheduler knows them. Raises QueueError."""

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        """Asks jobs to end; with ``kill``, ends them. One that has ended is no error. Raises QueueError."""
