"""The same hang with fewer ranks, and with smaller tensors; where gloo would not hang, with larger ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from msgspec import structs

from safelaunch.diagnose import diagnose
from safelaunch.diagnose.collectives import op_name, signature
from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import CallArguments, Collective, Evidence, FlightRecord, ProcessEvidence, RankEvidence, Verdict
from safelaunch.model.entries import Entries
from safelaunch.reading.source import ReadSource
from safelaunch.reproduce.program import EAGER, TRANSFERS, Call, Program, RankProgram, Sizes

Ranks = tuple[int, ...]
MOST_ELEMENTS = 1 << 24  # of a tensor that is made as it was recorded
_PEERS = re.compile(r"((?:send|recv)\s+)(\d+)(\s*(?:->|<-)\s*)(\d+)")
_MOST_TRIES = 200
_MOST_OF_A_KIND = 4

# --- fewer ranks ------------------------------------------------------------------------------------------------------


def with_fewest_ranks(
    evidence: Evidence, verdict: Verdict, read_source: ReadSource | None
) -> tuple[Evidence, list[int]]:
    """The evidence of as few of the ranks as lead to the same verdict, and who they were: they are counted anew."""
    facts = Facts.of(evidence, read_source)
    culprits = {one.rank for one in verdict.culprits}
    everybody = sorted(facts.ranks)
    if facts.unseen or not everybody:
        return evidence, everybody
    alignment = facts.alignment
    groups = {name: alignment.ranks_of(name) for name in alignment.groups() if alignment.members(name)[1]}
    search = _Search(evidence, verdict, groups, read_source)
    kinds: dict[object, list[int]] = {}
    for rank in sorted(set(facts.ranks) - culprits):
        kinds.setdefault(_kind(facts, rank), []).append(rank)
    for number in range(1, _MOST_OF_A_KIND + 1):
        kept = culprits | {rank for ranks in kinds.values() for rank in ranks[:number]}
        if search.shows(kept):
            break
    else:
        kept = set(everybody)
    fewest = sorted(_without_any(search, kept, culprits)) if len(kept) <= _MOST_TRIES else everybody
    return search.of(fewest), fewest


def _without_any(search: _Search, kept: set[int], culprits: Collection[int]) -> set[int]:
    for rank in sorted(kept - set(culprits), reverse=True):
        if search.shows(kept - {rank}):
            kept = kept - {rank}
    return kept


def _kind(facts: Facts, rank: int) -> object:
    """Ranks of one kind wait in the same operation, and made their last calls alike."""
    one = facts.ranks[rank]
    record = facts.alignment.records.get(rank)
    last = [(signature(entry), entry.frames) for entry in record.entries[-8:]] if record is not None else []
    wait, condition = one.wait, one.condition
    return (
        (wait.kind, wait.op, wait.signature) if wait is not None else None,
        (condition.cause, condition.frame) if condition is not None else None,
        tuple(last),
    )


class _Search:
    def __init__(
        self, evidence: Evidence, verdict: Verdict, groups: Mapping[str, Ranks], read_source: ReadSource | None
    ) -> None:
        self._evidence, self._verdict, self._groups = evidence, verdict, groups
        self._culprits = {one.rank for one in verdict.culprits}
        self._read_source = read_source
        self._tries = 0

    def of(self, kept: Collection[int]) -> Evidence:
        return _Fewer(sorted(kept), self._groups).evidence(self._evidence)

    def shows(self, kept: Collection[int]) -> bool:
        """Whether these ranks lead to the same verdict."""
        self._tries += 1
        if self._tries > _MOST_TRIES or len(kept) < 2:
            return False
        number = {rank: place for place, rank in enumerate(sorted(kept))}
        found = diagnose(self.of(kept), self._read_source)
        same = {one.rank for one in found.culprits} == {number[rank] for rank in self._culprits}
        return same and (found.outcome, found.cause) == (self._verdict.outcome, self._verdict.cause)


class _Fewer:
    """The evidence of some of the ranks: with new numbers, in groups without the others.

    ``groups``: those whose members are known by what they have called, where neither records nor ranks tell.
    """

    def __init__(self, kept: Sequence[int], groups: Mapping[str, Ranks]) -> None:
        self._groups = groups
        self._number = {rank: place for place, rank in enumerate(kept)}

    def evidence(self, evidence: Evidence) -> Evidence:
        ranks = tuple(self._rank(one) for one in evidence.ranks if one.rank in self._number)
        return structs.replace(evidence, world_size=len(self._number), ranks=ranks, missing_ranks=())

    def _rank(self, rank: RankEvidence) -> RankEvidence:
        number = self._number[rank.rank]
        groups = {name: self._ranks(ranks) for name, ranks in rank.gil.groups.items()}
        posted = tuple(
            structs.replace(one, peer=self._number[one.peer]) for one in rank.gil.posted if one.peer in self._number
        )
        return structs.replace(
            rank,
            rank=number,
            progress=structs.replace(rank.progress, rank=number, world_size=len(self._number))
            if rank.progress is not None
            else None,
            main=self._process(rank.main) if rank.main is not None else None,
            flight_record=self._record(rank.flight_record, rank.gil.groups) if rank.flight_record is not None else None,
            gil=structs.replace(rank.gil, groups=groups, posted=posted),
        )

    def _ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._number[rank] for rank in ranks if rank in self._number)

    def _process(self, process: ProcessEvidence) -> ProcessEvidence:
        stacks = tuple(
            structs.replace(
                sample,
                threads=tuple(
                    structs.replace(thread, call=self._arguments(thread.call)) if thread.call is not None else thread
                    for thread in sample.threads
                ),
            )
            for sample in process.stacks
        )
        return structs.replace(process, stacks=stacks)

    def _arguments(self, call: CallArguments) -> CallArguments:
        found = {name: self._number.get(rank) for name in ("src", "dst") if (rank := getattr(call, name)) is not None}
        return structs.replace(call, **found)

    def _record(self, record: FlightRecord, told: Mapping[str, Ranks]) -> FlightRecord:
        used = {kind.group for kind in Entries.of(record.entries).used().values()}
        groups = {name: ranks for name, ranks in self._groups.items() if name in used}
        groups |= {**told, **{name: ranks for name, ranks in record.groups.items() if ranks}}
        alone = {name for name, ranks in groups.items() if len(self._ranks(ranks)) < 2}
        kept = []
        for entry in record.entries:
            changed = self._entry(entry, groups.get(entry.group, ()))
            if changed is not None and entry.group not in alone:
                kept.append(changed)
        if record.entries and record.entries[0].record_id == 0:
            kept = [structs.replace(entry, record_id=place) for place, entry in enumerate(kept)]
        return structs.replace(
            record,
            entries=Entries.of(kept),
            groups={name: self._ranks(ranks) for name, ranks in groups.items() if name not in alone},
            status={name: one for name, one in record.status.items() if name not in alone},
        )

    def _entry(self, entry: Collective, members: Sequence[int]) -> Collective | None:
        """None for a transfer with a rank that is left out."""
        match = _PEERS.search(op_name(entry)) if entry.is_p2p else None
        if match is None:
            return entry
        places = [int(match.group(2)), int(match.group(4))]
        if any(place >= len(members) or members[place] not in self._number for place in places):
            return None
        left = self._ranks(members)
        mine, peer = (left.index(self._number[members[place]]) for place in places)
        return structs.replace(entry, op=_PEERS.sub(rf"\g<1>{mine}\g<3>{peer}", entry.op))


# --- smaller tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Small:
    """The number of elements that was recorded → a small one. Numbers that differ stay different."""

    of: Mapping[int, int]

    def sizes(self, sizes: Sizes) -> Sizes:
        return tuple((self.of[prod(size)],) if size else size for size in sizes)

    def call(self, call: Call) -> Call:
        parts = tuple(self.call(part) for part in call.parts)
        return replace(call, sizes=self.sizes(call.sizes), gets=self.sizes(call.gets), parts=parts)


def is_large(program: Program) -> bool:
    return any(number > MOST_ELEMENTS for number in _numbers(program))


def with_small_tensors(program: Program) -> Program:
    """Each tensor as small as can be. One whose size decides whether its sender has to wait stays as it is."""
    step = program.world_size if any(call.op in _DIVIDED for call in _every(program)) else 1
    small = _Small({number: (place + 1) * step for place, number in enumerate(sorted(_numbers(program)))})
    ranks = {rank: _with_calls(one, small.call) for rank, one in program.ranks.items()}
    return replace(program, ranks=ranks)


_DIVIDED = frozenset({"reduce_scatter_tensor", "all_to_all"})


# --- larger tensors ---------------------------------------------------------------------------------------------------

_LARGER = "The tensors whose sizes differ have {} times as many elements: of so small ones, gloo may not notice it."
ABORTS = (
    "The sizes of an all_reduce differ: there gloo aborts, where other backends hang. The records of aborted ranks are"
    " lost, so a verdict on this script may name more of the ranks, or fewer."
)


def with_sizes_that_gloo_checks(program: Program) -> Program:
    """gloo aborts the rank of an ``all_reduce`` that gets a longer segment than its own. Where segments are of one
    length, and some ranks only have fewer of them, ranks come back from the call. There are two segments a rank.
    """
    for group in {call.group for call in _every(program)}:
        last = [one.calls[-1] for one in program.ranks.values() if one.calls and one.end.kind == "waits"]
        sizes = {prod(call.sizes[0]) for call in last if (call.op, call.group, len(call.sizes)) == (_SUMS, group, 1)}
        if len(sizes) < 2:
            continue
        segments = 2 * len(program.members(group))
        times = 1 if len({-(-size // segments) for size in sizes}) == len(sizes) else segments
        program = _with_larger(program, group, sizes, times)
        program = replace(program, notes=(*program.notes, ABORTS, *([_LARGER.format(times)] if times > 1 else [])))
    return program


_SUMS = "all_reduce"


def _with_larger(program: Program, group: str, sizes: Collection[int], times: int) -> Program:
    def larger(call: Call) -> Call:
        same = (call.op, call.group, len(call.sizes)) == (_SUMS, group, 1) and prod(call.sizes[0]) in sizes
        return replace(call, sizes=((prod(call.sizes[0]) * times,),)) if same and times > 1 else call

    ranks = {rank: replace(one, calls=tuple(map(larger, one.calls))) for rank, one in program.ranks.items()}
    return replace(program, ranks=ranks)


# --- all calls --------------------------------------------------------------------------------------------------------


def _numbers(program: Program) -> set[int]:
    parts = (part for call in _every(program) for part in (call, *call.parts))
    return {prod(size) for part in parts for size in (*part.sizes, *part.gets)}


def _every(program: Program) -> Iterable[Call]:
    for one in program.ranks.values():
        yield from one.all_calls


def _with_calls(program: RankProgram, change: Callable[[Call], Call]) -> RankProgram:
    calls = [*map(change, program.calls)]
    last = program.calls[-1] if program.calls else None
    if (
        last is not None
        and program.end.kind == "waits"
        and last.op in EAGER | TRANSFERS | {"batch"}
        and _is_small(last)
    ):
        calls[-1] = last
    sides = tuple(replace(side, calls=tuple(map(change, side.calls))) for side in program.sides)
    return replace(program, calls=tuple(calls), sides=sides)


def _is_small(call: Call) -> bool:
    return all(prod(size) <= MOST_ELEMENTS for part in (call, *call.parts) for size in part.sizes)
