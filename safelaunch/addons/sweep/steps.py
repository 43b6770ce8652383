"""Reads the progress of jobs from their ranks' progress pages, without sending queries or waiting.

A page stays mapped after its run directory was removed, so the last step of a job that has ended is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from safelaunch.addons.sweep.jobs import Pace
from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from safelaunch.job.process import ProcessId
from safelaunch.model import EarlyLook, Progress, WrongResult
from safelaunch.supervise.control import discover
from safelaunch.supervise.watch.quiet import is_quiet
from safelaunch.system.decoding import from_json

T = TypeVar("T")
LOOK_EVERY_S = 0.25
RATE_OVER_S = 10.0


@dataclass(slots=True)
class _FollowedJob:
    roster: Roster | None = None
    run: RunPaths | None = None
    samples: deque[tuple[float, int]] = field(default_factory=deque)  # recent (time, step), oldest first
    newest_s: float = 0.0  # time of the latest step of any rank
    usual_s: float = 0.0
    announced: bool = False
    wrong: str = ""

    def look(self, now: float) -> None:
        if self.roster is None:
            return
        self.roster.refresh()
        if not self.wrong and self.run is not None:
            self.wrong = wrong_cause(self.run.wrong)
        ranks = [page.read() for page in self.roster.pages().values()]
        step = slowest(ranks)
        if step is None:
            return
        stepping = [rank for rank in ranks if rank.step is not None]
        self.newest_s = max(rank.last_step_ns for rank in stepping) / 1e9
        self.usual_s = max(rank.mean_step_s(rank.step or 0) for rank in stepping)
        self.announced = any(rank.paused or rank.phase for rank in ranks)
        if self.samples and step < self.samples[-1][1]:
            self.samples.clear()  # torchrun restarted the ranks
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
    """Follows jobs, identified by their supervisors. ``places`` returns the parents of run directories."""

    def __init__(self, places: Callable[[], tuple[Path, ...]], clock: Callable[[], float]) -> None:
        self._places = places
        self._clock = clock
        self._followed: dict[ProcessId, _FollowedJob] = {}
        self._looked_s = float("-inf")

    def look(self, supervisors: Collection[ProcessId]) -> None:
        """Reads the progress pages of these jobs, at most every ``LOOK_EVERY_S`` seconds."""
        now = self._clock()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        for supervisor in supervisors:
            self._followed.setdefault(supervisor, _FollowedJob())
        if any(self._followed[supervisor].roster is None for supervisor in supervisors):
            for job in discover.find(self._places()):
                followed = self._followed.get(job.supervisor) if job.supervisor is not None else None
                if followed is not None and followed.roster is None:
                    run = RunPaths(job.directory)
                    followed.roster, followed.run = Roster(run), run
        for supervisor in supervisors:
            self._followed[supervisor].look(now)

    def of(self, supervisor: ProcessId) -> Pace:
        followed = self._followed.get(supervisor, _FollowedJob())
        if followed.roster is None or followed.run is None:
            return Pace()
        age_s = max(0.0, self._clock() - followed.newest_s) if followed.newest_s else None
        quiet = age_s is not None and not followed.announced and is_quiet(age_s, followed.usual_s)
        cause = early_cause(followed.run.early) if quiet else ""
        port = followed.roster.master_port
        return Pace(followed.step, followed.steps_per_s, port, age_s, quiet, cause, followed.wrong)

    def last_of(self, supervisor: ProcessId) -> tuple[int | None, str]:
        followed = self._followed.pop(supervisor, _FollowedJob())
        followed.look(self._clock())
        return followed.step, followed.wrong


def early_cause(path: Path) -> str:
    """Returns the cause in the latest early look; empty if there is none, or if the ranks are active again."""
    looks = _listed(path, EarlyLook)
    return looks[-1].cause if looks and looks[-1].movement == "still" and not looks[-1].lasted_s else ""


def wrong_cause(path: Path) -> str:
    lines = _listed(path, WrongResult)
    return lines[0].cause if lines else ""


def _listed(path: Path, kind: type[T]) -> list[T]:
    try:
        return from_json(path.read_bytes(), list[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError):
        return []


def slowest(ranks: Iterable[Progress]) -> int | None:
    """Returns the step of the slowest active rank or, if all ranks have ended, of the slowest of all."""
    stepping = [rank for rank in ranks if rank.step is not None]
    going_on = [rank for rank in stepping if rank.state != "exited"]
    return min((rank.step or 0 for rank in going_on or stepping), default=None)
