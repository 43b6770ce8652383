"""Where the ranks at fault belong: their process groups (a pipeline stage, a tensor group) and their GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from safelaunch.diagnose.collectives import label_of
from safelaunch.diagnose.findings import Finding, ranks_word
from safelaunch.diagnose.waits import Case
from safelaunch.model import Claim
from safelaunch.model.entries import Entries

MOST_RANKS, MOST_GROUPS = 4, 6


@dataclass(frozen=True)
class _Group:
    name: str
    ranks: tuple[int, ...]

    @property
    def words(self) -> str:
        return f"{self.name} ({ranks_word(self.ranks)})"


def with_belonging(case: Case, finding: Finding) -> Finding:
    """Adds the groups and the GPUs of the ranks at fault. Where these are all ranks of one group, and no others, the
    summary says so: what that group alone does is then where to look."""
    named = sorted({one.rank for one in finding.culprits})
    if not named:
        return finding
    claims = [claim for rank in named[:MOST_RANKS] for claim in _claims(case, rank)]
    whole = next((group for group in _groups(case, named[0]) if list(group.ranks) == named), None)
    if whole is None or len(named) < 2:
        return replace(finding, claims=(*finding.claims, *claims))
    text = f"{finding.summary} These are all ranks of group {whole.name}."
    return replace(finding, summary=text, claims=(*finding.claims, *claims))


def _claims(case: Case, rank: int) -> Iterator[Claim]:
    groups = _groups(case, rank)
    if groups:
        words = ", ".join(group.words for group in groups[:MOST_GROUPS])
        record = case.ranks[rank].evidence.flight_record
        told = record is not None and any(record.groups.values())
        yield Claim(f"rank {rank} is in {words}", f"ranks/{rank}/{'flight_recorder' if told else 'rank'}.json")
    gpu = case.ranks[rank].evidence.gpu
    if gpu:
        yield Claim(f"rank {rank} has GPU {gpu}, by its CUDA_VISIBLE_DEVICES and LOCAL_RANK", f"ranks/{rank}/rank.json")


def _groups(case: Case, rank: int) -> Sequence[_Group]:
    """The groups that the rank is in with others, but not with all, the smallest first; of equal ones the first."""
    record = case.alignment.records.get(rank)
    if record is None:
        return ()
    names = {kind.group: label_of(kind) for kind in Entries.of(record.entries).used().values()}
    found: dict[tuple[int, ...], _Group] = {}
    for name, ranks in record.groups.items():
        members = tuple(sorted(ranks))
        if rank in members and 1 < len(members) < len(case.world):
            found.setdefault(members, _Group(names.get(name) or f"'{name.partition(' of ranks ')[0]}'", members))
    return sorted(found.values(), key=lambda group: (len(group.ranks), group.ranks))
