"""Reads the Flight Recorders of a live rank through its worker server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from safelaunch.beacon import layout
from safelaunch.capture.flight_dump import parse_json, parse_pickle, to_json
from safelaunch.capture.flight_records import merged
from safelaunch.capture.result import Result, attempt
from safelaunch.capture.worker_server import Questions, names, post, post_to_python
from safelaunch.model import FlightRecord
from safelaunch.system.decoding import from_json

_RECORD_ID = re.compile(rb'"record_id": ?(\d{1,18})\b')

# A rank can have several recorders. gloo uses c10d's default one. NCCL had its own; since torch 2.15 each backend has
# one, the default handler takes its name, and the beacon adds a handler for each (``beacon/server.py``). torchcomms
# adds its own.
JSON_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json", "torchcomms_fr_trace_json")
PICKLE_HANDLERS = ("safelaunch_flight_record", "dump_nccl_trace_pickle")
_PEER = re.compile(r":(?:send (?P<sends>\d+)->(?P<to>\d+)|recv (?P<receives>\d+)<-(?P<of>\d+))")
TRANSFER = "->"
DEFAULT_GROUP = {"0", "default_pg"}  # name and description
_BACKEND = re.compile(r'"safelaunch_flight_record_([A-Za-z0-9_-]{1,64})"')
NCCL_ONLY = "this torch records only NCCL's collectives, and there are none (torch 2.13 records gloo's too)"


@dataclass(frozen=True)
class FlightCapture:
    record: Result[FlightRecord]
    json: Result[bytes]
    pickle: Result[bytes]


def flight_record_of(
    socket_path: str,
    questions: Questions | None = None,
    *,
    json_deadline_s: float = 2.0,
    pickle_deadline_s: float = 2.0,
    ask_python: bool = True,
) -> FlightCapture:
    """Reads the JSON dump first, then the pickle unless ``ask_python`` is False; never raises.

    The record comes from the pickle, which has frames, or else from the JSON. Records of several backends are merged.
    In torch 2.6 and 2.9, the handlers don't support gloo: if the job has no NCCL group, their response isn't a record.
    """
    backends = _backends(socket_path, json_deadline_s)
    as_json = _of_all(_all_of(socket_path, _json_handlers(backends), json_deadline_s), parse_json)
    if ask_python:
        handlers = (*PICKLE_HANDLERS, *(f"{PICKLE_HANDLERS[0]}_{name}" for name in backends))
        ask = partial(post_to_python, questions=questions)
        as_pickle = _of_all(_all_of(socket_path, handlers, pickle_deadline_s, ask), parse_pickle)
    else:
        unasked = Result[bytes](None, PICKLE_HANDLERS[0], 0.0, missing="not queried: the GIL isn't free")
        as_pickle = (unasked, None, unasked.missing)
    raw, record, _ = as_pickle if as_pickle[1] is not None else as_json
    if record is not None:
        note = "" if as_pickle[1] is not None else "without frames"
        return FlightCapture(Result(record, raw.how, 0.0, note=note), as_json[0], as_pickle[0])
    missing = "; ".join(dict.fromkeys(filter(None, (as_pickle[2], as_json[2]))))
    return FlightCapture(Result(None, as_json[0].how, 0.0, missing=missing), as_json[0], as_pickle[0])


def kept_at_exit(page: Path) -> FlightCapture | None:
    """Reads the Flight Recorder dump that the page's rank wrote at its exit. Never raises."""
    paths = [p for p in page.parent.glob(f"{page.name}{layout.FLIGHT_SUFFIX}-*") if p.suffix != layout.PARTIAL]
    answers = [attempt("the rank, at its exit", path.read_bytes) for path in sorted(paths)]
    raw, record, _ = _of_all(answers, parse_pickle) if answers else (None, None, "")
    if raw is None or record is None or _is_empty(record):
        return None
    return FlightCapture(Result(record, raw.how, 0.0), Result(to_json(record), raw.how, 0.0), raw)


_DumpRead = tuple[Result[bytes], FlightRecord | None, str]


def _of_all(answers: Sequence[Result[bytes]], parse: Callable[[bytes], FlightRecord]) -> _DumpRead:
    dumps: list[tuple[Result[bytes], FlightRecord]] = []
    reasons: list[str] = []
    for raw in answers:
        data = raw.value
        if data is None:
            reasons.append(raw.missing)
            continue
        record = attempt(raw.how, partial(parse, data))
        if record.value is None:
            reasons.append(record.missing)
        elif _is_empty(record.value) and "dump_nccl" in raw.how:
            reasons.append(NCCL_ONLY)
        else:
            dumps.append((raw, record.value))
    dumps = [dump for dump in dumps if dump[1].entries] or dumps[:1]
    if len(dumps) > 1:
        whole = merged([record for _, record in dumps])
        how = " and ".join(raw.how for raw, _ in dumps)
        return Result(to_json(whole), how, sum(raw.duration_s for raw, _ in dumps)), whole, ""
    if dumps:
        return (*dumps[0], "")
    silent = next((raw for raw in answers if raw.value is not None), answers[0])
    reason = "; ".join(dict.fromkeys(reasons))
    return (replace(silent, note=NCCL_ONLY) if NCCL_ONLY in reasons and silent.value else silent), None, reason


def newest_entry(socket_path: str, *, deadline_s: float = 1.0) -> int | None:
    """Returns the newest entry's number, summed over all recorders; None if unknown. It grows with every collective.

    Doesn't need the rank's GIL.
    """
    newest = [max(map(int, _RECORD_ID.findall(text)), default=None) for text in _texts(socket_path, deadline_s)]
    numbers = [number for number in newest if number is not None]
    return sum(numbers) if numbers else None


class _Arrival(msgspec.Struct):
    """The fields of an entry that are needed from a healthy job.

    Other fields are skipped, because a record has thousands of entries.
    """

    process_group: tuple[str, ...] = ()
    timeout_ms: int = 0
    collective_seq_id: int = 0
    time_created_ns: int = 0
    is_p2p: bool = False
    profiling_name: str = ""


class _Arrivals(msgspec.Struct):
    entries: list[_Arrival] = []


def arrivals_of(socket_path: str, *, deadline_s: float = 2.0) -> dict[tuple[str, int], int]:
    """Returns (group, number) → time at which the rank entered that call, in ns of CLOCK_REALTIME.

    The name of a transfer's group includes sender and receiver, as ranks of the group (``3 0->1``). Its number is its
    place among those in the rank's record: c10d's numbers differ between both ends. Doesn't need the rank's GIL. Empty
    if unknown.
    """
    arrivals: dict[tuple[str, int], int] = {}
    transfers: Counter[str] = Counter()
    for entry in _arrivals(socket_path, deadline_s):
        if not entry.process_group or not entry.time_created_ns or entry.profiling_name.endswith(":coalesced"):
            continue  # the end of a batch of transfers has the number of a collective
        group = entry.process_group[0]
        if not entry.is_p2p:
            arrivals.setdefault((group, entry.collective_seq_id), entry.time_created_ns)
        elif (peer := _PEER.search(entry.profiling_name)) is not None:
            group = f"{group} {peer['sends'] or peer['of']}{TRANSFER}{peer['to'] or peer['receives']}"
            arrivals[group, transfers[group]] = entry.time_created_ns
            transfers[group] += 1
    return arrivals


def default_timeout_s(socket_path: str, *, deadline_s: float = 2.0) -> float | None:
    """Returns the default group's timeout; None if no collective of the group is recorded.

    If calls or backends differ, the most frequent timeout counts, or the shortest of equally frequent ones. Doesn't
    need the rank's GIL.
    """
    entries = _arrivals(socket_path, deadline_s)
    timeouts = [e.timeout_ms for e in entries if set(e.process_group) & DEFAULT_GROUP and e.timeout_ms > 0]
    return max(sorted(set(timeouts)), key=timeouts.count) / 1000 if timeouts else None


def _arrivals(socket_path: str, deadline_s: float) -> list[_Arrival]:
    entries: list[_Arrival] = []
    for text in _texts(socket_path, deadline_s):
        try:
            entries += from_json(text, _Arrivals).entries
        except msgspec.DecodeError:
            continue  # another version's format
    return entries


def _texts(socket_path: str, deadline_s: float) -> list[bytes]:
    handlers = _json_handlers(_backends(socket_path, deadline_s))
    return [answer.value for answer in _all_of(socket_path, handlers, deadline_s) if answer.value is not None]


def _backends(socket_path: str, deadline_s: float) -> list[str]:
    handlers = attempt("", lambda: names(socket_path, deadline_s=deadline_s)).value or b""
    return list(dict.fromkeys(_BACKEND.findall(handlers.decode("latin-1"))))


def _json_handlers(backends: Sequence[str]) -> tuple[str, ...]:
    return (*JSON_HANDLERS, *(f"{JSON_HANDLERS[0]}?backend={name}" for name in backends))


def _all_of(
    socket_path: str, handlers: Sequence[str], deadline_s: float, ask: Callable[..., bytes] | None = None
) -> list[Result[bytes]]:
    """Returns the replies of the handlers that this torch has; if it has none, the first handler's failure.

    Stops at the first failure, because the remaining handlers would fail, too.
    """
    results: list[Result[bytes]] = []
    for handler in handlers:
        answer = attempt(f"worker server: {handler}", partial(ask or post, socket_path, handler, deadline_s=deadline_s))
        results.append(answer)
        if answer.value is None and answer.kind != "no handler":
            break
    return [result for result in results if result.kind != "no handler"] or results[:1]


def _is_empty(record: FlightRecord) -> bool:
    return not (record.entries or record.groups or record.status)
