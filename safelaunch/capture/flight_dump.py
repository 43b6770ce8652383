"""Parses Flight Recorder dumps (c10d's record of a rank's last collectives), versions 2.0 to 2.10.

A dump is either JSON from the worker server, which has no frames but doesn't need the GIL, or a pickle with frames. The
unpickler creates only built-in types, and a value is hashed, shown or compared only after a check of its type and size.
A value that c10d wouldn't write counts as unknown, and ``FlightRecord.damaged`` names its field.

A pickle with a hostile *structure* can still kill its reader, because reading hashes a dictionary's keys. So files from
strangers are read in a child process (``bundle/reading/guard.py``).

torch 2.15 makes ``nccl2`` the default backend. Each backend then has its own recorder, in the same format
(pytorch#192233), so a rank can have several dumps. Those recorders never record a call's start. They record its end,
unless the backend is written in Python: then each call is marked ``retired`` as soon as it is made
(``verdict/comparable.py``).

gloo differs (torch 2.13): ``state`` stays ``"scheduled"`` (``retired`` shows the end), ``pg_config`` has the key ``""``
instead of ``"0"``, and the numbers in ``pg_status`` are strings in the JSON.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Hashable, Sequence
from itertools import chain, compress, count
from operator import itemgetter, ne
from typing import Any

from msgspec import structs

from safelaunch.capture.flight_values import (
    FIELDS,
    KEYS,
    LISTS,
    MAX_ITEMS,
    MAX_LEAVES,
    SCALARS,
    STATES,
    frames_of,
    integer,
    is_number,
    sizes_of,
    text_of,
    types_of,
)
from safelaunch.model import Collective, FlightRecord, Frame, GroupStatus
from safelaunch.model.entries import Entries, Kinds, Same, packed, positions
from safelaunch.system.decoding import load_pickle
from safelaunch.system.errors import CaptureError

# Backends that ask the device if an operation has finished. An entry retired without that has timed out.
_WITH_EVENTS = ("nccl:", "nccl2:", "ncclx:", "rccl:", "rcclx:", "xccl:", "mccl:", "hccl:")

MAX_DUMP_BYTES = 256 << 20
MAX_ENTRIES = 200_000
MAX_RANKS = 65_536
_MAX_GROUPS = 16_384  # per rank
_MAX_LEAVES_READ = 1 << 25  # tensors, sizes and frames per dump
_MAX_COUNT = 1 << 48  # sequence numbers
_LISTS_OR_NONE = frozenset({list, tuple, type(None)})
_NUMBERS_OR_NONE = frozenset({int, type(None)})
_TEXTS_OR_NONE = frozenset({str, type(None)})


class DumpParts:
    def __init__(self) -> None:
        self.kinds = Kinds()
        self.frames: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}


def parse_json(data: bytes, shared: DumpParts | None = None) -> FlightRecord:
    """Parses the output of handler ``fr_trace_json`` or ``dump_nccl_trace_json``. Raises ``CaptureError``."""
    _check_size(data)
    try:
        dump = json.loads(data)
    except (ValueError, RecursionError) as error:  # or a number of more than 4300 digits
        raise CaptureError(f"Flight Recorder JSON is damaged: {error}") from error
    return record_of(dump, shared)


def parse_pickle(data: bytes, shared: DumpParts | None = None) -> FlightRecord:
    """Parses a pickle written by ``_dump_fr_trace()`` or by NCCL. Raises ``CaptureError``."""
    _check_size(data)
    return record_of(load_pickle(data), shared)


def to_json(record: FlightRecord) -> bytes:
    groups = {name: {"name": name, "ranks": json.dumps(list(ranks))} for name, ranks in record.groups.items()}
    status = {
        name: {
            "last_enqueued_collective": group.last_enqueued,
            "last_started_collective": group.last_started,
            "last_completed_collective": group.last_completed,
        }
        for name, group in record.status.items()
    }
    dump = {"version": record.version, "pg_config": groups, "pg_status": status}
    dump |= {"comm_lib_version": record.library} if record.library else {}
    entries = list(record.entries)
    timed = any(entry.started is False for entry in entries)
    return json.dumps({**dump, "entries": [_entry(entry, timed=timed) for entry in entries]}).encode()


def _entry(entry: Collective, *, timed: bool) -> dict[str, object]:
    noticed = entry.started is True and (timed or entry.state == "scheduled")
    return {
        "state": entry.state,
        "retired": entry.completed,
        "profiling_name": entry.op,
        "process_group": [entry.group, entry.description],
        "pg_id": entry.group,
        "is_p2p": entry.is_p2p,
        "timeout_ms": entry.timeout_ms,
        "input_sizes": entry.input_sizes,
        "input_dtypes": entry.input_dtypes,
        "output_sizes": entry.output_sizes,
        "output_dtypes": entry.output_dtypes,
        "frames": [{"filename": f.file, "line": f.line, "name": f.function} for f in entry.frames],
        "collective_seq_id": entry.seq,
        "p2p_seq_id": entry.p2p_seq,
        "record_id": entry.record_id,
        "time_created_ns": entry.created_ns,
        "time_discovered_started_ns": int(noticed),
        "thread_id": str(entry.thread),
    }


def record_of(dump: object, shared: DumpParts | None = None) -> FlightRecord:
    """Converts a decoded dump. Missing keys and values of another type keep their defaults.

    Raises ``CaptureError`` if it isn't a Flight Recorder dump. ``shared`` holds parts that this job's dumps have in
    common.
    """
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list) or not _marks(dump):
        raise CaptureError("not a Flight Recorder dump: it has no version and no entries")
    entries = dump.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise CaptureError(f"a Flight Recorder dump with too many entries: {len(entries)}")
    shared = shared or DumpParts()
    damaged: set[str] = set()
    if not {dict}.issuperset(map(type, entries)):
        entries = [entry for entry in entries if isinstance(entry, dict)]
        damaged.add("entries")
    decoder = _Decoder(entries, shared, damaged)
    return FlightRecord(
        version=text_of(dump.get("version")),
        entries=_without_doubles(decoder.entries(), damaged),
        groups=_groups(dump.get("pg_config"), shared.ranks, damaged),
        status=_status(dump.get("pg_status"), decoder.names_by_id, damaged),
        damaged=tuple(sorted(damaged)),
        library=text_of(dump.get("nccl_version")) or text_of(dump.get("comm_lib_version")),  # name since torch 2.9
    )


def _without_doubles(entries: Entries, damaged: set[str]) -> Entries:
    numbers = entries.record_ids
    if isinstance(numbers, (range, Same)) or len(set(numbers)) == len(numbers):
        return entries
    damaged.add("record_id")
    first = {number: at for at, number in reversed(list(enumerate(numbers)))}
    return Entries.of(entries[at] for at in sorted(first.values()))


_NUMBERS = (
    "collective_seq_id", "p2p_seq_id", "record_id", "time_created_ns", "time_discovered_started_ns", "thread_id",
)  # fmt: skip
_FORMER_NAMES = {"collective_seq_id": "seq_id", "record_id": "id"}  # up to version 2.2
_EntryRow = tuple[Any, ...]


class _Decoder:
    """Decodes the entries of one dump. Most entries recur in every iteration of a training loop.

    If a row is known, another iteration might begin there: the following rows are compared in bulk with the rows that
    followed last time, and decoded only if they differ. Comparing is cheap, because c10d's pickler shares the frames'
    dictionaries, and identical objects are equal. It is safe, because one of the two compared values has been checked,
    or equals a checked value, which limits the depth of the recursion.
    """

    def __init__(self, entries: list[dict[Any, Any]], shared: DumpParts, damaged: set[str]) -> None:
        self.names_by_id = {"0": "0"}  # the default group comes first on every rank
        self._entries = entries
        self._shared = shared
        self._damaged = damaged
        self._leaves_read = 0
        columns = _columns_of(entries)
        self._columns = columns[: len(KEYS)]
        groups = columns[KEYS.index("process_group")]
        if not LISTS.issuperset(map(type, groups)):  # some entries have no name: read all names first
            self.names_by_id.update(_names(groups, columns[KEYS.index("pg_id")]))
        self._values = dict(zip(_NUMBERS, columns[len(KEYS) :], strict=True))
        self._rows: list[_EntryRow] = []
        self._numbers: list[int] = []  # row → kind, as a number in the shared kinds
        self._row_by_key: dict[Hashable, int] = {}

    def entries(self) -> Entries:
        row_of = self._rows_of_entries()
        numbers = self._numbers
        return Entries(
            self._shared.kinds,
            self._kinds_with_starts(row_of) or array("I", map(numbers.__getitem__, row_of)),
            seqs=self._counts("collective_seq_id"),
            p2p_seqs=self._counts("p2p_seq_id"),
            record_ids=self._counts("record_id"),
            created_ns=self._numbers_in("time_created_ns"),
            threads=self._threads(),
        )

    def _rows_of_entries(self) -> list[int]:
        row_of: list[int] = []
        last_at: dict[int, int] = {}  # row → its last position
        while len(row_of) < len(self._entries):
            now = len(row_of)
            row = self._look_up(tuple([column[now] for column in self._columns]))
            period = now - last_at.get(row, now)
            row_of.append(row)
            last_at[row] = now
            if period > 0:
                self._repeat(row_of, period)
                begin = max(now + 1, len(row_of) - period)
                last_at.update(zip(row_of[begin:], count(begin), strict=False))
        return row_of

    def _repeat(self, row_of: list[int], period: int) -> None:
        """Extends ``row_of`` for as long as entries equal those ``period`` positions earlier."""
        most = 16  # compared at once, doubled each time: in an irregular program the first entry differs
        while len(row_of) < len(self._entries):
            now = len(row_of)
            most = min(2 * most, 4096, len(self._entries) - now)
            equal = most
            for column in self._columns:
                here, before = column[now : now + equal], column[now - period : now - period + equal]
                if here != before:
                    equal = next(compress(count(), map(ne, here, before)))
            if equal <= period:
                row_of += row_of[now - period : now - period + equal]
            else:
                row_of += (row_of[-period:] * (equal // period + 1))[:equal]
            if equal < most:
                return

    def _look_up(self, row: _EntryRow) -> int:
        key = _key_of(row)
        if key is None:
            row = self._mended(row)
            key = _key_of(row)
        self._leaves_read += len(key[0]) + len(key[2]) if key is not None else 0
        if key is None or self._leaves_read > _MAX_LEAVES_READ:
            raise CaptureError(f"a Flight Recorder dump with too many sizes and frames: more than {_MAX_LEAVES_READ}")
        number = self._row_by_key.get(key, -1)
        if number < 0:
            number = self._row_by_key[key] = len(self._rows)
            self._rows.append(row)
            self._numbers.append(self._shared.kinds.number_of(self._kind(row)))
        return number

    def _mended(self, row: _EntryRow) -> _EntryRow:
        mended = tuple(mend(value) for value, (mend, _) in zip(row, FIELDS.values(), strict=True))
        self._damaged.update(name for name, old, new in zip(KEYS, row, mended, strict=True) if old is not new)
        return mended

    def _kind(self, row: _EntryRow) -> Collective:
        state, retired, op, group, pg_id, is_p2p, timeout_ms, in_sizes, in_types, out_sizes, out_types, frames = row
        # Without a group name, the entry belongs to the group with its number in other entries.
        pair = group if isinstance(group, (list, tuple)) else (self.names_by_id.get(text_of(pg_id), pg_id), "")
        if pair is group and pair and (name := text_of(pair[0])):
            self.names_by_id[text_of(pg_id)] = name
        checks = zip(FIELDS.items(), row, strict=True)
        self._damaged.update(name for (name, (_, is_valid)), value in checks if not is_valid(value))
        state, op, retired = text_of(state), text_of(op) if isinstance(op, str) else "", retired is True
        watched = op.startswith(_WITH_EVENTS) and state in STATES
        decoded = frames_of(frames)
        return Collective(
            group=text_of(pair[0]) if pair else "",
            seq=0,
            op=op,
            completed=state == "completed" or (retired and not watched),
            state=state,
            description=text_of(pair[1]) if len(pair) > 1 else "",
            is_p2p=is_p2p is True,
            input_sizes=sizes_of(in_sizes),
            input_dtypes=types_of(in_types),
            output_sizes=sizes_of(out_sizes),
            output_dtypes=types_of(out_types),
            started=True if state in ("started", "completed") else None,
            timeout_ms=integer(timeout_ms),
            frames=self._shared.frames.setdefault(decoded, decoded),
        )

    def _kinds_with_starts(self, row_of: list[int]) -> array[int] | None:
        """Returns the kind of each entry, with ``started`` set if the device reported starts; None if it reported none.

        gloo never reports starts. NCCL doesn't if an entry was retired before its start was noticed, or if
        TORCH_NCCL_ENABLE_TIMING is off.
        """
        starts = self._values["time_discovered_started_ns"]
        if not _NUMBERS_OR_NONE.issuperset(map(type, starts)):
            self._damaged.add("time_discovered_started_ns")
        if not any(integer(value) > 0 for value in starts if value):
            return None
        kinds = self._shared.kinds
        started, waiting = {}, {}
        for row, number in enumerate(self._numbers):
            kind, retired = kinds.all[number], self._rows[row][1] is True
            if kind.started is None:
                started[row] = kinds.number_of(structs.replace(kind, started=True))
                is_timed = kind.op.startswith(("nccl:", "ncclx:")) and kind.state == "scheduled" and not retired
                waiting[row] = kinds.number_of(structs.replace(kind, started=False)) if is_timed else number
        if not started:
            return None
        numbers = array("I", map(self._numbers.__getitem__, row_of))
        for position in positions(row_of, started):
            numbers[position] = (started if integer(starts[position]) > 0 else waiting)[row_of[position]]
        return numbers

    def _counts(self, name: str) -> Sequence[int]:
        values = packed(self._numbers_in(name))
        ends = (values[0], values[-1]) if isinstance(values, (range, Same)) and values else values
        if min(ends, default=0) >= 0 and max(ends, default=0) < _MAX_COUNT:
            return values
        self._damaged.add(name)
        return [value if 0 <= value < _MAX_COUNT else 0 for value in values]

    def _threads(self) -> Sequence[int]:
        values = self._values["thread_id"]
        first = values[0] if values else None
        if type(first) is str and values.count(first) == len(values) and (number := _thread(first)) is not None:
            return Same(number, len(values))
        if not values or not _TEXTS_OR_NONE.issuperset(map(type, values)):
            self._damaged.update(["thread_id"] if values else [])
            return ()
        different = set(values) - {None}
        by_text = {value: number for value in different if (number := _thread(value)) is not None}
        if len(by_text) < len(different):
            self._damaged.add("thread_id")
        return [by_text.get(value, 0) for value in values] if by_text else ()

    def _numbers_in(self, name: str) -> Sequence[int]:
        values = self._values[name]
        try:
            return array("q", values)
        except (TypeError, OverflowError):
            former = _FORMER_NAMES.get(name, name)
            pairs = zip(values, self._entries, strict=True)
            values = tuple(entry.get(former) if value is None else value for value, entry in pairs)
            if not all(map(is_number, values)):
                self._damaged.add(name)
            return [integer(value) for value in values]


def _thread(text: str) -> int | None:
    return int(text) if len(text) < 19 and text.isascii() and text.isdecimal() else None


def _columns_of(entries: list[dict[Any, Any]]) -> list[tuple[Any, ...]]:
    if not entries:
        return [()] * (len(KEYS) + len(_NUMBERS))
    own = {key: key for key in entries[0] if type(key) is str}  # the dump's own objects: identical ones compare fast
    keys = [own.get(key, key) for key in (*KEYS, *_NUMBERS)]
    try:
        return list(zip(*map(itemgetter(*keys), entries), strict=True))
    except KeyError:  # another version, or not from c10d
        return list(zip(*(tuple(map(entry.get, keys)) for entry in entries), strict=True))


def _names(groups: Sequence[object], ids: Sequence[object]) -> dict[str, str]:
    names = {}
    for group, number in zip(groups, ids, strict=True):
        if isinstance(group, (list, tuple)) and group and (name := text_of(group[0])):
            names[text_of(number)] = name
    return names


def _key_of(row: _EntryRow) -> tuple[_EntryRow, _EntryRow, _EntryRow] | None:
    """Returns a key that is equal for equal rows; None if a value isn't a string, a number or a short list of these.

    Compares frames by identity; the dump keeps them alive.
    """
    state, retired, op, group, pg_id, is_p2p, timeout_ms, in_sizes, in_types, out_sizes, out_types, frames = row
    lists = (group, in_types, out_types, in_sizes, out_sizes, frames)
    if not _LISTS_OR_NONE.issuperset(map(type, lists)):
        return None
    group, in_types, out_types, in_sizes, out_sizes, frames = (value or () for value in lists)
    sizes = (*in_sizes, *out_sizes)
    if len(sizes) > MAX_ITEMS or len(frames) > MAX_ITEMS or not LISTS.issuperset(map(type, sizes)):
        return None
    shape = (row[3] is None, *map(len, (group, in_types, out_types, in_sizes)), *map(len, sizes))
    if sum(shape) > MAX_LEAVES:
        return None
    numbers = chain.from_iterable(sizes)
    leaves = (state, retired, op, pg_id, is_p2p, timeout_ms, *group, *in_types, *out_types, *numbers)
    return (leaves, shape, tuple(map(id, frames))) if SCALARS.issuperset(map(type, leaves)) else None


def _groups(config: object, ranks_by_text: dict[str, tuple[int, ...]], damaged: set[str]) -> dict[str, tuple[int, ...]]:
    """Reads ``pg_config``. All dumps share ``ranks_by_text``, because thousands of ranks have the same text."""
    groups: dict[str, tuple[int, ...]] = {}
    by_list: dict[int, tuple[int, ...] | None] = {}  # a pickle can refer to one list many times
    for key, value in _pairs("pg_config", config, damaged):
        ranks = value.get("ranks") if isinstance(value, dict) else None
        if isinstance(ranks, str) and ranks in ranks_by_text:
            members: tuple[int, ...] | None = ranks_by_text[ranks]
        else:
            members = by_list[id(ranks)] = by_list[id(ranks)] if id(ranks) in by_list else _ranks(ranks)
        if members is None:
            damaged.add("pg_config")
        elif isinstance(ranks, str):
            ranks_by_text[ranks] = members
        if members:
            groups[text_of(key)] = members
    return groups


def _pairs(name: str, table: object, damaged: set[str]) -> list[tuple[Any, Any]]:
    if not (table is None or (isinstance(table, dict) and len(table) <= _MAX_GROUPS)):
        damaged.add(name)
    return list(table.items())[:_MAX_GROUPS] if isinstance(table, dict) else []


def _ranks(ranks: object) -> tuple[int, ...] | None:
    if ranks is None:
        return ()
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks) if len(ranks) < 1 << 20 else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(ranks, (list, tuple)) or len(ranks) > MAX_RANKS or not {int}.issuperset(map(type, ranks)):
        return None
    return tuple(ranks) if min(ranks, default=0) >= 0 and max(ranks, default=0) < MAX_RANKS else None


def _status(status: object, names: dict[str, str], damaged: set[str]) -> dict[str, GroupStatus]:
    """Reads ``pg_status`` by group name.

    A ``pg_id`` is local to the rank, so a group without an entry can't be identified.
    """
    by_name = {}
    for key, value in _pairs("pg_status", status, damaged):
        if not isinstance(value, dict):
            damaged.add("pg_status")
        elif text_of(key) in names:
            numbers = [value.get(f"last_{what}_collective") for what in ("enqueued", "started", "completed")]
            if not all(-1 <= integer(number, -1) < _MAX_COUNT and is_number(number) for number in numbers):
                damaged.add("pg_status")
                continue
            by_name[names[text_of(key)]] = GroupStatus(*(integer(number, -1) for number in numbers))
    return by_name


def _marks(dump: dict[Any, Any]) -> bool:
    return "version" in dump or "entries" in dump


def _check_size(data: bytes) -> None:
    if len(data) > MAX_DUMP_BYTES:
        raise CaptureError(f"a Flight Recorder dump that is too large: {len(data)} bytes")
    if not data:
        raise CaptureError("an empty Flight Recorder dump")
