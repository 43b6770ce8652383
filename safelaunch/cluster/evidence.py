"""A node's evidence as it travels to the leader, and the evidence of all nodes as one.

It has been through the node's redaction before. What is long is cut: of a Flight Recorder the newest entries travel,
of the output its end. The whole of it stays in the node's own bundle.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from safelaunch.cluster.messages import MOST_RANKS, BadMessage, packed, unpacked
from safelaunch.model import Collective, Evidence, FlightRecord, GroupStatus, NodeEvidence, RankEvidence
from safelaunch.model.entries import Entries, Kinds

MOST_ENTRIES = 4096  # of a rank
MOST_LOG = 8 << 10  # characters
MOST_CHILDREN = 64
MOST_FILES, LARGEST_FILE = 4096, 1 << 20
# What a file of another node may be called: nothing leads out of the bundle, and nothing there is replaced.
_FILE = re.compile(r"node/[\w.-]{1,255}/\w[\w.-]{0,100}|ranks/\d{1,5}/flight_recorder\.pickle", re.ASCII)


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Flight Recorder by column: ``kinds`` once, and numbers for each entry; times as differences."""

    version: str
    kinds: tuple[Collective, ...]
    kind_of: list[int]
    seqs: list[int]
    p2p_seqs: list[int]
    record_ids: list[int]
    created_ns: list[int]
    groups: dict[str, tuple[int, ...]] = {}
    status: dict[str, GroupStatus] = {}
    damaged: tuple[str, ...] = ()
    threads: list[int] = []  # of each entry, its place in ``thread_idents``; empty where all are of the first
    thread_idents: list[int] = []


class _Travelling(msgspec.Struct, frozen=True):
    """``rest``: everything of the evidence but the Flight Recorders, which are in ``records`` by rank."""

    rest: Evidence
    records: dict[int, _Record]
    files: dict[str, bytes] = {}


def condensed(evidence: Evidence, files: Mapping[str, bytes] | None = None) -> list[bytes]:
    """Chunks that a store takes; without ``files`` of the bundle, and of fewer and fewer entries, until they fit."""
    most = MOST_ENTRIES
    ranks = tuple(
        replace(rank, flight_record=None, log_tail=rank.log_tail[-MOST_LOG:], children=rank.children[:MOST_CHILDREN])
        for rank in evidence.ranks
    )
    carried = dict(files or {})
    while True:
        records = {
            rank.rank: _columns(rank.flight_record, most) for rank in evidence.ranks if rank.flight_record and most
        }
        travelling = _Travelling(replace(evidence, ranks=ranks), records, carried)
        chunks = packed(msgspec.msgpack.encode(travelling))
        if chunks is not None:
            return chunks
        if carried:
            carried = {}
            continue
        if not most:  # stacks and states of thousands of processes: who is there is all that is said
            bare = tuple(RankEvidence(rank.rank, rank.host, rank.pid, rank.local_rank) for rank in evidence.ranks)
            return packed(msgspec.msgpack.encode(_Travelling(replace(evidence, ranks=bare), {}))) or []
        most //= 4


def expanded(chunks: list[bytes]) -> Evidence:
    """Raises BadMessage for what ``condensed`` did not make."""
    return received(chunks)[0]


def received(chunks: list[bytes]) -> tuple[Evidence, dict[str, bytes]]:
    """The evidence, and the files of the bundle that came with it. Raises BadMessage."""
    try:
        found = msgspec.msgpack.decode(unpacked(chunks), type=_Travelling)
        records = {rank: _record(columns) for rank, columns in found.records.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError, IndexError) as error:
        raise BadMessage(str(error)) from error
    numbers = [rank.rank for rank in found.rest.ranks]
    if len(set(numbers)) != len(numbers) or not all(0 <= number < MOST_RANKS for number in numbers):
        raise BadMessage("evidence of ranks that there cannot be")
    if len(found.files) > MOST_FILES or not all(map(_may_be, found.files.items())):
        raise BadMessage("files that no bundle has")
    ranks = tuple(replace(rank, flight_record=records.get(rank.rank)) for rank in found.rest.ranks)
    return replace(found.rest, ranks=ranks), found.files


def _may_be(item: tuple[str, bytes]) -> bool:
    name, content = item
    return _FILE.fullmatch(name) is not None and "/../" not in name and len(content) <= LARGEST_FILE


def merged(own: Evidence, others: Sequence[Evidence]) -> Evidence:
    """The evidence of all nodes as one. Of a rank that several bring, the first counts."""
    kept: dict[int, RankEvidence] = {}
    for rank in (rank for evidence in (own, *others) for rank in evidence.ranks):
        if rank.rank < own.world_size:
            kept.setdefault(rank.rank, rank)
    everybody = (own, *others)
    return replace(
        own,
        ranks=tuple(kept[number] for number in sorted(kept)),
        missing_ranks=tuple(number for number in range(own.world_size) if number not in kept),
        stall_s=max(evidence.stall_s for evidence in everybody),
        moving=any(evidence.moving for evidence in everybody),
        notes=tuple(dict.fromkeys(note for evidence in everybody for note in evidence.notes)),
        nodes=all_nodes(everybody),
    )


def aged(evidence: Evidence, now_unix_s: float) -> Evidence:
    """With the times of failures as seconds since ``now_unix_s`` (negative ones): no node's clock travels.

    All nodes say so within a second or two of the failure, so these compare where the clocks do not.
    """

    def one(rank: RankEvidence) -> RankEvidence:
        if rank.exception is not None:
            rank = replace(rank, exception=replace(rank.exception, time_unix_s=rank.exception.time_unix_s - now_unix_s))
        if rank.exit is not None:
            rank = replace(rank, exit=replace(rank.exit, time_unix_s=rank.exit.time_unix_s - now_unix_s))
        return rank

    return replace(evidence, ranks=tuple(map(one, evidence.ranks)))


def all_nodes(halves: Sequence[Evidence]) -> tuple[NodeEvidence, ...]:
    """What each half says of its own node, and what any says of one that it did not hear.

    Of a node whose own half is not here, what is said of it by the one who knows the most.
    """
    every = [node for half in halves for node in half.nodes]
    kept = {node.slot or node.host: node for node in every if node.here}
    gone: dict[int | str, NodeEvidence] = {}
    for node in (node for node in every if not node.here):
        key = node.slot or node.host
        if node.is_gone:
            gone[key] = max(gone.get(key, node), node, key=lambda one: (bool(one.probe or one.store), one.silent_s))
        else:
            kept.setdefault(key, node)
    return (*kept.values(), *gone.values())


def _columns(record: FlightRecord, most: int) -> _Record:
    entries = Entries.of(record.entries)
    begin = max(0, len(entries) - most)
    used = sorted(set(entries.kind_of[begin:]))
    number_of = {kind: number for number, kind in enumerate(used)}
    created = list(entries.created_ns)[begin:]
    threads = list(dict.fromkeys(entries.threads[begin:]))
    return _Record(
        version=record.version,
        kinds=tuple(entries.kinds.all[kind] for kind in used),
        kind_of=[number_of[kind] for kind in entries.kind_of[begin:]],
        seqs=list(entries.seqs)[begin:],
        p2p_seqs=list(entries.p2p_seqs)[begin:],
        record_ids=list(entries.record_ids)[begin:],
        created_ns=[now - before for now, before in zip(created, [0, *created], strict=False)],
        threads=[threads.index(thread) for thread in entries.threads[begin:]] if len(threads) > 1 else [],
        thread_idents=threads,
        groups=record.groups,
        status=record.status,
        damaged=record.damaged,
    )


def _record(columns: _Record) -> FlightRecord:
    kinds = Kinds()
    numbers = [kinds.number_of(kind) for kind in columns.kinds]
    created, at = [], 0
    for difference in columns.created_ns:
        at += difference
        created.append(at)
    threads = [columns.thread_idents[number] for number in columns.threads if 0 <= number < len(columns.thread_idents)]
    threads = threads or list(columns.thread_idents[:1]) * len(created)
    lists = (threads or created, columns.kind_of, columns.seqs, columns.p2p_seqs, columns.record_ids, created)
    if len({len(each) for each in lists}) > 1 or len(created) > MOST_ENTRIES or min(columns.kind_of, default=0) < 0:
        raise BadMessage("a Flight Recorder whose columns do not fit")
    entries = Entries(
        kinds,
        array("I", [numbers[kind] for kind in columns.kind_of]),
        seqs=columns.seqs,
        p2p_seqs=columns.p2p_seqs,
        record_ids=columns.record_ids,
        created_ns=created,
        threads=threads,
    )
    return FlightRecord(columns.version, entries, columns.groups, columns.status, columns.damaged)
