"""The kinds of incidents: why one looks at a job, and what that may cost it."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.job.job import HOLD_S
from safelaunch.model import Outcome

LOOK_S = 6.0
ASKING_S = 0.3  # of what Ctrl-C waits: for what the ranks themselves are asked


@dataclass(frozen=True, slots=True)
class IncidentKind:
    """One kind. All that it needs of the ranks comes first, so that they may end while the bundle is written."""

    outcome: Outcome
    """of the bundle, where the looks don't show another one"""
    looks: int = 2
    """at the ranks: two show what moves"""
    look_s: float = LOOK_S
    """the longest that a look may take"""
    between_s: float = 1.0
    """two looks"""
    budget_s: float = float("inf")
    """for the looks: then the ranks end, and what is there has to do"""
    asks: bool = True
    """the ranks themselves, for their records: not where they are gone, or everybody waits for us"""
    native: bool = True
    """C frames, where they tell: that pauses a process, so not in a job that may go on"""


HANG = IncidentKind("hang")
SUSPECT = IncidentKind("suspect", native=False)
FIRST_WORD = IncidentKind("hang", between_s=2.0)
INTERRUPT = IncidentKind("hang", look_s=0.8, between_s=0.5, budget_s=HOLD_S - ASKING_S, native=False)
DUMP = IncidentKind("dump")
ATTACH = IncidentKind("dump", between_s=2.0, native=False)
CRASH = IncidentKind("crash", looks=1, asks=False)
ENDED = IncidentKind("dump", between_s=0.0, asks=False)
RENDEZVOUS = IncidentKind("crash", looks=0, asks=False)
