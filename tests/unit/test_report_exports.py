"""The files for Perfetto and speedscope: what their viewers need to read them, and what they show."""

from __future__ import annotations

import json
from typing import Any

import incidents
import pytest
from evidence import in_user, job, rank

from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import Evidence
from safelaunch.report import exports


def trace_of(evidence: Evidence) -> list[dict[str, Any]]:
    document = json.loads(exports.as_json(exports.perfetto(Facts.of(evidence))))
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_a_trace_is_what_the_trace_event_format_asks_for() -> None:
    events = trace_of(incidents.hang(4).evidence)
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str) and event["name"]
        if event["ph"] == "X":
            assert isinstance(event["tid"], int) and event["ts"] >= 0 and event["dur"] >= 0
    begun = [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert begun == sorted(begun) and begun[0] == 0


def test_a_rank_is_a_process_and_its_pending_call_lasts_until_the_evidence_was_taken() -> None:
    events = trace_of(incidents.hang(4).evidence)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {n: f"rank {n} on node1" for n in range(4)}
    last = [event for event in events if event["ph"] == "X" and event["pid"] == 0][-1]
    assert (last["name"], last["args"]["state"], last["args"]["number"]) == ("all_gather", "pending", 75)
    assert last["dur"] == 30e6 and last["args"]["at"] == "/home/me/train.py:12 evaluate"


def test_of_thousands_of_ranks_a_trace_has_the_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MOST_EVENTS", 64 * 10)
    calls = [event for event in trace_of(incidents.hang(64).evidence) if event["ph"] == "X"]
    assert len(calls) == 64 * 10 and {call["args"]["number"] for call in calls} == set(range(66, 76))


def test_stacks_weigh_as_many_ranks_as_have_them() -> None:
    document = json.loads(exports.as_json(exports.speedscope(Facts.of(incidents.hang(4).evidence), "train")))
    assert document["$schema"] == exports.SPEEDSCOPE_SCHEMA
    frames = document["shared"]["frames"]
    mains, _ = document["profiles"]
    assert (mains["type"], mains["unit"], mains["weights"], mains["endValue"]) == ("sampled", "none", [1, 3], 4)
    stacks = [[frames[number]["name"] for number in sample] for sample in mains["samples"]]
    assert stacks[0][0] == "rank 0" and stacks[1][0] == "ranks 1-3"
    assert stacks[1][1] == "<module>" and stacks[1][-1] == "all_reduce"


def test_a_rank_that_raised_stands_where_it_raised_without_a_frame_of_ours() -> None:
    document = exports.as_json(exports.speedscope(Facts.of(incidents.crash().evidence)))
    assert "_safelaunch_beacon" not in document and '"forward"' in document


def test_without_records_or_stacks_both_are_empty_and_whole() -> None:
    for evidence in (Evidence("hang", 0, ()), job(rank(0, in_user(7), seen=False))):
        assert [event for event in trace_of(evidence) if event["ph"] == "X"] == []
        assert exports.speedscope(Facts.of(evidence))["profiles"][0]["samples"] == []
