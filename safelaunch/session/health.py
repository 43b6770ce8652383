"""What slows a healthy job down, looked for rarely and said once: a straggler, a shared GPU, a stranger's memory.

Never a reason to end anything. Asked are the worker servers' C++ threads (no GIL, no frame in the rank) and NVML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from safelaunch.capture.flight_recorder import arrivals_of
from safelaunch.capture.gpu import gpus_json
from safelaunch.capture.look import Target
from safelaunch.capture.parallel import gather
from safelaunch.console import say
from safelaunch.leases.driver import has_driver
from safelaunch.session import gpu_use
from safelaunch.task import Task
from safelaunch.watch import stragglers
from safelaunch.watch.watch import Watch

FIRST_AFTER_S = 60.0  # of steps: the first ones are everybody's slowest
AGAIN_AFTER_S = 600.0


class Health:
    """Keeps ``watch.notes``. ``advance`` is called with every tick and never blocks."""

    def __init__(self, watch: Watch, own_pids: Callable[[], Collection[int]]) -> None:
        self._watch = watch
        self._own_pids = own_pids
        self._looking: Task[tuple[str, ...]] | None = None
        self._attempt = -1
        self._next_s = 0.0

    def advance(self, now: float) -> None:
        """Looks when it is time to; says what is new once the look is done. ``now``: CLOCK_MONOTONIC, seconds."""
        if self._looking is not None:
            if self._looking.done:
                found, self._looking = self._looking.result(), None
                self._tell(found)
            return
        if self._attempt != self._watch.roster.attempt:
            self._attempt, self._next_s, self._watch.notes = self._watch.roster.attempt, 0.0, ()
        first_s = min((p.first_step_ns for p in self._watch.last_progress.values() if p.first_step_ns), default=0) / 1e9
        if now < self._next_s or not first_s or now < first_s + FIRST_AFTER_S:
            return
        self._next_s = now + AGAIN_AFTER_S
        targets, own = self._watch.targets(), frozenset(self._own_pids())
        self._looking = Task("health", lambda: look(targets, own))

    def _tell(self, found: tuple[str, ...]) -> None:
        known = {_subject(note) for note in self._watch.notes}
        for note in found:
            if _subject(note) not in known:
                say(f"{note}; it runs on")
        self._watch.notes = found


def look(targets: Collection[Target], own: Collection[int]) -> tuple[str, ...]:
    """One look at all ranks of this node and their GPUs; what cannot be asked is left out."""
    found: list[str] = []
    asked = [target for target in targets if target.socket is not None]
    answers = gather([partial(arrivals_of, str(target.socket)) for target in asked], deadline_s=5.0)
    arrivals = {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer}
    straggler = stragglers.find(arrivals)
    if straggler is not None:
        found.append(straggler.words)
    document = _gpus()
    if document is not None:
        found += gpu_use.notes(document, {target.rank: target.pid for target in targets}, own)
    return tuple(found)


def _gpus() -> dict[str, Any] | None:
    """NVML's answer; None where there is no NVIDIA driver, which is seen without starting anything."""
    if not has_driver(os.environ):
        return None
    answer = gpus_json().value
    return json.loads(answer) if answer is not None else None


def _subject(note: str) -> str:
    """What a note is about, without its figures, which change from look to look."""
    return note.partition(":")[0] if note.startswith("rank") else note.partition(", not of this job")[0]
