"""What the records of the script will tell. Pure.

Histories are compared by the lines of calls. Where ranks part, a branch of the script may hold a call again that all
make elsewhere in it, and then a rank would seem to do there what it never does. So the records of calls from their own
lines are diagnosed, and those of equal calls from one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from msgspec import structs

from safelaunch.model import Evidence, FlightRecord, Frame, RankEvidence
from safelaunch.reproduce.families import in_families
from safelaunch.reproduce.fold import Node, done
from safelaunch.reproduce.program import Program
from safelaunch.verdict.diagnose import diagnose

Told = tuple[str, list[int]]  # cause and culprits


def places_matter(program: Program, nodes: Sequence[Node]) -> bool:
    """Whether the lines of ``nodes`` lead to another verdict than one line for equal calls would."""
    steps = {rank: list(done(nodes, rank)) for rank in program.ranks}
    lines, items = ({r: [k(s) for s in made] for r, made in steps.items()} for k in (id, lambda step: step.item))
    return _told(program, lines) != _told(program, items)


def records_tell(program: Program) -> Told:
    """By the records alone that the script leaves, if it makes equal calls from one line."""
    named, _ = in_families(program)
    return _told(named, {rank: one.calls for rank, one in named.ranks.items()})


def _told(program: Program, places: Mapping[int, Sequence[Hashable]]) -> Told:
    numbers: dict[object, int] = {}
    ranks = []
    for rank, one in program.ranks.items():
        entries = [
            structs.replace(
                entry, frames=(Frame("/repro.py", numbers.setdefault(place, len(numbers) + 1), "<module>"),)
            )
            for place, left in zip(places[rank], one.entries, strict=False)
            for entry in left
            if not entry.is_p2p
        ]
        entries = [structs.replace(entry, record_id=at) for at, entry in enumerate(entries)]
        groups = {one.group: program.groups.get(one.group, tuple(program.ranks)) for one in entries}
        ranks.append(RankEvidence(rank, "", rank + 1, flight_record=FlightRecord("", tuple(entries), groups)))
    found = diagnose(Evidence("hang", program.world_size, tuple(ranks)))
    return found.cause, [one.rank for one in found.culprits]
