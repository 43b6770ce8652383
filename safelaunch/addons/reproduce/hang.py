"""Describes how a job hangs, and compares that with a run of the script.

The conditions in the script differ from those in the job's source: if the recorded calls don't distinguish some ranks,
the script might assign them different roles than the job did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from safelaunch.addons.reproduce.gloo import FUNCTIONS
from safelaunch.model import Evidence, RankEvidence, Verdict
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.rank_state import CaseFacts


@dataclass(frozen=True)
class WaitPosition:
    op: str  # empty if it waits for no peer
    ranks: tuple[int, ...] | None = None  # None if unknown
    peer: int | None = None  # None if unknown

    def differs(self, other: WaitPosition) -> bool:
        pairs = ((self.ranks, other.ranks), (self.peer, other.peer))
        return self.op != other.op or any(a != b for a, b in pairs if None not in (a, b))

    def __str__(self) -> str:
        group = f" of {ranks_word(self.ranks)}" if self.ranks else ""
        return f"in {self.op}{group}" if self.op else "in no call of torch.distributed"


@dataclass(frozen=True)
class Hang:
    outcome: str
    cause: str
    culprits: tuple[int, ...]
    ranks: Mapping[int, WaitPosition]
    bare: bool = False  # the evidence consists of call records alone
    by_calls: frozenset[int] | None = None  # culprits according to calls alone; None if the cause then differs

    def names_like(self, other: Hang) -> bool:
        """Returns whether the culprits are the same, or can't be told apart by the calls in either hang."""
        if set(self.culprits) == set(other.culprits):
            return True
        tied = self.by_calls
        return tied is not None and tied == other.by_calls and tied.issuperset(self.culprits + other.culprits)


# Cause of the job → causes that its replay can have instead, if it can't reproduce that one.
_STAND_INS = {
    "missing-from-collective": ("stuck-in-user-code",),  # in the replay, the stack shows the reason
    "data-loading": ("stuck-in-user-code",),
    "uninterruptible-io": ("stuck-in-user-code",),
    "gil-held": ("stuck-in-user-code",),
    "swallowed-exception": ("collective-mismatch", "uneven-batches"),
    "uneven-batches": ("collective-mismatch",),  # the script has no loop to leave
}


def hang_of(evidence: Evidence, kept: Sequence[int], read_source: ReadSource | None = None) -> Hang:
    """Describes a hang. Ranks get the numbers that they have in a script with only the ``kept`` ranks."""
    verdict, facts = diagnose(evidence, read_source), CaseFacts.of(evidence, read_source)
    number = {rank: place for place, rank in enumerate(kept)}
    ranks = {number[rank]: _wait_position(facts, rank, number) for rank in facts.ranks if rank in number}
    bare, calls = all(rank.main is None for rank in evidence.ranks), diagnose(evidence)
    by_calls = frozenset(_named(calls, number)) if calls.cause == verdict.cause else None
    return Hang(verdict.outcome, verdict.cause, _named(verdict, number), ranks, bare, by_calls)


def _named(verdict: Verdict, number: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number[culprit.rank] for culprit in verdict.culprits if culprit.rank in number))


def compare_run(recorded: Hang, run: Evidence, read_source: ReadSource | None = None) -> tuple[list[str], Hang]:
    """Returns how the run differs from the job, and how the run hangs.

    If the job left only records, then only the run's records are compared, too, and the closer of both results counts.
    """
    bare = tuple(
        RankEvidence(rank=rank.rank, host=rank.host, pid=rank.pid, flight_record=rank.flight_record)
        for rank in run.ranks
    )
    views = (run, structs.replace(run, ranks=bare)) if recorded.bare else (run,)
    hangs = [hang_of(view, range(run.world_size), read_source) for view in views]
    return min(((differences(recorded, hang), hang) for hang in hangs), key=lambda pair: len(pair[0]))


def _wait_position(facts: CaseFacts, rank: int, number: Mapping[int, int]) -> WaitPosition:
    wait = facts.ranks[rank].wait
    if wait is None or wait.kind == "init":
        return WaitPosition("init_process_group" if wait is not None else "")
    members, is_known = facts.alignment.members(wait.group) if wait.group is not None else (frozenset[int](), False)
    ranks = tuple(sorted(number[member] for member in members if member in number)) if is_known else None
    return WaitPosition(
        FUNCTIONS.get(wait.op.split(" ")[0], wait.op), ranks, number.get(wait.peer) if wait.peer is not None else None
    )


def differences(recorded: Hang, run: Hang) -> list[str]:
    """Returns how the run's hang differs from the recorded one, one sentence each; empty if it is the same."""
    sentences = []
    crashes = {hang.outcome == "crash" for hang in (recorded, run)}  # a dump or an early look can show a hang as well
    for rank, position in recorded.ranks.items():
        here = run.ranks.get(rank)
        if here is None:
            sentences.append(f"rank {rank} was not seen in the run")
        elif crashes == {False} and position.differs(here):
            sentences.append(f"rank {rank} was {position}, and is {here}")
    if len(crashes) > 1:
        sentences = [f"the script ends in a {run.outcome}, and the job ended in a {recorded.outcome}"]
    causes = (recorded.cause, *_STAND_INS.get(recorded.cause, ()))
    if run.cause not in causes or not run.names_like(recorded):
        sentences.append(f"the verdict on the run is {_describe_verdict(run)}, and was {_describe_verdict(recorded)}")
    return sentences


def _describe_verdict(hang: Hang) -> str:
    return f"{hang.cause} ({ranks_word(hang.culprits) if hang.culprits else 'no rank named'})"
