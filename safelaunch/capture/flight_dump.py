"""Flight Recorder dumps: c10d's record of the last collectives of a rank, versions 2.0 to 2.10.

Two forms of the same thing: JSON from the worker server, which needs no GIL and has no frames, and a pickle
with frames. Both are untrusted: the pickle is read by an unpickler that knows no classes, and every value is
checked.

What gloo does differently (torch 2.13): ``state`` stays ``"scheduled"`` for ever (``retired`` tells),
``pg_config`` is keyed ``""`` where entries say ``"0"``, and the numbers of ``pg_status`` are strings in the
JSON.
"""

from __future__ import annotations

import io
import json
import pickle
from array import array
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import compress, count
from operator import itemgetter, ne
from typing import Any, TypeGuard

from msgspec import structs

from safelaunch.entries import Entries, Kinds
from safelaunch.errors import CaptureError
from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord, Frame, GroupStatus

# Backends that ask the device whether an operation is over. What they retire without that has timed out.
_WITH_EVENTS = ("nccl:", "ncclx:", "rccl:", "rcclx:", "xccl:", "mccl:", "hccl:")

MAX_DUMP_BYTES = 256 << 20
MAX_ENTRIES = 200_000
_MAX_ITEMS = 4096  # tensors of one collective, frames of one stack


class Shared:
    """What dumps of one job have in common and is kept once: kinds of entry, stacks, members of groups."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.frames: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}


def parse_json(data: bytes, shared: Shared | None = None) -> FlightRecord:
    """A dump of handler ``fr_trace_json`` or ``dump_nccl_trace_json``. Raises ``CaptureError``."""
    _check_size(data)
    try:
        dump = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"Flight Recorder JSON is damaged: {error}") from error
    return record_of(dump, shared)


def parse_pickle(data: bytes, shared: Shared | None = None) -> FlightRecord:
    """A dump as ``_dump_fr_trace()`` returns and NCCL writes it, by a restricted unpickler. Raises ``CaptureError``."""
    _check_size(data)
    try:
        # With a buffer that can be peeked into, the unpickler reads ahead: half the time.
        dump = _Primitives(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except Exception as error:  # the unpickler raises nearly any type on damaged input
        raise CaptureError(f"Flight Recorder pickle is damaged: {type(error).__name__}: {error}") from error
    return record_of(dump, shared)


def record_of(dump: object, shared: Shared | None = None) -> FlightRecord:
    """The record in a decoded dump; keys that are missing or of another type are left at their defaults.

    ``shared``: of the other dumps of the same job. Raises ``CaptureError`` when it is not a Flight Recorder dump.
    """
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list) or not _marks(dump):
        raise CaptureError("not a Flight Recorder dump: neither version nor entries")
    entries = dump.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise CaptureError(f"a Flight Recorder dump of {len(entries)} entries, too many")
    shared = shared or Shared()
    if set(map(type, entries)) != {dict}:
        entries = [entry for entry in entries if isinstance(entry, dict)]
    decoder = _Decoder(entries, shared)
    try:
        ring = decoder.entries()
    except RecursionError as error:
        raise CaptureError("Flight Recorder entries are damaged: lists within lists without an end") from error
    return FlightRecord(
        version=_str(dump.get("version")),
        entries=ring,
        groups=_groups(dump.get("pg_config"), shared.ranks),
        status=_status(dump.get("pg_status"), decoder.names_by_id),
    )


class _Primitives(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings, numbers; anything that would run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump does")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to a persistent object, which no dump does")


# What makes a kind of entry: all that is no number of its own.
_KEYS = (
    "state", "retired", "profiling_name", "process_group", "pg_id", "is_p2p", "timeout_ms",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "frames",
)  # fmt: skip
_NUMBERS = ("collective_seq_id", "p2p_seq_id", "record_id", "time_created_ns", "time_discovered_started_ns")
_STATES = ("scheduled", "started", "completed")
_CALLED_BEFORE = {"collective_seq_id": "seq_id", "record_id": "id"}  # up to version 2.2
_Row = tuple[Any, ...]


class _Decoder:
    """The entries of one dump, of which a loop makes the same ones again and again.

    What makes an entry's kind is its row. A row that was there before is taken for the beginning of another round: the
    rows that follow are compared with those that followed then, at the speed of C, and looked up again only where they
    differ; only a row that is new is decoded. Comparing is cheap: c10d's pickler shares the dictionaries of the frames
    between entries, and what is identical is equal.
    """

    def __init__(self, entries: list[dict[Any, Any]], shared: Shared) -> None:
        self.names_by_id = {"0": "0"}  # pg_id → name; the default group is the first on every rank
        self._entries = entries
        self._shared = shared
        columns = _columns_of(entries)
        self._columns = columns[: len(_KEYS)]
        groups = columns[_KEYS.index("process_group")]
        if not set(map(type, groups)) <= {list, tuple}:  # some are without: all names first, so that they find theirs
            self.names_by_id.update(_names(groups, columns[_KEYS.index("pg_id")]))
        self._values = dict(zip(_NUMBERS, columns[len(_KEYS) :], strict=True))
        self._rows: list[_Row] = []
        self._numbers: list[int] = []  # of the rows: the kind, among those that all records share
        self._found: dict[Hashable, int] = {}

    def entries(self) -> Entries:
        row_of = self._rows_of_entries()
        numbers = self._numbers
        return Entries(
            self._shared.kinds,
            self._begun(row_of) or array("I", map(numbers.__getitem__, row_of)),
            seqs=self._numbers_called("collective_seq_id"),
            p2p_seqs=self._numbers_called("p2p_seq_id"),
            record_ids=self._numbers_called("record_id"),
            created_ns=self._numbers_called("time_created_ns"),
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
        """Adds to ``row_of`` as many entries as are those of ``period`` entries before."""
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

    def _look_up(self, row: _Row) -> int:
        key = _key_of(row)
        number = self._found.get(key, -1)
        if number < 0:
            number = self._found[key] = len(self._rows)
            self._rows.append(row)
            self._numbers.append(self._shared.kinds.number_of(self._kind(row)))
        return number

    def _kind(self, row: _Row) -> Collective:
        state, retired, op, group, pg_id, is_p2p, timeout_ms, in_sizes, in_types, out_sizes, out_types, frames = row
        # Without a name of its own an entry belongs to the group that the others of its number name.
        pair = group if isinstance(group, (list, tuple)) else (self.names_by_id.get(_str(pg_id), pg_id), "")
        if pair is group and pair and (name := _str(pair[0])):
            self.names_by_id[_str(pg_id)] = name
        state, op, retired = _str(state), op if isinstance(op, str) else "", retired is True
        watched = op.startswith(_WITH_EVENTS) and state in _STATES
        decoded = _frames(frames)
        return Collective(
            group=_str(pair[0]) if pair else "",
            seq=0,
            op=op,
            completed=state == "completed" or (retired and not watched),
            state=state,
            description=_str(pair[1]) if len(pair) > 1 else "",
            is_p2p=is_p2p is True,
            input_sizes=_sizes(in_sizes),
            input_dtypes=_types(in_types),
            output_sizes=_sizes(out_sizes),
            output_dtypes=_types(out_types),
            started=True if state in ("started", "completed") else None,
            timeout_ms=_int(timeout_ms),
            frames=self._shared.frames.setdefault(decoded, decoded),
        )

    def _begun(self, row_of: list[int]) -> array[int] | None:
        """The kinds where some entries say when the device was seen to begin; None where none does.

        gloo does not say; nor does an NCCL entry that was retired unseen, nor a whole record in which no start was ever
        noticed (TORCH_NCCL_ENABLE_TIMING is off).
        """
        seen = self._values["time_discovered_started_ns"]
        if not any(_int(value) > 0 for value in seen if value):
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
        for position, row in enumerate(row_of):
            if row in begun:
                made[position] = (begun if _int(seen[position]) > 0 else waiting)[row]
        return made

    def _numbers_called(self, name: str) -> Sequence[int]:
        values = self._values[name]
        try:
            return array("q", values)
        except (TypeError, OverflowError):  # missing in some, or none that c10d would write
            former = _CALLED_BEFORE.get(name, name)
            pairs = zip(values, self._entries, strict=True)
            return [_int(entry.get(former) if value is None else value) for value, entry in pairs]


def _columns_of(entries: list[dict[Any, Any]]) -> list[tuple[Any, ...]]:
    """The values under ``_KEYS`` and ``_NUMBERS``, entry by entry; None where an entry has none."""
    if not entries:
        return [()] * (len(_KEYS) + len(_NUMBERS))
    own = {key: key for key in entries[0]}  # the dump's own strings: identical ones are found without comparing
    keys = [own.get(key, key) for key in (*_KEYS, *_NUMBERS)]
    try:
        return list(zip(*map(itemgetter(*keys), entries), strict=True))
    except KeyError:  # another version, or not from c10d
        return list(zip(*(tuple(map(entry.get, keys)) for entry in entries), strict=True))


def _names(groups: Sequence[object], ids: Sequence[object]) -> dict[str, str]:
    """pg_id → name, as the entries tell it."""
    pairs: Iterable[tuple[object, object]] = zip(groups, ids, strict=True)
    with suppress(TypeError):  # lists, as JSON has them
        pairs = dict.fromkeys(zip(groups, ids, strict=True))
    named = ((_str(number), _str(group[0])) for group, number in pairs if _is_named(group))
    return {number: name for number, name in named if name}


def _is_named(group: object) -> TypeGuard[Sequence[object]]:
    return isinstance(group, (list, tuple)) and bool(group)


def _key_of(row: _Row) -> Hashable:
    """Equal where rows are equal; frames count by their identity, for the dump holds them."""
    state, retired, op, group, pg_id, is_p2p, timeout_ms, in_sizes, in_types, out_sizes, out_types, frames = row
    stack = tuple(map(id, frames)) if isinstance(frames, (list, tuple)) else None
    try:
        key = (
            state, retired, op, tuple(group), pg_id, is_p2p, timeout_ms, tuple(map(tuple, in_sizes)), tuple(in_types),
            tuple(map(tuple, out_sizes)), tuple(out_types), stack,
        )  # fmt: skip
        hash(key)
    except TypeError:  # not as c10d writes it
        return repr((row[:-1], stack))
    return key


def _groups(config: object, known: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``known``: text → ranks, of the other dumps: thousands of ranks say the same."""
    groups: dict[str, tuple[int, ...]] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        ranks = value.get("ranks") if isinstance(value, dict) else None
        text = ranks if isinstance(ranks, str) else repr(ranks) if isinstance(ranks, (list, tuple)) else ""
        if text not in known:
            known[text] = _ranks(ranks)
        if known[text]:
            groups[_str(key)] = known[text]
    return groups


def _ranks(ranks: object) -> tuple[int, ...]:
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks) if len(ranks) < 1 << 20 else None
        except (ValueError, RecursionError):
            ranks = None
    whole = isinstance(ranks, (list, tuple)) and all(type(rank) is int for rank in ranks)
    return tuple(ranks) if whole and isinstance(ranks, (list, tuple)) else ()


def _status(status: object, names: dict[str, str]) -> dict[str, GroupStatus]:
    """By the groups' names, for a ``pg_id`` is the rank's own running number of the group: another one on each rank.

    Of a group without an entry only that number is known, which says nothing.
    """
    return {
        names[_str(key)]: GroupStatus(
            last_enqueued=_int(value.get("last_enqueued_collective"), -1),
            last_started=_int(value.get("last_started_collective"), -1),
            last_completed=_int(value.get("last_completed_collective"), -1),
        )
        for key, value in (status.items() if isinstance(status, dict) else ())
        if isinstance(value, dict) and _str(key) in names
    }


def _frames(frames: object) -> tuple[Frame, ...]:
    return tuple(
        Frame(_str(frame.get("filename")), _int(frame.get("line")), _str(frame.get("name")))
        for frame in _items(frames)
        if isinstance(frame, dict)
    )


def _sizes(sizes: object) -> tuple[tuple[int, ...], ...]:
    """What is no list of lists of counts is unknown, and not empty: nothing can be said of it, nor compared with it."""
    if sizes is None:
        return ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, (list, tuple)) for size in sizes):
        return UNKNOWN_SIZES
    read = tuple(tuple(_int(n, -1) for n in _items(size)) for size in _items(sizes))
    return UNKNOWN_SIZES if any(n < 0 for size in read for n in size) else read


def _types(values: object) -> tuple[str, ...]:
    """``""`` for one that is not known."""
    return tuple(value if isinstance(value, str) else "" for value in _items(values))


def _items(value: object) -> list[Any]:
    return list(value[:_MAX_ITEMS]) if isinstance(value, (list, tuple)) else []


def _int(value: object, default: int = 0) -> int:
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 63 else default
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isascii():
        return int(value) if value.removeprefix("-").isdigit() else default
    return default


def _str(value: object) -> str:
    return value if isinstance(value, str) else str(value) if type(value) is int else ""


def _marks(dump: dict[Any, Any]) -> bool:
    return "version" in dump or "entries" in dump


def _check_size(data: bytes) -> None:
    if len(data) > MAX_DUMP_BYTES:
        raise CaptureError(f"a Flight Recorder dump of {len(data)} bytes, too large")
    if not data:
        raise CaptureError("an empty Flight Recorder dump")
