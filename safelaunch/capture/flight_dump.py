"""Flight Recorder dumps: c10d's record of the last collectives of a rank, versions 2.0 to 2.10.

torch 2.15 makes ``nccl2`` the default backend. Each backend then has a recorder of its own, in the same format
(pytorch#192233), so a rank may have several dumps: :func:`~.flight_records.merged`. A start is never noticed there. An
end is, but not of a backend in Python, whose calls are retired as they are made (``verdict/comparable.py``).

A dump has two forms: JSON from the worker server, which needs no GIL and has no frames, and a pickle with frames. Both
are untrusted. The unpickler knows no classes, and no value is hashed, shown or compared before its type and size are
known. A value that c10d would not write counts as unknown, and ``FlightRecord.damaged`` names it: a verdict from such a
record is less certain.

A pickle with a hostile *structure* can still kill the process that reads it, because reading hashes a dictionary's
keys. So a child reads strangers' files (``bundle/reading/guard.py``).

gloo differs (torch 2.13): ``state`` stays ``"scheduled"`` for ever (``retired`` says more), ``pg_config`` has the key
``""`` where entries say ``"0"``, and the numbers of ``pg_status`` are strings in the JSON.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, compress, count
from operator import itemgetter, ne
from typing import Any

from msgspec import structs

from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord, Frame, GroupStatus
from safelaunch.model.entries import Entries, Kinds, Same, packed, positions
from safelaunch.system.decoding import load_pickle
from safelaunch.system.errors import CaptureError

# Backends that ask the device whether an operation has finished. One that they retire otherwise has timed out.
_WITH_EVENTS = ("nccl:", "nccl2:", "ncclx:", "rccl:", "rcclx:", "xccl:", "mccl:", "hccl:")

MAX_DUMP_BYTES = 256 << 20
MAX_ENTRIES = 200_000
MAX_RANKS = 65_536
_MAX_GROUPS = 16_384  # of one rank
_MAX_LOOKED_AT = 1 << 25  # tensors, sizes and frames of one dump
_MAX_COUNT = 1 << 48  # of sequence numbers
_LISTS_OR_NONE = frozenset({list, tuple, type(None)})
_NUMBERS_OR_NONE = frozenset({int, type(None)})
_TEXTS_OR_NONE = frozenset({str, type(None)})


class DumpParts:
    """The common parts of a job's dumps, kept once: kinds of entry, stacks, members of groups."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.frames: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}


def parse_json(data: bytes, shared: DumpParts | None = None) -> FlightRecord:
    """A dump of handler ``fr_trace_json`` or ``dump_nccl_trace_json``. Raises ``CaptureError``."""
    _check_size(data)
    try:
        dump = json.loads(data)
    except (ValueError, RecursionError) as error:  # also a number of more than 4300 digits
        raise CaptureError(f"Flight Recorder JSON is damaged: {error}") from error
    return record_of(dump, shared)


def parse_pickle(data: bytes, shared: DumpParts | None = None) -> FlightRecord:
    """A dump from ``_dump_fr_trace()`` or NCCL. Raises ``CaptureError``."""
    _check_size(data)
    return record_of(load_pickle(data), shared)


def to_json(record: FlightRecord) -> bytes:
    """A dump that says what the record says: ``parse_json`` makes the same of it."""
    groups = {name: {"name": name, "ranks": json.dumps(list(ranks))} for name, ranks in record.groups.items()}
    status = {
        name: {
            "last_enqueued_collective": one.last_enqueued,
            "last_started_collective": one.last_started,
            "last_completed_collective": one.last_completed,
        }
        for name, one in record.status.items()
    }
    dump = {"version": record.version, "pg_config": groups, "pg_status": status}
    dump |= {"comm_lib_version": record.library} if record.library else {}
    entries = list(record.entries)
    timed = any(entry.started is False for entry in entries)
    return json.dumps({**dump, "entries": [_entry(entry, timed=timed) for entry in entries]}).encode()


def _entry(entry: Collective, *, timed: bool) -> dict[str, object]:
    """As c10d writes it; a group's name stands for its running number on the rank. ``timed``: starts are noticed."""
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
    """The record in a decoded dump. Missing keys, and values of another type, keep their defaults.

    ``shared``: from the other dumps of the same job. Raises ``CaptureError`` if it is not a Flight Recorder dump.
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
        library=text_of(dump.get("nccl_version")) or text_of(dump.get("comm_lib_version")),  # the name since torch 2.9
    )


def _without_doubles(entries: Entries, damaged: set[str]) -> Entries:
    """Each entry has a number of its own; one that is there twice counts once."""
    numbers = entries.record_ids
    if isinstance(numbers, (range, Same)) or len(set(numbers)) == len(numbers):
        return entries
    damaged.add("record_id")
    first = {number: at for at, number in reversed(list(enumerate(numbers)))}
    return Entries.of(entries[at] for at in sorted(first.values()))


_NUMBERS = (
    "collective_seq_id", "p2p_seq_id", "record_id", "time_created_ns", "time_discovered_started_ns", "thread_id",
)  # fmt: skip
_CALLED_BEFORE = {"collective_seq_id": "seq_id", "record_id": "id"}  # up to version 2.2
_EntryRow = tuple[Any, ...]


class _Decoder:
    """Decodes the entries of one dump. A training loop writes the same ones over and over.

    An entry's row decides its kind. A known row may begin another round of the loop: the rows that follow are compared
    with those that followed then, at the speed of C, and looked up only where they differ. Only new rows are decoded.
    Comparing is cheap, because c10d's pickler shares the frames' dictionaries between entries, and identical objects
    are equal. It is safe, because an unchecked value is compared only with a checked one, or with one equal to it, and
    so no deeper than that one goes.
    """

    def __init__(self, entries: list[dict[Any, Any]], shared: DumpParts, damaged: set[str]) -> None:
        self.names_by_id = {"0": "0"}  # pg_id → name; the default group is the first on every rank
        self._entries = entries
        self._shared = shared
        self._damaged = damaged
        self._looked_at = 0
        columns = _columns_of(entries)
        self._columns = columns[: len(KEYS)]
        groups = columns[KEYS.index("process_group")]
        if not LISTS.issuperset(map(type, groups)):  # some entries have no name: read all names first
            self.names_by_id.update(_names(groups, columns[KEYS.index("pg_id")]))
        self._values = dict(zip(_NUMBERS, columns[len(KEYS) :], strict=True))
        self._rows: list[_EntryRow] = []
        self._numbers: list[int] = []  # of the rows: the kind, among those that all records share
        self._found: dict[Hashable, int] = {}

    def entries(self) -> Entries:
        row_of = self._rows_of_entries()
        numbers = self._numbers
        return Entries(
            self._shared.kinds,
            self._begun(row_of) or array("I", map(numbers.__getitem__, row_of)),
            seqs=self._counts("collective_seq_id"),
            p2p_seqs=self._counts("p2p_seq_id"),
            record_ids=self._counts("record_id"),
            created_ns=self._numbers_called("time_created_ns"),
            threads=self._threads(),
        )

    def _rows_of_entries(self) -> list[int]:
        row_of: list[int] = []
        seen_at: dict[int, int] = {}  # row → where it was last
        while len(row_of) < len(self._entries):
            now = len(row_of)
            row = self._look_up(tuple([column[now] for column in self._columns]))
            period = now - seen_at.get(row, now)
            row_of.append(row)
            seen_at[row] = now
            if period > 0:
                self._go_round(row_of, period)
                begin = max(now + 1, len(row_of) - period)
                seen_at.update(zip(row_of[begin:], count(begin), strict=False))
        return row_of

    def _go_round(self, row_of: list[int], period: int) -> None:
        """Adds to ``row_of`` the entries that equal those ``period`` entries before."""
        most = 16  # so many at once, and twice as many each time: in an irregular program the first one differs
        while len(row_of) < len(self._entries):
            now = len(row_of)
            most = min(2 * most, 4096, len(self._entries) - now)
            alike = most
            for column in self._columns:
                here, before = column[now : now + alike], column[now - period : now - period + alike]
                if here != before:
                    alike = next(compress(count(), map(ne, here, before)))
            if alike <= period:
                row_of += row_of[now - period : now - period + alike]
            else:
                row_of += (row_of[-period:] * (alike // period + 1))[:alike]
            if alike < most:
                return

    def _look_up(self, row: _EntryRow) -> int:
        key = _key_of(row)
        if key is None:
            row = self._mended(row)
            key = _key_of(row)
        self._looked_at += len(key[0]) + len(key[2]) if key is not None else 0
        if key is None or self._looked_at > _MAX_LOOKED_AT:
            raise CaptureError(f"a Flight Recorder dump with too many sizes and frames: more than {_MAX_LOOKED_AT}")
        number = self._found.get(key, -1)
        if number < 0:
            number = self._found[key] = len(self._rows)
            self._rows.append(row)
            self._numbers.append(self._shared.kinds.number_of(self._kind(row)))
        return number

    def _mended(self, row: _EntryRow) -> _EntryRow:
        """The row, with each value that c10d does not write as unknown; adds their names to ``damaged``."""
        mended = tuple(mend(value) for value, (mend, _) in zip(row, _FIELDS.values(), strict=True))
        self._damaged.update(name for name, was, now in zip(KEYS, row, mended, strict=True) if was is not now)
        return mended

    def _kind(self, row: _EntryRow) -> Collective:
        state, retired, op, group, pg_id, is_p2p, timeout_ms, in_sizes, in_types, out_sizes, out_types, frames = row
        # An entry without a group name belongs to the group that other entries with its number name.
        pair = group if isinstance(group, (list, tuple)) else (self.names_by_id.get(text_of(pg_id), pg_id), "")
        if pair is group and pair and (name := text_of(pair[0])):
            self.names_by_id[text_of(pg_id)] = name
        checks = zip(_FIELDS.items(), row, strict=True)
        self._damaged.update(name for (name, (_, fits)), value in checks if not fits(value))
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

    def _begun(self, row_of: list[int]) -> array[int] | None:
        """The kind of each entry, with ``started`` set by whether the device was seen to start it; None if none says.

        gloo never says. Neither does an NCCL entry that was retired unseen, nor a record in which no start was ever
        noticed (TORCH_NCCL_ENABLE_TIMING is off).
        """
        seen = self._values["time_discovered_started_ns"]
        if not _NUMBERS_OR_NONE.issuperset(map(type, seen)):
            self._damaged.add("time_discovered_started_ns")
        if not any(integer(value) > 0 for value in seen if value):
            return None
        kinds = self._shared.kinds
        begun, waiting = {}, {}
        for row, number in enumerate(self._numbers):
            kind, retired = kinds.all[number], self._rows[row][1] is True
            if kind.started is None:
                begun[row] = kinds.number_of(structs.replace(kind, started=True))
                tells = kind.op.startswith(("nccl:", "ncclx:")) and kind.state == "scheduled" and not retired
                waiting[row] = kinds.number_of(structs.replace(kind, started=False)) if tells else number
        if not begun:
            return None
        made = array("I", map(self._numbers.__getitem__, row_of))
        for position in positions(row_of, begun):
            made[position] = (begun if integer(seen[position]) > 0 else waiting)[row_of[position]]
        return made

    def _counts(self, name: str) -> Sequence[int]:
        """Numbers that count from 0."""
        values = packed(self._numbers_called(name))
        ends = (values[0], values[-1]) if isinstance(values, (range, Same)) and values else values
        if min(ends, default=0) >= 0 and max(ends, default=0) < _MAX_COUNT:
            return values
        self._damaged.add(name)
        return [value if 0 <= value < _MAX_COUNT else 0 for value in values]

    def _threads(self) -> Sequence[int]:
        """Who made each call; older versions do not say. Mostly one thread has made them all."""
        values = self._values["thread_id"]
        first = values[0] if values else None
        if type(first) is str and values.count(first) == len(values) and (number := _thread(first)) is not None:
            return Same(number, len(values))
        if not values or not _TEXTS_OR_NONE.issuperset(map(type, values)):
            self._damaged.update(["thread_id"] if values else [])
            return ()
        different = set(values) - {None}
        known = {value: number for value in different if (number := _thread(value)) is not None}
        if len(known) < len(different):
            self._damaged.add("thread_id")
        return [known.get(value, 0) for value in values] if known else ()

    def _numbers_called(self, name: str) -> Sequence[int]:
        values = self._values[name]
        try:
            return array("q", values)
        except (TypeError, OverflowError):  # missing in some, or none that c10d would write
            former = _CALLED_BEFORE.get(name, name)
            pairs = zip(values, self._entries, strict=True)
            values = tuple(entry.get(former) if value is None else value for value, entry in pairs)
            if not all(map(is_number, values)):
                self._damaged.add(name)
            return [integer(value) for value in values]


def _thread(text: str) -> int | None:
    """The number that c10d writes as a text; None for anything else."""
    return int(text) if len(text) < 19 and text.isascii() and text.isdecimal() else None


def _columns_of(entries: list[dict[Any, Any]]) -> list[tuple[Any, ...]]:
    """The values under ``KEYS`` and ``_NUMBERS``, entry by entry; None where an entry lacks one."""
    if not entries:
        return [()] * (len(KEYS) + len(_NUMBERS))
    own = {key: key for key in entries[0] if type(key) is str}  # the dump's own objects: identical ones are equal
    keys = [own.get(key, key) for key in (*KEYS, *_NUMBERS)]
    try:
        return list(zip(*map(itemgetter(*keys), entries), strict=True))
    except KeyError:  # another version, or not from c10d
        return list(zip(*(tuple(map(entry.get, keys)) for entry in entries), strict=True))


def _names(groups: Sequence[object], ids: Sequence[object]) -> dict[str, str]:
    """pg_id → group name, according to the entries."""
    found = {}
    for group, number in zip(groups, ids, strict=True):
        if isinstance(group, (list, tuple)) and group and (name := text_of(group[0])):
            found[text_of(number)] = name
    return found


def _key_of(row: _EntryRow) -> tuple[_EntryRow, _EntryRow, _EntryRow] | None:
    """A key that is equal for equal rows; None if a value is not a text, a number or a short list of them.

    Frames count by identity, because the dump keeps them alive.
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


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(config: object, known: dict[str, tuple[int, ...]], damaged: set[str]) -> dict[str, tuple[int, ...]]:
    """The groups of ``pg_config``. ``known``: text → ranks of the other dumps: thousands of ranks have the same."""
    groups: dict[str, tuple[int, ...]] = {}
    by_list: dict[int, tuple[int, ...] | None] = {}  # a pickle may refer to one list many times
    for key, value in _pairs("pg_config", config, damaged):
        ranks = value.get("ranks") if isinstance(value, dict) else None
        if isinstance(ranks, str) and ranks in known:
            members: tuple[int, ...] | None = known[ranks]
        else:
            members = by_list[id(ranks)] = by_list[id(ranks)] if id(ranks) in by_list else _ranks(ranks)
        if members is None:
            damaged.add("pg_config")
        elif isinstance(ranks, str):
            known[ranks] = members
        if members:
            groups[text_of(key)] = members
    return groups


def _pairs(name: str, table: object, damaged: set[str]) -> list[tuple[Any, Any]]:
    """What the dump says by group, of a bounded number of them."""
    if not (table is None or (isinstance(table, dict) and len(table) <= _MAX_GROUPS)):
        damaged.add(name)
    return list(table.items())[:_MAX_GROUPS] if isinstance(table, dict) else []


def _ranks(ranks: object) -> tuple[int, ...] | None:
    """The ranks; None if that is not a list of ranks."""
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
    """The status by group name: a ``pg_id`` is the rank's own number of the group, different on each rank.

    A group without an entry has only that number, which says nothing.
    """
    found = {}
    for key, value in _pairs("pg_status", status, damaged):
        if not isinstance(value, dict):
            damaged.add("pg_status")
        elif text_of(key) in names:
            numbers = [value.get(f"last_{what}_collective") for what in ("enqueued", "started", "completed")]
            if not all(-1 <= integer(number, -1) < _MAX_COUNT and is_number(number) for number in numbers):
                damaged.add("pg_status")
                continue
            found[names[text_of(key)]] = GroupStatus(*(integer(number, -1) for number in numbers))
    return found


def _marks(dump: dict[Any, Any]) -> bool:
    return "version" in dump or "entries" in dump


def _check_size(data: bytes) -> None:
    if len(data) > MAX_DUMP_BYTES:
        raise CaptureError(f"a Flight Recorder dump that is too large: {len(data)} bytes")
    if not data:
        raise CaptureError("an empty Flight Recorder dump")


# --- values, one by one -----------------------------------------------------------------------------------------------
# Nothing here trusts a value: it is neither hashed, shown nor compared before its type and size are known.

MAX_ITEMS = 4096  # tensors of one collective, frames of one stack
MAX_LEAVES = 1 << 16  # texts and numbers of one entry
_MAX_TEXT = 4096
SCALARS = frozenset({str, int, bool, type(None)})
LISTS = frozenset({list, tuple})
STATES = ("scheduled", "started", "completed")


# --- what a value says ------------------------------------------------------------------------------------------------


def frames_of(frames: object) -> tuple[Frame, ...]:
    return tuple(
        Frame(text_of(frame.get("filename")), integer(frame.get("line")), text_of(frame.get("name")))
        for frame in _items(frames)
        if isinstance(frame, dict)
    )


def sizes_of(sizes: object) -> tuple[tuple[int, ...], ...]:
    """Sizes. Anything but a list of lists of counts is unknown, not empty: it must not be compared."""
    if sizes is None:
        return ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, (list, tuple)) for size in sizes):
        return UNKNOWN_SIZES
    read = tuple(tuple(integer(n, -1) for n in _items(size)) for size in _items(sizes))
    return UNKNOWN_SIZES if any(n < 0 for size in read for n in size) else read


def types_of(values: object) -> tuple[str, ...]:
    """Data types; ``""`` for an unknown one."""
    return tuple(text_of(value) if isinstance(value, str) else "" for value in _items(values))


def _items(value: object) -> list[Any]:
    return list(value[:MAX_ITEMS]) if isinstance(value, (list, tuple)) else []


def integer(value: object, default: int = 0) -> int:
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 63 else default
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isascii():
        return int(value) if value.removeprefix("-").isdigit() else default
    return default


def text_of(value: object) -> str:
    """A text of bounded length that is valid UTF-8; ``""`` for anything else."""
    if not isinstance(value, str):
        return str(value) if type(value) is int and -(1 << 63) <= value < 1 << 63 else ""
    text = value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# --- values that c10d does not write ----------------------------------------------------------------------------------
# What makes a value safe to handle: the value itself, or what takes its place.


def _scalar(value: object) -> object:
    return value if type(value) in SCALARS else None


def _list_of(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return None
    plain = [_scalar(item) for item in _items(value)]
    return value if len(plain) == len(value) and SCALARS.issuperset(map(type, value)) else plain


def _list_of_frames(value: object) -> object:
    whole = value is None or (isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS)
    return value if whole else _items(value)


def _list_of_sizes(value: object) -> object:
    whole = isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS and all(map(_is_size, value))
    whole = whole and sum(map(len, _items(value))) < MAX_LEAVES // 4
    return value if whole or value is None else UNKNOWN_SIZES


def _is_size(size: object) -> bool:
    return isinstance(size, (list, tuple)) and len(size) <= MAX_ITEMS and {int}.issuperset(map(type, size))


# Whether it says what it should.


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_state(value: object) -> bool:
    return value is None or value in STATES


def _is_flag(value: object) -> bool:
    return value in (None, 0, 1)


def is_number(value: object) -> bool:
    return value is None or (integer(value, -2) != -2 and type(value) is not bool)


def _is_id(value: object) -> bool:
    return value is None or text_of(value) != ""


def _is_texts(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value)))


def _is_sizes(value: object) -> bool:
    return sizes_of(value) is not UNKNOWN_SIZES


def _is_stack(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(map(_is_frame, value)))


def _is_frame(frame: object) -> bool:
    if not isinstance(frame, dict):
        return False
    return _is_text(frame.get("filename")) and _is_text(frame.get("name")) and is_number(frame.get("line"))


# What makes a kind of entry: all that is no number of its own.
_FIELDS: dict[str, tuple[Callable[[object], object], Callable[[object], bool]]] = {
    "state": (_scalar, _is_state),
    "retired": (_scalar, _is_flag),
    "profiling_name": (_scalar, _is_text),
    "process_group": (_list_of, _is_texts),
    "pg_id": (_scalar, _is_id),
    "is_p2p": (_scalar, _is_flag),
    "timeout_ms": (_scalar, is_number),
    "input_sizes": (_list_of_sizes, _is_sizes),
    "input_dtypes": (_list_of, _is_texts),
    "output_sizes": (_list_of_sizes, _is_sizes),
    "output_dtypes": (_list_of, _is_texts),
    "frames": (_list_of_frames, _is_stack),
}
KEYS = tuple(_FIELDS)
