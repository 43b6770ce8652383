"""Perfetto file: valid for its viewer, and complete."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import Evidence
from safelaunch.report import exports
from safelaunch.verdict.rank_state import CaseFacts
from tests.support import incidents
from tests.support.evidence import entry, in_user, job, rank, record


def trace_of(evidence: Evidence) -> list[dict[str, Any]]:
    document = json.loads(exports.as_json(exports.perfetto(CaseFacts.of(evidence))))
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_perfetto_events_follow_trace_event_format() -> None:
    events = trace_of(incidents.hang(4).evidence)
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str) and event["name"]
        if event["ph"] == "X":
            assert isinstance(event["tid"], int) and event["tid"] > 0
            assert isinstance(event["ts"], int) and event["ts"] >= 0
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            assert isinstance(event["cat"], str) and isinstance(event["args"], dict)
        else:
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
    begun = [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert begun == sorted(begun) and begun[0] == 0


def test_perfetto_calls_on_same_track_never_overlap() -> None:
    hang = incidents.hang(64, nodes=8).evidence
    late = [replace(entry("all_reduce", n), created_ns=10**9 + 1001 * (n ^ 1)) for n in range(1, 9)]  # by two threads
    for events in (trace_of(hang), trace_of(job(rank(0, in_user(7), flight=record(*late))))):
        tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for event in events:
            if event["ph"] == "X":
                tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        for track in tracks.values():
            open_until: list[int] = []
            for begin, minus in sorted(track):
                while open_until and open_until[-1] <= begin:
                    open_until.pop()
                assert not open_until or begin - minus <= open_until[-1]
                open_until.append(begin - minus)
        named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
        assert set(tracks) == named


def test_perfetto_hostile_names_stay_ascii() -> None:
    facts = CaseFacts.of(incidents.hostile().evidence)
    document = exports.perfetto(facts, incidents.EVIL + "\ud800\x7f")
    text = exports.as_json(document)
    assert text.isascii() and text.isprintable()
    assert json.loads(text) == document


def test_perfetto_pending_call_lasts_until_end_of_evidence() -> None:
    events = trace_of(incidents.hang(4).evidence)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {n: f"rank {n} on node1" for n in range(4)}
    last = [event for event in events if event["ph"] == "X" and event["pid"] == 0][-1]
    assert (last["name"], last["args"]["state"], last["args"]["number"]) == ("all_gather", "pending", 75)
    assert last["dur"] == 30e6 and last["args"]["at"] == "/home/me/train.py:12 evaluate"


def test_perfetto_of_many_ranks_keeps_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MOST_EVENTS", 64 * 10)
    calls = [event for event in trace_of(incidents.hang(64).evidence) if event["ph"] == "X"]
    assert len(calls) == 64 * 10 and {call["args"]["number"] for call in calls} == set(range(66, 76))
