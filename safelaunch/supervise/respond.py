"""One incident, in a thread of its own: it looks at the job, takes its evidence, and writes the bundle.

Whatever it is about (see ``kinds``), the supervisor's loop asks it two things: does it still need the ranks, and is it
done? It can be cancelled at each step.
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
from safelaunch.supervise.collecting import Collected, Exits, JobSnapshot, Timeline
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
    """Nobody wants what the incident would find, or the ranks that it needs are being ended."""


class Incident(Generic[T]):
    """Starts ``work`` in a thread; it is given the incident itself."""

    def __init__(self, name: str, work: Callable[[Incident[T]], T]) -> None:
        self.cancelled, self._seen = threading.Event(), threading.Event()
        self._task: BackgroundTask[T | None] = BackgroundTask(name, lambda: self._run(work))

    def _run(self, work: Callable[[Incident[T]], T]) -> T | None:
        try:
            return work(self)
        except Cancelled:
            return None
        finally:
            self._seen.set()

    @property
    def needs_ranks(self) -> bool:
        return not (self._seen.is_set() or self.cancelled.is_set())

    @property
    def done(self) -> bool:
        return self._task.done

    @property
    def result(self) -> T | None:
        """None where it was cancelled. Raises what ``work`` raised."""
        return self._task.result()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end, at most so long. Returns whether it is done."""
        return self._task.wait(timeout_s)

    def cancel(self) -> None:
        self.cancelled.set()

    # --- for the work itself

    def on_ranks_done(self) -> None:
        """The ranks may end now."""
        self._seen.set()

    def pause(self, seconds: float) -> None:
        """Raises Cancelled."""
        if self.cancelled.wait(seconds):
            raise Cancelled

    def until(self, reached: Callable[[], object]) -> None:
        """Waits. Raises Cancelled."""
        while not reached():
            self.pause(STEP_S)


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as its supervisor sees it."""

    watch: Watch
    context: JobContext
    exits: Exits
    council: Council

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the job is on this node."""
        return not self.watch.unseen

    def nodes(self, *, probing: bool = True) -> tuple[NodeEvidence, ...]:
        """What is known of the job's nodes; empty where every rank is on this one. ``probing``: as in ``Council``."""
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
    """Looks at all ranks as often as this kind of incident does; fewer times where that is cancelled.

    ``quiet``, ``network``: see ``look_at``; of the first and of the last look. ``between``: called between the looks.
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
) -> Collected:
    """The evidence of a job that nobody suspects of a hang: somebody asks for it, or stops the job.

    ``stall_s``: how long it had made no progress; None: to be found out. Raises Cancelled, unless the kind has a
    budget: then what was seen before has to do.
    """
    known, before = job.snapshot(), job.watch.marks()
    looks = look(kind, job, at)
    over = at.cancelled.is_set()
    if over and kind.budget_s == float("inf"):
        raise Cancelled
    advanced = kind is ENDED or len(looks.taken) < kind.looks or looks.collectives_moved
    advanced = advanced or (not over and job.watch.marks() != before)
    moving = advanced or bool(work_in(looks, job.watch.background))
    if stall_s is None:
        ages = [job.watch.age_s(rank.progress, time.monotonic()) for rank in known.ranks.values() if rank.progress]
        stall_s = 0.0 if advanced else max(ages, default=0.0)
    if kind.outcome == "hang" and (moving or not job.is_whole):
        kind = replace(kind, outcome="dump")
    found = collecting.take_evidence(
        replace(kind, asks=kind.asks and not over),
        looks,
        known,
        job.context,
        on_ranks_done=at.on_ranks_done,
        timeline=timeline,
    )
    found = found.with_facts(stall_s=stall_s, moving=moving, for_finding=for_finding, **threshold.facts)
    return found.with_facts(answer="dead" if proves(found.evidence) else "unknown") if kind.outcome == "hang" else found


def interrupted(job: JobView, frozen_s: float, usual_s: float, now: float) -> Incident[Report | None]:
    """Ctrl-C at a frozen job: first the evidence, while the ranks still stand where they froze; then the stop.

    The signal waits for it, for ``HOLD_S`` at most. What is not there by then is done without: the ranks end, and the
    verdict goes by the looks that were taken before. ``frozen_s``: for how long none has made a step.
    """
    mark_s = now - frozen_s
    timeline = Timeline().plus("last progress", mark_s).plus("interrupted", now)
    times = f"{FROZEN_TIMES:g} x its usual step, when Ctrl-C was pressed"
    threshold = Threshold(FROZEN_TIMES * usual_s, times) if usual_s else NONE

    def respond(at: Incident[Report | None]) -> Report | None:
        steps = job.watch.steps()
        found = observe(INTERRUPT, job, at, stall_s=now - mark_s, threshold=threshold, timeline=timeline)
        if job.watch.steps() != steps:
            found.discard()
            say(ADVANCED)
            return None
        return publishing.finish(found.with_facts(nodes=job.nodes(probing=False)))

    return Incident("interrupt", respond)
