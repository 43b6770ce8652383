"""The records of all ranks, made comparable: one name for one group, one state for what was launched together.

NCCL launches what stands between the start and the end of a group as one, and torch (2.5 to 2.14) records it so:

- Each send and receive of a batch (``batch_isend_irecv``) gets an entry, all under one ``p2p_seq_id``. Their state
  stays ``scheduled`` for ever: no event belongs to a single one. ``nccl:coalesced`` follows, with the state of them
  all; it is not marked as point to point and bears the number of the last *collective*, which it is not.
- Collectives of a block get an entry each since format 2.7, also without a state, all under one
  ``collective_seq_id``. ``nccl:coalesced`` or, say, ``nccl:ALLGATHER_coalesced`` follows, with the state and without
  sizes. Before 2.7 that last entry is the only one.

Here the members of a batch get the state of their batch, and a block of collectives becomes one entry.

For a backend that doesn't report what has ended (one in Python, outside torch), torch 2.15 retires each call as it is
made. Here such a call is over where all members have made it, and one has made a later one.
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

OPEN = "open"  # the state of what stands in a group that the rank has not ended: nothing of it is launched

_NEWEST = 64
_MemberRanks = tuple[str, frozenset[int]]  # of one group: others may have the same name


class Block(Collective, frozen=True):
    """Collectives that the rank launched as one. ``ops``: their names, without the backend; ``op`` is for people."""

    ops: tuple[str, ...] = ()


def comparable(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    agreed = _without_early_ends(_without_contradictions(records))
    apart = _with_distinct_backends({rank: _counted_by_group(record) for rank, record in agreed.items()})
    return _with_distinct_groups({rank: _past_ends(settled(record)) for rank, record in apart.items()})


def _without_contradictions(records: Mapping[int, FlightRecord]) -> Mapping[int, FlightRecord]:
    """Without what single records say of a group's members, where more of the others say something else.

    Groups of one name may differ (:func:`_with_distinct_groups`), but share no rank; and who records a group is in it.
    """
    said: dict[str, Counter[frozenset[int]]] = {}
    for record in records.values():
        for name, ranks in record.groups.items():
            said.setdefault(name, Counter())[frozenset(ranks)] += 1
    disputed = {name: counts for name, counts in said.items() if len(counts) > 1}
    if not disputed:
        return records

    def is_doubtful(rank: int, name: str, mine: frozenset[int]) -> bool:
        times = disputed[name][mine]
        return any(count > times and (other & mine or rank in other) for other, count in disputed[name].items())

    found = dict(records)
    for rank, record in records.items():
        wrong = {n for n in record.groups if n in disputed and is_doubtful(rank, n, frozenset(record.groups[n]))}
        if wrong:
            groups = {name: ranks for name, ranks in record.groups.items() if name not in wrong}
            found[rank] = structs.replace(record, groups=groups)
    return found


def _without_early_ends(records: Mapping[int, FlightRecord]) -> Mapping[int, FlightRecord]:
    """Calls that were retired as they were made are open again, unless what came later shows that they are over."""
    rings = {rank: Entries.of(record.entries) for rank, record in records.items()}
    early = {rank: {n for n, kind in ring.used().items() if _ended_early(kind)} for rank, ring in rings.items()}
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
    opened = {r: _marked(records[r], kinds, partial(is_open, r), completed=False) for r, kinds in again.items()}
    return {**records, **opened}


def _marked(
    record: FlightRecord, kinds: Collection[int], wanted: Callable[[int, Collective], bool], *, completed: bool
) -> FlightRecord:
    """The record in which the ``wanted`` entries of these kinds, by their place, are completed, or are not."""
    ring = Entries.of(record.entries)
    found = [
        structs.replace(entry, completed=completed) if ring.kind_of[at] in kinds and wanted(at, entry) else entry
        for at, entry in enumerate(ring)
    ]
    return structs.replace(record, entries=Entries.of(found))


def _ended_early(kind: Collective) -> bool:
    """Retired, and its backend has not said that it is over. gloo's own recorder retires what is."""
    return kind.completed and kind.state != "completed" and kind.op.partition(":")[0] not in (kind.op, "gloo")


def _members(record: FlightRecord, group: str) -> _MemberRanks:
    return group, frozenset(record.groups.get(group, ()))


def _with_distinct_backends(records: dict[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Where one group has called through two backends (``cpu:gloo,cuda:nccl2``), each is a group of its own.

    Each backend counts for itself, and an operation of one never meets one of the other.
    """
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
    """The record with these names for the groups of its calls; ``groups``: its fields with what it says of groups."""
    entries = Entries.of(record.entries).with_kinds(lambda kind: structs.replace(kind, group=name_of(kind)), kinds)
    return structs.replace(record, entries=entries, **groups)


def _counted_by_group(record: FlightRecord) -> FlightRecord:
    """The record with numbers that count in each group, where it counts over all of them, as torchcomms does.

    Such a number is the entry's own, from 0 on; c10d's starts with 1. Where the ring has wrapped, nobody knows how many
    calls of each group it has lost.
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
    found = []
    for entry in ring:
        is_p2p = entry.is_p2p or entry.op.rpartition(":")[2].startswith(("send", "recv"))
        counts[entry.group, is_p2p] += 1
        seq, p2p_seq = counts[entry.group, False], counts[entry.group, True]
        found.append(structs.replace(entry, is_p2p=is_p2p, seq=seq, p2p_seq=p2p_seq))
    return structs.replace(record, entries=Entries.of(found), status={})


def _past_ends(record: FlightRecord) -> FlightRecord:
    """The record in which what stands before a completed operation of ``nccl2`` in its group is completed, too.

    A communicator works in order. The sends of a batch have no end of their own there, nor an entry that ends them.
    """
    ring = Entries.of(record.entries)
    kinds = ring.used()
    ends = ring.positions_of(lambda kind: kind.op.startswith("nccl2:") and kind.completed)
    left = {n for n, kind in kinds.items() if kind.op.startswith("nccl2:") and kind.is_p2p and not kind.completed}
    if not ends or not left:
        return record
    last = {kinds[ring.kind_of[at]].group: at for at in ends}
    return _marked(record, left, lambda at, entry: at < last.get(entry.group, -1), completed=True)


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

    return _with_names(
        record,
        lambda kind: names.get(kind.group, kind.group),
        kinds,
        groups={names.get(name, name): ranks for name, ranks in record.groups.items()},
        status={names.get(name, name): status for name, status in record.status.items()},
    )


def settled(record: FlightRecord) -> FlightRecord:
    """The same record, its coalesced entries put together; the same object where there are none."""
    if not _has_blocks(record.entries):
        return record
    wrapped = record.entries[0].record_id > 0
    runs: dict[str, list[list[Collective]]] = {}
    for entry in record.entries:
        mine = runs.setdefault(entry.group, [])
        if mine and _belongs(entry, mine[-1]):
            mine[-1].append(entry)
        else:
            mine.append([entry])
    found: list[Collective] = []
    for mine in runs.values():
        if not wrapped:
            mine = _renumbered(mine)
        for place, run in enumerate(mine):
            found += _one(run, cut_off=wrapped and place == 0, newest=place == len(mine) - 1)
    found.sort(key=lambda entry: entry.record_id)
    return structs.replace(record, entries=Entries.of(found))


def _has_blocks(entries: Sequence[Collective]) -> bool:
    """Of a ring the kinds tell; a block that was not ended is among its newest entries."""
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
    """``coalesced``, or the block's type in capitals; ``allreduce_coalesced`` is one collective of several tensors."""
    name = entry.op.rsplit(":", 1)[-1]
    kind = name.removesuffix("coalesced").rstrip("_")
    bare = entry.input_sizes in ((), UNKNOWN_SIZES)
    return name.endswith("coalesced") and not entry.is_p2p and kind == kind.upper() and bare


def _belongs(entry: Collective, run: list[Collective]) -> bool:
    """To the launch that ``run`` began. The end of a batch has the number of its sends and of no new collective."""
    last = run[-1]
    if _is_end(last):
        return False
    if _number(entry) == _number(last):
        return _number(entry)[1] > 0  # c10d counts from 1: these are entries whose numbers nobody can read
    return _is_end(entry) and last.is_p2p and (entry.p2p_seq, entry.seq) == (last.p2p_seq, last.seq)


def _renumbered(runs: list[list[Collective]]) -> list[list[Collective]]:
    """Without the numbers that batches of sends took from the collectives, as torch 2.5 counts.

    Ranks of a pipeline make different numbers of batches, and after them the same collective is called differently.
    Only a record that goes back to its first entry can tell how many there were.
    """
    last = taken = 0
    found = []
    for run in runs:
        number = run[0].seq - taken
        if run[0].is_p2p and _is_end(run[-1]) and number > last:
            taken += number - last
            number = last
        last = max(last, number)
        found.append([structs.replace(entry, seq=entry.seq - taken) for entry in run] if taken else run)
    return found


def _one(run: list[Collective], *, cut_off: bool, newest: bool) -> list[Collective]:
    """The entries to go on with. ``cut_off``: the ring may have lost what stood before ``run``.

    A run that has no end was not launched yet, where it is the rank's newest in the group. Else its end went unrecorded
    (a graph was captured, or the library records none), and nobody knows more than that the rank is past it.
    """
    end = run[-1] if _is_end(run[-1]) else None
    members = run[:-1] if end is not None else run
    if end is not None and cut_off and (not members or (end.completed and not members[0].is_p2p)):
        return []  # it may be the end of a batch, or lack some of its operations: of no use for comparing
    if not members or (end is None and len(members) == 1):
        return run
    state = end.state if end is not None else OPEN if newest else members[-1].state
    completed = end.completed if end is not None else not newest
    started = end.started if end is not None else None if completed else False
    changed = {"state": state, "completed": completed, "started": started}
    if members[0].is_p2p:
        return [structs.replace(member, **changed) for member in members]
    first = members[0]
    ops = tuple(member.op.rsplit(":", 1)[-1] for member in members)
    made = {
        "op": f"{first.op.partition(':')[0]}:coalesced {_counted(ops)}",
        "ops": ops,
        "input_sizes": tuple(size for member in members for size in member.input_sizes),
        "input_dtypes": tuple(dtype for member in members for dtype in member.input_dtypes),
        "output_sizes": tuple(size for member in members for size in member.output_sizes),
        "output_dtypes": tuple(dtype for member in members for dtype in member.output_dtypes),
    }
    return [Block(**structs.asdict(end or first) | changed | made)]


def _counted(ops: Sequence[str]) -> str:
    """``3 x all_reduce, broadcast``."""
    names = [(name, len(list(same))) for name, same in groupby(ops)]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names)
