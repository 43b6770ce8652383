"""The last calls of every rank, as lanes: ranks that called alike share one."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from safelaunch.model import Collective, FlightRecord, Frame, format_ranks
from safelaunch.model.entries import Entries
from safelaunch.report.tables import Frames
from safelaunch.verdict.collectives import number_of, op_name
from safelaunch.verdict.rank_state import Facts
from safelaunch.verdict.reading.frames import stack_of

MOST_CALLS = 96  # of a lane
MOST_LANES = 160
LONGEST_S = 1e8
_FEW_GROUPS = 12
_NAMELESS = ("", "undefined")
State = str  # "done", "waits", "queued": entered by the CPU, not begun by the device


@dataclass(frozen=True)
class Kind:
    """What many calls have in common. ``group``: its label."""

    op: str
    group: str
    sizes: str
    dtypes: str
    frame: Frame | None
    state: State


@dataclass(frozen=True)
class Lane:
    """The last calls of ``ranks``, oldest first, by column. ``at_ns``: of the first of these ranks.

    ``orders``: where a call stands among all calls of its rank. ``culprit``: these ranks are at fault.
    """

    ranks: tuple[int, ...]
    culprit: bool
    kinds: tuple[int, ...]
    numbers: tuple[int, ...]
    orders: tuple[int, ...]
    at_ns: tuple[int, ...]


@dataclass(frozen=True)
class Parting:
    """Call ``number`` of the group with this label is where ranks part. ``absent``: those that never entered it."""

    group: str
    number: int
    absent: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """``end_ns``: when the evidence was taken, as far as it is known. ``recorded``: ranks with a record.

    ``mixed``: those at fault wait in several groups.
    """

    kinds: tuple[Kind, ...]
    lanes: tuple[Lane, ...]
    groups: Mapping[str, tuple[str, ...]]  # label → names of the groups that it stands for
    parting: Parting | None
    end_ns: int
    recorded: int
    mixed: bool


def timeline(facts: Facts, culprits: Collection[int]) -> Timeline:
    """The lanes of all ranks whose Flight Recorder holds any calls: those at fault first, then the largest."""
    records = {
        rank: one.evidence.flight_record
        for rank, one in facts.ranks.items()
        if one.evidence.flight_record is not None and one.evidence.flight_record.entries
    }
    rings = {rank: Entries.of(record.entries) for rank, record in records.items()}
    labels = _labels(records, rings)
    kinds = _Kinds(facts, labels)
    folded: dict[Hashable, list[int]] = {}
    for rank, ring in rings.items():
        begin = max(0, len(ring) - MOST_CALLS)
        numbers = kinds.of(rank, ring)
        called = tuple(numbers[number] for number in ring.kind_of[begin:])
        key = (rank in culprits, called, tuple(ring.seqs[begin:]), tuple(ring.p2p_seqs[begin:]))
        folded.setdefault(key, []).append(rank)
    lanes = [_lane(tuple(ranks), rings[ranks[0]], kinds, culprits) for ranks in folded.values()]
    without = sorted(rank for rank in culprits if rank in facts.ranks and rank not in records)
    lanes += [Lane(tuple(without), True, (), (), (), ())] if without and lanes else []
    lanes.sort(key=lambda lane: (not lane.culprit, -len(lane.ranks), lane.ranks[0]))
    groups: dict[str, tuple[str, ...]] = {}
    for name, label in labels.items():
        groups[label] = (*groups.get(label, ()), name)
    newest = max((lane.at_ns[-1] for lane in lanes if lane.at_ns), default=0)
    end_ns = newest + int(min(max(facts.evidence.stall_s, 0.0), LONGEST_S) * 1e9)
    parting, mixed = _parting(facts, labels, culprits), len(_groups_of(facts, culprits)) > 1
    return Timeline(tuple(kinds.all), tuple(lanes), groups, parting, end_ns, len(records), mixed)


class _Kinds:
    """Numbers the kinds of call over all ranks. All rings outlive it: it knows their tables of kinds by their ids."""

    def __init__(self, facts: Facts, labels: Mapping[str, str]) -> None:
        self.all: list[Kind] = []
        self._facts = facts
        self._labels = labels
        self._numbers: dict[Kind, int] = {}
        self._known: dict[tuple[int, int, tuple[str, ...]], int] = {}

    def of(self, rank: int, ring: Entries) -> Mapping[int, int]:
        """The kinds of one record → their numbers here."""
        roots = self._facts.ranks[rank].evidence.code_roots
        found = {}
        for number in set(ring.kind_of):
            key = (id(ring.kinds), number, roots)
            if key not in self._known:
                kind = self._kind(rank, ring.kinds.all[number])
                self._known[key] = self._numbers.setdefault(kind, len(self.all))
                self.all += [kind] if self._known[key] == len(self.all) else []
            found[number] = self._known[key]
        return found

    def _kind(self, rank: int, call: Collective) -> Kind:
        evidence = self._facts.ranks[rank].evidence
        place = stack_of(evidence, call.frames).user_frame or next(iter(call.frames), None)
        state = "done" if call.completed else "queued" if call.started is False else "waits"
        sizes = ", ".join("×".join(map(str, size)) or "scalar" for size in call.input_sizes[:4] if -1 not in size)
        dtypes = ", ".join(dict.fromkeys(call.input_dtypes))
        return Kind(op_name(call), self._labels.get(call.group, call.group), sizes, dtypes, place, state)


def _lane(ranks: tuple[int, ...], ring: Entries, kinds: _Kinds, culprits: Collection[int]) -> Lane:
    numbers = kinds.of(ranks[0], ring)
    begin = max(0, len(ring) - MOST_CALLS)
    calls: array[int] = ring.kind_of[begin:]
    transfers = {number for number in set(calls) if ring.kinds.all[number].is_p2p}
    return Lane(
        ranks,
        ranks[0] in culprits,
        tuple(numbers[call] for call in calls),
        tuple(
            p2p if call in transfers else seq
            for call, seq, p2p in zip(calls, ring.seqs[begin:], ring.p2p_seqs[begin:], strict=True)
        ),
        tuple(ring.record_ids[begin:]),
        tuple(ring.created_ns[begin:]),
    )


def _labels(records: Mapping[int, FlightRecord], rings: Mapping[int, Entries]) -> dict[str, str]:
    """Group → what people call it. Groups of one purpose (the data-parallel ones of a mesh) share a label."""
    described: dict[str, str] = {}
    members: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for rank, record in records.items():
        ring = rings[rank]
        for number in set(ring.kind_of):
            if (id(ring.kinds), number) not in seen:
                seen.add((id(ring.kinds), number))
                kind = ring.kinds.all[number]
                described.setdefault(kind.group, kind.description)
        for name, ranks in record.groups.items():
            members.setdefault(name, len(ranks))
    many = len(described) > _FEW_GROUPS
    labels = {}
    for name, text in described.items():
        size = members.get(name, 0)
        if text not in _NAMELESS:
            labels[name] = text if many or list(described.values()).count(text) == 1 else f"{text} ({name})"
        elif many and size:
            labels[name] = f"groups of {size}"
        else:
            labels[name] = f"group {name}" if name else "default group"
    return labels


def _parting(facts: Facts, labels: Mapping[str, str], culprits: Collection[int]) -> Parting | None:
    """Where the calls of the ranks part, as far as their records show it."""
    place = (
        _shifted(facts, culprits) or _mismatched(facts) or _not_entered(facts, culprits) or _met(facts, set(culprits))
    )
    if place is None:
        return None
    group, number = place
    members, known = facts.alignment.members(group)
    absent = [r for r in members if r in facts.alignment.records and facts.alignment.last(r, group) < number]
    return Parting(labels.get(group, group), number, tuple(sorted(absent)) if known else ())


def _shifted(facts: Facts, culprits: Collection[int]) -> tuple[str, int] | None:
    """A call too many or too few, by the ranks at fault, behind which the calls agree again."""
    for group in _waited_in(facts):
        shift = facts.histories.shift_in(group)
        if shift is not None and shift.agrees_again and set(shift.ranks) & set(culprits):
            return group, shift.number
    return None


def _mismatched(facts: Facts) -> tuple[str, int] | None:
    found = facts.histories.first_mismatch
    return (found.group, found.seq) if found is not None else None


def _not_entered(facts: Facts, culprits: Collection[int]) -> tuple[str, int] | None:
    """The first collective that some rank waits in and another member has not entered: one at fault before others, and
    one in whose group another one at fault waits before those.
    """
    found = []
    waits = _groups_of(facts, culprits)
    for group in _waited_in(facts):
        numbers = [
            number_of(call)
            for rank in facts.ranks
            for call in facts.alignment.pending(rank)
            if call.group == group and not call.is_p2p
        ]
        members, known = facts.alignment.members(group)
        if numbers and known:
            first = min(numbers)
            late = {rank for rank in members if facts.alignment.last(rank, group) < first}
            at_fault = late & set(culprits)
            with_another = bool(at_fault) and group in waits
            found += [(not with_another, not at_fault, -len(late), group, first)] if late else []
    return min(found)[3:] if found else None


def _met(facts: Facts, culprits: Set[int]) -> tuple[str, int] | None:
    """The call that ranks at fault and others wait in together: they differ in something that it was called with."""
    pending: dict[tuple[str, int], set[int]] = {}
    for rank in facts.ranks:
        for call in facts.alignment.pending(rank):
            if not call.is_p2p:
                pending.setdefault((call.group, number_of(call)), set()).add(rank)
    return next((place for place, ranks in pending.items() if ranks & culprits and ranks - culprits), None)


def _waited_in(facts: Facts) -> list[str]:
    """The groups that ranks wait in; where none is known to wait, as after a crash, those of calls that are pending."""
    groups = _groups_of(facts, facts.ranks)
    return sorted(groups or {call.group for rank in facts.ranks for call in facts.alignment.pending(rank)})[:64]


def _groups_of(facts: Facts, ranks: Collection[int]) -> set[str]:
    """The groups that these ranks wait in."""
    waits = (facts.ranks[rank].wait for rank in ranks if rank in facts.ranks)
    return {wait.group for wait in waits if wait is not None and wait.group is not None}


def as_page(shown: Timeline, frames: Frames) -> dict[str, Any]:
    """The lanes for the page: kinds as rows, times in microseconds since the oldest call that is shown."""
    lanes = shown.lanes[:MOST_LANES]
    used = sorted({kind for lane in lanes for kind in lane.kinds})
    places = {kind: number for number, kind in enumerate(used)}
    counts: dict[str, int] = {}
    for lane in lanes:
        for kind in lane.kinds:
            counts[shown.kinds[kind].op] = counts.get(shown.kinds[kind].op, 0) + 1
    ops = sorted(counts, key=lambda op: -counts[op])
    groups = list(shown.groups)
    start = min((lane.at_ns[0] for lane in lanes if lane.at_ns), default=0)
    left_out = shown.lanes[MOST_LANES:]
    return {
        "ops": ops,
        "groups": [[label, len(shown.groups[label])] for label in groups],
        "kinds": [_row(shown.kinds[kind], ops, groups, frames) for kind in used],
        "lanes": [
            {
                "r": format_ranks(lane.ranks),
                "n": len(lane.ranks),
                "c": int(lane.culprit),
                "k": [places[kind] for kind in lane.kinds],
                "s": lane.numbers,
                "o": lane.orders,
                "t": [(at - start) // 1000 for at in lane.at_ns],
                "a": int(shown.parting is not None and lane.ranks[0] in shown.parting.absent),
            }
            for lane in lanes
        ],
        "part": [groups.index(shown.parting.group), shown.parting.number]
        if shown.parting is not None and shown.parting.group in groups
        else None,
        "end": max(0, (shown.end_ns - start) // 1000),
        "start_ns": str(start),
        "left_out": [len(left_out), sum(len(lane.ranks) for lane in left_out)],
        "recorded": shown.recorded,
        "mixed": int(shown.mixed),
    }


def _row(kind: Kind, ops: list[str], groups: list[str], frames: Frames) -> list[Any]:
    place = frames.number(kind.frame) if kind.frame is not None else -1
    group = groups.index(kind.group) if kind.group in groups else -1
    return [ops.index(kind.op), group, kind.sizes, kind.dtypes, place, kind.state]
