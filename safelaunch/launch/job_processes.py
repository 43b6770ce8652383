"""Every process of one job: finding them, telling the guardian of orphans, ending them all or the ranks alone."""

from __future__ import annotations

import os
import signal
import time

from safelaunch.launch import process
from safelaunch.launch.guardian import Guardian
from safelaunch.launch.process import ProcessId

GRACE_S = 5.0
RANK_GRACE_S = 1.0
ORPHANS_EVERY_S = 1.0


class JobProcesses:
    """The processes below this supervisor that are the job's; ``agent`` is the first of them."""

    def __init__(self, agent: ProcessId, guardian: Guardian | None) -> None:
        self.agent = agent
        self._guardian = guardian
        self._orphans: set[ProcessId] = set()
        self._next_look_s = 0.0

    def look_for_orphans(self, now: float) -> None:
        """Processes of the job that lost their parent are ours now; the guardian has to know them by name."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + ORPHANS_EVERY_S
        for orphan in process.adopted([self.agent.pid, *self._not_the_jobs()]):
            if orphan not in self._orphans and self._guardian is not None:
                self._orphans.add(orphan)
                self._guardian.adopt(orphan)

    def adopt_helper(self, pid: int) -> None:
        """A program that we run for ourselves: the guardian ends it, too, when we are killed."""
        helper = process.identify(pid)
        if helper is not None and self._guardian is not None:
            self._guardian.adopt(helper)

    def _not_the_jobs(self) -> list[int]:
        return [*([self._guardian.pid] if self._guardian is not None else []), *process.helpers()]

    def all(self) -> tuple[ProcessId, ...]:
        """Everything of the job: what is below the agent, and orphans that have become our own children."""
        return process.descendants([os.getpid()], exclude=self._not_the_jobs())

    def end_all(self) -> tuple[ProcessId, ...]:
        """SIGTERM, grace, SIGKILL; returns what would not die. Takes seconds."""
        return process.end_all(self.agent, self.all, grace_s=GRACE_S)

    def end_ranks(self) -> tuple[ProcessId, ...]:
        """Ends what is below the agent now, and nothing that it starts afterwards: it is to start the ranks again."""
        ranks = process.descendants([self.agent.pid])
        for rank in ranks:
            rank.send(signal.SIGTERM)
        deadline = time.monotonic() + RANK_GRACE_S
        while time.monotonic() < deadline and any(rank.is_alive() and not rank.is_stopped() for rank in ranks):
            time.sleep(0.05)
        for rank in ranks:
            rank.send(signal.SIGKILL)
        return tuple(rank for rank in ranks if rank.is_alive())
