"""A stall, from its first sign to its bundle. ``advance`` is called with every tick and never blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.timeline import Timeline
from safelaunch.console import say
from safelaunch.model import RankExit
from safelaunch.session import incident
from safelaunch.session.incident import Circumstances, Report
from safelaunch.session.looks import Looks, look_at
from safelaunch.session.patience import Patience
from safelaunch.task import Task
from safelaunch.watch.rhythm import Threshold
from safelaunch.watch.stall import Movement, Stall
from safelaunch.watch.watch import Glance, Watch

Exits = Callable[[], Mapping[int, RankExit]]


@dataclass
class _Suspicion:
    """A closer look under way: what is suspected, what has been seen, when the second look is due (None: no sooner).

    ``patience``: both looks are taken, and the workers that a rank waits for are given some time to wake up.
    """

    stall: Stall
    threshold: Threshold
    timeline: Timeline
    looks: Looks | None = None
    second_look_s: float | None = None
    patience: Patience | None = None


class StallCase:
    """suspect → two looks → conclusion → bundle."""

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits) -> None:
        self._watch = watch
        self._about = about
        self._exits = exits
        self._suspicion: _Suspicion | None = None
        self._looking: Task[Looks] | None = None
        self._writing: Task[Report] | None = None
        self._said_undecided = False

    @property
    def busy(self) -> bool:
        return self.looking or self.writing

    @property
    def looking(self) -> bool:
        return self._suspicion is not None

    @property
    def writing(self) -> bool:
        return self._writing is not None

    def abandon(self) -> None:
        """What was suspected no longer counts: a rank has failed meanwhile, or the clock was started again."""
        self._suspicion = None
        self._looking = None

    def advance(self, glance: Glance, now: float) -> Report | None:
        """One tick; returns the report when a hang has been confirmed and its bundle is written."""
        event = glance.event
        if event is not None and event.kind == "suspect" and event.stall is not None:
            timeline = Timeline().plus("last progress", event.stall.mark_s).plus("suspected")
            threshold = Threshold(event.stall.threshold_s, self._why(event.stall))
            self._suspicion = _Suspicion(event.stall, threshold, timeline)
            self._look(None)
        elif event is not None and event.kind == "clock-restarted":
            self.abandon()
        elif event is not None and event.kind == "recovered" and self._said_undecided:
            self._said_undecided = False
            say("it moves again; watching on")
        if self._suspicion is not None:
            self._advance_suspicion(self._suspicion, now)
        if self._writing is not None and self._writing.done:
            writing, self._writing = self._writing, None
            return writing.result()
        return None

    def _why(self, stall: Stall) -> str:
        if stall.phase and stall.threshold_s != self._watch.policy.stall_s:
            return f"phase {stall.phase!r}"
        threshold = self._watch.threshold_without_steps() if stall.before_first_step else self._watch.threshold()
        return threshold.why

    def _look(self, looks: Looks | None) -> None:
        targets = self._watch.targets()
        self._looking = Task("look", lambda: look_at(targets, looks, collectives=True))

    def _advance_suspicion(self, suspicion: _Suspicion, now: float) -> None:
        if suspicion.second_look_s is not None and now >= suspicion.second_look_s:
            suspicion.second_look_s = None
            self._look(suspicion.looks)
        if suspicion.patience is not None and suspicion.looks is not None:
            movement = suspicion.patience.advance(now)
            if movement is not None:
                self._suspicion = None
                self._conclude(suspicion, suspicion.looks, movement, now)
            return
        if self._looking is None or not self._looking.done:
            return
        first = suspicion.looks is None
        suspicion.looks = self._looking.result()
        self._looking = None
        if first:
            suspicion.second_look_s = now + self._watch.policy.confirm_s
        else:
            movement = self._movement(suspicion.stall, suspicion.looks)
            if movement == "still":
                suspicion.patience = self._patience(suspicion, suspicion.looks, now)
            if suspicion.patience is not None:
                return
            self._suspicion = None
            self._conclude(suspicion, suspicion.looks, movement, now)

    def _conclude(self, suspicion: _Suspicion, looks: Looks, movement: Movement, now: float) -> None:
        stall = suspicion.stall
        if self._watch.stepped_since(stall):
            movement = "moving"
        event = self._watch.conclude(stall, movement, now)
        if event is None or self._writing is not None:
            return
        if event.kind == "undecided":
            self._say_undecided(stall, now)
        elif event.kind == "hang":
            first, second = looks.taken[-2:]
            timeline = suspicion.timeline.plus("first look", first.end_s).plus("second look", second.end_s)
            self._begin_writing(suspicion, looks, now, timeline.plus("confirmed"))

    def _movement(self, stall: Stall, looks: Looks) -> Movement:
        from safelaunch.watch import movement

        if self._watch.stepped_since(stall):
            return "moving"
        # Where a limit before the first step was given, it holds.
        without_steps = self._watch.has_pulse_only and self._watch.policy.startup_max_s is None
        judged = movement.judge(looks.taken[-2], looks.taken[-1], _outputs(), without_steps=without_steps)
        return "active" if judged == "still" and looks.collectives_moved else judged

    @staticmethod
    def _patience(suspicion: _Suspicion, looks: Looks, now: float) -> Patience | None:
        from safelaunch.watch import movement

        before, after = looks.taken[-2:]
        pids = (*movement.working_workers(after), *movement.perhaps_polling(before, after))
        return Patience(pids, suspicion.threshold.seconds, now) if pids else None

    def _begin_writing(self, suspicion: _Suspicion, looks: Looks, now: float, timeline: Timeline) -> None:
        stall, threshold = suspicion.stall, suspicion.threshold
        stalled_s = now - stall.mark_s
        where = "no step yet" if stall.before_first_step else f"last step {stall.step}"
        say(f"nothing has moved for {stalled_s:.0f} s ({where}): collecting evidence from every rank")
        known = incident.known_of(self._watch, self._exits())
        self._writing = Task(
            "bundle",
            lambda: incident.write(
                "hang", looks, known, self._about, stall_s=stalled_s, threshold=threshold, timeline=timeline
            ),
        )

    def _say_undecided(self, stall: Stall, now: float) -> None:
        if self._said_undecided:
            return
        self._said_undecided = True
        policy = self._watch.policy
        limit = policy.startup_max_s if stall.before_first_step else policy.max_stall_s
        until = (
            f"--max-stall, {limit:.0f} s, decides" if limit is not None else "not a reason to act before the first step"
        )
        say(f"no step for {now - stall.mark_s:.0f} s, but something computes, writes or serves ({until})")


def _outputs() -> frozenset[str]:
    """Where our standard output and error lead, which the job has inherited, if a reader can hold them up."""
    found = []
    for descriptor in (1, 2):
        with suppress(OSError):
            found.append(os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return frozenset(target for target in found if target.startswith(("pipe:", "socket:", "/dev/")))
