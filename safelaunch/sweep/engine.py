"""What the runner asks of an engine: the place where the jobs of a sweep run. Another engine is another such class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safelaunch.sweep.jobs import Job, Outcome
from safelaunch.sweep.view import JobView


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an attempt."""

    job: Job
    attempt: int
    outcome: Outcome


class Engine(Protocol):
    """Runs the jobs of one ``Sweep``, which says what may start. No method waits for a job."""

    @property
    def kind(self) -> str:
        """What a job runs on: ``GPU``, ``slot``, ``node``."""

    @property
    def unfinished(self) -> int:
        """The number of attempts that ``poll`` has yet to report."""

    @property
    def tick_s(self) -> float:
        """How long the runner may wait before it polls again, in seconds."""

    def submit(self) -> None:
        """Starts, or hands over, the jobs that ``Sweep.next`` gives, and reports each with ``Sweep.began``."""

    def poll(self) -> Iterable[Ended]:
        """The attempts that have ended. The runner records each before it asks for the next."""

    def cancel(self, *, kill: bool) -> None:
        """Asks all jobs to end; with ``kill``, ends them."""

    def log(self, name: str, attempt: int) -> Path:
        """The file with an attempt's output."""

    def look(self) -> None:
        """Looks at running jobs, for ``view`` and ``so_far``."""

    def view(self, name: str) -> JobView:
        """One job at this moment."""

    def so_far(self) -> Mapping[str, Outcome]:
        """What is known of running jobs, in the form of their outcomes."""

    def close(self) -> None:
        """Lets go of what the engine holds, once the runner has finished."""
