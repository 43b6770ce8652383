"""Which job starts next. Pure: a queue in, a queue and the names of the jobs to start out.

Jobs start in their order as far as they fit; one that does not fit is overtaken by later ones that do, so that no slot
stays idle. But a large job must get its turn: the first that waits for room (the head) may be overtaken freely only as
often as there are slots. From then on room is kept for it: what overtakes it then may hold no more than what the head
leaves over, so that it starts, at the latest, when the jobs that were running at that moment have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that may start as far as order goes. ``overtaken``: how often another one went before while it was head."""

    name: str
    units: int
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """``past``: the head for which room was being kept when this one overtook it, or empty."""

    name: str
    units: int
    past: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """``capacity`` units (slots, GPUs), ``at_most`` jobs at a time."""

    capacity: int
    at_most: int
    waiting: tuple[Waiting, ...] = ()
    running: tuple[Running, ...] = ()

    @property
    def used(self) -> int:
        return sum(job.units for job in self.running)


def add(queue: Queue, name: str, units: int) -> Queue:
    """With one more job waiting, behind all others."""
    return replace(queue, waiting=(*queue.waiting, Waiting(name, units)))


def end(queue: Queue, name: str) -> Queue:
    """Without a job that was running."""
    return replace(queue, running=tuple(job for job in queue.running if job.name != name))


def clear(queue: Queue) -> Queue:
    """With nothing waiting: no more jobs are to start."""
    return replace(queue, waiting=())


@dataclass(frozen=True, slots=True)
class Start:
    """A job that may start now, and the queue as it is once that has started."""

    name: str
    queue: Queue


def next_start(queue: Queue, free: int | None = None) -> Start | None:
    """The next job that fits. ``free``: units that are to be had, where others use some; else all that are not used."""
    left = queue.capacity - queue.used if free is None else min(free, queue.capacity - queue.used)
    choice = _next(queue, left)
    return Start(choice[0].name, _moved(queue, *choice)) if choice is not None else None


def _next(queue: Queue, free: int) -> tuple[Waiting, Waiting | None] | None:
    """The next job to start, and the head that it overtakes."""
    if len(queue.running) >= queue.at_most:
        return None
    head: Waiting | None = None
    for job in queue.waiting:
        if job.units <= free and (head is None or job.units <= _spare(queue, head, free)):
            return job, head
        if head is None:
            head = job
    return None


def _spare(queue: Queue, head: Waiting, free: int) -> int:
    """How many units may go to a job that overtakes ``head``.

    While others use so much that our jobs' ends alone could not make room for it, nothing is kept idle for it.
    """
    ours = queue.used + free
    if not _kept_for(queue, head) or head.units > ours:
        return queue.capacity
    late = sum(job.units for job in queue.running if job.past == head.name)
    return ours - head.units - late


def _kept_for(queue: Queue, head: Waiting) -> bool:
    return head.overtaken >= queue.capacity


def _moved(queue: Queue, job: Waiting, head: Waiting | None) -> Queue:
    past = head.name if head is not None and _kept_for(queue, head) else ""
    waiting = tuple(
        replace(other, overtaken=other.overtaken + 1) if other is head else other
        for other in queue.waiting
        if other is not job
    )
    return replace(queue, waiting=waiting, running=(*queue.running, Running(job.name, job.units, past)))
