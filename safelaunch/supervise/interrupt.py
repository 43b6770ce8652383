"""Ctrl-C at a frozen job: first the evidence, while the ranks still stand where they froze; then the stop.

The signal waits for the evidence for ``job.job.HOLD_S`` at most. What is not there by then is done without: the
ranks end, and the verdict goes by the looks that were taken before.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from msgspec import structs

from safelaunch.job.job import HOLD_S
from safelaunch.model import Answer, Outcome
from safelaunch.supervise import incident
from safelaunch.supervise.answer import proves, work_in
from safelaunch.supervise.council import Council
from safelaunch.supervise.incident import Circumstances, Exits, Report, Timeline
from safelaunch.supervise.looks import Looks, look_at
from safelaunch.supervise.watch.job import Watch
from safelaunch.supervise.watch.quiet import FROZEN_TIMES
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.system.console import say
from safelaunch.system.task import Task

# Of the time that the signal waits: for each look, between the two, and for what the ranks themselves are asked.
LOOK_S, BETWEEN_S, ASKING_S = 0.8, 0.5, 0.3


@dataclass
class _Taking:
    """The evidence in progress. ``over``: the ranks are being ended; ``taken``: nothing more is needed of them."""

    writing: Task[Report | None]
    over: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)


class Interrupt:
    """What is taken of a frozen job before it is stopped. No method but the work itself blocks."""

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits, council: Council) -> None:
        self._watch = watch
        self._about = about
        self._exits = exits
        self._council = council
        self._taking: _Taking | None = None

    def begin(self, frozen_s: float, usual_s: float, now: float) -> None:
        """Begins to look at the ranks; ``frozen_s``: for how long none has made a step."""
        over, taken = threading.Event(), threading.Event()
        mark_s = now - frozen_s
        timeline = Timeline().plus("last progress", mark_s).plus("interrupted", now)

        def work() -> Report | None:
            try:
                return self._write(over, taken, mark_s, usual_s, timeline)
            finally:
                taken.set()

        self._taking = _Taking(Task("interrupt", work), over, taken)

    @property
    def needs_ranks(self) -> bool:
        """Whether the ranks have to live for a moment yet."""
        return self._taking is not None and not (self._taking.over.is_set() or self._taking.taken.is_set())

    @property
    def writing(self) -> bool:
        return self._taking is not None and not self._taking.writing.done

    def is_over(self) -> None:
        """The ranks are being ended: what is seen of them from here on says nothing."""
        if self._taking is not None:
            self._taking.over.set()

    def report(self) -> Report | None:
        """The report, once, when its bundle is written."""
        if self._taking is None or not self._taking.writing.done:
            return None
        writing, self._taking = self._taking.writing, None
        return writing.result()

    def _write(
        self, over: threading.Event, taken: threading.Event, mark_s: float, usual_s: float, timeline: Timeline
    ) -> Report | None:
        known = incident.known_of(self._watch, self._exits())
        steps = self._steps()
        looks = self._look(over, timeline.moments[-1].monotonic_s)
        moving = len(looks.taken) < 2 or looks.collectives_moved or bool(work_in(looks, self._watch.background))
        alone = not self._watch.unseen
        outcome: Outcome = "hang" if not moving and alone else "dump"
        times = f"{FROZEN_TIMES:g} x its usual step, when Ctrl-C was pressed" if usual_s else "Ctrl-C was pressed"
        found = incident.take_evidence(
            outcome,
            looks,
            known,
            self._about,
            stall_s=time.monotonic() - mark_s,
            threshold=Threshold(FROZEN_TIMES * usual_s, times) if usual_s else None,
            moving=moving,
            ask=not over.is_set(),
            native=False,
            ranks_seen=taken.set,
            timeline=timeline,
        )
        if outcome == "hang":
            answer: Answer = "dead" if proves(found.evidence) else "unknown"
            found = replace(found, evidence=structs.replace(found.evidence, answer=answer))
        if steps != self._steps():
            incident.discard(found)
            say("a rank advanced: the job is slow, not hung; no bundle written")
            return None
        return incident.finish(found if alone else incident.with_nodes(found, self._council.nodes(probing=False)))

    def _look(self, over: threading.Event, begin_s: float) -> Looks:
        """Two looks, or what there is time for."""
        targets = self._watch.targets()
        first = look_at(targets, None, collectives=True, deadline_s=LOOK_S)
        if over.wait(BETWEEN_S):
            return first
        left_s = begin_s + HOLD_S - ASKING_S - time.monotonic()
        second = look_at(targets, first, collectives=True, deadline_s=min(LOOK_S, left_s)) if left_s > 0 else first
        return first if over.is_set() else second

    def _steps(self) -> tuple[int, ...]:
        return tuple(page.marks()[0] for _, page in sorted(self._watch.roster.pages().items()))
