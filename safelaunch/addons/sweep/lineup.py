"""Chooses which waiting job starts next.

Jobs start in order if they fit. A job that fits can overtake one that doesn't, so that no slot stays idle. The first
waiting job (the head) can be overtaken only as many times as there are slots, because otherwise a large job might never
start. After that, room is reserved for it: only jobs that fit into the remaining room can overtake it. The head
therefore starts at the latest when all jobs that were running at that moment have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Waiting:
    name: str
    units: int
    overtaken: int = 0  # times another job overtook it while it was the head


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    units: int
    past: str = ""  # head with reserved room that this job overtook


@dataclass(slots=True)
class Lineup:
    capacity: int
    at_most: int
    waiting: list[Waiting] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(job.units for job in self.running)

    def add(self, name: str, units: int) -> None:
        self.waiting.append(Waiting(name, units))

    def end(self, name: str) -> None:
        self.running = [job for job in self.running if job.name != name]

    def next(self, free: int | None = None) -> str | None:
        """Returns the next job that fits into ``free`` units, or None.

        Args:
            free: None means all units that our jobs don't use.
        """
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
        head = self.waiting[0]
        job = next(job for job in self.waiting if job.name == name)
        self.running.append(Running(name, job.units, head.name if job is not head and self._kept_for(head) else ""))
        self.waiting.remove(job)
        if job is not head:
            head.overtaken += 1

    def _spare(self, head: Waiting, free: int) -> int:
        ours = self.used + free
        if not self._kept_for(head) or head.units > ours:
            return self.capacity
        late = sum(job.units for job in self.running if job.past == head.name)
        return ours - head.units - late

    def _kept_for(self, head: Waiting) -> bool:
        return head.overtaken >= self.capacity
