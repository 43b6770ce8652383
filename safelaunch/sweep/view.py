"""The view of a sweep that a screen gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from safelaunch.sweep.jobs import Job, Metric, Outcome, State


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at one moment. ``on``: its GPUs or slots; ``outcome``: of its last attempt that ended.

    ``ports``: the ranks' master port, then the leased ones. ``age_s``: since its newest step; ``quiet``: that is far
    longer than usual; ``cause``: what an early look suggests, or why a scheduler lets it wait. ``wrong``: what
    --check-every has found. ``metrics``: the newest ones of a running job.
    """

    job: Job
    state: State
    attempts: int = 0
    why: str = ""
    on: str = ""
    ports: str = ""
    step: int | None = None
    steps_per_s: float | None = None
    elapsed_s: float | None = None
    outcome: Outcome | None = None
    age_s: float | None = None
    quiet: bool = False
    cause: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs. ``kind``: the unit they run on (``GPU``, ``slot``); ``stopped``: why no more start, or empty."""

    jobs: tuple[JobView, ...]
    kind: str
    stopped: str = ""


class Screen(Protocol):
    """A display of a sweep. Neither method waits long for a terminal that does not read."""

    def note(self, text: str) -> None:
        """Shows an event."""

    def ended(self, text: str) -> None:
        """Shows how a job has ended; a display that has a line for each job does by itself."""

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Updates the display; takes a snapshot only if it will be shown."""
