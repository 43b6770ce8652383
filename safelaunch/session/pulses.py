"""Asks the ranks of a job that marks no step how far their collectives are, every few seconds."""

from __future__ import annotations

from safelaunch.session.looks import newest_entries
from safelaunch.task import Task
from safelaunch.watch.watch import Watch


class PulseTaker:
    """``advance`` is called with every tick and never blocks. A job that steps is not asked.

    The answers come from the worker servers' C++ threads: no GIL is taken, and no frame runs in the rank.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asking: Task[dict[int, int]] | None = None
        self._attempt = -1
        self._next_s = 0.0

    def advance(self, now: float) -> None:
        """``now``: CLOCK_MONOTONIC, seconds."""
        if self._asking is not None:
            if self._asking.done:
                answers, self._asking = self._asking.result(), None
                if self._attempt == self._watch.roster.attempt:
                    self._watch.hear(answers, now)
            return
        if now < self._next_s or not self._watch.has_pulse_only:
            return
        self._next_s = now + self._watch.pulse_period_s
        self._attempt = self._watch.roster.attempt
        targets = self._watch.targets()
        if any(target.socket for target in targets):
            self._asking = Task("pulse", lambda: newest_entries(targets))
