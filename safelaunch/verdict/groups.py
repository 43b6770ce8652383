"""Process groups of the ranks at fault (a pipeline stage, a tensor group), their names, and the device mesh."""

from __future__ import annotations

from collections.abc import Iterator

from safelaunch.model import Claim
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.phrases import ranks_word
from safelaunch.verdict.waits import Case

MOST_RANKS, MOST_GROUPS = 4, 6


def groups_and_gpus(case: Case, finding: Finding) -> Iterator[Annotation]:
    """Names the groups and GPUs of the ranks at fault, and says if these are exactly the ranks of one group."""
    with_labels = sorted({culprit.rank for culprit in finding.culprits})
    claims = tuple(claim for rank in with_labels[:MOST_RANKS] for claim in _claims(case, rank))
    whole = _groups(case, with_labels[0]).get(tuple(with_labels)) if len(with_labels) > 1 else None
    yield Annotation(f"These are all the ranks of group {whole}." if whole is not None else "", context=claims)


def _claims(case: Case, rank: int) -> Iterator[Claim]:
    groups = _groups(case, rank)
    if groups:
        words = ", ".join(f"{name} ({ranks_word(ranks)})" for ranks, name in list(groups.items())[:MOST_GROUPS])
        record = case.ranks[rank].evidence.flight_record
        is_recorded = record is not None and any(record.groups.values())
        yield Claim(f"rank {rank} is in {words}", f"ranks/{rank}/{'flight_recorder' if is_recorded else 'rank'}.json")
    gpu = case.ranks[rank].evidence.gpu
    if gpu:
        yield Claim(f"rank {rank} has GPU {gpu}, by its CUDA_VISIBLE_DEVICES and LOCAL_RANK", f"ranks/{rank}/rank.json")


def _groups(case: Case, rank: int) -> dict[tuple[int, ...], str]:
    """Returns the groups that the rank shares with some ranks, but not with all, the smallest first."""
    labels = case.alignment.labels_of(rank)
    names: dict[tuple[int, ...], str] = {}
    for name, ranks in case.alignment.groups_of(rank).items():
        members = tuple(sorted(ranks))
        if rank in members and 1 < len(members) < len(case.world):
            names.setdefault(members, labels.get(name) or f"'{name}'")
    return dict(sorted(names.items(), key=lambda item: (len(item[0]), item[0])))
