"""Reads the Flight Recorder of a live rank through its worker server; ``flight_dump`` parses the answer.

And what is asked of the records: those of one rank's recorders are put together, and one may contradict itself.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import structs

from safelaunch.beacon import layout
from safelaunch.capture.flight_dump import parse_json, parse_pickle, to_json
from safelaunch.capture.result import Result, attempt, left
from safelaunch.model import UNKNOWN_SIZES, Collective, FlightRecord, GilTest
from safelaunch.model.entries import Entries, Same
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError, Failure

_RECORD_ID = re.compile(rb'"record_id": ?(\d{1,18})\b')

# The recorders of a rank. gloo's is the default one of c10d. NCCL had one of its own; since torch 2.15 each backend
# has, and the default handler takes its name; the beacon adds a handler for each (``beacon/server.py``). torchcomms
# brings its own.
JSON_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json", "torchcomms_fr_trace_json")
PICKLE_HANDLERS = ("safelaunch_flight_record", "dump_nccl_trace_pickle")
DEFAULT_GROUP = {"0", "default_pg"}  # its name and its description
_BACKEND = re.compile(r'"safelaunch_flight_record_([A-Za-z0-9_-]{1,64})"')
NCCL_ONLY = "this torch records only NCCL's collectives, and there are none (torch 2.13 records gloo's too)"


@dataclass(frozen=True)
class FlightCapture:
    """One rank's Flight Recorder: the best record, and both raw dumps for the bundle."""

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
    """The Flight Recorder of a live rank: JSON first, then the pickle unless ``ask_python`` is False; never raises.

    The record comes from the pickle, which has frames, if it is readable, else from the JSON. A rank with several
    recorders, one for each backend, has one record of them all. The handlers of torch 2.6 and 2.9 don't know gloo:
    without an NCCL group, their answer is not a record.
    """
    backends = _backends(socket_path, json_deadline_s)
    as_json = _of_all(_all_of(socket_path, _json_handlers(backends), json_deadline_s), parse_json)
    if ask_python:
        asked = (*PICKLE_HANDLERS, *(f"{PICKLE_HANDLERS[0]}_{name}" for name in backends))
        ask = partial(post_to_python, questions=questions)
        as_pickle = _of_all(_all_of(socket_path, asked, pickle_deadline_s, ask), parse_pickle)
    else:
        unasked = Result[bytes](None, PICKLE_HANDLERS[0], 0.0, missing="not asked, because the GIL is not free")
        as_pickle = (unasked, None, unasked.missing)
    raw, record, _ = as_pickle if as_pickle[1] is not None else as_json
    if record is not None:
        note = "" if as_pickle[1] is not None else "without frames"
        return FlightCapture(Result(record, raw.how, 0.0, note=note), as_json[0], as_pickle[0])
    missing = "; ".join(dict.fromkeys(filter(None, (as_pickle[2], as_json[2]))))
    return FlightCapture(Result(None, as_json[0].how, 0.0, missing=missing), as_json[0], as_pickle[0])


def kept_at_exit(page: Path) -> FlightCapture | None:
    """The Flight Recorder that the rank of this page wrote when it ended by itself; None for none. Never raises."""
    paths = [p for p in page.parent.glob(f"{page.name}{layout.FLIGHT_SUFFIX}-*") if p.suffix != layout.PARTIAL]
    answers = [attempt("the rank, at its exit", path.read_bytes) for path in sorted(paths)]
    raw, record, _ = _of_all(answers, parse_pickle) if answers else (None, None, "")
    if raw is None or record is None or _is_empty(record):
        return None
    return FlightCapture(Result(record, raw.how, 0.0), Result(to_json(record), raw.how, 0.0), raw)


_DumpRead = tuple[Result[bytes], FlightRecord | None, str]


def _of_all(answers: Sequence[Result[bytes]], parse: Callable[[bytes], FlightRecord]) -> _DumpRead:
    """One dump of all answers, the record in it, and why there is none. A single recorder's dump is kept as it is."""
    found: list[tuple[Result[bytes], FlightRecord]] = []
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
            found.append((raw, record.value))
    found = [one for one in found if one[1].entries] or found[:1]
    if len(found) > 1:
        whole = merged([one for _, one in found])
        how = " and ".join(raw.how for raw, _ in found)
        return Result(to_json(whole), how, sum(raw.duration_s for raw, _ in found)), whole, ""
    if found:
        return (*found[0], "")
    silent = next((raw for raw in answers if raw.value is not None), answers[0])
    reason = "; ".join(dict.fromkeys(reasons))
    return (replace(silent, note=NCCL_ONLY) if NCCL_ONLY in reasons and silent.value else silent), None, reason


def newest_entry(socket_path: str, *, deadline_s: float = 1.0) -> int | None:
    """The number of the newest recorded entry, of all recorders together, without the rank's GIL.

    It grows with every collective.
    """
    newest = [max(map(int, _RECORD_ID.findall(text)), default=None) for text in _texts(socket_path, deadline_s)]
    known = [number for number in newest if number is not None]
    return sum(known) if known else None


class _Arrival(msgspec.Struct):
    """The fields that are needed of a healthy job: a full record has thousands of entries."""

    process_group: tuple[str, ...] = ()
    timeout_ms: int = 0
    collective_seq_id: int = 0
    time_created_ns: int = 0
    is_p2p: bool = False


class _Arrivals(msgspec.Struct):
    entries: list[_Arrival] = []


def arrivals_of(socket_path: str, *, deadline_s: float = 2.0) -> dict[tuple[str, int], int]:
    """(group, number) → when the rank entered that collective, CLOCK_REALTIME in nanoseconds; without its GIL.

    Empty if unknown.
    """
    found: dict[tuple[str, int], int] = {}
    for entry in _arrivals(socket_path, deadline_s):
        if entry.process_group and entry.time_created_ns and not entry.is_p2p:
            found.setdefault((entry.process_group[0], entry.collective_seq_id), entry.time_created_ns)
    return found


def default_timeout_s(socket_path: str, *, deadline_s: float = 2.0) -> float | None:
    """The timeout of the default group, in seconds, without the rank's GIL; None if no collective of it is recorded.

    A call may have one of its own, and each backend has its own: that of most calls counts, of equals the shorter one.
    """
    entries = _arrivals(socket_path, deadline_s)
    found = [entry.timeout_ms for entry in entries if set(entry.process_group) & DEFAULT_GROUP and entry.timeout_ms > 0]
    return max(sorted(set(found)), key=found.count) / 1000 if found else None


def _arrivals(socket_path: str, deadline_s: float) -> list[_Arrival]:
    found: list[_Arrival] = []
    for answer in _texts(socket_path, deadline_s):
        try:
            found += from_json(answer, _Arrivals).entries
        except msgspec.DecodeError:
            continue  # another version's format
    return found


def _texts(socket_path: str, deadline_s: float) -> list[bytes]:
    """The JSON of each recorder that the rank has."""
    asked = _json_handlers(_backends(socket_path, deadline_s))
    return [one.value for one in _all_of(socket_path, asked, deadline_s) if one.value is not None]


def _backends(socket_path: str, deadline_s: float) -> list[str]:
    """The backends that have a recorder of their own, by the server's list of its handlers; none if it is silent."""
    known = attempt("", lambda: names(socket_path, deadline_s=deadline_s)).value or b""
    return list(dict.fromkeys(_BACKEND.findall(known.decode("latin-1"))))


def _json_handlers(backends: Sequence[str]) -> tuple[str, ...]:
    return (*JSON_HANDLERS, *(f"{JSON_HANDLERS[0]}?backend={name}" for name in backends))


def _all_of(
    socket_path: str, handlers: Sequence[str], deadline_s: float, ask: Callable[..., bytes] | None = None
) -> list[Result[bytes]]:
    """The answers of the handlers that this torch has; that of the first one, where it has none.

    One that does not answer in time ends it: the others would not either.
    """
    results: list[Result[bytes]] = []
    for handler in handlers:
        one = attempt(f"worker server: {handler}", partial(ask or post, socket_path, handler, deadline_s=deadline_s))
        results.append(one)
        if one.value is None and one.kind != "no handler":
            break
    return [result for result in results if result.kind != "no handler"] or results[:1]


def _is_empty(record: FlightRecord) -> bool:
    return not (record.entries or record.groups or record.status)


# --- records ----------------------------------------------------------------------------------------------------------

_NEAR = 64  # entries of a group that are looked back at


def merged(records: Sequence[FlightRecord]) -> FlightRecord:
    """One record of a rank's several recorders, one for each backend, in the order in which the calls were made.

    What two of them hold of one backend is of one recorder: the longer one counts. Groups of which they say different
    things are left out, and are ``damaged``.
    """
    longest: dict[str, tuple[int, int]] = {}  # backend → how many entries, of which record
    for place, record in enumerate(records):
        for backend, times in Counter(backend_of(entry.op) for entry in record.entries).items():
            longest[backend] = max(longest.get(backend, (0, 0)), (times, -place))
    held = [
        (entry.created_ns, place, entry.record_id, entry)
        for place, record in enumerate(records)
        for entry in record.entries
        if longest[backend_of(entry.op)][1] == -place
    ]
    held.sort(key=itemgetter(0, 1, 2))
    used = [record for place, record in enumerate(records) if -place in {at for _, at in longest.values()}]
    first = 0 if all(record.entries[0].record_id == 0 for record in used) else 1  # 0: no ring has wrapped
    groups = [record.groups for record in records]
    apart = {name for group in groups for name in group if len({frozenset(g[name]) for g in groups if name in g}) > 1}
    return FlightRecord(
        version=next((record.version for record in used), ""),
        entries=Entries.of(structs.replace(entry, record_id=n) for n, (*_, entry) in enumerate(held, first)),
        groups={name: ranks for group in reversed(groups) for name, ranks in group.items() if name not in apart},
        damaged=tuple(sorted({*chain(*(record.damaged for record in records)), *(["pg_config"] if apart else [])})),
        library=next((record.library for record in used if record.library), ""),
    )


def backend_of(op: str) -> str:
    """``nccl2`` of ``nccl2:all_reduce``; empty where it does not say."""
    return op.partition(":")[0] if ":" in op else ""


def contradicts_itself(record: FlightRecord) -> bool:
    """Some collectives of a group have no number, or that of an earlier one: how far the rank came is not known.

    Nor is it where one number runs over several groups, and the ring has wrapped. Those of one launch stand side by
    side under one number. Two threads may be recorded in the other order. The end of a batch of sends is no collective.
    """
    ring = Entries.of(record.entries)
    kinds = ring.used()
    if not any(ring.seqs):  # it tells none
        return False
    if _same(ring.seqs, ring.record_ids):  # torchcomms counts so, over all groups
        return ring.seqs[0] > 0 and len({kind.group for kind in kinds.values()}) > 1
    if _ascends(ring, kinds):
        return False
    last: dict[str, list[int]] = {}
    sent: dict[str, tuple[int, int] | None] = {}  # group → the numbers of a send that is its newest entry
    for at, number in enumerate(ring.seqs):
        kind = kinds[ring.kind_of[at]]
        numbers = (ring.p2p_seqs[at], number)
        before, sent[kind.group] = sent.get(kind.group, numbers), numbers if kind.is_p2p else None
        if kind.is_p2p or (before == numbers and _ends_a_block(kind)):
            continue
        mine = last.setdefault(kind.group, [])
        if mine and (number == 0 or (number != mine[-1] and number in mine) or (not mine[-1] and ring.record_ids[at])):
            return True
        mine.append(number)
        del mine[:-_NEAR]
    return False


def _ends_a_block(kind: Collective) -> bool:
    """After sends, or as the first entry that is left, it bears the number of an earlier collective: 0 before any."""
    return kind.op.endswith("coalesced") and kind.input_sizes in ((), UNKNOWN_SIZES)


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two columns are equal: they are packed, so equal ones are of one type."""
    return one == other if type(one) is type(other) and not isinstance(one, Same) else list(one) == list(other)


def _ascends(ring: Entries, kinds: Mapping[int, Collective]) -> bool:
    """The numbers of each group only grow, as in nearly every record: told at a glance."""
    if isinstance(ring.seqs, range) and ring.seqs[0] > 0:
        return True  # those of one group are some of them
    groups = {number: None if kind.is_p2p else kind.group for number, kind in kinds.items()}
    newest: dict[str, int] = {}
    for kind, number in zip(ring.kind_of, ring.seqs, strict=True):
        group = groups[kind]
        if group is not None:
            if number <= newest.get(group, 0):
                return False
            newest[group] = number
    return True


# --- c10d's worker server ---------------------------------------------------------------------------------------------
# It expects ``POST /handler/<name>`` with a Content-Length (without one, torch 2.6 and 2.9 wait until they time out).
# Its answer has a Content-Length, and it keeps the connection open unless the request says otherwise.

MAX_RESPONSE_BYTES = 64 << 20
_MAX_HEADER_BYTES = 64 << 10
_MOST_EXCEPTIONS = 16


_COUNTED = "safelaunch_"  # the handlers that count the questions which they have answered


class Questions(Protocol):
    """The part of a rank's page that its Python handlers need; see ``capture.pages.Page``."""

    @property
    def owes_answer(self) -> bool: ...

    def begin_question(self) -> bool: ...

    def withdraw_question(self) -> None: ...


class Unanswered(CaptureError):
    """A question that got no usable answer: its ``kind`` is absent, timeout, no handler or broken."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message, kind=kind)


def post(socket_path: str, handler: str, *, deadline_s: float) -> bytes:
    """The body of the answer to ``POST /handler/<handler>``; everything within ``deadline_s`` seconds.

    Raises ``Unanswered`` (a ``CaptureError``).
    """
    return _ask(socket_path, "POST", handler, deadline_s)


def post_to_python(socket_path: str, handler: str, questions: Questions | None, *, deadline_s: float) -> bytes:
    """``post`` to a handler that needs the GIL. ``questions``: where that is announced, so that the rank does not end
    meanwhile; one that is exiting gets none.
    """
    if questions is None:
        return post(socket_path, handler, deadline_s=deadline_s)
    if not questions.begin_question():
        raise Unanswered("absent", "the rank is exiting")
    try:
        answer = post(socket_path, handler, deadline_s=deadline_s)
    except Unanswered as error:
        if error.kind in ("absent", "no handler"):
            questions.withdraw_question()
        raise
    if not handler.startswith(_COUNTED):
        questions.withdraw_question()
    return answer


def names(socket_path: str, *, deadline_s: float) -> bytes:
    """The server's list of its handlers. Raises ``Unanswered``."""
    return _ask(socket_path, "GET", "", deadline_s)


def _ask(socket_path: str, method: str, handler: str, deadline_s: float) -> bytes:
    until = time.monotonic() + deadline_s
    head = f"{method} /handler/{handler} HTTP/1.1\r\nHost: localhost\r\n"
    request = f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(left(until))
            connection.connect(socket_path)
            connection.sendall(request.encode("ascii"))
            return _answer(connection, handler, until)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise Unanswered("absent", "the worker server is not running") from error
        except TimeoutError as error:
            raise Unanswered("timeout", f"worker server: {handler}: no answer within {deadline_s:g} s") from error
        except BlockingIOError as error:  # the queue of connections is full: a stopped process accepts none
            raise Unanswered("timeout", "the worker server accepts no connections") from error
        except OSError as error:
            raise Unanswered("broken", f"worker server: {handler}: {error}") from error


def gil_test(socket_path: str, questions: Questions | None = None, *, deadline_s: float = 1.0) -> GilTest:
    """Whether the rank's C++ side answers, and whether Python code can run in it; never raises.

    The beacon's handler needs the GIL. It is asked twice, ``deadline_s`` seconds each: a busy Python loop releases the
    GIL often enough to answer. Both stay None if the server is not running; ``python`` does if the handler is missing.
    """
    try:
        post(socket_path, "ping", deadline_s=deadline_s)
    except Unanswered as error:
        return GilTest(ping=False if error.kind == "timeout" else None)
    for _ in range(2):
        try:
            return _told(post_to_python(socket_path, "safelaunch_gil", questions, deadline_s=deadline_s))
        except Unanswered as error:
            if error.kind != "timeout":
                return GilTest(ping=True)
    return GilTest(ping=True, python=False)


def _told(answer: bytes) -> GilTest:
    """What the Python handler says; nothing where the answer is of another version, or of somebody else."""
    try:
        told = from_json(answer, GilTest)
    except (msgspec.DecodeError, RecursionError):
        told = GilTest()
    handling = told.handling[:_MOST_EXCEPTIONS]
    return structs.replace(told, ping=True, python=True, handling=handling)


def parse_head(head: bytes) -> tuple[int, int | None]:
    """Status and Content-Length (None if absent) of an HTTP response's head. Raises ``ValueError``."""
    first, _, rest = head.decode("latin-1").partition("\r\n")
    status = re.match(r"HTTP/1\.[01] (\d{3})", first)
    if not status:
        raise ValueError(f"not an HTTP response: {first[:80]!r}")
    if re.search(r"^transfer-encoding:\s*(?!identity)", rest, re.IGNORECASE | re.MULTILINE):
        raise ValueError("an encoded response, which c10d's server does not send")
    length = re.search(r"^content-length:\s*(\d+)\s*$", rest, re.IGNORECASE | re.MULTILINE)
    return int(status[1]), int(length[1]) if length else None


def _answer(connection: socket.socket, handler: str, until: float) -> bytes:
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > _MAX_HEADER_BYTES:
            raise Unanswered("broken", f"worker server: {handler}: the header does not end")
        _receive(connection, data, until, handler)
    try:
        status, length = parse_head(bytes(data[:end]))
    except ValueError as error:
        raise Unanswered("broken", f"worker server: {handler}: {error}") from error
    del data[: end + 4]
    if length is not None and length > MAX_RESPONSE_BYTES:
        raise Unanswered("broken", f"worker server: {handler}: the answer is too large ({length} bytes)")
    while length is None or len(data) < length:
        if not _receive(connection, data, until, handler, may_end=length is None):
            break
        if len(data) > MAX_RESPONSE_BYTES:
            raise Unanswered("broken", f"worker server: {handler}: the answer does not end")
    body = bytes(data if length is None else data[:length])
    if status == 404:
        raise Unanswered("no handler", f"this torch's worker server has no handler {handler}")
    if status != 200:
        text = body[:200].decode("utf-8", "replace").strip()
        raise Unanswered("broken", f"worker server: {handler}: status {status}: {text}")
    return body


def _receive(connection: socket.socket, data: bytearray, until: float, handler: str, *, may_end: bool = False) -> bool:
    connection.settimeout(left(until))
    chunk = connection.recv(1 << 18)
    data += chunk
    if not chunk and not may_end:
        raise Unanswered("broken", f"worker server: {handler}: the connection closed before the answer was complete")
    return bool(chunk)
