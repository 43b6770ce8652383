"""Recorded calls → a small script that hangs in the same way. Pure.

``recorded`` chooses the calls, ``programs`` makes a program of them, ``families`` and ``fold`` find what ranks and
rounds have in common, and ``text`` writes it down. ``smaller`` leaves out ranks and elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from safelaunch.diagnose import diagnose
from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import Evidence, Verdict
from safelaunch.reading.source import ReadSource
from safelaunch.reproduce.programs import program_of
from safelaunch.reproduce.recorded import Extent
from safelaunch.reproduce.text import Head, script

__all__ = ["Extent", "Reproduction", "Wish", "reproduction_of"]


@dataclass(frozen=True)
class Wish:
    """What the script is to hold. ``fewest``: only as many ranks as still show it; ``shrink``: small tensors."""

    extent: Extent = field(default_factory=Extent)
    fewest: bool = False
    shrink: bool = False


@dataclass(frozen=True)
class Reproduction:
    """``text``: the script. ``world_size``: how many ranks it takes. ``verdict``: on what was recorded."""

    text: str
    world_size: int
    verdict: Verdict
    notes: tuple[str, ...]


def reproduction_of(evidence: Evidence, wish: Wish, read_source: ReadSource | None = None) -> Reproduction:
    verdict = diagnose(evidence, read_source)
    program = program_of(Facts.of(evidence, read_source), wish.extent)
    head = Head((f"Recorded: {verdict.cause} ({verdict.confidence} confidence). {verdict.summary}",))
    return Reproduction(script(program, head), program.world_size, verdict, program.notes)
