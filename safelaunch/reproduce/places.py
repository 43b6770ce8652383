"""Whether it matters to a verdict that the script makes equal calls from several lines.

Histories are compared by the lines of calls. Where ranks part, a branch of the script may hold a call again that all
make elsewhere in it, and then a rank would seem to do there what it never does. That shows in the records that the
script leaves, so both kinds are diagnosed: those of calls from their own lines, and those of equal calls from one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from safelaunch.diagnose import diagnose
from safelaunch.model import Collective, Evidence, FlightRecord, Frame, RankEvidence
from safelaunch.reproduce.families import in_families
from safelaunch.reproduce.fold import Node, done
from safelaunch.reproduce.program import Program

_FILE = "/repro.py"


def places_matter(program: Program, nodes: Sequence[Node]) -> bool:
    """Whether the lines of ``nodes`` lead to another verdict than one line for equal calls would."""
    steps = {rank: list(done(nodes, rank)) for rank in program.ranks}
    numbers: dict[object, int] = {}
    for made in steps.values():
        for step in made:
            numbers.setdefault(("line", id(step)), len(numbers) + 1)
            numbers.setdefault(("item", step.item), len(numbers) + 1)

    def line_of(rank: int, at: int) -> int:
        return numbers["line", id(steps[rank][at])]

    def line_of_item(rank: int, at: int) -> int:
        return numbers["item", steps[rank][at].item]

    return _verdict(program, line_of) != _verdict(program, line_of_item)


def records_tell(program: Program) -> tuple[str, list[int]]:
    """Cause and culprits by the records alone that the script leaves, if it makes equal calls from one line.

    Of threads nothing is told: each is a program of its own.
    """
    if any(one.sides for one in program.ranks.values()):
        return "", []
    named, _ = in_families(program)
    numbers: dict[object, int] = {}

    def line_of(rank: int, at: int) -> int:
        return numbers.setdefault(named.ranks[rank].calls[at], len(numbers) + 1)

    return _verdict(named, line_of)


def _verdict(program: Program, line_of: Callable[[int, int], int]) -> tuple[str, list[int]]:
    ranks = tuple(
        RankEvidence(rank, "", rank + 1, flight_record=_record(program, rank, line_of)) for rank in program.ranks
    )
    found = diagnose(Evidence("hang", program.world_size, ranks))
    return found.cause, [one.rank for one in found.culprits]


def _record(program: Program, rank: int, line_of: Callable[[int, int], int]) -> FlightRecord:
    entries: list[Collective] = []
    for at, made in enumerate(program.ranks[rank].entries):
        frames = (Frame(_FILE, line_of(rank, at), "<module>"),)
        entries += [structs.replace(one, frames=frames, record_id=len(entries)) for one in made if not one.is_p2p]
    return FlightRecord("", tuple(entries), _groups(program, rank, entries))


def _groups(program: Program, rank: int, entries: Sequence[Collective]) -> dict[str, tuple[int, ...]]:
    return {one.group: program.groups.get(one.group, tuple(program.ranks)) for one in entries}
