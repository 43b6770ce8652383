"""Encodes a node's redacted evidence for the leader.

If the evidence is long, only the newest Flight Recorder entries and the end of the output are sent. The node's own
bundle has all of it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated

import msgspec
from msgspec.structs import replace

from safelaunch.model import (
    Collective,
    Evidence,
    FlightRecord,
    GroupStatus,
    Progress,
    RankEvidence,
)
from safelaunch.model.entries import Entries, Kinds
from safelaunch.supervise.cluster.codec import MOST_OF_NODE, BadMessage, pack, parse, unpack
from safelaunch.supervise.cluster.messages import MOST_RANKS, WireRank

MOST_ENTRIES = 4096
MOST_LOG = 8 << 10  # characters
MOST_CHILDREN = 64
MOST_STEPS = 32  # of a rank's history
MOST_GROUPS = 16_384  # of a node
MOST_FILES, LARGEST_FILE = 4096, 1 << 20
# Names of files accepted from other nodes: inside the bundle, and not taken.
_FILE = re.compile(r"node/[\w.-]{1,255}/\w[\w.-]{0,100}|ranks/\d{1,5}/flight_recorder\.pickle", re.ASCII)


_Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
Runs = tuple[tuple[WireRank, _Positive, _Positive], ...]


class _PackedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    version: str
    kinds: tuple[Collective, ...]
    kind_of: list[int]
    seqs: list[int]
    p2p_seqs: list[int]
    record_ids: list[int]
    created_ns: list[int]  # differences between successive values
    groups: dict[str, int] = {}  # index in ``_Travelling.groups``
    status: dict[str, GroupStatus] = {}
    damaged: tuple[str, ...] = ()
    library: str = ""
    threads: list[int] = []  # index in ``thread_idents`` of each entry; empty if all are 0
    thread_idents: list[int] = []


class _Travelling(msgspec.Struct, frozen=True):
    rest: Evidence
    records: dict[int, _PackedRecord]
    files: dict[str, bytes] = {}
    groups: tuple[Runs, ...] = ()  # members of each process group


class SharedColumns:
    def __init__(self) -> None:
        self.kinds = Kinds()
        self._members: dict[Runs, tuple[int, ...]] = {}

    def members(self, runs: Runs) -> tuple[int, ...]:
        """Returns the ranks in ``runs``. Raises BadMessage."""
        if runs not in self._members:
            if sum(count for _, _, count in runs) > MOST_RANKS:
                raise BadMessage("a process group with an impossible number of ranks")
            ranges = (range(first, first + step * count, step) for first, step, count in runs if count)
            self._members[runs] = tuple(chain.from_iterable(ranges))
        return self._members[runs]


def condense(evidence: Evidence, files: Mapping[str, bytes] | None = None, share: int = MOST_OF_NODE) -> list[bytes]:
    """Compresses evidence into at most ``share`` bytes.

    Drops ``files``, then older Flight Recorder entries, until the evidence fits. Leaves out ranks that no node sees,
    because the leader already knows them.
    """
    evidence = replace(evidence, missing_ranks=(), launched=None)
    most = MOST_ENTRIES
    ranks = tuple(
        replace(
            rank,
            flight_record=None,
            log_tail=rank.log_tail[-MOST_LOG:],
            children=rank.children[:MOST_CHILDREN],
            progress=_thinned(rank.progress),
        )
        for rank in evidence.ranks
    )
    carried = dict(files or {})
    while True:
        groups: dict[tuple[int, ...], int] = {}
        records = {
            rank.rank: _columns(rank.flight_record, most, groups)
            for rank in evidence.ranks
            if rank.flight_record and most
        }
        travelling = _Travelling(replace(evidence, ranks=ranks), records, carried, tuple(map(_runs, groups)))
        chunks = pack(msgspec.msgpack.encode(travelling), share)
        if chunks is not None:
            return chunks
        if carried:
            carried = {}
            continue
        if not most:  # stacks and states of thousands of processes: send only the list of ranks
            bare = tuple(
                RankEvidence(rank=rank.rank, host=rank.host, pid=rank.pid, local_rank=rank.local_rank)
                for rank in evidence.ranks
            )
            return pack(msgspec.msgpack.encode(_Travelling(replace(evidence, ranks=bare), {}))) or []
        most //= 4


def _thinned(progress: Progress | None) -> Progress | None:
    if progress is None or len(progress.history) <= MOST_STEPS:
        return progress
    every = -(-len(progress.history) // MOST_STEPS)
    return replace(progress, history=progress.history[::-1][::every][::-1])


def unpack_evidence(chunks: list[bytes], shared: SharedColumns | None = None) -> tuple[Evidence, dict[str, bytes]]:
    """Returns the evidence and files that ``condense`` packed. Raises BadMessage.

    Args:
        shared: Stores parts that several nodes have in common; pass the same object for all nodes.
    """
    shared, content = shared or SharedColumns(), parse(unpack(chunks), _Travelling)
    try:
        groups = [shared.members(runs) for runs in content.groups[:MOST_GROUPS]]
        records = {rank: _record(columns, groups, shared.kinds) for rank, columns in content.records.items()}
    except (IndexError, OverflowError, ValueError) as error:
        raise BadMessage(str(error)) from error
    numbers = [rank.rank for rank in content.rest.ranks]
    if len(set(numbers)) != len(numbers) or not all(0 <= number < MOST_RANKS for number in numbers):
        raise BadMessage("evidence of impossible ranks")
    if len(content.files) > MOST_FILES or not all(map(_may_be, content.files.items())):
        raise BadMessage("files that do not belong in a bundle")
    ranks = tuple(replace(rank, flight_record=records.get(rank.rank)) for rank in content.rest.ranks)
    return replace(content.rest, ranks=ranks), content.files


def _may_be(item: tuple[str, bytes]) -> bool:
    name, content = item
    return _FILE.fullmatch(name) is not None and "/../" not in name and len(content) <= LARGEST_FILE


def _runs(members: tuple[int, ...]) -> Runs:
    """Compresses ranks into runs of (first, step, count). For example, ``0 8 16 24`` is one run."""
    runs: list[tuple[int, int, int]] = []
    for rank in members:
        first, step, count = runs[-1] if runs else (0, 0, 0)
        if count == 1 and rank > first:
            runs[-1] = first, rank - first, 2
        elif count > 1 and rank == first + step * count:
            runs[-1] = first, step, count + 1
        else:
            runs.append((rank, 1, 1))
    return tuple(runs)


def _columns(record: FlightRecord, most: int, groups: dict[tuple[int, ...], int]) -> _PackedRecord:
    entries = Entries.of(record.entries)
    begin = max(0, len(entries) - most)
    used = sorted(set(entries.kind_of[begin:]))
    number_of = {kind: number for number, kind in enumerate(used)}
    created = list(entries.created_ns)[begin:]
    threads = {ident: number for number, ident in enumerate(dict.fromkeys(entries.threads[begin:]))}
    return _PackedRecord(
        version=record.version,
        kinds=tuple(entries.kinds.all[kind] for kind in used),
        kind_of=[number_of[kind] for kind in entries.kind_of[begin:]],
        seqs=list(entries.seqs)[begin:],
        p2p_seqs=list(entries.p2p_seqs)[begin:],
        record_ids=list(entries.record_ids)[begin:],
        created_ns=[now - before for now, before in zip(created, [0, *created], strict=False)],
        groups={name: groups.setdefault(members, len(groups)) for name, members in record.groups.items()},
        threads=[threads[ident] for ident in entries.threads[begin:]] if len(threads) > 1 else [],
        thread_idents=list(threads),
        status=record.status,
        damaged=record.damaged,
        library=record.library,
    )


def _record(columns: _PackedRecord, groups: Sequence[tuple[int, ...]], kinds: Kinds) -> FlightRecord:
    numbers = [kinds.number_of(kind) for kind in columns.kinds]
    created, at = [], 0
    for difference in columns.created_ns:
        at += difference
        created.append(at)
    threads = [columns.thread_idents[number] for number in columns.threads if 0 <= number < len(columns.thread_idents)]
    threads = threads or list(columns.thread_idents[:1]) * len(created)
    lists = (threads or created, columns.kind_of, columns.seqs, columns.p2p_seqs, columns.record_ids, created)
    if len({len(each) for each in lists}) > 1 or len(created) > MOST_ENTRIES or min(columns.kind_of, default=0) < 0:
        raise BadMessage("a Flight Recorder with columns that do not match")
    entries = Entries(
        kinds,
        array("I", [numbers[kind] for kind in columns.kind_of]),
        seqs=columns.seqs,
        p2p_seqs=columns.p2p_seqs,
        record_ids=columns.record_ids,
        created_ns=created,
        threads=threads,
    )
    members = {name: groups[number] for name, number in columns.groups.items() if number >= 0}
    return FlightRecord(columns.version, entries, members, columns.status, columns.damaged, columns.library)
