"""The evidence for two viewers: ``timeline.perfetto.json`` (Perfetto, chrome://tracing) and ``stacks.speedscope.json``.

Both formats are JSON. Perfetto reads the Trace Event Format that chrome://tracing defines; times there are in
microseconds. speedscope reads the format of its own schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safelaunch import __version__
from safelaunch.diagnose.collectives import describe, number_of, op_name
from safelaunch.diagnose.conditions import View
from safelaunch.diagnose.rank_state import Facts, child_views, view_of
from safelaunch.model import Collective, Frame, format_ranks
from safelaunch.model.entries import Entries
from safelaunch.reading.frames import stack_of
from safelaunch.report.calls import state
from safelaunch.report.overview import main_frames, without_ours
from safelaunch.report.timeline import LONGEST_S
from safelaunch.system.printable import clean_json

MOST_EVENTS = 40_000
LEAST_CALLS = 8  # of a rank
MOST_CALLS = 500
PERFETTO, SPEEDSCOPE = "timeline.perfetto.json", "stacks.speedscope.json"
SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def as_json(document: dict[str, Any]) -> str:
    return clean_json(json.dumps(document, ensure_ascii=False, separators=(",", ":")))


def perfetto(facts: Facts, name: str = "") -> dict[str, Any]:
    """The newest calls of every rank: a process is a rank, a thread of it a process group.

    A call lasts until the next of its rank in that group, and the last one until the evidence was taken, unless it had
    completed: a Flight Recorder has no times of completion on every backend.
    """
    records = {
        rank: Entries.of(one.evidence.flight_record.entries)
        for rank, one in facts.ranks.items()
        if one.evidence.flight_record is not None
    }
    most = min(MOST_CALLS, max(LEAST_CALLS, MOST_EVENTS // max(1, len(records))))
    begins = {rank: max(0, len(ring) - most) for rank, ring in records.items()}
    start = min((ring.created_ns[begins[rank]] for rank, ring in records.items() if ring), default=0)
    newest = max((ring.created_ns[len(ring) - 1] for ring in records.values() if ring), default=0)
    end = newest + int(min(facts.evidence.stall_s, LONGEST_S) * 1e9)
    events: list[dict[str, Any]] = []
    for rank, ring in records.items():
        calls = [ring[number] for number in range(begins[rank], len(ring))]
        events += _of_rank(facts, rank, calls, start, end)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"exporter": f"safelaunch {__version__}", "bundle": name, "start_unix_ns": str(start)},
    }


def _of_rank(facts: Facts, rank: int, calls: list[Collective], start: int, end: int) -> list[dict[str, Any]]:
    evidence = facts.ranks[rank].evidence
    groups = {group: number for number, group in enumerate(dict.fromkeys(call.group for call in calls))}
    descriptions = {call.group: call.description for call in calls}
    where = f" on {evidence.host}" if evidence.host else ""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}{where}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for group, number in groups.items():
        title = f"group {group} {descriptions[group]}".strip()
        events.append({"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": title}})
    following: dict[str, int] = {}
    made = []
    for call in reversed(calls):
        stops = following.get(call.group, end if not call.completed else call.created_ns)
        following[call.group] = call.created_ns
        place = stack_of(evidence, call.frames).user_frame
        arguments: dict[str, Any] = {"number": number_of(call), "call": describe(call), "state": state(call)}
        arguments |= {"at": f"{place.file}:{place.line} {place.function}"} if place is not None else {}
        event = {
            "ph": "X",
            "pid": rank,
            "tid": groups[call.group],
            "name": op_name(call) or "unknown",
            "cat": "collective" if not call.is_p2p else "p2p",
            "ts": (call.created_ns - start) / 1000,
            "dur": max(0, stops - call.created_ns) / 1000,
            "args": arguments,
        }
        made.append(event if call.completed else {**event, "cname": "terrible"})
    return [*events, *reversed(made)]


def speedscope(facts: Facts, name: str = "") -> dict[str, Any]:
    """Two profiles, in which a sample weighs as many ranks as have that stack: main threads, and all processes'."""
    mains: dict[tuple[Frame, ...], list[int]] = {}
    everything: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for rank, one in facts.ranks.items():
        view = view_of(one.evidence)
        if mine := main_frames(one.evidence):
            mains.setdefault(mine, []).append(rank)
        for label, stack in _stacks(view, child_views(one.evidence)):
            everything.setdefault((label, stack), []).append(rank)
    numbers: dict[Frame, int] = {}
    titles: dict[str, int] = {}
    frames: list[dict[str, Any]] = []

    def number(frame: Frame) -> int:
        if frame not in numbers:
            numbers[frame] = len(frames)
            frames.append({"name": frame.function or frame.file, "file": frame.file, "line": frame.line})
        return numbers[frame]

    def title(text: str) -> int:
        if text not in titles:
            titles[text] = len(frames)
            frames.append({"name": text})
        return titles[text]

    of_mains = {
        (title(_who(ranks)), *(number(frame) for frame in reversed(stack))): len(ranks)
        for stack, ranks in mains.items()
    }
    of_all = {
        (title(label), title(_who(ranks)), *(number(frame) for frame in reversed(stack))): len(ranks)
        for (label, stack), ranks in everything.items()
    }
    return {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": name or "ranks",
        "exporter": f"safelaunch@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": [_profile("main threads", of_mains), _profile("all threads and processes", of_all)],
    }


def _stacks(view: View | None, children: list[View]) -> list[tuple[str, tuple[Frame, ...]]]:
    found = []
    for one in (view, *children):
        for thread in one.sample.threads if one is not None and one.sample is not None else ():
            frames = without_ours(one.stack_of(thread).frames) if one is not None else ()
            if frames:
                role = "main process" if one is view else one.process.role if one is not None else ""
                found.append((role, frames))
    return found


def _who(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def _profile(name: str, stacks: Mapping[tuple[int, ...], int]) -> dict[str, Any]:
    return {
        "type": "sampled",
        "name": name,
        "unit": "none",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": [list(stack) for stack in stacks],
        "weights": list(stacks.values()),
    }
