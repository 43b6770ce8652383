"""When each stage of an incident was reached."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """When a stage of an incident was reached, on both clocks."""

    stage: str
    unix_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The stages of an incident in their order, for ``manifest.json``: how long it took us, and where that went."""

    moments: tuple[Moment, ...] = ()

    def plus(self, stage: str, at_s: float | None = None) -> Timeline:
        """One stage more, reached at ``at_s`` seconds of CLOCK_MONOTONIC (None: now)."""
        now = time.monotonic()
        then = now if at_s is None else at_s
        moment = Moment(stage, round(time.time() - (now - then), 4), round(then, 4))
        return Timeline((*self.moments, moment))
