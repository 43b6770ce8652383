"""Recorded calls → a small script that hangs in the same way. Pure.

``recorded`` chooses the calls, ``programs`` makes a program of them and finds which of them nobody can have waited for,
``fold`` finds what ranks and rounds have in common, and ``text`` writes it down.
``program`` is its record, and leaves out ranks and elements. ``compared`` says whether a run of the script hangs as the
job did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from safelaunch.addons.reproduce.program import (
    FUNCTIONS,
    Program,
    fewest_ranks,
    is_large,
    of_ranks,
    with_sizes_that_gloo_checks,
    with_small_tensors,
)
from safelaunch.addons.reproduce.programs import program_of
from safelaunch.addons.reproduce.recorded import Extent
from safelaunch.addons.reproduce.text import records_tell, script
from safelaunch.model import Evidence, RankEvidence, Verdict
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.rank_state import CaseFacts

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command
    from safelaunch.addons.reproduce import command

    _COMMAND: Command = command

__all__ = ["Extent", "Hang", "Reproduction", "ScriptWish", "compared", "reproduction_of"]


_MANY = 100_000  # entries of all ranks
LOST = (
    "Older calls than the oldest that the records hold are lost: the script begins with these, and its own records hold"
    " all, so a verdict on it may single out one of the ranks."
)
_TOO_LARGE = "Tensors are smaller, as some were too large for any machine; sizes that differ stay different."


@dataclass(frozen=True)
class WaitPosition:
    """What a rank waits in. ``op`` is empty where it waits for no peer; ``ranks``, ``peer``: None where not known."""

    op: str
    ranks: tuple[int, ...] | None = None
    peer: int | None = None

    def differs(self, other: WaitPosition) -> bool:
        pairs = ((self.ranks, other.ranks), (self.peer, other.peer))
        return self.op != other.op or any(a != b for a, b in pairs if None not in (a, b))

    def __str__(self) -> str:
        group = f" of {ranks_word(self.ranks)}" if self.ranks else ""
        return f"in {self.op}{group}" if self.op else "in no call of torch.distributed"


@dataclass(frozen=True)
class Hang:
    """How a job hangs, or how it ended. ``ranks``: those that were seen. ``bare``: by records of calls alone.
    ``by_calls``: the culprits of the same cause without any source; None where the cause is then different.
    """

    outcome: str
    cause: str
    culprits: tuple[int, ...]
    ranks: Mapping[int, WaitPosition]
    bare: bool = False
    by_calls: frozenset[int] | None = None

    def names_like(self, other: Hang) -> bool:
        """The same ranks, or some of those that neither job's calls tell apart."""
        if set(self.culprits) == set(other.culprits):
            return True
        tied = self.by_calls
        return tied is not None and tied == other.by_calls and tied.issuperset(self.culprits + other.culprits)


@dataclass(frozen=True)
class ScriptWish:
    """What the script is to hold. ``fewest``: only as many ranks as still show it; ``shrink``: small tensors; ``name``:
    what it will be called.
    """

    extent: Extent = field(default_factory=Extent)
    fewest: bool = False
    shrink: bool = False
    name: str = "repro.py"


@dataclass(frozen=True)
class Reproduction:
    """``text``: the script; ``command`` runs it. ``hang``: what to expect of it.
    ``notes``: what is not as it was recorded. ``replays``: there is anything to replay.
    """

    text: str
    world_size: int
    command: str
    hang: Hang
    notes: tuple[str, ...]
    replays: bool


def reproduction_of(evidence: Evidence, wish: ScriptWish, read_source: ReadSource | None = None) -> Reproduction:
    verdict = diagnose(evidence, read_source)
    culprits = list(dict.fromkeys(culprit.rank for culprit in verdict.culprits))
    program = _program(CaseFacts.of(evidence, read_source), wish.extent)
    kept = fewest_ranks(program, culprits, records_tell) if wish.fewest else list(program.ranks)
    program, culprits = of_ranks(program, kept), [kept.index(rank) for rank in culprits]
    if is_large(program):
        program = replace(program, notes=(*program.notes, _TOO_LARGE))
    if wish.shrink or is_large(program):
        program = with_small_tensors(program)
    program = with_sizes_that_gloo_checks(program)
    if any(text.startswith("calls before ") for text in verdict.missing):
        program = replace(program, notes=(*program.notes, LOST))
    written = script(program, _recorded(verdict, kept), wish.name)
    return Reproduction(
        text=written.text,
        world_size=program.world_size,
        command=written.command,
        hang=hang_of(evidence, kept, read_source),
        notes=written.notes,
        replays=any(rank.calls or rank.end.kind != "stands" for rank in program.ranks.values()),
    )


def _program(facts: CaseFacts, extent: Extent) -> Program:
    """With as few rounds before the parting as lead to the verdict that all of them do."""
    program = program_of(facts, extent)
    size = sum(len(record.entries) for record in facts.alignment.records.values())
    if extent != Extent() or size > _MANY:
        return program
    every = program_of(facts, Extent(everything=True))
    wanted = records_tell(every)
    longer = (program_of(facts, Extent(rounds=rounds)) for rounds in (6, 12, 24))
    return next((one for one in (program, *longer) if records_tell(one) == wanted), every)


def _recorded(verdict: Verdict, kept: Sequence[int]) -> list[str]:
    recorded = [f"Recorded: {verdict.cause} ({verdict.confidence} confidence). {verdict.summary}"]
    if list(kept) != list(range(len(kept))):
        pairs = ", ".join(f"{place} was {rank}" for place, rank in enumerate(kept))
        recorded.append(f"Ranks are renumbered: {pairs}.")
    return recorded


# --- Whether a run of the script hangs as the job did: each rank in the same call, with the same verdict --------------
#
# The conditions in the script are not those of the job's source. Where these chose among ranks that the calls alone do
# not tell apart, the script's may choose another one.

# What makes a rank stand, by the cause of the replay, where it cannot be the recorded one.
_STAND_INS = {
    "missing-from-collective": ("stuck-in-user-code",),  # here its stack says why
    "data-loading": ("stuck-in-user-code",),
    "uninterruptible-io": ("stuck-in-user-code",),
    "gil-held": ("stuck-in-user-code",),
    "swallowed-exception": ("collective-mismatch", "uneven-batches"),
    "uneven-batches": ("collective-mismatch",),  # the script has no loop to leave
}


def hang_of(evidence: Evidence, kept: Sequence[int], read_source: ReadSource | None = None) -> Hang:
    """With the numbers that the ``kept`` ranks have in a script of these alone."""
    verdict, facts = diagnose(evidence, read_source), CaseFacts.of(evidence, read_source)
    number = {rank: place for place, rank in enumerate(kept)}
    ranks = {number[rank]: _standing(facts, rank, number) for rank in facts.ranks if rank in number}
    bare, calls = all(rank.main is None for rank in evidence.ranks), diagnose(evidence)
    by_calls = frozenset(_named(calls, number)) if calls.cause == verdict.cause else None
    return Hang(verdict.outcome, verdict.cause, _named(verdict, number), ranks, bare, by_calls)


def _named(verdict: Verdict, number: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number[culprit.rank] for culprit in verdict.culprits if culprit.rank in number))


def compared(recorded: Hang, run: Evidence, read_source: ReadSource | None = None) -> tuple[list[str], Hang]:
    """What a run of the script does otherwise, and how it hangs. Where records alone told of the job, the run's alone
    may tell the same.
    """
    bare = tuple(
        RankEvidence(rank=rank.rank, host=rank.host, pid=rank.pid, flight_record=rank.flight_record)
        for rank in run.ranks
    )
    views = (run, structs.replace(run, ranks=bare)) if recorded.bare else (run,)
    hangs = [hang_of(view, range(run.world_size), read_source) for view in views]
    return min(((differences(recorded, hang), hang) for hang in hangs), key=lambda one: len(one[0]))


def _standing(facts: CaseFacts, rank: int, number: Mapping[int, int]) -> WaitPosition:
    wait = facts.ranks[rank].wait
    if wait is None or wait.kind == "init":
        return WaitPosition("init_process_group" if wait is not None else "")
    members, known = facts.alignment.members(wait.group) if wait.group is not None else (frozenset[int](), False)
    ranks = tuple(sorted(number[member] for member in members if member in number)) if known else None
    return WaitPosition(
        FUNCTIONS.get(wait.op.split(" ")[0], wait.op), ranks, number.get(wait.peer) if wait.peer is not None else None
    )


def differences(recorded: Hang, run: Hang) -> list[str]:
    """What the run does otherwise, a sentence each; none where it hangs in the same way."""
    found = []
    crashes = {one.outcome == "crash" for one in (recorded, run)}  # a dump or an early look may show a hang as well
    for rank, there in recorded.ranks.items():
        here = run.ranks.get(rank)
        if here is None:
            found.append(f"rank {rank} was not seen in the run")
        elif crashes == {False} and there.differs(here):
            found.append(f"rank {rank} was {there}, and is {here}")
    if len(crashes) > 1:
        found = [f"the script ends in a {run.outcome}, and the job ended in a {recorded.outcome}"]
    causes = (recorded.cause, *_STAND_INS.get(recorded.cause, ()))
    if run.cause not in causes or not run.names_like(recorded):
        found.append(f"the verdict on the run is {_told(run)}, and was {_told(recorded)}")
    return found


def _told(hang: Hang) -> str:
    return f"{hang.cause} ({ranks_word(hang.culprits) if hang.culprits else 'no rank named'})"
