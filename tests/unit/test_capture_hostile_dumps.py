"""Hostile Flight Recorder dumps: any value in any field, and values that grow when they are processed."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.guard import LimitExceeded, ReadLimits, in_child
from safelaunch.capture.flight_dump import MAX_RANKS, parse_json, parse_pickle, record_of
from safelaunch.model import Evidence, FlightRecord, RankEvidence
from safelaunch.system.errors import CaptureError
from safelaunch.verdict.diagnose import diagnose
from tests.support.bundles import dumps, mismatching
from tests.support.sample_dumps import GLOO, GLOO_ENTRY, NCCL, as_json, places

FIELDS = sorted({*GLOO_ENTRY, *NCCL["entries"][0]})


def with_value(tree: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value
    made = list(tree) if isinstance(tree, tuple) else copy.copy(tree)
    made[path[0]] = with_value(tree[path[0]], path[1:], value)
    return tuple(made) if isinstance(tree, tuple) else made


def judged(record: FlightRecord) -> None:
    """Reaches a verdict on the record, and encodes it."""
    ranks = tuple(RankEvidence(rank=rank, host="", pid=0, flight_record=record) for rank in range(2))
    msgspec.json.encode(diagnose(Evidence("hang", 2, ranks)))


# --- any value --------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "\0", "²", "-1", "9" * 5000, "[0, 70000]"])
numbers = st.integers(-(1 << 70), 1 << 70) | st.sampled_from([1 << 10_000, -1, 1 << 62])
leaves = st.none() | st.booleans() | st.floats() | st.binary(max_size=4) | texts | numbers
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | numbers, inner, max_size=3)
    ),
    max_leaves=12,
)
dumps_of_both = st.sampled_from([GLOO, NCCL])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dump=dumps_of_both, value=values)
def test_pickle_with_any_value_anywhere_is_parsed_or_rejected(
    data: st.DataObject, dump: dict[str, Any], value: object
) -> None:
    place = data.draw(st.sampled_from(places(dump)))
    try:
        record = parse_pickle(pickle.dumps(with_value(dump, place, value)))
    except CaptureError:
        return
    judged(record)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dump=dumps_of_both, value=values)
def test_json_with_any_value_anywhere_is_parsed_or_rejected(
    data: st.DataObject, dump: dict[str, Any], value: object
) -> None:
    dump = json.loads(as_json(dump))
    place = data.draw(st.sampled_from(places(dump)))
    try:
        written = json.dumps(with_value(dump, place, value)).encode("utf-8", "surrogatepass")
        record = parse_json(written)
    except (CaptureError, TypeError, ValueError):  # JSON has no bytes, and no number of 6000 digits
        return
    judged(record)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dump=dumps_of_both)
def test_pickle_with_any_bytes_causes_no_internal_error(data: st.DataObject, dump: dict[str, Any]) -> None:
    """A child reads the dump, as for other users' files, because some bytes might crash the unpickler itself."""
    written = bytearray(pickle.dumps(dump, protocol=2))
    at = data.draw(st.integers(0, len(written) - 1))
    written[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=3))
    if b"r" in written[at : at + 3] or b"j" in written[at : at + 3]:
        return  # a memo of any size
    try:
        in_child(lambda: _read_and_judge(bytes(written)), ReadLimits(512 << 20, cpu_s=20))
    except LimitExceeded as error:
        assert "internal error" not in error.message, error.message


def _read_and_judge(written: bytes) -> None:
    try:
        record = parse_pickle(written)
    except (CaptureError, MemoryError):
        return
    judged(record)


# --- values that grow -------------------------------------------------------------------------------------------------


def deep(levels: int, kind: type[list[Any] | tuple[Any, ...]]) -> Any:
    made: Any = kind()
    for _ in range(levels):
        made = kind([made])
    return made


def bomb(levels: int, kind: type[list[Any] | tuple[Any, ...]]) -> Any:
    """Returns nested pairs of the same object: small in memory, but exponentially large to walk through."""
    made: Any = kind([1])
    for _ in range(levels):
        made = kind([made, made])
    return made


def wide() -> Any:
    return [[1] * 4096] * 4096


@cache
def hostile(what: str) -> Any:
    return HOSTILE[what]()


HOSTILE: dict[str, Callable[[], Any]] = {
    "deep tuples": lambda: deep(300_000, tuple),
    "deep lists": lambda: deep(300_000, list),
    "a bomb of tuples": lambda: bomb(400, tuple),
    "a bomb of lists": lambda: bomb(400, list),
    "wide lists": wide,
    "a million lists": lambda: [[]] * 1_000_000,
    "a number of 6000 digits": lambda: 1 << 20_000,
    "a long text": lambda: "x" * 50_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("field", FIELDS)
def test_entry_field_of_huge_value_is_bounded_in_time_and_size(field: str, what: str) -> None:
    """Three entries make rows be compared; objects that a pickle refers to twice are shared."""
    value = hostile(what)
    entries = [{**GLOO_ENTRY, field: other} for other in (value, copy.copy(value), value)]
    begin = time.process_time()
    record = record_of({**GLOO, "entries": entries})
    judged(record)
    assert time.process_time() - begin < 5
    assert len(repr(record)) < 10_000_000


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize(
    "place",
    [("version",), ("pg_config",), ("pg_config", ""), ("pg_config", "", "ranks"), ("pg_status",), ("pg_status", "0"),
     ("pg_status", "0", "last_enqueued_collective")],
)  # fmt: skip
def test_dump_header_of_huge_value_is_parsed(place: tuple[str, ...], what: str) -> None:
    judged(record_of(with_value(GLOO, place, hostile(what))))


def test_groups_sharing_one_rank_list_are_parsed_quickly() -> None:
    ranks = list(range(60_000))
    begin = time.process_time()
    record_of({**GLOO, "pg_config": {str(number): {"ranks": ranks} for number in range(16_000)}})
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("ranks", [[MAX_RANKS], "[-1]", [1 << 100], "[0, 99999999999]", [True], [0.0], ["0"]])
def test_group_with_impossible_ranks_is_damaged(ranks: object) -> None:
    record = record_of({**GLOO, "pg_config": {"0": {"ranks": ranks}}})
    assert (record.groups, record.damaged) == ({}, ("pg_config",))


# --- damaged fields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", 3), ("state", "schedulfd"), ("retired", "yes"), ("profiling_name", 7), ("process_group", "0"),
        ("process_group", ("0", 5)), ("pg_id", -0.5), ("is_p2p", 2), ("timeout_ms", "soon"), ("input_sizes", [3]),
        ("input_sizes", [[-1]]), ("output_sizes", {"a": 1}), ("input_dtypes", [1]), ("output_dtypes", "Float"),
        ("frames", [None]), ("frames", [{"line": "x"}]), ("frames", "f"), ("collective_seq_id", "x"),
        ("collective_seq_id", 1 << 62), ("p2p_seq_id", -4), ("record_id", 1.5), ("time_created_ns", [1]),
        ("time_discovered_started_ns", "now"),
    ],
)  # fmt: skip
def test_impossible_entry_field_is_named_as_damaged(field: str, value: object) -> None:
    record = record_of({**GLOO, "entries": [GLOO_ENTRY, {**GLOO_ENTRY, field: value}]})
    assert record.damaged == (field,)


@pytest.mark.parametrize("dump", [GLOO, NCCL, {"entries": [{}]}, {"version": "2.0", "entries": [{"pg_id": 3}]}])
def test_valid_dump_is_not_damaged(dump: dict[str, Any]) -> None:
    assert record_of(dump).damaged == ()
    assert parse_json(as_json({"pg_status": {}, **dump})).damaged == ()


def test_damaged_record_lowers_verdict_confidence(tmp_path: Any) -> None:
    """Rank 2 makes a different last call; an earlier call of rank 1 is damaged."""
    folder = dumps(tmp_path / "dumps", mismatching())
    sure = diagnose(locate.read(folder).evidence)
    dump = pickle.loads((folder / "nccl_trace_rank_1").read_bytes())
    dump["entries"][0]["retired"] = "yes"
    (folder / "nccl_trace_rank_1").write_bytes(pickle.dumps(dump))
    verdict = diagnose(locate.read(folder).evidence)
    assert (sure.confidence, verdict.confidence) == ("high", "medium")
    assert "damaged in the Flight Recorder of rank 1: retired" in verdict.missing


# --- dumps that kill their reader -------------------------------------------------------------------------------------

OPCODES = {
    "a key of deep tuples": (b"}" + b")" + b"\x85" * 1_000_000 + b"Ns", "(SIGSEGV)"),
    "a memo of 2 ** 31": (b"Nr" + struct.pack("<I", (1 << 31) - 1), "MB of memory"),
    "many sets": (b"](" + b"\x8f" * 3_000_000 + b"e", "MB of memory"),
    "a set of bombs": (b"\x8f()" + b"2\x86" * 100 + b"\x90", "s of CPU time"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OPCODES)
def test_dump_that_kills_its_reader_loses_only_its_rank(what: str, tmp_path: Any) -> None:
    opcodes, reason = OPCODES[what]
    folder = dumps(tmp_path / "dumps", mismatching())
    written = (folder / "nccl_trace_rank_3").read_bytes()
    (folder / "nccl_trace_rank_3").write_bytes(b"\x80\x02}" + b"X\x01\0\0\0x" + opcodes + b"s" + written[3:])
    contents = locate.read(folder)
    assert [rank.rank for rank in contents.evidence.ranks] == [0, 1, 2]
    (problem,) = contents.problems
    assert problem.startswith("nccl_trace_rank_3: ") and problem.endswith(reason)
