"""The records of all ranks, made comparable: one name for one group, one state for what was launched together."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from safelaunch.diagnose.coalesced import settled
from safelaunch.entries import Entries, Kinds
from safelaunch.model import Collective, FlightRecord, format_ranks


def comparable(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    return _with_distinct_groups({rank: settled(record) for rank, record in records.items()})


def _with_distinct_groups(records: dict[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Groups that differ in their members get different names.

    torch names a group by a counter, or by a hash of its ranks. ``split_group`` (2.6 on), and with it a device mesh,
    counts on every rank alike: the groups of ranks 0-1 and of ranks 2-3 are then both called ``1``.
    """
    members: dict[str, set[frozenset[int]]] = {}
    for record in records.values():
        for name, ranks in record.groups.items():
            members.setdefault(name, set()).add(frozenset(ranks))
    shared = {name for name, different in members.items() if len(different) > 1}
    if not shared:
        return records
    kinds = Kinds()
    return {
        rank: _renamed(record, shared, kinds) if shared & record.groups.keys() else record
        for rank, record in records.items()
    }


def _renamed(record: FlightRecord, shared: set[str], kinds: Kinds) -> FlightRecord:
    names = {
        name: f"{name} of ranks {format_ranks(set(ranks))}" for name, ranks in record.groups.items() if name in shared
    }

    def renamed(kind: Collective) -> Collective:
        return structs.replace(kind, group=names[kind.group]) if kind.group in names else kind

    return structs.replace(
        record,
        entries=Entries.of(record.entries).with_kinds(renamed, kinds),
        groups={names.get(name, name): ranks for name, ranks in record.groups.items()},
        status={names.get(name, name): status for name, status in record.status.items()},
    )
