"""Defines the interface of a scheduler, and the records exchanged with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from safelaunch.addons.sweep.jobs import JobState, SweepJob
from safelaunch.system.errors import SafelaunchError


class QueueError(SafelaunchError):
    passing = False  # another try might succeed
    full = False  # no more jobs from this user until some have ended


@dataclass(frozen=True, slots=True)
class SubmittedWork:
    name: str  # unique name, by which the scheduler's list shows the job
    job: SweepJob
    script: Path
    output: Path
    after: tuple[str, ...] = ()  # numbers of jobs that must succeed first


@dataclass(frozen=True, slots=True)
class ListedJob:
    name: str
    number: str
    stage: Literal["queued", "running", "ended"]
    word: str = ""  # the scheduler's name of the state
    reason: str = ""
    nodes: str = ""
    hopeless: bool = False  # ended because a job that it needs didn't succeed


@dataclass(frozen=True, slots=True)
class Meaning:
    """Our state and cause for a scheduler's name of a state, for jobs that didn't succeed."""

    state: JobState
    cause: str
    asked: bool = False  # applies only if a signal ended the job


class Scheduler(Protocol):
    """A scheduler. Its methods can take minutes; they are called in a thread, one at a time.

    The scheduler's module defines this object as ``SCHEDULER``, and a job's view of itself as ``SCHEDULER_JOB`` (see
    ``task``).
    """

    name: str
    meanings: Mapping[str, Meaning]
    keeps_order: bool  # it supports SubmittedWork.after

    def across(self, nodes: int) -> Sequence[str] | None:
        """Returns the command prefix that runs a command once on each node; None if jobs can have only one node."""

    def submit_command(self, work: SubmittedWork) -> list[str]:
        """Returns the command that submits ``work``."""

    def submit(self, work: SubmittedWork) -> str:
        """Submits ``work``; returns the number that the scheduler assigns to it. Raises QueueError."""

    def list(self) -> Iterable[ListedJob]:
        """Returns this user's jobs, including ended jobs that the scheduler still lists. Raises QueueError."""

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        """Asks jobs to end, or kills them; ignores those that have ended. Raises QueueError."""
