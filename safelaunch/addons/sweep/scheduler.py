"""Defines the interface of a scheduler for ``BatchEngine``, and the records they exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from safelaunch.addons.sweep.jobs import JobState, SweepJob
from safelaunch.system.errors import SafelaunchError


class QueueError(SafelaunchError):
    """A scheduler refused a request or didn't answer."""

    passing = False  # another try might succeed
    full = False  # the scheduler accepts no more jobs from this user until some have ended


@dataclass(frozen=True, slots=True)
class SubmittedWork:
    name: str  # unique: finds the job in the scheduler's list
    job: SweepJob
    script: Path
    output: Path
    after: tuple[str, ...] = ()  # numbers of the jobs that have to succeed first


@dataclass(frozen=True, slots=True)
class ListedJob:
    name: str
    number: str  # the scheduler's id
    stage: Literal["queued", "running", "ended"]
    word: str = ""  # the scheduler's name of the state
    reason: str = ""  # why it waits
    nodes: str = ""
    hopeless: bool = False  # it was ended because a job that it needs didn't succeed


@dataclass(frozen=True, slots=True)
class Meaning:
    """State and cause for a scheduler's state name, if a job didn't succeed."""

    state: JobState
    cause: str
    asked: bool = False  # applies only if a signal ended the job


class Scheduler(Protocol):
    """A scheduler. Its methods can take minutes, and are called one at a time, in a thread.

    Its module defines it as ``SCHEDULER``, and the job's view of itself as ``SCHEDULER_JOB`` (see ``task``).
    """

    name: str
    meanings: Mapping[str, Meaning]
    keeps_order: bool  # it supports SubmittedWork.after

    def across(self, nodes: int) -> Sequence[str] | None:
        """Returns the words that run a command once on each node; None if a job has only one node."""

    def submit_command(self, work: SubmittedWork) -> list[str]:
        """Returns the command that submits ``work``."""

    def submit(self, work: SubmittedWork) -> str:
        """Submits ``work``; returns its number. Raises QueueError."""

    def list(self) -> Iterable[ListedJob]:
        """Returns this user's jobs, including ended ones that the scheduler still lists. Raises QueueError."""

    def cancel(self, numbers: Sequence[str], *, kill: bool) -> None:
        """Asks jobs to end; with ``kill``, kills them. Ignores jobs that have ended. Raises QueueError."""
