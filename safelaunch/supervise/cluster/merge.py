"""TODO."""

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
    """The evidence of all nodes as one. Of a rank that several bring, the first counts."""
    kept: dict[int, RankEvidence] = {}
    for rank in (rank for evidence in (own, *others) for rank in evidence.ranks):
        if rank.rank < own.world_size:
            kept.setdefault(rank.rank, rank)
    everybody = (own, *others)
    answers = [evidence.answer for evidence in everybody]
    answer = next((one for one in _LEAST_KNOWN if one in answers), None)
    return replace(
        own,
        ranks=tuple(kept[number] for number in sorted(kept)),
        missing_ranks=tuple(number for number in range(own.world_size) if number not in kept),
        stall_s=max(evidence.stall_s for evidence in everybody),
        moving=any(evidence.moving for evidence in everybody),
        notes=tuple(dict.fromkeys(note for evidence in everybody for note in evidence.notes)),
        nodes=all_nodes(everybody),
        wrong_results=tuple(dict.fromkeys(one for evidence in everybody for one in evidence.wrong_results)),
        nccl=next((evidence.nccl for evidence in everybody if evidence.nccl is not None), None),
        gpus=tuple(one for evidence in everybody for one in evidence.gpus),
        answer=answer,
        work=tuple(one for evidence in everybody for one in evidence.work),
        ends=any(evidence.ends for evidence in everybody if evidence.answer == answer),
    )


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    """What other nodes have submitted, as far as it can be read; ``notes``: what could not be."""

    evidence: tuple[Evidence, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def with_own(self, own: Evidence) -> Evidence:
        """The evidence of all nodes as one."""
        own = replace(own, notes=(*own.notes, *self.notes))
        return merge(own, self.evidence) if self.evidence else own


_LEAST_KNOWN: tuple[Answer, ...] = ("alive", "unseen", "unknown", "dead")


def with_relative_times(evidence: Evidence, now_unix_s: float) -> Evidence:
    """With the times of failures as seconds since ``now_unix_s`` (negative ones): no node's clock travels.

    All nodes say so within a second or two of the failure, so these compare where the clocks do not.
    """

    def one(rank: RankEvidence) -> RankEvidence:
        if rank.exception is not None:
            rank = replace(rank, exception=replace(rank.exception, time_unix_s=rank.exception.time_unix_s - now_unix_s))
        if rank.exit is not None:
            rank = replace(rank, exit=replace(rank.exit, time_unix_s=rank.exit.time_unix_s - now_unix_s))
        return rank

    return replace(evidence, ranks=tuple(map(one, evidence.ranks)))
