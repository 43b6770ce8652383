"""Shows the recorded calls of all ranks in one table, in order.

Each row is a call in a process group. Ranks that made the same call share a row.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypedDict, TypeVar

from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence, format_ranks
from safelaunch.model.entries import Entries
from safelaunch.report.tables import ItemNumbers
from safelaunch.stacks.frames import place, stack_of
from safelaunch.system.printable import clean
from safelaunch.verdict.c10d import describe, op_name
from safelaunch.verdict.rank_state import CaseFacts

NOT_CALLED = "not called"
T = TypeVar("T")
Slot = tuple[str, bool, int, int]  # group, is it a send or receive, number, index among calls with this number


@dataclass(frozen=True)
class Selection:
    ranks: frozenset[int] | None = None  # None: all
    groups: frozenset[str] = frozenset()  # names or descriptions; empty: all
    last: int = 0  # 0: all

    def has(self, call: Collective) -> bool:
        return not self.groups or call.group in self.groups or call.description in self.groups


@dataclass
class CallRow:
    slot: Slot
    at_ns: int
    kinds: dict[int, list[int]] = field(default_factory=dict)  # kind of call -> ranks
    absent: tuple[int, ...] = ()  # members without it


@dataclass(frozen=True)
class CallTable:
    rows: tuple[CallRow, ...]
    kinds: tuple[tuple[Collective, str], ...]  # calls of the rows, with their lines
    unrecorded: tuple[int, ...]  # ranks without a Flight Recorder
    groups: tuple[str, ...]
    more: bool  # ``last`` cut some off


def table(facts: CaseFacts, chosen: Selection) -> CallTable:
    wanted = [rank for rank in facts.ranks if chosen.ranks is None or rank in chosen.ranks]
    records = {rank: record for rank in wanted if (record := facts.ranks[rank].evidence.flight_record) is not None}
    rings = {rank: Entries.of(record.entries) for rank, record in records.items()}
    numbers = ItemNumbers[tuple[Collective, str]]()
    columns = _columns(facts, rings, chosen, numbers)
    rows: dict[Slot, CallRow] = {}
    for column in columns:
        for slot, kind, time_ns in zip(column.slots, column.kinds, column.at_ns, strict=True):
            row = rows.setdefault(slot, CallRow(slot, time_ns))
            row.at_ns = min(row.at_ns, time_ns)
            row.kinds.setdefault(kind, []).extend(column.ranks)
    _note_absent(rows.values(), records, rings)
    order = in_order([column.slots for column in columns], {slot: row.at_ns for slot, row in rows.items()})
    return CallTable(
        tuple(rows[slot] for slot in order),
        tuple(numbers),
        tuple(sorted({*(chosen.ranks or facts.ranks), *wanted} - set(records))),
        tuple(dict.fromkeys(_label(kind) for kind, _ in numbers)),
        any(0 < chosen.last < column.recorded for column in columns),
    )


@dataclass
class _CallColumn:
    """A sequence of selected calls that all of ``ranks`` made."""

    slots: list[Slot]
    kinds: list[int]
    at_ns: list[int]  # on the first rank
    recorded: int = 0  # number of calls before the cut
    ranks: list[int] = field(default_factory=list)


def _columns(
    facts: CaseFacts, rings: Mapping[int, Entries], chosen: Selection, numbers: ItemNumbers[tuple[Collective, str]]
) -> list[_CallColumn]:

    def number(rank: RankEvidence, call: Collective) -> int:
        frame = called_at(rank, call)
        return numbers[call, place(frame) if frame is not None else ""]

    folded: dict[Hashable, _CallColumn] = {}
    kinds = ByKind(number)
    for rank, ring in rings.items():
        used, numbers_of = ring.used(), kinds.of(facts.ranks[rank].evidence, ring)
        every: Sequence[int] = range(len(ring))
        if chosen.groups:
            every = [position for position, kind in enumerate(ring.kind_of) if chosen.has(used[kind])]
        at = every[-chosen.last :]
        called = [numbers_of[ring.kind_of[n]] for n in at]
        seqs = [ring.p2p_seqs[n] if used[ring.kind_of[n]].is_p2p else ring.seqs[n] for n in at]
        key = (tuple(called), tuple(seqs))
        if key not in folded:
            folded[key] = _CallColumn(_slots(ring, at, seqs), called, [ring.created_ns[n] for n in at])
        folded[key].ranks.append(rank)
        folded[key].recorded = max(folded[key].recorded, len(every))
    return list(folded.values())


class ByKind(Generic[T]):
    """Calls ``make`` once for each kind of call, even if several ranks made it.

    Rings with a common table of kinds share results. The rings must outlive this object, because it identifies their
    tables by ``id()``.
    """

    def __init__(self, make: Callable[[RankEvidence, Collective], T]) -> None:
        self._make = make
        self._known: dict[tuple[int, int, tuple[str, ...]], T] = {}

    def of(self, rank: RankEvidence, ring: Entries) -> dict[int, T]:
        """Returns the result of ``make`` for each kind of call in a record."""
        made = {}
        for number, call in ring.used().items():
            key = (id(ring.kinds), number, rank.code_roots)
            if key not in self._known:
                self._known[key] = self._make(rank, call)
            made[number] = self._known[key]
        return made


def called_at(rank: RankEvidence, call: Collective) -> Frame | None:
    """Returns the user's frame of a recorded call, or else its innermost frame; None if it has no frames."""
    return stack_of(rank, call.frames).user_frame or next(iter(call.frames), None)


def _slots(ring: Entries, at: Sequence[int], numbers: Sequence[int]) -> list[Slot]:
    """Returns a slot for each of a rank's calls. Coalesced calls have the same number but get different slots."""
    counts = Counter[tuple[str, bool, int]]()
    slots = []
    for n, number in zip(at, numbers, strict=True):
        call = ring.kinds.all[ring.kind_of[n]]
        key = (call.group, call.is_p2p, number)
        slots.append((*key, counts[key]))
        counts[key] += 1
    return slots


def _note_absent(rows: Iterable[CallRow], records: Mapping[int, FlightRecord], rings: Mapping[int, Entries]) -> None:
    """Adds to each row the members of its group that haven't reached it: their last collective has a smaller number."""
    last: dict[str, dict[int, int]] = {}
    members: dict[str, set[int]] = {}
    whole = set()  # ranks with a ring that lost nothing: groups missing from it weren't called
    for rank, record in records.items():
        ring = rings[rank]
        for group, number in _newest(ring):
            last.setdefault(group, {})[rank] = number
        whole |= {rank} if ring and ring.record_ids[0] == 0 else set()
        for group, ranks in record.groups.items():
            members.setdefault(group, set()).update(ranks)
    for row in rows:
        group, is_p2p, number, _ = row.slot
        reached = last.get(group, {})
        members_with_ring = members.get(group, set()) & whole | set(reached)
        row.absent = (
            () if is_p2p else tuple(sorted(rank for rank in members_with_ring if reached.get(rank, -1) < number))
        )


def _newest(ring: Entries) -> Iterator[tuple[str, int]]:
    left = {call.group for call in ring.used().values() if not call.is_p2p}
    for seq, kind in zip(reversed(ring.seqs), reversed(ring.kind_of), strict=True):
        call = ring.kinds.all[kind]
        if not call.is_p2p and call.group in left:
            yield call.group, seq
            left.remove(call.group)
        if not left:
            return


def in_order(columns: Iterable[Sequence[Slot]], at_ns: Mapping[Slot, int]) -> list[Slot]:
    """Returns all slots, in the order of each column; if columns contradict each other, by time."""
    before: dict[Slot, int] = dict.fromkeys(at_ns, 0)
    after: dict[Slot, set[Slot]] = {slot: set() for slot in at_ns}
    for column in columns:
        for one, other in pairwise(column):
            if other not in after[one]:
                after[one].add(other)
                before[other] += 1
    ready = [(at_ns[slot], slot) for slot, count in before.items() if not count]
    heapq.heapify(ready)
    by_time = iter(sorted((time_ns, slot) for slot, time_ns in at_ns.items()))
    placed: dict[Slot, None] = {}
    while len(placed) < len(at_ns):
        while not ready:  # a cycle: ranks entered groups in different orders
            ready = [slot for slot in [next(by_time)] if slot[1] not in placed]
        _, slot = heapq.heappop(ready)
        if slot in placed:
            continue
        placed[slot] = None
        for following in after[slot]:
            before[following] -= 1
            if not before[following] and following not in placed:
                heapq.heappush(ready, (at_ns[following], following))
    return list(placed)


# --- text and JSON ----------------------------------------------------------------------------------------------------


def lines(shown: CallTable) -> list[str]:
    cells = [("group", "number", "call", "ranks", "state", "at")]
    for row in shown.rows:
        group, is_p2p, number, _ = row.slot
        label = next((_label(shown.kinds[kind][0]) for kind in row.kinds), group)
        head = (label, f"{'p2p ' if is_p2p else ''}{number}")
        for kind, ranks in sorted(row.kinds.items(), key=lambda item: min(item[1])):
            call, where = shown.kinds[kind]
            cells.append((*head, describe(call), format_ranks(ranks), state(call), where))
        if row.absent:
            cells.append((*head, NOT_CALLED, format_ranks(row.absent), "", ""))
    shown_cells = [[cell if cell.isprintable() else clean(cell) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*shown_cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in shown_cells]


def _label(call: Collective) -> str:
    return call.group if call.description in ("", "undefined") else f"{call.group} {call.description}"


class CallDocument(TypedDict):
    """A call made by ``ranks``. ``number`` counts calls in its process group; sends and receives are counted apart."""

    group: str
    description: str
    number: int
    p2p: bool
    op: str
    input_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_sizes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[str, ...]
    state: str
    at: str
    ranks: list[int]
    not_called_by: list[int]


def document(shown: CallTable) -> list[CallDocument]:
    return [
        {
            "group": row.slot[0],
            "description": call.description,
            "number": row.slot[2],
            "p2p": row.slot[1],
            "op": op_name(call),
            "input_sizes": call.input_sizes,
            "input_dtypes": call.input_dtypes,
            "output_sizes": call.output_sizes,
            "output_dtypes": call.output_dtypes,
            "state": state(call),
            "at": where,
            "ranks": sorted(ranks),
            "not_called_by": list(row.absent),
        }
        for row in shown.rows
        for (call, where), ranks in ((shown.kinds[kind], ranks) for kind, ranks in row.kinds.items())
    ]


def state(call: Collective) -> str:
    return "completed" if call.completed else "queued" if call.started is False else "pending"
