"""Kinds of incidents."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.job.job import HOLD_S
from safelaunch.model import Outcome

LOOK_S = 6.0
ASKING_S = 0.3  # part of Ctrl-C's wait for the worker servers' replies


@dataclass(frozen=True, slots=True)
class IncidentKind:
    """The evidence to collect for one kind of incident."""

    outcome: Outcome
    """outcome of the bundle, unless the looks show another one"""
    looks: int = 2
    look_s: float = LOOK_S
    between_s: float = 1.0
    budget_s: float = float("inf")
    """time for all looks; then the ranks end"""
    asks: bool = True
    """query the worker servers; False if the ranks are gone or blocked"""
    native: bool = True
    """read C frames if they help, which pauses a process"""


HANG = IncidentKind("hang")
SUSPECT = IncidentKind("suspect", native=False)
EARLY_LOOK = IncidentKind("hang", between_s=2.0)
INTERRUPT = IncidentKind("hang", look_s=0.8, between_s=0.5, budget_s=HOLD_S - ASKING_S, native=False)
DUMP = IncidentKind("dump")
ATTACH = IncidentKind("dump", between_s=2.0, native=False)
CRASH = IncidentKind("crash", looks=1, asks=False)
ENDED = IncidentKind("dump", between_s=0.0, asks=False)
RENDEZVOUS = IncidentKind("crash", looks=0, asks=False)
