"""Interface of a scheduler for ``BatchEngine``, and the records they exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from safelaunch.addons.sweep.jobs import JobState, SweepJob
from safelaunch.system.errors import SafelaunchError


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
