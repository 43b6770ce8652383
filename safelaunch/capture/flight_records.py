"""Merges the records of a rank's recorders, and finds records that contradict themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

from msgspec import structs

from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord
from safelaunch.model.entries import Entries, Same

_NEAR = 64  # preceding entries of a group that are compared


def merged(records: Sequence[FlightRecord]) -> FlightRecord:
    """Merges the records of a rank's recorders, one per backend, in call order.

    If two records hold the same backend's entries, the longer one counts. Groups on which the records disagree are
    dropped and reported as ``damaged``.
    """
    longest: dict[str, tuple[int, int]] = {}  # backend → number of entries, and minus the record's position
    for place, record in enumerate(records):
        for backend, times in Counter(backend_of(entry.op) for entry in record.entries).items():
            longest[backend] = max(longest.get(backend, (0, 0)), (times, -place))
    kept = [
        (entry.created_ns, place, entry.record_id, entry)
        for place, record in enumerate(records)
        for entry in record.entries
        if longest[backend_of(entry.op)][1] == -place
    ]
    kept.sort(key=itemgetter(0, 1, 2))
    used = [record for place, record in enumerate(records) if -place in {at for _, at in longest.values()}]
    first = 0 if all(record.entries[0].record_id == 0 for record in used) else 1  # 0: no ring has wrapped
    groups = [record.groups for record in records]
    apart = {name for group in groups for name in group if len({frozenset(g[name]) for g in groups if name in g}) > 1}
    return FlightRecord(
        version=next((record.version for record in used), ""),
        entries=Entries.of(structs.replace(entry, record_id=n) for n, (*_, entry) in enumerate(kept, first)),
        groups={name: ranks for group in reversed(groups) for name, ranks in group.items() if name not in apart},
        damaged=tuple(sorted({*chain(*(record.damaged for record in records)), *(["pg_config"] if apart else [])})),
        library=next((record.library for record in used if record.library), ""),
    )


def backend_of(op: str) -> str:
    """Returns the backend in an operation's name: ``nccl2`` for ``nccl2:all_reduce``; empty if it has none."""
    return op.partition(":")[0] if ":" in op else ""


def contradicts_itself(record: FlightRecord) -> bool:
    """Returns whether the record can't show how far the rank got, because a group's numbers are missing or repeated.

    Also true if several groups share one counter and the ring has wrapped. Some repetitions are normal: calls of one
    launch share a number in adjacent entries, two threads' calls can be recorded in reverse order, and the end of a
    batch of sends isn't counted.
    """
    ring = Entries.of(record.entries)
    kinds = ring.used()
    if not any(ring.seqs):
        return False
    if _same(ring.seqs, ring.record_ids):  # torchcomms counts like this, over all groups
        return ring.seqs[0] > 0 and len({kind.group for kind in kinds.values()}) > 1
    if _ascends(ring, kinds):
        return False
    last: dict[str, list[int]] = {}
    sent: dict[str, tuple[int, int] | None] = {}  # group → numbers of its newest entry if it is a send
    for at, number in enumerate(ring.seqs):
        kind = kinds[ring.kind_of[at]]
        numbers = (ring.p2p_seqs[at], number)
        before, sent[kind.group] = sent.get(kind.group, numbers), numbers if kind.is_p2p else None
        if kind.is_p2p or (before == numbers and _ends_a_block(kind)):
            continue
        recent = last.setdefault(kind.group, [])
        is_repeated = recent and number != recent[-1] and number in recent
        if recent and (number == 0 or is_repeated or (not recent[-1] and ring.record_ids[at])):
            return True
        recent.append(number)
        del recent[:-_NEAR]
    return False


def _ends_a_block(kind: Collective) -> bool:
    # The end of a batch has the number of an earlier collective (0 before any).
    return kind.op.endswith("coalesced") and kind.input_sizes in ((), UNKNOWN_SIZES)


def _same(column: Sequence[int], other: Sequence[int]) -> bool:
    same_type = type(column) is type(other) and not isinstance(column, Same)
    return column == other if same_type else list(column) == list(other)


def _ascends(ring: Entries, kinds: Mapping[int, Collective]) -> bool:
    """True if each group's numbers only increase. This cheap first test succeeds for nearly every record."""
    if isinstance(ring.seqs, range) and ring.seqs[0] > 0:
        return True  # each group's numbers are part of the range
    groups = {number: None if kind.is_p2p else kind.group for number, kind in kinds.items()}
    newest: dict[str, int] = {}
    for kind, number in zip(ring.kind_of, ring.seqs, strict=True):
        group = groups[kind]
        if group is not None:
            if number <= newest.get(group, 0):
                return False
            newest[group] = number
    return True
