"""Flight Recorder records of all ranks in a comparable form: unique group names, and one state per launch.

NCCL launches the operations of a coalescing block together. torch (2.5 to 2.14) records it so:

- Each send and receive of a batch has an entry with the same ``p2p_seq_id``. Their state stays ``scheduled``, because
  they have no events. ``nccl:coalesced`` follows with the state of the batch. It isn't marked as point to point, and
  has the number of the last *collective*.
- Since format 2.7, each collective of a block has an entry without a state, with the same ``collective_seq_id``.
  ``nccl:coalesced`` or ``nccl:ALLGATHER_coalesced`` follows, with the state, but without sizes. Before, only that last
  one exists.

torch 2.15 retires a call at launch if its backend (in Python, outside torch) doesn't report completion. Here it is
completed once all members have made it and one has made a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from msgspec import structs

from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord, GroupStatus, format_ranks
from safelaunch.model.entries import Entries, Kinds

NOT_LAUNCHED = "open"  # state of entries in a coalescing block that the rank hasn't closed: nothing of it is launched

_NEWEST = 64
_MemberRanks = tuple[str, frozenset[int]]  # name and members of a group, as names can repeat


class Block(Collective, frozen=True):
    """Collectives that the rank launched together. ``op`` is a description."""

    ops: tuple[str, ...] = ()  # their names, without the backend


def comparable(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    agreed = _without_early_ends(_without_contradictions(records))
    apart = _with_distinct_backends({rank: _with_numbers_by_group(record) for rank, record in agreed.items()})
    return _with_distinct_groups(
        {rank: _with_earlier_calls_completed(with_blocks_merged(record)) for rank, record in apart.items()}
    )


def _without_contradictions(records: Mapping[int, FlightRecord]) -> Mapping[int, FlightRecord]:
    """Drops the members of a group that a record lists, if more records list others.

    Groups with the same name can differ (:func:`_with_distinct_groups`), but share no rank.
    """
    memberships: dict[str, Counter[frozenset[int]]] = {}
    for record in records.values():
        for name, ranks in record.groups.items():
            memberships.setdefault(name, Counter())[frozenset(ranks)] += 1
    disputed = {name: counts for name, counts in memberships.items() if len(counts) > 1}
    if not disputed:
        return records

    def is_doubtful(rank: int, name: str, members: frozenset[int]) -> bool:
        times = disputed[name][members]
        return any(count > times and (other & members or rank in other) for other, count in disputed[name].items())

    corrected = dict(records)
    for rank, record in records.items():
        wrong = {n for n in record.groups if n in disputed and is_doubtful(rank, n, frozenset(record.groups[n]))}
        if wrong:
            groups = {name: ranks for name, ranks in record.groups.items() if name not in wrong}
            corrected[rank] = structs.replace(record, groups=groups)
    return corrected


def _without_early_ends(records: Mapping[int, FlightRecord]) -> Mapping[int, FlightRecord]:
    """Reopens calls that were retired at launch, unless later calls show that they are completed."""
    rings = {rank: Entries.of(record.entries) for rank, record in records.items()}
    early = {
        rank: {n for n, kind in ring.used().items() if _is_retired_at_launch(kind)} for rank, ring in rings.items()
    }
    if not any(early.values()):
        return records
    newest: dict[_MemberRanks, dict[int, int]] = {}
    last: dict[tuple[int, str], int] = {}
    for rank, record in records.items():
        for name in (name for name, members in record.groups.items() if rank in members):
            newest.setdefault(_members(record, name), {})[rank] = 0
        for at, entry in enumerate(rings[rank]):
            counts = newest.setdefault(_members(record, entry.group), {})
            counts[rank] = max(counts.get(rank, 0), 0 if entry.is_p2p else entry.seq)
            last[rank, entry.group] = at

    def is_open(rank: int, at: int, entry: Collective) -> bool:
        if entry.is_p2p:
            return at == last[rank, entry.group]
        counts = newest[_members(records[rank], entry.group)].values()
        return entry.seq > min(counts) or entry.seq == max(counts)

    again = {rank: kinds for rank, kinds in early.items() if kinds}
    opened = {
        r: _with_completion(records[r], kinds, partial(is_open, r), completed=False) for r, kinds in again.items()
    }
    return {**records, **opened}


def _with_completion(
    record: FlightRecord, kinds: Collection[int], wanted: Callable[[int, Collective], bool], *, completed: bool
) -> FlightRecord:
    ring = Entries.of(record.entries)
    entries = [
        structs.replace(entry, completed=completed) if ring.kind_of[at] in kinds and wanted(at, entry) else entry
        for at, entry in enumerate(ring)
    ]
    return structs.replace(record, entries=Entries.of(entries))


def _is_retired_at_launch(kind: Collective) -> bool:
    return kind.completed and kind.state != "completed" and kind.op.partition(":")[0] not in (kind.op, "gloo")


def _members(record: FlightRecord, group: str) -> _MemberRanks:
    return group, frozenset(record.groups.get(group, ()))


def _with_distinct_backends(records: dict[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Splits groups that called through two backends (``cpu:gloo,cuda:nccl2``), which count separately."""
    backends: dict[str, set[str]] = {}
    for record in records.values():
        for kind in Entries.of(record.entries).used().values():
            if ":" in kind.op:
                backends.setdefault(kind.group, set()).add(kind.op.partition(":")[0])
    several = {group for group, names in backends.items() if len(names) > 1}
    if not several:
        return records
    kinds = Kinds()

    def name_of(kind: Collective) -> str:
        backend, colon, _ = kind.op.partition(":")
        return f"{kind.group} ({backend})" if kind.group in several and colon else kind.group

    def all_groups(record: FlightRecord) -> dict[str, tuple[int, ...]]:
        more = {f"{g} ({b})": record.groups[g] for g in several & record.groups.keys() for b in sorted(backends[g])}
        return {**record.groups, **more}

    def status(record: FlightRecord) -> dict[str, GroupStatus]:
        return {name: status for name, status in record.status.items() if name not in several}

    return {
        rank: _with_names(record, name_of, kinds, groups=all_groups(record), status=status(record))
        for rank, record in records.items()
    }


def _with_names(
    record: FlightRecord, name_of: Callable[[Collective], str], kinds: Kinds, **groups: Any
) -> FlightRecord:
    entries = Entries.of(record.entries).with_kinds(lambda kind: structs.replace(kind, group=name_of(kind)), kinds)
    return structs.replace(record, entries=entries, **groups)


def _with_numbers_by_group(record: FlightRecord) -> FlightRecord:
    """Renumbers calls per group if the record numbers them across all groups, as torchcomms does.

    A number across groups equals the entry's index, counted from 0. After the ring has wrapped, numbers per group can't
    be recovered.
    """
    ring = Entries.of(record.entries)
    if not len(ring) or ring.seqs[0] != ring.record_ids[0] or any(ring.p2p_seqs):
        return record
    kinds = ring.used().values()
    if list(ring.seqs) != list(ring.record_ids) or {kind.op.partition(":")[0] for kind in kinds} & {"gloo", ""}:
        return record
    if ring.record_ids[0] > 0:
        return record
    counts: Counter[tuple[str, bool]] = Counter()
    entries = []
    for entry in ring:
        is_p2p = entry.is_p2p or entry.op.rpartition(":")[2].startswith(("send", "recv"))
        counts[entry.group, is_p2p] += 1
        seq, p2p_seq = counts[entry.group, False], counts[entry.group, True]
        entries.append(structs.replace(entry, is_p2p=is_p2p, seq=seq, p2p_seq=p2p_seq))
    return structs.replace(record, entries=Entries.of(entries), status={})


def _with_earlier_calls_completed(record: FlightRecord) -> FlightRecord:
    """Marks every nccl2 call as completed if a later call of its group has completed: communicators work in order.

    nccl2 doesn't record completion of the individual sends in a batch.
    """
    ring = Entries.of(record.entries)
    kinds = ring.used()
    ends = ring.positions_of(lambda kind: kind.op.startswith("nccl2:") and kind.completed)
    left = {n for n, kind in kinds.items() if kind.op.startswith("nccl2:") and kind.is_p2p and not kind.completed}
    if not ends or not left:
        return record
    last = {kinds[ring.kind_of[at]].group: at for at in ends}
    return _with_completion(record, left, lambda at, entry: at < last.get(entry.group, -1), completed=True)


def _with_distinct_groups(records: dict[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Gives groups with different members different names.

    ``split_group`` (since torch 2.6), and so a device mesh, counts the same way on every rank: the groups of ranks 0-1
    and of ranks 2-3 are both called ``1``.
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
        rank: _with_group_suffixes(record, shared, kinds) if shared & record.groups.keys() else record
        for rank, record in records.items()
    }


def _with_group_suffixes(record: FlightRecord, shared: set[str], kinds: Kinds) -> FlightRecord:
    names = {
        name: f"{name} of ranks {format_ranks(set(ranks))}" for name, ranks in record.groups.items() if name in shared
    }

    return _with_names(
        record,
        lambda kind: names.get(kind.group, kind.group),
        kinds,
        groups={names.get(name, name): ranks for name, ranks in record.groups.items()},
        status={names.get(name, name): status for name, status in record.status.items()},
    )


def with_blocks_merged(record: FlightRecord) -> FlightRecord:
    """Merges coalesced entries. Returns the record itself if it has none."""
    if not _has_blocks(record.entries):
        return record
    wrapped = record.entries[0].record_id > 0
    runs: dict[str, list[list[Collective]]] = {}
    for entry in record.entries:
        group_runs = runs.setdefault(entry.group, [])
        if group_runs and _belongs_to(entry, group_runs[-1]):
            group_runs[-1].append(entry)
        else:
            group_runs.append([entry])
    merged: list[Collective] = []
    for group_runs in runs.values():
        if not wrapped:
            group_runs = _without_p2p_numbers(group_runs)
        for place, run in enumerate(group_runs):
            merged += _merged(run, cut_off=wrapped and place == 0, newest=place == len(group_runs) - 1)
    merged.sort(key=lambda entry: entry.record_id)
    return structs.replace(record, entries=Entries.of(merged))


def _has_blocks(entries: Sequence[Collective]) -> bool:
    """Returns whether the ring has coalesced entries, or among the newest ones, a block without its end."""
    ring = Entries.of(entries)
    kinds = ring.used()
    if any(kind.op.endswith("coalesced") for kind in kinds.values()):
        return True
    last: dict[str, tuple[bool, int]] = {}
    for at in range(max(0, len(ring) - _NEWEST), len(ring)):
        kind = kinds[ring.kind_of[at]]
        number = (kind.is_p2p, ring.p2p_seqs[at] if kind.is_p2p else ring.seqs[at])
        if last.get(kind.group) == number and number[1] > 0:
            return True
        last[kind.group] = number
    return False


def _number(entry: Collective) -> tuple[bool, int]:
    return entry.is_p2p, entry.p2p_seq if entry.is_p2p else entry.seq


def _is_end(entry: Collective) -> bool:
    name = entry.op.rsplit(":", 1)[-1]
    kind = name.removesuffix("coalesced").rstrip("_")
    bare = entry.input_sizes in ((), UNKNOWN_SIZES)
    return name.endswith("coalesced") and not entry.is_p2p and kind == kind.upper() and bare


def _belongs_to(entry: Collective, run: list[Collective]) -> bool:
    last = run[-1]
    if _is_end(last):
        return False
    if _number(entry) == _number(last):
        return _number(entry)[1] > 0  # c10d counts from 1; entries with 0 have an unreadable number
    return _is_end(entry) and last.is_p2p and (entry.p2p_seq, entry.seq) == (last.p2p_seq, last.seq)


def _without_p2p_numbers(runs: list[list[Collective]]) -> list[list[Collective]]:
    """Subtracts the numbers of batches of sends, which torch 2.5 counts as collectives.

    The ranks of a pipeline make different numbers of batches. Only a record back to its first entry shows how many.
    """
    last = taken = 0
    renumbered = []
    for run in runs:
        number = run[0].seq - taken
        if run[0].is_p2p and _is_end(run[-1]) and number > last:
            taken += number - last
            number = last
        last = max(last, number)
        renumbered.append([structs.replace(entry, seq=entry.seq - taken) for entry in run] if taken else run)
    return renumbered


def _merged(run: list[Collective], *, cut_off: bool, newest: bool) -> list[Collective]:
    """Returns the entries that replace one coalesced run.

    A run without an end entry isn't launched yet if it is the newest in the group. Otherwise its end wasn't recorded (a
    captured graph, or a library that records none), and only shows that the rank got past it.

    Args:
        cut_off: the ring might have lost entries before ``run``.
    """
    end = run[-1] if _is_end(run[-1]) else None
    members = run[:-1] if end is not None else run
    if end is not None and cut_off and (not members or (end.completed and not members[0].is_p2p)):
        return []  # it might be the end of a batch or lack operations, so it can't be compared
    if not members or (end is None and len(members) == 1):
        return run
    state = end.state if end is not None else NOT_LAUNCHED if newest else members[-1].state
    completed = end.completed if end is not None else not newest
    started = end.started if end is not None else None if completed else False
    changed = {"state": state, "completed": completed, "started": started}
    if members[0].is_p2p:
        return [structs.replace(member, **changed) for member in members]
    first = members[0]
    ops = tuple(member.op.rsplit(":", 1)[-1] for member in members)
    made = {
        "op": f"{first.op.partition(':')[0]}:coalesced {_op_counts(ops)}",
        "ops": ops,
        "input_sizes": tuple(size for member in members for size in member.input_sizes),
        "input_dtypes": tuple(dtype for member in members for dtype in member.input_dtypes),
        "output_sizes": tuple(size for member in members for size in member.output_sizes),
        "output_dtypes": tuple(dtype for member in members for dtype in member.output_dtypes),
    }
    return [Block(**structs.asdict(end or first) | changed | made)]


def _op_counts(ops: Sequence[str]) -> str:
    names = [(name, len(list(same))) for name, same in groupby(ops)]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names)
