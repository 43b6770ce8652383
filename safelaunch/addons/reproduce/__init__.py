"""Converts recorded calls to a small script that hangs in the same way. Does no I/O.

``recorded`` selects the calls, and ``programs`` builds a ``Program`` from them. ``fewer_ranks`` and ``tensor_sizes``
reduce it, ``fold`` finds what ranks and iterations have in common, and ``text`` writes the script. ``hang`` compares a
run of the script with the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from safelaunch.addons.reproduce.fewer_ranks import fewest_ranks, restricted_to
from safelaunch.addons.reproduce.hang import Hang, compare_run, hang_of
from safelaunch.addons.reproduce.program import Program
from safelaunch.addons.reproduce.programs import program_of
from safelaunch.addons.reproduce.recorded import Extent
from safelaunch.addons.reproduce.script_verdict import records_verdict
from safelaunch.addons.reproduce.tensor_sizes import is_large, with_sizes_that_gloo_checks, with_small_tensors
from safelaunch.addons.reproduce.text import script
from safelaunch.model import Evidence, Verdict
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import CaseFacts

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command
    from safelaunch.addons.reproduce import command

    _COMMAND: Command = command

__all__ = ["Extent", "Hang", "Reproduction", "ScriptOptions", "compare_run", "reproduction_of"]
_MANY = 100_000  # record entries of all ranks
LOST = (
    "Calls older than the records are lost: the script begins with the oldest recorded ones, and its own records are"
    " complete, so a verdict on it might single out one of the ranks."
)
_TOO_LARGE = "Tensors are smaller: some were too large for one machine. Sizes that differ stay different."


@dataclass(frozen=True)
class ScriptOptions:
    extent: Extent = field(default_factory=Extent)
    fewest: bool = False  # only as many ranks as still show the hang
    shrink: bool = False
    name: str = "repro.py"


@dataclass(frozen=True)
class Reproduction:
    text: str
    world_size: int
    command: str
    hang: Hang
    notes: tuple[str, ...]  # differences from the recording
    replays: bool  # False if no call could be replayed


def reproduction_of(evidence: Evidence, options: ScriptOptions, read_source: ReadSource | None = None) -> Reproduction:
    verdict = diagnose(evidence, read_source)
    culprits = list(dict.fromkeys(culprit.rank for culprit in verdict.culprits))
    program = _program(CaseFacts.of(evidence, read_source), options.extent)
    kept = fewest_ranks(program, culprits, records_verdict) if options.fewest else list(program.ranks)
    program, culprits = restricted_to(program, kept), [kept.index(rank) for rank in culprits]
    if is_large(program):
        program = replace(program, notes=(*program.notes, _TOO_LARGE))
    if options.shrink or is_large(program):
        program = with_small_tensors(program)
    program = with_sizes_that_gloo_checks(program)
    if any(text.startswith("calls before ") for text in verdict.missing):
        program = replace(program, notes=(*program.notes, LOST))
    written = script(program, _recorded(verdict, kept), options.name)
    return Reproduction(
        text=written.text,
        world_size=program.world_size,
        command=written.command,
        hang=hang_of(evidence, kept, read_source),
        notes=written.notes,
        replays=any(rank.calls or rank.end.kind != "stalls" for rank in program.ranks.values()),
    )


def _program(facts: CaseFacts, extent: Extent) -> Program:
    """Builds a program with as few iterations before the divergence as still lead to the same verdict."""
    program = program_of(facts, extent)
    size = sum(len(record.entries) for record in facts.alignment.records.values())
    if extent != Extent() or size > _MANY:
        return program
    every = program_of(facts, Extent(everything=True))
    wanted = records_verdict(every)
    longer = (program_of(facts, Extent(rounds=rounds)) for rounds in (6, 12, 24))
    return next((candidate for candidate in (program, *longer) if records_verdict(candidate) == wanted), every)


def _recorded(verdict: Verdict, kept: Sequence[int]) -> list[str]:
    recorded = [f"Recorded: {verdict.cause} ({verdict.confidence} confidence). {verdict.summary}"]
    if list(kept) != list(range(len(kept))):
        pairs = ", ".join(f"{place} was {rank}" for place, rank in enumerate(kept))
        recorded.append(f"Ranks are renumbered: {pairs}.")
    return recorded
