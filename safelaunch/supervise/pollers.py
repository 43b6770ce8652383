"""Periodically queries the ranks of a running job: timeouts, collectives, background work.

The C++ threads of the worker servers reply without the GIL and without running a frame in the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from safelaunch.capture import counters, stacks
from safelaunch.capture.counters import Counters
from safelaunch.capture.flight_recorder import default_timeout_s
from safelaunch.supervise.looks import newest_entries
from safelaunch.supervise.watch import rhythm, work
from safelaunch.supervise.watch.progress import Watch, first_step_s
from safelaunch.supervise.watch.work import Background
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

Answer = TypeVar("Answer")

CAP_AFTER_S, CAP_AGAIN_S = 5.0, 900.0  # groups can be created late
_INSTEAD = "the ranks send their stacks themselves, without C frames and without the stacks of child processes"
_FIX = "run 'safelaunch doctor' where the job runs: it shows the fix"


class Poller(Generic[Answer]):
    """Sends a query from a thread, and processes the reply on a later tick."""

    name: str
    again_s: float

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asking: BackgroundTask[Answer] | None = None
        self._asked_of = self._attempt = -1
        self._next_s = 0.0

    def advance(self, now: float) -> None:
        """Starts a query or processes its reply, without blocking. Drops replies about an ended attempt."""
        if self._attempt != self._watch.roster.attempt:
            self._attempt, self._next_s = self._watch.roster.attempt, 0.0
            self.reset()
        if self._asking is not None:
            if self._asking.done:
                answer, self._asking = self._asking.result(), None
                if self._asked_of == self._attempt:
                    self.take(answer, now)
            return
        if now < self._next_s or not self.is_due(now):
            return
        self._next_s = now + self.again_s
        self._asked_of = self._attempt
        question = self.question()
        if question is not None:
            self._asking = BackgroundTask(self.name, question)

    def reset(self) -> None:
        """Forgets everything about an ended attempt."""

    def is_due(self, now: float) -> bool:
        raise NotImplementedError

    def question(self) -> Callable[[], Answer] | None:
        """Returns a function to run in a thread; None if there are no ranks."""
        raise NotImplementedError

    def take(self, answer: Answer, now: float) -> None:
        raise NotImplementedError

    def has_stepped_for(self, seconds: float, now: float) -> bool:
        first_s = first_step_s(self._watch.last_progress)
        return bool(first_s) and now >= first_s + seconds


class GroupTimeoutPoller(Poller["float | None"]):
    """Derives ``watch.cap_s`` from the default group's timeout in a rank's Flight Recorder.

    See ``rhythm.cap_of`` for ``floor_s``.
    """

    name, again_s = "group timeout", CAP_AGAIN_S

    def __init__(self, watch: Watch, floor_s: float) -> None:
        super().__init__(watch)
        self._floor_s = floor_s

    def reset(self) -> None:
        self._watch.cap_s = None

    def is_due(self, now: float) -> bool:
        return self.has_stepped_for(CAP_AFTER_S, now) or self._watch.is_in_loop

    def question(self) -> Callable[[], float | None] | None:
        asked = next((target for target in self._watch.targets() if target.socket is not None), None)
        return partial(default_timeout_s, str(asked.socket)) if asked is not None else None

    def take(self, answer: float | None, now: float) -> None:
        if answer is not None:
            self._watch.cap_s = rhythm.cap_of(answer, self._floor_s)


class TracingPoller(Poller[str]):
    """Checks once whether py-spy can read a rank's stacks without stopping it, and prints a line if it can't."""

    name, again_s = "tracing", math.inf
    _asked = False

    def is_due(self, now: float) -> bool:
        return not self._asked and any(target.has_beacon for target in self._watch.targets())

    def question(self) -> Callable[[], str] | None:
        self._asked = True
        return partial(stacks.refusal, next(target.pid for target in self._watch.targets() if target.has_beacon))

    def take(self, answer: str, now: float) -> None:
        if answer:
            say(f"py-spy can't read the stacks of the ranks: {answer}; {_INSTEAD}; {_FIX}")


class PulsePoller(Poller[dict[int, int]]):
    """Passes the ranks' newest collectives to the watch, unless the job marks steps."""

    name = "pulse"

    @property
    def again_s(self) -> float:  # type: ignore[override]
        return self._watch.pulse_period_s

    def is_due(self, now: float) -> bool:
        return self._watch.has_pulse_only

    def question(self) -> Callable[[], dict[int, int]] | None:
        targets = self._watch.targets()
        return (lambda: newest_entries(targets)) if any(target.socket for target in targets) else None

    def take(self, answer: dict[int, int], now: float) -> None:
        self._watch.note_collectives(answer, now)


YOUNG_S, WINDOW_S, WINDOW_EVERY_S = 20.0, 1.5, 30.0
QUIET_AFTER_S, QUIET_TIMES = 3.0, 3.0  # the larger of seconds and usual steps


class BackgroundPoller(Poller[Counters]):
    """Learns the background work of a job while it is stepping, and reads its counters once it is quiet.

    Each window is as short as the time between two looks, because longer windows would dilute bursts. A window counts
    once a later step shows that the job was training.
    """

    name, again_s = "work", WINDOW_S

    def reset(self) -> None:
        self._before: Counters | None = None
        self._tentative: Background | None = None
        self._end_s = 0.0

    def is_due(self, now: float) -> bool:
        if not self._watch.last_progress or (self._is_quiet(now) and self._watch.quiet is not None):
            self._before = None
            return False
        return True

    def question(self) -> Callable[[], Counters] | None:
        pids, before = [target.pid for target in self._watch.targets()], self._before
        return (lambda: counters.read(pids, before)) if pids else None

    def take(self, answer: Counters, now: float) -> None:
        watch, before = self._watch, self._before
        if self._tentative is not None and self._mark_s(now) > self._end_s:
            watch.background, self._tentative = self._tentative, None
        if self._is_quiet(now):
            watch.keep_quiet_counters(answer)
            self._before = self._tentative = None
            return
        if before is not None:
            self._tentative, self._end_s = work.learn(self._tentative or watch.background, before, answer), answer.at_s
        self._before = answer
        if before is not None and self.has_stepped_for(YOUNG_S, now):
            self._before, self._next_s = None, now + WINDOW_EVERY_S

    def _mark_s(self, now: float) -> float:
        spell = self._watch.spell(now)
        return spell.since_s if spell is not None else now

    def _is_quiet(self, now: float) -> bool:
        return now - self._mark_s(now) > max(QUIET_AFTER_S, QUIET_TIMES * self._watch.usual_step_s)
