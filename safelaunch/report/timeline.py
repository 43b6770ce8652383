"""Shows the last calls of every rank as lanes. Ranks with the same calls share a lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence, format_ranks
from safelaunch.model.entries import Entries
from safelaunch.report.calls import ByKind, called_at
from safelaunch.report.tables import Frames, ItemNumbers
from safelaunch.verdict.c10d import number_of, op_name
from safelaunch.verdict.rank_state import CaseFacts

MOST_CALLS = 96
MOST_LANES = 160
LONGEST_S = 1e8
_FEW_GROUPS = 12
_NAMELESS = ("", "undefined")


@dataclass(frozen=True)
class _CallKind:
    op: str
    group: str
    sizes: str
    dtypes: str
    frame: Frame | None
    state: Literal["done", "waits", "queued"]

    @classmethod
    def of(cls, rank: RankEvidence, call: Collective, group: str) -> _CallKind:
        sizes = ", ".join("×".join(map(str, size)) or "scalar" for size in call.input_sizes[:4] if -1 not in size)
        dtypes = ", ".join(dict.fromkeys(call.input_dtypes))
        state: Literal["done", "waits", "queued"] = "queued" if call.started is False else "waits"
        return cls(op_name(call), group, sizes, dtypes, called_at(rank, call), "done" if call.completed else state)


@dataclass(frozen=True)
class _Lane:
    """The last calls of ``ranks``, oldest first, column by column."""

    ranks: list[int]
    culprit: bool
    kinds: Sequence[int] = ()
    numbers: Sequence[int] = ()
    orders: Sequence[int] = ()  # positions among the rank's calls
    at_ns: Sequence[int] = ()  # on the first rank


def timeline(facts: CaseFacts, culprits: Collection[int], frames: Frames) -> dict[str, Any]:
    """Returns the lanes of all ranks with recorded calls: ranks at fault first, then the largest lanes.

    Each row is a kind of call. Times are in microseconds since the oldest call shown. ``part`` is the call at which
    ranks diverge, ``recorded`` lists the ranks with a record, and ``mixed`` means that the ranks at fault wait in
    several groups.
    """
    records = {
        rank: state.evidence.flight_record
        for rank, state in facts.ranks.items()
        if state.evidence.flight_record is not None and state.evidence.flight_record.entries
    }
    rings = {rank: Entries.of(record.entries) for rank, record in records.items()}
    labels = _labels(records, rings)
    groups = Counter(labels.values())
    kinds = ItemNumbers[_CallKind]()
    every = _lanes(
        facts, rings, culprits, ByKind(lambda rank, call: kinds[_CallKind.of(rank, call, labels[call.group])])
    )
    lanes, left_out = every[:MOST_LANES], every[MOST_LANES:]
    rows = list(kinds)
    used = sorted({kind for lane in lanes for kind in lane.kinds})
    places = {kind: number for number, kind in enumerate(used)}
    counts = Counter(rows[kind].op for lane in lanes for kind in lane.kinds)
    ops = sorted(counts, key=lambda op: -counts[op])
    order = list(groups)
    start = min((lane.at_ns[0] for lane in lanes if lane.at_ns), default=0)
    newest = max((lane.at_ns[-1] for lane in every if lane.at_ns), default=0)
    end = newest + int(min(max(facts.evidence.stall_s, 0.0), LONGEST_S) * 1e9)  # time of the evidence
    part, absent = _parting(facts, labels, culprits)
    return {
        "ops": ops,
        "groups": [[label, many] for label, many in groups.items()],
        "kinds": [_row(rows[kind], ops, order, frames) for kind in used],
        "lanes": [_lane(lane, places, start, absent) for lane in lanes],
        "part": [order.index(part[0]), part[1]] if part is not None and part[0] in groups else None,
        "end": max(0, (end - start) // 1000),
        "start_ns": str(start),
        "left_out": [len(left_out), sum(len(lane.ranks) for lane in left_out)],
        "recorded": len(records),
        "mixed": int(len(_groups_of(facts, culprits)) > 1),
    }


def _row(kind: _CallKind, ops: list[str], groups: list[str], frames: Frames) -> list[Any]:
    group = groups.index(kind.group) if kind.group in groups else -1
    return [ops.index(kind.op), group, kind.sizes, kind.dtypes, frames.number(kind.frame), kind.state]


def _lane(lane: _Lane, kinds: Mapping[int, int], start: int, absent: Set[int]) -> dict[str, Any]:
    return {
        "r": format_ranks(lane.ranks),
        "n": len(lane.ranks),
        "c": int(lane.culprit),
        "k": [kinds[kind] for kind in lane.kinds],
        "s": lane.numbers,
        "o": lane.orders,
        "t": [(at - start) // 1000 for at in lane.at_ns],
        "a": int(lane.ranks[0] in absent),
    }


def _lanes(
    facts: CaseFacts, rings: Mapping[int, Entries], culprits: Collection[int], kinds: ByKind[int]
) -> list[_Lane]:
    folded: dict[Hashable, _Lane] = {}
    for rank, ring in rings.items():
        kinds_of = kinds.of(facts.ranks[rank].evidence, ring)
        newest = range(max(0, len(ring) - MOST_CALLS), len(ring))
        called = tuple(kinds_of[ring.kind_of[at]] for at in newest)
        key = (rank in culprits, called, tuple(ring.seqs[newest.start :]), tuple(ring.p2p_seqs[newest.start :]))
        if key not in folded:
            transfers = {kind for kind, call in ring.used().items() if call.is_p2p}
            numbers = [ring.p2p_seqs[at] if ring.kind_of[at] in transfers else ring.seqs[at] for at in newest]
            orders, at_ns = ring.record_ids[newest.start :], ring.created_ns[newest.start :]
            folded[key] = _Lane([], rank in culprits, called, numbers, list(orders), list(at_ns))
        folded[key].ranks.append(rank)
    lanes = list(folded.values())
    without = sorted(rank for rank in culprits if rank in facts.ranks and rank not in rings)
    lanes += [_Lane(without, culprit=True)] if without and lanes else []
    return sorted(lanes, key=lambda lane: (not lane.culprit, -len(lane.ranks), lane.ranks[0]))


def _labels(records: Mapping[int, FlightRecord], rings: Mapping[int, Entries]) -> dict[str, str]:
    """Returns a label for each group. Groups with the same purpose, such as data-parallel ones, share a label."""
    described: dict[str, str] = {}
    members: dict[str, int] = {}
    for rank, record in records.items():
        for kind in rings[rank].used().values():
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


def _parting(
    facts: CaseFacts, labels: Mapping[str, str], culprits: Collection[int]
) -> tuple[tuple[str, int] | None, Set[int]]:
    """Returns the call at which ranks diverge (its group's label, its number), and the ranks that never entered it."""
    differs = facts.histories.first_mismatch
    place = _shifted(facts, culprits) or ((differs.group, differs.seq) if differs is not None else None)
    place = place or _not_entered(facts, culprits) or _met(facts, set(culprits))
    if place is None:
        return None, set()
    group, number = place
    members, complete = facts.alignment.members(group)
    absent = {r for r in members if r in facts.alignment.records and facts.alignment.last(r, group) < number}
    return (labels.get(group, group), number), absent if complete else set()


def _shifted(facts: CaseFacts, culprits: Collection[int]) -> tuple[str, int] | None:
    # Extra or missing call of ranks at fault, after which calls agree again.
    for group in _waited_in(facts):
        shift = facts.histories.in_group(group).shift
        if shift is not None and shift.sure and set(shift.ranks) & set(culprits):
            return group, shift.number
    return None


def _not_entered(facts: CaseFacts, culprits: Collection[int]) -> tuple[str, int] | None:
    """Returns the first collective in which a rank waits and which another member of its group hasn't entered.

    Prefers collectives that a rank at fault hasn't entered, and groups in which another rank at fault waits.
    """
    candidates = []
    waits = _groups_of(facts, culprits)
    for group in _waited_in(facts):
        numbers = [
            number_of(call)
            for rank in facts.ranks
            for call in facts.alignment.pending(rank)
            if call.group == group and not call.is_p2p
        ]
        members, complete = facts.alignment.members(group)
        if numbers and complete:
            first = min(numbers)
            late = {rank for rank in members if facts.alignment.last(rank, group) < first}
            at_fault = late & set(culprits)
            with_another = bool(at_fault) and group in waits
            candidates += [(not with_another, not at_fault, -len(late), group, first)] if late else []
    return min(candidates)[3:] if candidates else None


def _met(facts: CaseFacts, culprits: Set[int]) -> tuple[str, int] | None:
    """Returns the call in which both ranks at fault and other ranks wait, but with different arguments."""
    pending: dict[tuple[str, int], set[int]] = {}
    for rank in facts.ranks:
        for call in facts.alignment.pending(rank):
            if not call.is_p2p:
                pending.setdefault((call.group, number_of(call)), set()).add(rank)
    return next((place for place, ranks in pending.items() if ranks & culprits and ranks - culprits), None)


def _waited_in(facts: CaseFacts) -> list[str]:
    # After a crash, no rank waits: groups with pending calls count.
    groups = _groups_of(facts, facts.ranks)
    return sorted(groups or {call.group for rank in facts.ranks for call in facts.alignment.pending(rank)})[:64]


def _groups_of(facts: CaseFacts, ranks: Collection[int]) -> set[str]:
    waits = (facts.ranks[rank].wait for rank in ranks if rank in facts.ranks)
    return {wait.group for wait in waits if wait is not None and wait.group is not None}
