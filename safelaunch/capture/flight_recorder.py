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
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from safelaunch.capture.result import Result, attempt
from safelaunch.capture.worker_server import Unanswered, post
from safelaunch.errors import CaptureError
from safelaunch.model import Collective, FlightRecord, Frame, GroupStatus

_TIMEOUT_MS = re.compile(rb'"timeout_ms": ?(\d{1,12})\b')
_RECORD_ID = re.compile(rb'"record_id": ?(\d{1,18})\b')

# Backends that ask the device whether an operation is over. What they retire without that has timed out.
_WITH_EVENTS = ("nccl:", "ncclx:", "rccl:", "rcclx:", "xccl:", "mccl:", "hccl:")

MAX_DUMP_BYTES = 256 << 20
MAX_ENTRIES = 200_000
_MAX_ITEMS = 4096  # tensors of one collective, frames of one stack

JSON_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
PICKLE_HANDLERS = ("safelaunch_flight_record", "dump_nccl_trace_pickle")
NCCL_ONLY = "this torch tells of NCCL's collectives only, and there are none (2.13 tells of gloo's, too)"


@dataclass(frozen=True)
class FlightCapture:
    """What one rank's recorder gave: the best record, and both raw dumps for the bundle."""

    record: Result[FlightRecord]
    json: Result[bytes]
    pickle: Result[bytes]


def flight_record_of(
    socket_path: str,
    *,
    json_deadline_s: float = 2.0,
    pickle_deadline_s: float = 2.0,
    ask_python: bool = True,
) -> FlightCapture:
    """The Flight Recorder of a live rank: JSON first, then the pickle unless ``ask_python`` is False; never
    raises.

    The record is that of the pickle, which has frames, when it could be had and read, else that of the JSON. The
    handlers of torch 2.6 and 2.9 know no gloo: what they give where NCCL has no group is no record of anything.
    """
    as_json = _first_of(socket_path, JSON_HANDLERS, json_deadline_s)
    if ask_python:
        as_pickle = _first_of(socket_path, PICKLE_HANDLERS, pickle_deadline_s)
    else:
        as_pickle = Result(None, PICKLE_HANDLERS[0], 0.0, missing="not asked: the GIL is not free")
    reasons: list[str] = []
    for raw, parse in ((as_pickle, parse_pickle), (as_json, parse_json)):
        if raw.value is None:
            reasons.append(raw.missing)
            continue
        data = raw.value
        record = attempt(raw.how, lambda parse=parse, data=data: parse(data))  # type: ignore[misc]
        if record.value is not None and "dump_nccl" in raw.how and _is_empty(record.value):
            reasons.append(NCCL_ONLY)
            if raw is as_json:
                as_json = replace(as_json, note=NCCL_ONLY)
            continue
        if record.value is not None:
            note = "" if parse is parse_pickle else "without frames"
            return FlightCapture(Result(record.value, raw.how, record.duration_s, note=note), as_json, as_pickle)
        reasons.append(record.missing)
    missing = "; ".join(dict.fromkeys(reasons))
    return FlightCapture(Result(None, as_json.how, 0.0, missing=missing), as_json, as_pickle)


def smallest_timeout_s(socket_path: str, *, deadline_s: float = 2.0) -> float | None:
    """The shortest time-out of the collectives on record, without the rank's GIL; None where nobody says.

    Looked for in the text: a full record has thousands of entries, and this is asked of healthy jobs.
    """
    text = _first_of(socket_path, JSON_HANDLERS, deadline_s).value or b""
    found = {int(number) for number in _TIMEOUT_MS.findall(text)} - {0}
    return min(found) / 1000 if found else None


def newest_entry(socket_path: str, *, deadline_s: float = 1.0) -> int | None:
    """The number of the newest entry on record, without the rank's GIL: it grows with every collective entered."""
    text = _first_of(socket_path, JSON_HANDLERS, deadline_s).value or b""
    return max(map(int, _RECORD_ID.findall(text)), default=None)


class _Arrival(msgspec.Struct):
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = 0
    time_created_ns: int = 0
    is_p2p: bool = False


class _Arrivals(msgspec.Struct):
    entries: list[_Arrival] = []


def arrivals_of(socket_path: str, *, deadline_s: float = 2.0) -> dict[tuple[str, int], int]:
    """(group, number) → when the rank entered that collective, CLOCK_REALTIME in nanoseconds; without its GIL.

    Empty where nobody says. Only the four fields are decoded: this is asked of healthy jobs.
    """
    answer = _first_of(socket_path, JSON_HANDLERS, deadline_s).value or b"{}"
    try:
        entries = msgspec.json.decode(answer, type=_Arrivals).entries
    except msgspec.DecodeError:
        return {}  # another version's form: no news of this kind
    return {
        (entry.process_group[0], entry.collective_seq_id): entry.time_created_ns
        for entry in entries
        if entry.process_group and entry.time_created_ns and not entry.is_p2p
    }


def parse_json(data: bytes) -> FlightRecord:
    """A dump of handler ``fr_trace_json`` or ``dump_nccl_trace_json``. Raises ``CaptureError``."""
    _check_size(data)
    try:
        dump = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"Flight Recorder JSON is damaged: {error}") from error
    return record_of(dump)


def parse_pickle(data: bytes) -> FlightRecord:
    """A dump as ``_dump_fr_trace()`` returns and NCCL writes it, by a restricted unpickler. Raises ``CaptureError``."""
    _check_size(data)
    try:
        # With a buffer that can be peeked into, the unpickler reads ahead: half the time.
        dump = _Primitives(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except Exception as error:  # the unpickler raises nearly any type on damaged input
        raise CaptureError(f"Flight Recorder pickle is damaged: {type(error).__name__}: {error}") from error
    return record_of(dump)


def record_of(dump: object) -> FlightRecord:
    """The record in a decoded dump; keys that are missing or of another type are left at their defaults.

    Raises ``CaptureError`` when it is not a Flight Recorder dump.
    """
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list) or not _marks(dump):
        raise CaptureError("not a Flight Recorder dump: neither version nor entries")
    entries = dump.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise CaptureError(f"a Flight Recorder dump of {len(entries)} entries, too many")
    tells_starts = any(
        isinstance(entry, dict) and _int(entry.get("time_discovered_started_ns")) > 0 for entry in entries
    )
    known = _Known(tells_starts)
    return FlightRecord(
        version=_str(dump.get("version")),
        entries=tuple(_collective(entry, known) for entry in entries if isinstance(entry, dict)),
        groups=_groups(dump.get("pg_config")),
        status=_status(dump.get("pg_status"), _names_by_id(entries)),
    )


class _Primitives(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings, numbers; anything that would run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump does")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to a persistent object, which no dump does")


def _first_of(socket_path: str, handlers: tuple[str, ...], deadline_s: float) -> Result[bytes]:
    """The answer of the first handler that this torch has."""
    result: Result[bytes] | None = None
    for handler in handlers:
        unknown = False

        def ask(handler: str = handler) -> bytes:
            nonlocal unknown
            try:
                return post(socket_path, handler, deadline_s=deadline_s)
            except Unanswered as error:
                unknown = error.reason == "no handler"
                raise

        result = attempt(f"worker server: {handler}", ask)
        if not unknown:
            return result
    assert result is not None
    return result


def _is_empty(record: FlightRecord) -> bool:
    return not (record.entries or record.groups or record.status)


class _Known:
    """What entries of one dump have in common, decoded once: stacks, shapes, types. A loop repeats them for ever.

    ``frames`` are found again by the identity of the dictionaries, which c10d's pickler shares between entries; they
    live as long as the dump.
    """

    def __init__(self, tells_starts: bool) -> None:
        self.tells_starts = tells_starts
        self._frames: dict[tuple[int, ...], tuple[Frame, ...]] = {}
        self._equal: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._sizes: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._texts: dict[tuple[object, ...], tuple[str, ...]] = {}

    def frames(self, frames: object) -> tuple[Frame, ...]:
        if not isinstance(frames, list) or not frames:
            return ()
        key = tuple(map(id, frames))
        found = self._frames.get(key)
        if found is None:
            decoded = _frames(frames)
            found = self._frames[key] = self._equal.setdefault(decoded, decoded)
        return found

    def sizes(self, sizes: object) -> tuple[tuple[int, ...], ...]:
        if not sizes:
            return ()
        try:
            key = repr(sizes)
        except RecursionError:
            return _sizes(sizes)
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = _sizes(sizes)
        return found

    def texts(self, texts: object) -> tuple[str, ...]:
        if not isinstance(texts, list) or not all(type(text) is str for text in texts):
            return _strings(texts)
        key = tuple(texts[:_MAX_ITEMS])
        return self._texts.setdefault(key, key)


def _collective(entry: dict[Any, Any], known: _Known) -> Collective:
    get = entry.get
    group = get("process_group")
    pair = group if isinstance(group, (list, tuple)) else (get("pg_id", ""), "")
    state, op, retired = _str(get("state")), _str(get("profiling_name")), get("retired") is True
    return Collective(
        group=_str(pair[0]) if pair else "",
        seq=_int(get("collective_seq_id", get("seq_id"))),
        op=op,
        completed=state == "completed" or (retired and not op.startswith(_WITH_EVENTS)),
        state=state,
        description=_str(pair[1]) if len(pair) > 1 else "",
        is_p2p=get("is_p2p") is True,
        p2p_seq=_int(get("p2p_seq_id")),
        record_id=_int(get("record_id", get("id"))),
        input_sizes=known.sizes(get("input_sizes")),
        input_dtypes=known.texts(get("input_dtypes")),
        output_sizes=known.sizes(get("output_sizes")),
        output_dtypes=known.texts(get("output_dtypes")),
        created_ns=_int(get("time_created_ns")),
        started=_started(entry, state, op, retired, known.tells_starts),
        timeout_ms=_int(get("timeout_ms")),
        frames=known.frames(get("frames")),
    )


def _started(entry: dict[Any, Any], state: str, op: str, retired: bool, tells_starts: bool) -> bool | None:
    """Whether the device began it.

    gloo does not say; nor does an NCCL entry that was retired unseen, nor a whole record in which no start was ever
    noticed (TORCH_NCCL_ENABLE_TIMING is off).
    """
    if state in ("started", "completed") or _int(entry.get("time_discovered_started_ns")) > 0:
        return True
    unseen = retired or not tells_starts or not op.startswith(("nccl:", "ncclx:"))
    return False if state == "scheduled" and not unseen else None


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        ranks = value.get("ranks") if isinstance(value, dict) else None
        if isinstance(ranks, str):
            try:
                ranks = json.loads(ranks) if len(ranks) < 1 << 20 else None
            except (ValueError, RecursionError):
                ranks = None
        if isinstance(ranks, (list, tuple)) and ranks and all(type(rank) is int for rank in ranks):
            groups[_str(key)] = tuple(ranks)
    return groups


def _names_by_id(entries: list[Any]) -> dict[str, str]:
    """``pg_id`` → name. The id is the rank's own running number of the group: another one on each rank."""
    names = {"0": "0"}  # the default group is the first on every rank
    for entry in entries:
        group = entry.get("process_group") if isinstance(entry, dict) else None
        if isinstance(group, (list, tuple)) and group:
            names[_str(entry.get("pg_id"))] = _str(group[0])
    return names


def _status(status: object, names: dict[str, str]) -> dict[str, GroupStatus]:
    """By the groups' names. Of a group without an entry, only its number on this rank is known, which says nothing."""
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
    return tuple(tuple(_int(n) for n in _items(size)) for size in _items(sizes))


def _strings(values: object) -> tuple[str, ...]:
    return tuple(_str(value) for value in _items(values))


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
