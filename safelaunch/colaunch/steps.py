"""Reads the progress of jobs from the progress pages of their ranks, without asking or waiting for anybody.

A page stays mapped after the removal of its run directory, so the last step of a job that has ended is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.control import discover
from safelaunch.launch.paths import RunPaths
from safelaunch.launch.process import ProcessId
from safelaunch.model import Progress
from safelaunch.roster.progress import Roster

LOOK_EVERY_S = 0.25
RATE_OVER_S = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """A job's step and rate; None if unknown. ``master_port``: according to its ranks."""

    step: int | None = None
    steps_per_s: float | None = None
    master_port: str = ""


@dataclass(slots=True)
class _Followed:
    """A job under observation. ``samples``: (time, step) of the last seconds, oldest first."""

    roster: Roster | None = None
    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def look(self, now: float) -> None:
        if self.roster is None:
            return
        self.roster.refresh()
        step = slowest([page.read() for page in self.roster.pages().values()])
        if step is None:
            return
        if self.samples and step < self.samples[-1][1]:
            self.samples.clear()  # torchrun started the ranks again
        self.samples.append((now, step))
        while now - self.samples[0][0] > RATE_OVER_S:
            self.samples.popleft()

    @property
    def step(self) -> int | None:
        return self.samples[-1][1] if self.samples else None

    @property
    def steps_per_s(self) -> float | None:
        if len(self.samples) < 2:
            return None
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= 1.0 else None


class Steps:
    """The progress of jobs, identified by their supervisors. ``places``: the directories of run directories."""

    def __init__(self, places: Callable[[], tuple[Path, ...]], clock: Callable[[], float]) -> None:
        self._places = places
        self._clock = clock
        self._followed: dict[ProcessId, _Followed] = {}
        self._looked_s = float("-inf")

    def look(self, supervisors: Collection[ProcessId]) -> None:
        """Reads the pages of these jobs, at most every ``LOOK_EVERY_S`` seconds."""
        now = self._clock()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        for supervisor in supervisors:
            self._followed.setdefault(supervisor, _Followed())
        if any(self._followed[supervisor].roster is None for supervisor in supervisors):
            for found in discover.find(self._places()):
                followed = self._followed.get(found.supervisor) if found.supervisor is not None else None
                if followed is not None and followed.roster is None:
                    followed.roster = Roster(RunPaths(found.directory))
        for supervisor in supervisors:
            self._followed[supervisor].look(now)

    def of(self, supervisor: ProcessId) -> Pace:
        followed = self._followed.get(supervisor, _Followed())
        port = followed.roster.master_port if followed.roster is not None else ""
        return Pace(followed.step, followed.steps_per_s, port)

    def last_of(self, supervisor: ProcessId) -> int | None:
        """The last step of a job that has ended; forgets the job."""
        followed = self._followed.pop(supervisor, _Followed())
        followed.look(self._clock())
        return followed.step


def slowest(ranks: Iterable[Progress]) -> int | None:
    """The step of the slowest stepping rank that has not ended, or of all ranks if all have: that is the job's step."""
    stepping = [rank for rank in ranks if rank.step is not None]
    going_on = [rank for rank in stepping if rank.state != "exited"]
    return min((rank.step or 0 for rank in going_on or stepping), default=None)
