"""Flight Recorder dumps of several versions and backends, damaged dumps and hostile ones."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from safelaunch.beacon import layout, server
from safelaunch.capture import flight_dump, flight_recorder, flight_records, worker_server
from safelaunch.capture.flight_dump import parse_json, parse_pickle, record_of
from safelaunch.capture.flight_recorder import flight_record_of, kept_at_exit
from safelaunch.capture.worker_server import Unanswered
from safelaunch.model import Collective, Frame, GroupStatus
from safelaunch.system.errors import CaptureError
from tests.support.nccl_formats import FORMATS, Format, Hooked, Op, Recorder
from tests.support.sample_dumps import GLOO, GLOO_ENTRY, NCCL, as_json


def test_flight_status_uses_group_number_of_rank() -> None:
    """The second group of this rank is called "4"; the group called "2" has other members."""
    own_entry = {**GLOO_ENTRY, "pg_id": 2, "process_group": ("4", "undefined")}
    numbers = {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 8}
    dump = {**GLOO, "entries": [GLOO_ENTRY, own_entry], "pg_status": {"0": numbers, "2": numbers, "3": numbers}}
    status = GroupStatus(9, -1, 8)
    assert parse_pickle(pickle.dumps(dump)).status == {"0": status, "4": status}  # the name of number 3 is unknown


def test_gloo_pickle_is_parsed() -> None:
    record = parse_pickle(pickle.dumps(GLOO, protocol=2))
    assert record.version == "2.10"
    assert record.groups == {}  # "ranks" is empty there: unknown, not a group without members
    assert record.status == {"0": GroupStatus(last_enqueued=6, last_started=-1, last_completed=5)}
    assert [entry.completed for entry in record.entries] == [True, False]
    assert record.entries[1] == Collective(
        group="0",
        seq=6,
        op="gloo:all_reduce",
        completed=False,
        state="scheduled",
        description="default_pg",
        record_id=6,
        input_sizes=((7, 3),),
        input_dtypes=("Float",),
        output_sizes=((7, 3),),
        output_dtypes=("Float",),
        created_ns=1795170632995829080,
        started=None,
        timeout_ms=1800000,
        frames=(
            Frame("/env/torch/distributed/distributed_c10d.py", 3245, "all_reduce"),
            Frame("/home/me/train.py", 18, "<module>"),
        ),
        thread=140298925697920,
    )


@pytest.mark.parametrize("dump", [GLOO, NCCL])
def test_flight_json_equals_pickle_without_frames(dump: dict[str, Any]) -> None:
    from msgspec.structs import replace

    pickled = parse_pickle(pickle.dumps(dump))
    without = replace(pickled, entries=tuple(replace(entry, frames=()) for entry in pickled.entries))
    assert parse_json(as_json(dump)) == without


def test_nccl_pickle_is_parsed() -> None:
    record = parse_pickle(pickle.dumps(NCCL))
    assert record.groups == {"0": (0, 1), "1": (1,)}
    first, second, sent = record.entries
    assert (first.completed, first.started) == (True, True)
    assert (second.completed, second.started, second.seq) == (False, False, 2)
    assert (sent.is_p2p, sent.p2p_seq, sent.started, sent.seq) == (True, 3, True, 0)


@pytest.mark.parametrize(
    ("entry", "group", "seq"),
    [
        ({"pg_id": 3, "seq_id": 9, "profiling_name": "nccl:x"}, "3", 9),  # version 1 and 2.0
        ({"process_group": ["7"], "collective_seq_id": 1}, "7", 1),
        ({"process_group": [], "collective_seq_id": "12"}, "", 12),
        ({}, "", 0),
    ],
)
def test_older_flight_entries_are_parsed(entry: dict[str, Any], group: str, seq: int) -> None:
    (collective,) = record_of({"version": "2.0", "entries": [entry]}).entries
    assert (collective.group, collective.seq, collective.completed) == (group, seq, False)


@pytest.mark.parametrize(
    "ranks", ["[0, 1", "__import__('os').abort()", "[0, true]", '["0"]', 7, None, {"0": 1}, "[" * 100000]
)
def test_group_ranks_that_are_no_number_list_are_unknown(ranks: object) -> None:
    assert record_of({"version": "2.10", "entries": [], "pg_config": {"0": {"ranks": ranks}}}).groups == {}


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [None, 3, "x", []]},
        {"entries": [{"frames": [None, {"line": "x"}], "input_sizes": [3, "ab", [None]], "state": 5}]},
        {"pg_status": {"0": None, 1: {"last_enqueued_collective": []}}},
        {"pg_config": [1], "pg_status": "x", "version": 2},
        {"entries": [{"collective_seq_id": 1 << 80, "time_created_ns": "-", "process_group": ("0", 5, 6)}]},
    ],
)
def test_flight_values_of_wrong_type_are_tolerated(change: dict[str, Any]) -> None:
    record_of({**GLOO, **change})


@pytest.mark.parametrize("parse", [parse_json, parse_pickle])
@pytest.mark.parametrize("data", [b"", b"garbage", b"[]", b"null", b"\x80\x02}q\x00.", b"[" * 100_000, b"{}"])
def test_flight_parser_rejects_other_data(parse: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(CaptureError):
        parse(data)


def test_truncated_pickle_is_rejected_at_every_length() -> None:
    whole = pickle.dumps(GLOO, protocol=2)
    for length in range(len(whole)):
        with pytest.raises(CaptureError):
            parse_pickle(whole[:length])


def served(monkeypatch: pytest.MonkeyPatch, answers: dict[str, bytes], listed: bytes = b"") -> None:
    """Stands in for a worker server with these handlers."""

    def post(path: str, handler: str, *, deadline_s: float) -> bytes:
        if handler not in answers:
            raise Unanswered("no handler", f"no handler {handler}")
        return answers[handler]

    monkeypatch.setattr(flight_recorder, "post", post)
    monkeypatch.setattr(worker_server, "post", post)
    monkeypatch.setattr(flight_recorder, "names", lambda path, deadline_s: listed)


@pytest.mark.parametrize(("dump", "known"), [({"version": "2.4", "entries": []}, False), (NCCL, True)])
def test_worker_server_with_nccl_recorder_only_is_noted(
    monkeypatch: pytest.MonkeyPatch, dump: dict[str, Any], known: bool
) -> None:
    """On torch 2.6 and 2.9, an empty record without an NCCL group doesn't describe gloo's calls."""
    served(
        monkeypatch,
        {"dump_nccl_trace_json": json.dumps(dump).encode(), "dump_nccl_trace_pickle": pickle.dumps(dump)},
    )
    capture = flight_record_of("/run/s")
    assert (capture.record.value is not None) == known
    assert (capture.record.missing, capture.json.note) == (("", "") if known else (flight_recorder.NCCL_ONLY,) * 2)
    assert capture.json.value is not None, "what it said is kept"


EMPTY = {"version": "2.10", "entries": []}


@pytest.mark.parametrize("python", [True, False])
def test_gloo_and_nccl_recorders_are_merged(monkeypatch: pytest.MonkeyPatch, python: bool) -> None:
    """On torch 2.13 with CUDA, the default handler returns only gloo's record."""
    nccl = Recorder(0, {"0": (0, 1)}).collective().collective(state="started")
    for gloo, ops in ((GLOO, ["gloo", "gloo", "nccl", "nccl"]), (EMPTY, ["nccl", "nccl"])):
        answers = {"fr_trace_json": as_json({"pg_status": {}, **gloo}), "dump_nccl_trace_json": nccl.json()}
        answers["safelaunch_flight_record"] = pickle.dumps(gloo)
        answers["dump_nccl_trace_pickle"] = pickle.dumps(nccl.dump())
        served(monkeypatch, answers)
        capture = flight_record_of("/run/s", ask_python=python)
        assert capture.record.value is not None and capture.json.value is not None
        assert sorted(flight_records.backend_of(entry.op) for entry in capture.record.value.entries) == ops
        assert len(parse_json(capture.json.value).entries) == len(ops)
        assert flight_recorder.newest_entry("/run/s") == (7 if gloo is GLOO else 1)
        assert flight_recorder.default_timeout_s("/run/s") == 600.0


@pytest.mark.parametrize(
    ("calls", "timeout_s"),
    [
        ([(["0", "default_pg"], 600000), (["1", "health"], 15000)], 600.0),
        ([(["0", "default_pg"], 600000)] * 2 + [(["0", "default_pg"], 5000)], 600.0),
        ([(["0", "default_pg"], 1800000), (["0", "default_pg"], 600000)], 600.0),
        ([(["0", "default_pg"], 0), (["1", "health"], 15000)], None),
        ([(["1", "health"], 15000)], None),
        ([], None),
    ],
    ids=["health check", "one call's own", "two backends", "unknown", "only another group", "none"],
)
def test_default_timeout_comes_from_default_group_only(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[list[str], int]], timeout_s: float | None
) -> None:
    entries = [{"process_group": group, "timeout_ms": timeout_ms} for group, timeout_ms in calls]
    served(monkeypatch, {"fr_trace_json": as_json({"pg_status": {}, "entries": entries})})
    assert flight_recorder.default_timeout_s("/run/s") == timeout_s


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_arrivals_of_transfers_are_named_by_both_ends(monkeypatch: pytest.MonkeyPatch, layout: Format) -> None:
    """Sends and receives that match have the same name. The end of a batch isn't a collective."""
    groups = {"0": (0, 1, 2), "3": (1, 2)}
    first, second = (Recorder(rank, groups, layout).collective() for rank in (1, 2))
    first.send(1, group="3").batch([Op("send", peer=1), Op("recv", peer=1)], group="3").collective()
    second.recv(0, group="3").batch([Op("recv", peer=0), Op("send", peer=0)], group="3").collective()
    expected = {("3 0->1", 0), ("3 0->1", 1), ("3 1->0", 0), ("0", 1), ("0", 2)}
    for recorder in (first, second):
        served(monkeypatch, {"dump_nccl_trace_json": recorder.json()})
        arrivals = flight_recorder.arrivals_of("/run/s")
        assert set(arrivals) == expected and all(arrivals.values())


@pytest.mark.parametrize("python", [True, False])
def test_recorders_of_each_backend_are_merged(monkeypatch: pytest.MonkeyPatch, python: bool) -> None:
    """On torch 2.15, the default handlers take the backend's name.

    Older ones answer with gloo's record and list none.
    """
    own_record = Hooked(0, {"0": (0, 1)}, "my-own_2").collective().collective(state="scheduled")
    answers = {"fr_trace_json": as_json({"pg_status": {}, **GLOO}), "fr_trace_json?backend=my-own_2": own_record.json()}
    answers["safelaunch_flight_record"] = pickle.dumps(GLOO)
    answers["safelaunch_flight_record_my-own_2"] = pickle.dumps(own_record.dump())
    listed = ["fr_trace_json", "fr_dump_file", "safelaunch_flight_record", "safelaunch_flight_record_a b?c=d"]
    for more, ops in ((["safelaunch_flight_record_my-own_2"], 4), ([], 2)):
        served(monkeypatch, answers, json.dumps(listed + more).encode())
        record = flight_record_of("/run/s", ask_python=python).record.value
        assert record is not None and len(record.entries) == ops
        assert flight_recorder.newest_entry("/run/s") == (7 if more else 6)


class Hostile:
    def __init__(self, reduction: tuple[Any, ...]) -> None:
        self.reduction = reduction

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduction


@pytest.mark.parametrize("reduction", [(os.abort, ()), (eval, ("1/0",)), (bytearray, (1,)), (print, ("x",))])
def test_flight_pickle_that_runs_code_is_refused(reduction: tuple[Any, ...]) -> None:
    with pytest.raises(CaptureError, match="which no dump does"):
        parse_pickle(pickle.dumps({**GLOO, "comm_lib_version": Hostile(reduction)}))


def test_flight_dump_beyond_size_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "MAX_DUMP_BYTES", 100)
    with pytest.raises(CaptureError, match="too large"):
        parse_pickle(pickle.dumps(GLOO))
    with pytest.raises(CaptureError, match="too many"):
        record_of({"entries": [None] * (flight_dump.MAX_ENTRIES + 1)})


def test_packed_column_of_one_number_is_range() -> None:
    """The check for gaps in a window looks for a range."""
    from safelaunch.model.entries import Same, packed

    assert packed([7]) == range(7, 8)
    assert packed([7, 8, 9]) == range(7, 10)
    assert isinstance(packed([7, 7]), Same)


def test_flight_entry_without_group_name_uses_group_number() -> None:
    """The number is the rank's own: ``"2"`` might be the name of another group."""
    entries = [
        {"pg_id": 1, "process_group": ["2", "tensor"]},
        {"pg_id": 2, "process_group": ["5", "data"]},
        {"pg_id": 2},
        {"pg_id": 2, "process_group": 7},
        {"pg_id": 3},
    ]
    record = parse_pickle(pickle.dumps({"version": "2.10", "entries": entries}))
    assert [entry.group for entry in record.entries] == ["2", "5", "5", "5", "3"]


@pytest.mark.parametrize("dump", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_flight_record_survives_json_round_trip(dump: dict[str, Any]) -> None:
    record = parse_pickle(pickle.dumps(dump))
    assert parse_json(flight_dump.to_json(record)) == record


@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"torch {form.torch}")
def test_nccl_record_survives_json_round_trip(form: Format, timing: bool) -> None:
    recorder = Recorder(1, {"0": (0, 1, 2), "5": (1, 2)}, form, timing=timing)
    recorder.collective("all_reduce").collective("broadcast", group="5", size=(2, 3)).send(0).recv(2)
    recorder.collective("all_gather", "timed out").collective("all_reduce", "started")
    recorder.collective("all_reduce", "scheduled")
    record = parse_json(recorder.json())
    assert parse_json(flight_dump.to_json(record)) == record


# --- ranks that have ended --------------------------------------------------------------------------------------------


def keep(page: Path, monkeypatch: pytest.MonkeyPatch, **recorders: dict[str, Any]) -> None:
    """Writes the record as a rank does at its exit, with these recorders in its ``c10d``."""
    dumps = {f"_dump_{name}_trace": lambda dump=dump: pickle.dumps(dump) for name, dump in recorders.items()}
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**dumps))  # type: ignore[arg-type]
    server.keep_flight_record(f"{page}{layout.FLIGHT_SUFFIX}")


def test_flight_record_is_kept_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "0-1-4711"
    keep(page, monkeypatch, fr=GLOO)
    flight = kept_at_exit(page)
    assert flight is not None and flight.record.value is not None and flight.json.value is not None
    assert flight.record.value == parse_pickle(pickle.dumps(GLOO))
    assert parse_json(flight.json.value) == flight.record.value
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_two_recorders_kept_at_exit_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "0-1-4711"
    keep(page, monkeypatch, fr=GLOO, nccl=NCCL)
    flight = kept_at_exit(page)
    assert flight is not None and flight.record.value is not None
    assert len(flight.record.value.entries) == len(GLOO["entries"]) + len(NCCL["entries"])


def test_flight_record_of_each_backend_is_kept_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = {name: Hooked(0, {"0": (0, 1)}, name).collective().dump() for name in ("nccl2", "relay")}
    c10d = SimpleNamespace(_dump_fr_trace=lambda backend="gloo": pickle.dumps(dumps.get(backend, GLOO)))
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_backends", list(dumps))
    page = tmp_path / "0-1-4711"
    server.keep_flight_record(f"{page}{layout.FLIGHT_SUFFIX}")
    (tmp_path / "0-1-4711.flight-fr-broken.partial").write_bytes(b"")
    flight = kept_at_exit(page)
    assert flight is not None and flight.record.value is not None
    assert {flight_records.backend_of(e.op) for e in flight.record.value.entries} == {"gloo", "nccl2", "relay"}


@pytest.mark.parametrize("what", ["nothing", "no torch", "no entries", "a broken file"])
def test_kept_at_exit_returns_none_without_usable_record(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "0-1-4711"
    if what == "no torch":
        keep(page, monkeypatch)
    elif what == "no entries":
        keep(page, monkeypatch, fr={**GLOO, "entries": [], "pg_config": {}, "pg_status": {}})
    elif what == "a broken file":
        (tmp_path / "0-1-4711.flight-fr").write_bytes(pickle.dumps(GLOO)[:-9])
    assert kept_at_exit(page) is None
