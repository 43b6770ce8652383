"""Flight Recorder entries of all ranks, aligned by process group and sequence number.

Sequence numbers count the collectives of one group on one rank, so ranks that run the same program have the same
operation under the same number. Everything here tolerates windows of different length (a ring buffer that wrapped), a
rank without a record, and gloo's quirks: ``state`` is not looked at, ``retired`` is (:class:`Collective.completed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from msgspec import structs

from safelaunch.model import Collective, FlightRecord, RankEvidence
from safelaunch.model.entries import Entries, Same
from safelaunch.stacks.frames import Stack, stack_of
from safelaunch.verdict.comparable import (
    OPEN,
    Block,
    Numbering,
    Window,
    comparable,
    first_difference,
    program_of,
    windows_of,
)

Signature = tuple[object, ...]
TensorSizes = tuple[tuple[int, ...], ...]
_UNKNOWN: Signature = (None,)  # of an operation without a name

# Operations in which every rank has to pass the same number of elements of the same type: as input, or, where only the
# root has an input, as output. In the others (all_to_all, ragged forms) sizes may differ by design.
_SAME_SIZE = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "_all_gather_base", "gather",
     "_allgather_base", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
     "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce_barrier", "_broadcast_oop", "_reduce_oop"}
)  # fmt: skip
_SAME_OUTPUT = frozenset({"scatter"})
# One operation under the names of its forms (of a list or of one tensor), which backends carry out alike.
_FORMS = (
    ("all_gather", ("allgather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor", "all_gather_single")),
    ("reduce_scatter", ("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single")),
    ("all_reduce", ("allreduce",)),
)
_ONE_NAME = {form: name for name, forms in _FORMS for form in forms}
DEFAULT_GROUPS = ("0", "", "default_pg")
_NOTHING = Entries.of(())


def label_of(entry: Collective) -> str:
    """What people call the entry's group: the description that its maker gave it, as a DeviceMesh does; else its
    name.
    """
    given = entry.description if entry.description not in ("", "undefined", *DEFAULT_GROUPS) else ""
    return given or f"'{entry.group}'"


def op_name(entry: Collective) -> str:
    """``gloo:all_reduce`` → ``all_reduce``."""
    return entry.op.rsplit(":", 1)[-1]


def number_of(entry: Collective) -> int:
    """Sends and receives are counted for themselves."""
    return entry.p2p_seq if entry.is_p2p else entry.seq


def signature(entry: Collective) -> Signature:
    """What has to fit on all ranks (:func:`fits`); None for what the record does not tell.

    Shapes count by their number of elements: (4, 1) and (4,) do match.
    """
    op = op_name(entry)
    name = _ONE_NAME.get(op, op)
    if not op:
        return _UNKNOWN
    if op in _SAME_OUTPUT:
        return (name, elements(entry.output_sizes), _types(entry.output_sizes, entry.output_dtypes))
    if op in _SAME_SIZE:
        types = _types(entry.input_sizes, entry.input_dtypes)
        is_list = name in ("all_gather", "reduce_scatter") and types is not None
        return (name, elements(entry.input_sizes), tuple(dict.fromkeys(types)) if is_list and types else types)
    if isinstance(entry, Block) and _SAME_SIZE.issuperset(entry.ops):
        each = tuple(elements((size,)) for size in entry.input_sizes)
        return (op, None if None in each else each, _types(entry.input_sizes, entry.input_dtypes))
    return (op,)


def elements(sizes: TensorSizes) -> int | None:
    """How many there are in these tensors; None where that is not known, or no tensor is told of."""
    return None if not sizes or any(n < 0 for size in sizes for n in size) else sum(prod(size) for size in sizes)


def _types(sizes: TensorSizes, dtypes: tuple[str, ...]) -> tuple[str, ...] | None:
    """One for each tensor, else they are not known."""
    return dtypes if dtypes and all(dtypes) and (len(dtypes) == len(sizes) or elements(sizes) is None) else None


def fits(one: Signature, other: Signature) -> bool:
    """What one of the two does not tell is no difference."""
    if _UNKNOWN in (one, other):
        return True
    return len(one) == len(other) and all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


# torch's names of the types, where c10d writes its own.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def describe(entry: Collective) -> str:
    """``all_reduce of float32[4]``, for sentences."""
    if elements(entry.input_sizes) is None:
        return op_name(entry)
    names = tuple(_DTYPES.get(name, name.lower()) for name in entry.input_dtypes)
    each = names if len(names) == len(entry.input_sizes) else names[:1] * len(entry.input_sizes)
    tensors = (_tensor(size, name) for size, name in zip(entry.input_sizes[:3], each or ("",) * 3, strict=False))
    more = f" and {len(entry.input_sizes) - 3} more" if len(entry.input_sizes) > 3 else ""
    return f"{op_name(entry)} of {', '.join(tensors)}{more}"


def described(entry: Collective) -> str:
    """``all_reduce #31 of group '0', float32[4]``."""
    _, _, tensors = describe(entry).partition(" of ")
    return f"{op_name(entry)} #{number_of(entry)} of group {entry.group!r}{f', {tensors}' if tensors else ''}"


def _tensor(size: tuple[int, ...], dtype: str) -> str:
    """``float32[4,5]``, ``float32 scalar``."""
    if not size:
        return f"{dtype} scalar".strip()
    return f"{dtype}[{','.join(map(str, size))}]" if dtype else f"({', '.join(map(str, size))})"


class Alignment:
    """The records of all ranks, indexed. Building it is linear in the number of entries."""

    def __init__(self, ranks: Iterable[RankEvidence], world_size: int) -> None:
        self.world_size = world_size
        self._ranks = {rank.rank: rank for rank in ranks}
        self.records: dict[int, FlightRecord] = comparable(
            {rank: record for rank, one in self._ranks.items() if (record := _with_groups(one)) is not None}
        )
        self._rings = {rank: Entries.of(record.entries) for rank, record in self.records.items()}
        self._windows: dict[int, dict[str, Window]] = {}
        self._pending: dict[int, list[Collective]] = {}
        self._last: dict[int, dict[str, int]] = {}
        self._standings: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._users: dict[str, set[int]] = {}
        self._completed: set[str] = set()
        self._most_entries = max(map(len, self._rings.values()), default=0)
        self._default: set[str] = {"0", ""}
        self._members: dict[str, tuple[frozenset[int], bool]] = {}
        self._closed: dict[str, bool] = {}
        for rank, record in self.records.items():
            self._index(rank, record, self._rings[rank])

    def _index(self, rank: int, record: FlightRecord, ring: Entries) -> None:
        kinds = ring.used()
        windows = self._windows[rank] = windows_of(ring, kinds, self._ranks[rank].code_roots)
        self._pending[rank] = _pending(ring)
        self._default.update(k.group for k in kinds.values() if not k.is_p2p and k.description in DEFAULT_GROUPS[2:])
        self._completed.update(kind.group for kind in kinds.values() if not kind.is_p2p and kind.completed)
        queued = {number for number, kind in kinds.items() if kind.started is False}
        last: dict[str, int] = {}
        for group, window in windows.items():
            entered = zip(reversed(window.numbers), reversed(window.positions), strict=True)
            begun = (number for number, position in entered if ring.kind_of[position] not in queued)
            newest = next(begun, -1)  # what the device has not begun, only the CPU has entered
            if newest >= 0:
                last[group] = newest
        waiting = {kinds[number].group for number in queued}
        transfers = {kind.group for kind in kinds.values() if kind.is_p2p} if self.is_whole(rank) else set()
        for group, status in record.status.items():
            # The ring holds the newest, so what it has of a group says it all; NCCL's status counts sends along.
            if group not in last and group not in transfers:
                last[group] = status.last_started if group in waiting else status.last_enqueued
        self._last[rank] = last
        for group in last:
            self._users.setdefault(group, set()).add(rank)

    def ring(self, rank: int) -> Entries:
        """All that the rank's record holds, in order; nothing without a record."""
        return self._rings.get(rank) or _NOTHING

    def entry(self, rank: int, group: str, seq: int) -> Collective | None:
        window = self.window(rank, group)
        return window.at(seq) if window else None

    def window(self, rank: int, group: str) -> Window | None:
        """The collectives of ``rank`` in ``group`` that its record still holds; None for none."""
        return self._windows.get(rank, {}).get(group)

    def stack(self, rank: int, entry: Collective) -> Stack:
        """The stack that ``rank`` recorded with one of its entries."""
        return stack_of(self._ranks[rank], entry.frames)

    def programs(self) -> dict[int, Window]:
        """All calls of each rank, whatever their groups: counted from the first, or by the number of the record."""
        whole = all(map(self.is_whole, self.records))  # blocks leave gaps in the numbers of a recorder
        return {
            rank: program_of(ring, self._ranks[rank].code_roots, counted=whole) for rank, ring in self._rings.items()
        }

    @cached_property
    def has_collectives(self) -> bool:
        """Some rank has recorded a collective. Older torch lets nobody outside see gloo's."""
        return any(self._windows.values())

    @cached_property
    def has_threads(self) -> bool:
        """Some rank has recorded calls of several threads."""
        threads = (ring.threads for ring in self._rings.values())
        return any(not isinstance(mine, Same) and len(set(mine)) > 1 for mine in threads)

    def groups(self) -> list[str]:
        return sorted({group for windows in self._windows.values() for group in windows})

    def first(self, rank: int, group: str) -> int:
        """The lowest sequence number of ``group`` that the window of ``rank`` holds; 0 for none."""
        window = self.window(rank, group)
        return window.numbers[0] if window else 0

    def last(self, rank: int, group: str) -> int:
        """The highest sequence number that ``rank`` has entered in ``group``; -1 for none."""
        return self._last.get(rank, {}).get(group, -1)

    def joined(self, rank: int) -> bool:
        """The rank has been a member of some group: it is past ``init_process_group``."""
        record = self.records.get(rank)
        return record is not None and bool(record.entries or record.groups or record.status)

    def pending(self, rank: int) -> list[Collective]:
        """What the rank has entered and not completed: of each thread the oldest in each group, as a backend works in
        order.
        """
        return self._pending.get(rank, [])

    def unended(self, rank: int) -> Collective | None:
        """The newest entry of a batch or block that ``rank`` has begun and not launched."""
        return next(reversed(self.ring(rank).matching(lambda kind: kind.state == OPEN)), None)

    def transfers(self, rank: int, group: str) -> list[Collective]:
        """The sends and receives of ``rank`` in ``group``, in order."""
        return self.ring(rank).matching(lambda kind: kind.is_p2p and kind.group == group)

    def is_behind(self, rank: int, entry: Collective) -> bool:
        """The device of ``rank`` is still in an earlier call of the group: it takes in order what the CPU queued."""
        if entry.by_gloo:
            return False
        return any(one.group == entry.group and one.seq < entry.seq and not one.is_p2p for one in self.pending(rank))

    def is_over_elsewhere(self, rank: int, entry: Collective) -> bool:
        """All other members have completed the collective that ``rank`` has not; its peers hold it up no more."""
        members, known = self.members(entry.group)
        if entry.is_p2p or not known or members <= {rank}:
            return False
        return set(self._standing(entry.group, entry.seq)[0]) <= {rank}

    def is_begun_elsewhere(self, rank: int, entry: Collective) -> bool:
        """The device of another member has begun the collective."""
        return not entry.is_p2p and not set(self._standing(entry.group, entry.seq)[1]) <= {rank}

    def _standing(self, group: str, seq: int) -> tuple[list[int], list[int]]:
        """The first two members that have not completed it, as far as is known, and the first two that have begun it.

        Two, because each member asks for the others.
        """
        if (group, seq) not in self._standings:
            open_still: list[int] = []
            begun: list[int] = []
            for rank in sorted(self.members(group)[0]):
                entry = self.entry(rank, group, seq)
                if len(open_still) < 2 and not (
                    self._is_left_out(rank, group, seq) if entry is None else entry.completed
                ):
                    open_still.append(rank)
                if len(begun) < 2 and entry is not None and entry.started:
                    begun.append(rank)
                if len(open_still) == len(begun) == 2:
                    break
            self._standings[group, seq] = (open_still, begun)
        return self._standings[group, seq]

    @cached_property
    def _with_transfers(self) -> frozenset[str]:
        return frozenset(kind.group for ring in self._rings.values() for kind in ring.used().values() if kind.is_p2p)

    def _is_left_out(self, rank: int, group: str, seq: int) -> bool:
        """``rank`` has completed the collective, and its record holds only what is pending, as NCCL's may.

        A backend works in order, so what comes before its oldest pending one is over. A ring that is full may have lost
        pending ones as well; who else has more entries shows that it is not. The status of a group tells it, too, but
        counts sends along.
        """
        record = self.records.get(rank)
        if record is None or self.is_whole(rank):
            return False
        if group in record.status and group not in self._with_transfers:
            return record.status[group].last_completed >= seq
        if not 0 <= seq < self.first(rank, group):
            return False
        ring = self.ring(rank)
        return len(ring) < self._most_entries and not any(kind.completed for kind in ring.used().values())

    def is_whole(self, rank: int) -> bool:
        """The record of ``rank`` goes back to its first entry: its ring buffer has not wrapped."""
        record = self.records.get(rank)
        return record is not None and (not record.entries or record.entries[0].record_id == 0)

    def front(self) -> dict[str, int]:
        """Group → the highest number that some rank waits in or has completed. What CPUs have queued behind that has
        not been tried yet.
        """
        found: dict[str, int] = {}
        for rank, last in self._last.items():
            oldest = {entry.group: entry.seq for entry in self.pending(rank) if not entry.is_p2p}
            for group, number in last.items():
                found[group] = max(found.get(group, -1), min(oldest.get(group, number), number))
        return found

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """The members in the order of their ranks in the group; sorted where no dump tells the order."""
        for record in self.records.values():
            if record.groups.get(group):
                return record.groups[group]
        return tuple(sorted(self.members(group)[0]))

    def members(self, group: str) -> tuple[frozenset[int], bool]:
        """``(ranks of the group, is that known)``.

        Dumps say it in ``pg_config``; gloo's does so under the name ``""`` and for the default group only. Otherwise
        the ranks that have used the group are its members once a collective of it has completed, because that takes
        all of them. Before that, any rank of the world may be one.
        """
        if group not in self._members:
            self._members[group] = self._find_members(group)
        return self._members[group]

    def is_closed(self, group: str) -> bool:
        """Whether only ranks of this job are in it: each member lists it alike, or does not list its groups and has
        used it. A process from outside may be in a group with numbers of its own, which are not those of the job.
        """
        if group not in self._closed:
            self._closed[group] = self._is_closed(group)
        return self._closed[group]

    def _is_closed(self, group: str) -> bool:
        members, known = self.members(group)
        if not known or members - frozenset(range(self.world_size)):
            return False
        alike: tuple[int, ...] | None = None
        for member in members:
            listed = self.listed(member)
            if group in listed or (listed.keys() - {""} and group != DEFAULT_GROUPS[0]):
                ranks = listed.get(group, ())
                if ranks != alike and frozenset(ranks) != members:
                    return False
                alike = ranks
            elif group != DEFAULT_GROUPS[0] and self.last(member, group) < 0:
                return False
        return True

    def is_in_closed_groups(self, rank: int) -> bool:
        """Whether the rank lists its groups, and only ranks of this job are in them."""
        names = [name for name in self.listed(rank) if name]
        return bool(names) and all(map(self.is_closed, names))

    def listed(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """The members of each group that the rank's record lists; without a record, of those that it tells itself."""
        if rank in self.records:
            return self.records[rank].groups
        return self._ranks[rank].gil.groups if rank in self._ranks else {}

    def _find_members(self, group: str) -> tuple[frozenset[int], bool]:
        world = frozenset(range(self.world_size))
        for record in self.records.values():
            if record.groups.get(group):
                return frozenset(record.groups[group]), True
        if group in self._default:
            return world, True
        users = frozenset(self._users.get(group, ()))
        if group in self._completed and len(users) > 1 and len(self.records) == self.world_size:
            return users, True
        return world, False


def _with_groups(rank: RankEvidence) -> FlightRecord | None:
    """gloo's recorder does not know who is in a group; the rank does."""
    record, told = rank.flight_record, rank.gil.groups
    if record is None or not told:
        return record
    known = {name: ranks for name, ranks in record.groups.items() if ranks}
    return structs.replace(record, groups={**told, **known})


def _pending(ring: Entries) -> list[Collective]:
    oldest: dict[tuple[str, bool, int], Collective] = {}
    for entry in ring.matching(lambda kind: not kind.completed and kind.state != OPEN):
        if not entry.op and number_of(entry) <= 0:
            continue  # neither what nor which: nobody can be said to wait in it, or to be missing from it
        key = (entry.group, entry.is_p2p, entry.thread)
        if key not in oldest or _order(entry) < _order(oldest[key]):
            oldest[key] = entry
    return sorted(oldest.values(), key=lambda e: e.record_id)


def _order(entry: Collective) -> tuple[int, int]:
    return (number_of(entry), entry.record_id)


def out_of_sight(alignment: Alignment, groups: Iterable[str]) -> dict[str, int]:
    """Group → the first number that the windows of all its members still hold, where that is not the first of all.

    What happened before it, the recorders no longer tell.
    """
    found, late = {}, [rank for rank in alignment.records if not alignment.is_whole(rank)]
    for group in groups:
        members, _ = alignment.members(group)
        first = max((alignment.first(rank, group) for rank in late if rank in members), default=0)
        if first > 1:
            found[group] = first
    return found


@dataclass(frozen=True)
class Mismatch:
    """One sequence number under which ranks recorded different things: ``entries``. ``odd`` is the minority, or all
    when tied.
    """

    group: str
    seq: int
    classes: Mapping[Signature, tuple[int, ...]]
    odd: tuple[int, ...]
    majority: bool
    entries: Mapping[int, Collective]


K = TypeVar("K")


def sides_of(what: Mapping[int, K]) -> dict[K, list[int]]:
    """The ranks by what each of them has called, or is in; in the order of their first ones."""
    found: dict[K, list[int]] = {}
    for rank, one in what.items():
        found.setdefault(one, []).append(rank)
    return found


def vote(classes: Mapping[Any, Iterable[int]]) -> tuple[tuple[int, ...], bool]:
    """``(ranks outside the strict majority, there is one)``; with no strict majority, everybody is at odds."""
    counts = {key: tuple(ranks) for key, ranks in classes.items()}
    total = sum(map(len, counts.values()))
    most = max(counts, key=lambda key: len(counts[key]))
    if 2 * len(counts[most]) > total:
        return tuple(sorted(r for key, ranks in counts.items() if key != most for r in ranks)), True
    return tuple(sorted(r for ranks in counts.values() for r in ranks)), False


def mismatch_at(alignment: Alignment, group: str, seq: int) -> Mismatch | None:
    """Whether the members of ``group`` recorded different operations, sizes or types under ``seq``."""
    members, _ = alignment.members(group)
    entries = {rank: entry for rank in sorted(members) if (entry := alignment.entry(rank, group, seq)) is not None}
    classes = sides_of({rank: signature(entry) for rank, entry in entries.items()})
    if any(None in key for key in classes):
        classes = _told_apart(classes)
    if len(classes) < 2:
        return None
    odd, majority = vote(classes)
    return Mismatch(group, seq, {key: tuple(ranks) for key, ranks in classes.items()}, odd, majority, entries)


def _told_apart(classes: Mapping[Signature, list[int]]) -> dict[Signature, list[int]]:
    """Ranks whose records do not tell it all go with the largest class that they fit."""
    found = {key: ranks for key, ranks in classes.items() if None not in key}
    for key in classes.keys() - found.keys():
        fitting = [known for known in found if fits(key, known)]
        joined = max(fitting, key=lambda known: len(found[known]), default=key)
        found[joined] = sorted([*found.get(joined, ()), *classes[key]])
    return found


def first_mismatch(alignment: Alignment) -> Mismatch | None:
    """The oldest mismatch that the windows still hold, over all groups, as far as any rank has come."""
    signatures = Numbering(lambda entry, _: signature(entry))
    names = Numbering(lambda entry, _: op_name(entry))
    found = []
    front = alignment.front()
    for group in alignment.groups():
        windows = {rank: alignment.window(rank, group) for rank in sorted(alignment.members(group)[0])}
        held = [window for window in windows.values() if window is not None]
        seq = first_difference(map(signatures.column, held))
        if seq is not None and mismatch_at(alignment, group, seq) is None:  # what differs there, some do not tell
            seq = first_difference(map(names.column, held))
            seq = seq if seq is not None and mismatch_at(alignment, group, seq) is not None else None
        if seq is not None and seq <= front.get(group, -1):
            found.append((seq, group))
    return mismatch_at(alignment, min(found)[1], min(found)[0]) if found else None
