"""Merges the evidence of all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from safelaunch.model import (
    Answer,
    Evidence,
    RankEvidence,
)
from safelaunch.model.evidence import all_nodes


def merge(own: Evidence, others: Sequence[Evidence]) -> Evidence:
    """Merges the evidence of all nodes. If several nodes report a rank, the first report counts."""
    kept: dict[int, RankEvidence] = {}
    for rank in (rank for evidence in (own, *others) for rank in evidence.ranks):
        if rank.rank < own.world_size:
            kept.setdefault(rank.rank, rank)
    all_evidence = (own, *others)
    answers = [evidence.answer for evidence in all_evidence]
    answer = next((condition for condition in _LEAST_KNOWN if condition in answers), None)
    return replace(
        own,
        ranks=tuple(kept[number] for number in sorted(kept)),
        missing_ranks=tuple(number for number in range(own.world_size) if number not in kept),
        stall_s=max(evidence.stall_s for evidence in all_evidence),
        moving=any(evidence.moving for evidence in all_evidence),
        notes=tuple(dict.fromkeys(note for evidence in all_evidence for note in evidence.notes)),
        nodes=all_nodes(all_evidence),
        wrong_results=tuple(dict.fromkeys(result for evidence in all_evidence for result in evidence.wrong_results)),
        nccl=next((evidence.nccl for evidence in all_evidence if evidence.nccl is not None), None),
        gpus=tuple(gpu for evidence in all_evidence for gpu in evidence.gpus),
        links=tuple(link for evidence in all_evidence for link in evidence.links),
        answer=answer,
        work=tuple(item for evidence in all_evidence for item in evidence.work),
        ends=any(evidence.ends for evidence in all_evidence if evidence.answer == answer),
    )


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    evidence: tuple[Evidence, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def with_own(self, own: Evidence) -> Evidence:
        own = replace(own, notes=(*own.notes, *self.notes))
        return merge(own, self.evidence) if self.evidence else own


_LEAST_KNOWN: tuple[Answer, ...] = ("alive", "unseen", "unknown", "dead")


def with_relative_times(evidence: Evidence, now_unix_s: float) -> Evidence:
    """Replaces times of failures with seconds since ``now_unix_s``, because nodes' clocks differ.

    All nodes report within about two seconds of the failure, so the results can be compared.
    """

    def one(rank: RankEvidence) -> RankEvidence:
        if rank.exception is not None:
            rank = replace(rank, exception=replace(rank.exception, time_unix_s=rank.exception.time_unix_s - now_unix_s))
        if rank.exit is not None:
            rank = replace(rank, exit=replace(rank.exit, time_unix_s=rank.exit.time_unix_s - now_unix_s))
        return rank

    return replace(evidence, ranks=tuple(map(one, evidence.ranks)))
