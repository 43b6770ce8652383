"""Chooses which waiting job starts next. Pure.

Jobs start in order if they fit. Later jobs that fit overtake one that doesn't, so that no slot stays idle. So that a
large job gets its turn, the first waiting job (the head) can be overtaken only as often as there are slots. After that,
room is reserved for it: jobs that overtake it can use only what it leaves over. It therefore starts at the latest when
the jobs that were running at that moment have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Waiting:
    """A job whose needs are met. ``overtaken``: how often another job overtook it while it was the head."""

    name: str
    units: int
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """A running job. ``past``: the head with reserved room that this job overtook, or empty."""

    name: str
    units: int
    past: str = ""


@dataclass(slots=True)
class Lineup:
    """``capacity`` units (slots, GPUs), ``at_most`` jobs at a time."""

    capacity: int
    at_most: int
    waiting: list[Waiting] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(job.units for job in self.running)

    def add(self, name: str, units: int) -> None:
        """One more waiting job, at the end."""
        self.waiting.append(Waiting(name, units))

    def end(self, name: str) -> None:
        """A running job has ended."""
        self.running = [job for job in self.running if job.name != name]

    def next(self, free: int | None = None) -> str | None:
        """The next job that fits. ``free``: the available units if others use some; None: all that our jobs leave."""
        left = self.capacity - self.used if free is None else min(free, self.capacity - self.used)
        if len(self.running) >= self.at_most:
            return None
        spare = left
        for job in self.waiting:
            if job.units <= min(left, spare):
                return job.name
            if job is self.waiting[0]:
                spare = self._spare(job, left)
        return None

    def start(self, name: str) -> None:
        """Starts a waiting job, which overtakes the head if it is another one."""
        head = self.waiting[0]
        job = next(job for job in self.waiting if job.name == name)
        self.running.append(Running(name, job.units, head.name if job is not head and self._kept_for(head) else ""))
        self.waiting.remove(job)
        if job is not head:
            head.overtaken += 1

    def _spare(self, head: Waiting, free: int) -> int:
        """The number of units for a job that overtakes ``head``.

        While others use so many that the ends of our own jobs can't make room for the head, nothing is reserved for it.
        """
        ours = self.used + free
        if not self._kept_for(head) or head.units > ours:
            return self.capacity
        late = sum(job.units for job in self.running if job.past == head.name)
        return ours - head.units - late

    def _kept_for(self, head: Waiting) -> bool:
        return head.overtaken >= self.capacity
