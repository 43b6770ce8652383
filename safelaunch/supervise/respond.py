"""Handles an incident in its own thread: looks at the job, takes evidence, writes the bundle.

The incident can be cancelled at each step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from safelaunch.capture.counters import Counters
from safelaunch.model import NodeEvidence
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise.collecting import DraftBundle, Exits, JobSnapshot, Timeline
from safelaunch.supervise.council import Council
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.judge import proves, work_in
from safelaunch.supervise.kinds import ENDED, INTERRUPT, IncidentKind
from safelaunch.supervise.looks import Looks, look_at
from safelaunch.supervise.publishing import Report
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.quiet import FROZEN_TIMES
from safelaunch.supervise.watch.rhythm import NONE, Threshold
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

T = TypeVar("T")
STEP_S = 0.02
ADVANCED = "a rank advanced: the job is slow, not hung; no bundle written"


class Cancelled(Exception):
    """Raised if the incident's result isn't needed, or the ranks it needs are being ended."""


class Incident(Generic[T]):
    """Runs ``work(self)`` in a thread."""

    def __init__(self, name: str, work: Callable[[Incident[T]], T]) -> None:
        self.cancelled, self._ranks_done = threading.Event(), threading.Event()
        self._task: BackgroundTask[T | None] = BackgroundTask(name, lambda: self._run(work))

    def _run(self, work: Callable[[Incident[T]], T]) -> T | None:
        try:
            return work(self)
        except Cancelled:
            return None
        finally:
            self._ranks_done.set()

    @property
    def needs_ranks(self) -> bool:
        return not (self._ranks_done.is_set() or self.cancelled.is_set())

    @property
    def done(self) -> bool:
        return self._task.done

    @property
    def result(self) -> T | None:
        return self._task.result()

    def wait(self, timeout_s: float) -> bool:
        return self._task.wait(timeout_s)

    def cancel(self) -> None:
        self.cancelled.set()

    # --- for ``work`` ------------------------------------------------------------------------------------------------

    def on_ranks_done(self) -> None:
        self._ranks_done.set()

    def pause(self, seconds: float) -> None:
        if self.cancelled.wait(seconds):
            raise Cancelled

    def wait_until(self, reached: Callable[[], object]) -> None:
        while not reached():
            self.pause(STEP_S)


@dataclass(frozen=True, slots=True)
class JobView:
    watch: Watch
    context: JobContext
    exits: Exits
    council: Council

    @property
    def is_whole(self) -> bool:
        """True if every rank is on this node."""
        return not self.watch.unseen

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        return () if self.is_whole else self.council.nodes(probing=probing)

    def snapshot(self) -> JobSnapshot:
        return collecting.snapshot_of(self.watch, self.exits())


def look(
    kind: IncidentKind,
    job: JobView,
    at: Incident[T],
    *,
    quiet: Counters | None = None,
    network: bool = False,
    between: Callable[[], object] = lambda: None,
) -> Looks:
    """Looks at all ranks as often as the kind of incident requires, or until the incident is cancelled.

    Args:
        quiet: Counters from before the first look.
        network: Whether the last look checks the network.
        between: Function that is called between looks.
    """
    watch, collectives, begin_s = job.watch, kind.looks > 1, time.monotonic()
    looks = look_at(watch.targets(), None, collectives=collectives, quiet=quiet, deadline_s=kind.look_s)
    for _ in range(kind.looks - 1):
        between()
        is_over = at.cancelled.wait(kind.between_s)
        left_s = begin_s + kind.budget_s - time.monotonic()
        if is_over or left_s <= 0:
            break
        look_s = min(kind.look_s, left_s)
        more = look_at(watch.targets(), looks, collectives=collectives, network=network, deadline_s=look_s)
        looks = looks if at.cancelled.is_set() else more
    return looks


def observe(
    kind: IncidentKind,
    job: JobView,
    at: Incident[T],
    *,
    stall_s: float | None = None,
    threshold: Threshold = NONE,
    timeline: Timeline | None = None,
    for_finding: bool = False,
) -> DraftBundle:
    """Takes evidence on a job that isn't suspected.

    If it is cancelled, raises Cancelled, unless the kind of incident has a time budget: then uses the samples taken so
    far.

    Args:
        stall_s: Time without progress; if None, it is measured.
    """
    snapshot, before = job.snapshot(), job.watch.marks()
    looks = look(kind, job, at)
    over = at.cancelled.is_set()
    if over and kind.budget_s == float("inf"):
        raise Cancelled
    advanced = kind is ENDED or len(looks.taken) < kind.looks or looks.collectives_moved
    advanced = advanced or (not over and job.watch.marks() != before)
    moving = advanced or bool(work_in(looks, job.watch.background))
    if stall_s is None:
        ages = [job.watch.age_s(rank.progress, time.monotonic()) for rank in snapshot.ranks.values() if rank.progress]
        stall_s = 0.0 if advanced else max(ages, default=0.0)
    if kind.outcome == "hang" and (moving or not job.is_whole):
        kind = replace(kind, outcome="dump")
    collected = collecting.take_evidence(
        replace(kind, asks=kind.asks and not over),
        looks,
        snapshot,
        job.context,
        on_ranks_done=at.on_ranks_done,
        timeline=timeline,
    )
    collected = collected.with_facts(stall_s=stall_s, moving=moving, for_finding=for_finding, **threshold.facts)
    if kind.outcome != "hang":
        return collected
    return collected.with_facts(answer="dead" if proves(collected.evidence) else "unknown")


def interrupt(job: JobView, frozen_s: float, usual_s: float, now: float) -> Incident[Report | None]:
    """Takes evidence on a frozen job after Ctrl-C, before the signal reaches the ranks.

    The signal is delayed by at most ``HOLD_S``; then the verdict uses the samples taken so far.

    Args:
        frozen_s: Time since the last step of any rank.
    """
    mark_s = now - frozen_s
    timeline = Timeline().plus("last progress", mark_s).plus("interrupted", now)
    times = f"{FROZEN_TIMES:g} x its usual step, when Ctrl-C was pressed"
    threshold = Threshold(FROZEN_TIMES * usual_s, times) if usual_s else NONE

    def respond(at: Incident[Report | None]) -> Report | None:
        steps = job.watch.steps()
        collected = observe(INTERRUPT, job, at, stall_s=now - mark_s, threshold=threshold, timeline=timeline)
        if job.watch.steps() != steps:
            collected.discard()
            say(ADVANCED)
            return None
        return publishing.finish(collected.with_facts(nodes=job.nodes(probing=False)))

    return Incident("interrupt", respond)
