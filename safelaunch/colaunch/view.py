"""What a screen is shown of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from safelaunch.colaunch.jobs import Job, Outcome, State


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at one moment. ``on``: GPUs or slots; ``outcome``: of its last attempt that ended.

    ``ports``: the master port as its ranks have it, then those that were leased for it.
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs. ``kind``: what they run on (``GPU``, ``slot``); ``stopped``: why no more are started, or empty."""

    jobs: tuple[JobView, ...]
    kind: str
    stopped: str = ""


class Screen(Protocol):
    """Where a sweep is shown. Neither method waits long for a terminal that does not read."""

    def note(self, text: str) -> None:
        """Something has happened."""

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """The state may have changed; it is taken only when it will be shown."""
