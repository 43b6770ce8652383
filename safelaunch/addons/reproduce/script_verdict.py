"""Predicts the verdict on a run of the script from the records that the run will leave."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from msgspec import structs

from safelaunch.addons.reproduce.families import with_group_families
from safelaunch.addons.reproduce.fold import FoldNode, done
from safelaunch.addons.reproduce.program import Program
from safelaunch.model import Evidence, FlightRecord, Frame, RankEvidence
from safelaunch.verdict.diagnose import diagnose

ScriptComment = tuple[str, list[int]]  # cause and culprits


def places_matter(program: Program, nodes: Sequence[FoldNode]) -> bool:
    """Returns whether the verdict depends on the lines from which equal calls are made."""
    steps = {rank: list(done(nodes, rank)) for rank in program.ranks}
    lines, items = ({r: [k(s) for s in made] for r, made in steps.items()} for k in (id, lambda step: step.item))
    return _verdict_at(program, lines) != _verdict_at(program, items)


def records_verdict(program: Program) -> ScriptComment:
    """Returns the verdict on the script's records if the script makes equal calls from the same line."""
    named, _ = with_group_families(program)
    return _verdict_at(named, {rank: rank_program.calls for rank, rank_program in named.ranks.items()})


def _verdict_at(program: Program, places: Mapping[int, Sequence[Hashable]]) -> ScriptComment:
    numbers: dict[object, int] = {}
    ranks = []
    for rank, rank_program in program.ranks.items():
        entries = [
            structs.replace(
                entry, frames=(Frame("/repro.py", numbers.setdefault(place, len(numbers) + 1), "<module>"),)
            )
            for place, left in zip(places[rank], rank_program.entries, strict=False)
            for entry in left
            if not entry.is_p2p
        ]
        entries = [structs.replace(entry, record_id=at) for at, entry in enumerate(entries)]
        groups = {entry.group: program.groups.get(entry.group, tuple(program.ranks)) for entry in entries}
        ranks.append(
            RankEvidence(rank=rank, host="", pid=rank + 1, flight_record=FlightRecord("", tuple(entries), groups))
        )
    verdict = diagnose(Evidence("hang", program.world_size, tuple(ranks)))
    return verdict.cause, [culprit.rank for culprit in verdict.culprits]
