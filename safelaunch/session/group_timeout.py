"""The process groups' own time-outs, from a rank's Flight Recorder: evidence has to be taken before they come.

Asked of the worker server's C++ thread, with no GIL and no frame in the rank, once the job has taken some steps and
then rarely again: groups may be made late.
"""

from __future__ import annotations

from safelaunch.capture.flight_recorder import smallest_timeout_s
from safelaunch.task import Task
from safelaunch.watch.watch import Watch

PART = 0.7
FIRST_AFTER_S = 5.0
AGAIN_AFTER_S = 900.0


class GroupTimeout:
    """Keeps ``watch.cap_s`` at 70 % of the smallest time-out seen. ``advance`` is called with every tick."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asking: Task[float | None] | None = None
        self._attempt = -1
        self._next_s = 0.0

    def advance(self, now: float) -> None:
        """Asks when it is time to; takes the answer once it is there. Never blocks."""
        if self._asking is not None:
            if self._asking.done:
                found, self._asking = self._asking.result(), None
                if found is not None:
                    self._watch.cap_s = PART * found
            return
        if self._attempt != self._watch.roster.attempt:
            self._attempt, self._watch.cap_s, self._next_s = self._watch.roster.attempt, None, 0.0
        if now < self._next_s:
            return
        first_s = min((p.first_step_ns for p in self._watch.last_progress.values() if p.first_step_ns), default=0) / 1e9
        stepping = bool(first_s) and now >= first_s + FIRST_AFTER_S
        if not (stepping or self._watch.is_in_loop):
            return
        asked = next((target for target in self._watch.targets() if target.socket is not None), None)
        self._next_s = now + AGAIN_AFTER_S
        if asked is not None:
            path = str(asked.socket)
            self._asking = Task("group timeout", lambda: smallest_timeout_s(path))
