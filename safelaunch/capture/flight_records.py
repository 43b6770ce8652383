"""Records that are decoded: those of one rank's recorders put together, and whether one contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

from msgspec import structs

from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord
from safelaunch.model.entries import Entries, Same


def merged(records: Sequence[FlightRecord]) -> FlightRecord:
    """One record of a rank's several recorders, one for each backend, in the order in which the calls were made.

    What two of them hold of one backend is of one recorder: the longer one counts. Groups of which they say different
    things are left out, and are ``damaged``.
    """
    longest: dict[str, tuple[int, int]] = {}  # backend → how many entries, of which record
    for place, record in enumerate(records):
        for backend, times in Counter(backend_of(entry.op) for entry in record.entries).items():
            longest[backend] = max(longest.get(backend, (0, 0)), (times, -place))
    held = [
        (entry.created_ns, place, entry.record_id, entry)
        for place, record in enumerate(records)
        for entry in record.entries
        if longest[backend_of(entry.op)][1] == -place
    ]
    held.sort(key=itemgetter(0, 1, 2))
    used = [record for place, record in enumerate(records) if -place in {at for _, at in longest.values()}]
    first = 0 if all(record.entries[0].record_id == 0 for record in used) else 1  # 0: no ring has wrapped
    groups = [record.groups for record in records]
    apart = {name for one in groups for name in one if len({frozenset(g[name]) for g in groups if name in g}) > 1}
    return FlightRecord(
        version=next((record.version for record in used), ""),
        entries=Entries.of(structs.replace(entry, record_id=n) for n, (*_, entry) in enumerate(held, first)),
        groups={name: ranks for one in reversed(groups) for name, ranks in one.items() if name not in apart},
        damaged=tuple(sorted({*chain(*(record.damaged for record in records)), *(["pg_config"] if apart else [])})),
        library=next((record.library for record in used if record.library), ""),
    )


def backend_of(op: str) -> str:
    """``nccl2`` of ``nccl2:all_reduce``; empty where it does not say."""
    return op.partition(":")[0] if ":" in op else ""


def contradicts_itself(record: FlightRecord) -> bool:
    """Some collectives of a group have no number, or that of an earlier one: how far the rank came is not known.

    Nor is it where one number runs over several groups, and the ring has wrapped. Those of one launch stand side by
    side under one number. Two threads may be recorded in the other order. The end of a batch of sends is no collective.
    """
    ring = Entries.of(record.entries)
    kinds = ring.used()
    if not any(ring.seqs):  # it tells none
        return False
    if _same(ring.seqs, ring.record_ids):  # torchcomms counts so, over all groups
        return ring.seqs[0] > 0 and len({kind.group for kind in kinds.values()}) > 1
    if _ascends(ring, kinds):
        return False
    last: dict[str, list[int]] = {}
    sent: dict[str, tuple[int, int] | None] = {}  # group → the numbers of a send that is its newest entry
    for at, number in enumerate(ring.seqs):
        kind = kinds[ring.kind_of[at]]
        numbers = (ring.p2p_seqs[at], number)
        before, sent[kind.group] = sent.get(kind.group, numbers), numbers if kind.is_p2p else None
        if kind.is_p2p or (before == numbers and _ends_a_block(kind)):
            continue
        mine = last.setdefault(kind.group, [])
        if mine and (number == 0 or (number != mine[-1] and number in mine) or (not mine[-1] and ring.record_ids[at])):
            return True
        mine.append(number)
        del mine[:-_NEAR]
    return False


def _ends_a_block(kind: Collective) -> bool:
    """After sends, or as the first entry that is left, it bears the number of an earlier collective: 0 before any."""
    return kind.op.endswith("coalesced") and kind.input_sizes in ((), UNKNOWN_SIZES)


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two columns are equal: they are packed, so equal ones are of one type."""
    return one == other if type(one) is type(other) and not isinstance(one, Same) else list(one) == list(other)


def _ascends(ring: Entries, kinds: Mapping[int, Collective]) -> bool:
    """The numbers of each group only grow, as in nearly every record: told at a glance."""
    if isinstance(ring.seqs, range) and ring.seqs[0] > 0:
        return True  # those of one group are some of them
    groups = {number: None if kind.is_p2p else kind.group for number, kind in kinds.items()}
    newest: dict[str, int] = {}
    for kind, number in zip(ring.kind_of, ring.seqs, strict=True):
        group = groups[kind]
        if group is not None:
            if number <= newest.get(group, 0):
                return False
            newest[group] = number
    return True


_NEAR = 64  # entries of a group that are looked back at
