"""Merges bundles from the nodes of one job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Answer,
    Outcome,
)
from safelaunch.model.evidence import all_nodes
from safelaunch.verdict.exceptions import has_lost_a_peer
from safelaunch.verdict.exits import failed_by_itself
from safelaunch.verdict.rhythm import is_foreign_job

APART_S = 120.0  # tolerance for clocks of different nodes


def merge(bundles: Sequence[EvidenceSource], names: Sequence[str]) -> EvidenceSource:
    """Merges the bundles of one job's nodes. Messages refer to them by ``names``.

    Raises Unreadable if they belong to different jobs (a rank is in two bundles, or world sizes differ), or to
    different incidents (the job continued in between).
    """
    bundle_of_rank: dict[int, str] = {}
    for evidence_of_node, name in zip(bundles, names, strict=True):
        for rank in evidence_of_node.evidence.ranks:
            if rank.rank in bundle_of_rank:
                raise Unreadable(
                    f"rank {rank.rank} is in {bundle_of_rank[rank.rank]} and in {name}: name one of these bundles"
                )
            bundle_of_rank[rank.rank] = name
    worlds = {bundle.evidence.world_size for bundle in bundles}
    if len(worlds) > 1:
        raise Unreadable(
            f"it has bundles of jobs with {' and '.join(map(str, sorted(worlds)))} ranks: name one of them"
        )
    _check_same_incident(bundles, names)
    world = worlds.pop()
    first = bundles[0].evidence
    outcomes = {bundle.evidence.outcome for bundle in bundles}
    outcome: Outcome = next((kind for kind in _WORST if kind in outcomes), "dump")
    # One supervisor stopped its ranks for a hang, so the others' ranks lost their connections.
    stopped = _hung_ranks(bundles) if outcomes >= {"hang", "crash"} else ()
    outcome = "hang" if stopped else outcome
    ranks = sorted((rank for bundle in bundles for rank in bundle.evidence.ranks), key=lambda rank: rank.rank)
    by_name = list(zip(names, bundles, strict=True))
    asked, witness = next(((name, f.evidence.nccl) for name, f in by_name if f.evidence.nccl is not None), ("", None))
    evidence = msgspec.structs.replace(
        first,
        outcome=outcome,
        ranks=tuple(ranks),
        missing_ranks=tuple(sorted(set(range(world)) - set(bundle_of_rank))),
        stall_s=max(bundle.evidence.stall_s for bundle in bundles),
        moving=any(bundle.evidence.moving for bundle in bundles),
        for_finding=any(bundle.evidence.for_finding for bundle in bundles),
        nodes=all_nodes([bundle.evidence for bundle in bundles]),
        nccl=witness,
        answer=next((answer for answer in _ANSWERS if any(f.evidence.answer == answer for f in bundles)), None),
        wrong_results=tuple(dict.fromkeys(result for bundle in bundles for result in bundle.evidence.wrong_results)),
        launched=next((bundle.evidence.launched for bundle in bundles if bundle.evidence.launched is not None), None),
        stopped=stopped,
        gpus=tuple(gpu for bundle in bundles for gpu in bundle.evidence.gpus),
        links=tuple(link for bundle in bundles for link in bundle.evidence.links),
    )
    problems = [f"{name}/{text}" for name, bundle in by_name for text in bundle.problems]
    with_nodes = next((name for name, bundle in by_name if bundle.evidence.nodes), "")
    files = {"nodes.json": f"{with_nodes}/nodes.json"} if with_nodes else {}
    files |= {"early.json": f"{names[0]}/early.json"} if first.early else {}
    with_wrong_results = next((name for name, bundle in by_name if bundle.evidence.wrong_results), "")
    files |= {WRONG_RESULTS_FILE: f"{with_wrong_results}/{WRONG_RESULTS_FILE}"} if with_wrong_results else {}
    files |= {witness.file: f"{asked}/{witness.file}"} if witness is not None else {}
    files |= {f"ranks/{number}/": f"{name}/ranks/{number}/" for number, name in bundle_of_rank.items()}
    return EvidenceSource(f"{len(bundles)} bundles of one job", evidence, tuple(problems), files)


def _check_same_incident(bundles: Sequence[EvidenceSource], names: Sequence[str]) -> None:
    """Raises Unreadable if one node made progress after another wrote its bundle.

    If there are no step counts, this can't be decided, because nodes can be dumped one after the other.
    """
    counted = [
        (bundle, name) for bundle, name in zip(bundles, names, strict=True) if not is_foreign_job(bundle.evidence)
    ]
    moments = [(bundle.taken, name) for bundle, name in counted if all(bundle.taken)]
    if not moments:
        return
    (_, written_s), earlier = min(moments, key=lambda moment: moment[0][1])
    (progress_s, _), later = max(moments, key=lambda moment: moment[0][0])
    if progress_s - written_s > APART_S:
        minutes = (progress_s - written_s) / 60
        raise Unreadable(
            f"these bundles are of different incidents: the job still made progress in {later} {minutes:.0f} minutes "
            f"after {earlier} was written. Name one of them"
        )


_ANSWERS: tuple[Answer, ...] = ("dead", "alive", "unseen", "unknown")  # a proof covers all nodes' evidence
_WORST: tuple[Outcome, ...] = ("crash", "hang", "suspect")


def _hung_ranks(bundles: Sequence[EvidenceSource]) -> tuple[int, ...]:
    # Ranks in the bundles of a hang, if the other bundles' failures are only lost connections.
    failed = [rank for bundle in bundles if bundle.evidence.outcome == "crash" for rank in bundle.evidence.ranks]
    if not failed or not any(map(has_lost_a_peer, failed)) or any(map(failed_by_itself, failed)):
        return ()
    return tuple(rank.rank for bundle in bundles if bundle.evidence.outcome == "hang" for rank in bundle.evidence.ranks)
