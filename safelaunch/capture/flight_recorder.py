"""Reads the Flight Recorder of a live rank through its worker server; ``flight_dump`` parses the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from safelaunch.capture.flight_dump import parse_json, parse_pickle
from safelaunch.capture.result import Result, attempt
from safelaunch.capture.worker_server import post
from safelaunch.model import FlightRecord

_TIMEOUT_MS = re.compile(rb'"timeout_ms": ?(\d{1,12})\b')
_RECORD_ID = re.compile(rb'"record_id": ?(\d{1,18})\b')

JSON_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
PICKLE_HANDLERS = ("safelaunch_flight_record", "dump_nccl_trace_pickle")
NCCL_ONLY = "this torch records only NCCL's collectives, and there are none (torch 2.13 records gloo's too)"


@dataclass(frozen=True)
class FlightCapture:
    """One rank's Flight Recorder: the best record, and both raw dumps for the bundle."""

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
    """The Flight Recorder of a live rank: JSON first, then the pickle unless ``ask_python`` is False; never raises.

    The record comes from the pickle, which has frames, if it is readable, else from the JSON. The handlers of torch 2.6
    and 2.9 don't know gloo: without an NCCL group, their answer is not a record.
    """
    as_json = _first_of(socket_path, JSON_HANDLERS, json_deadline_s)
    if ask_python:
        as_pickle = _first_of(socket_path, PICKLE_HANDLERS, pickle_deadline_s)
    else:
        as_pickle = Result(None, PICKLE_HANDLERS[0], 0.0, missing="not asked, because the GIL is not free")
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
    """The shortest timeout of the recorded collectives, in seconds, without the rank's GIL; None if unknown.

    It searches the text without decoding it: a full record has thousands of entries, and healthy jobs are asked too.
    """
    text = _first_of(socket_path, JSON_HANDLERS, deadline_s).value or b""
    found = {int(number) for number in _TIMEOUT_MS.findall(text)} - {0}
    return min(found) / 1000 if found else None


def newest_entry(socket_path: str, *, deadline_s: float = 1.0) -> int | None:
    """The number of the newest recorded entry, without the rank's GIL; it grows with every collective."""
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

    Empty if unknown. It decodes only the four necessary fields, because healthy jobs are asked too.
    """
    answer = _first_of(socket_path, JSON_HANDLERS, deadline_s).value or b"{}"
    try:
        entries = msgspec.json.decode(answer, type=_Arrivals).entries
    except msgspec.DecodeError:
        return {}  # another version's format
    return {
        (entry.process_group[0], entry.collective_seq_id): entry.time_created_ns
        for entry in entries
        if entry.process_group and entry.time_created_ns and not entry.is_p2p
    }


def _first_of(socket_path: str, handlers: tuple[str, ...], deadline_s: float) -> Result[bytes]:
    """The answer of the first handler that this torch has."""
    result: Result[bytes] | None = None
    for handler in handlers:
        result = attempt(f"worker server: {handler}", partial(post, socket_path, handler, deadline_s=deadline_s))
        if result.kind != "no handler":
            return result
    assert result is not None
    return result


def _is_empty(record: FlightRecord) -> bool:
    return not (record.entries or record.groups or record.status)
