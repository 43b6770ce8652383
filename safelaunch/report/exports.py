"""Exports evidence for Perfetto and chrome://tracing: ``timeline.perfetto.json`` in Trace Event Format, in µs."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from safelaunch import __version__
from safelaunch.model import Collective, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.report.calls import ByKind, state
from safelaunch.report.timeline import LONGEST_S
from safelaunch.stacks.frames import stack_of
from safelaunch.verdict.c10d import describe, op_name
from safelaunch.verdict.rank_state import CaseFacts

MOST_EVENTS = 40_000
LEAST_CALLS = 8  # of each rank
MOST_CALLS = 500


def as_json(document: dict[str, Any]) -> str:
    try:
        data = msgspec.json.encode(document)  # faster than json, but doesn't escape non-ASCII characters
    except UnicodeEncodeError:
        data = b"\xff"
    text = data.decode() if data.isascii() else json.dumps(document, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")


def perfetto(facts: CaseFacts, name: str = "") -> dict[str, Any]:
    """Returns the newest calls of every rank as trace events. Processes stand for ranks, threads for process groups.

    A call is drawn until the rank's next call in that group; if the last call is incomplete, until the evidence was
    collected. Completion times aren't used, because not every backend records them.

    Times are whole microseconds, because Perfetto drops an event that, due to rounding, begins before the previous one
    ends. Threads are numbered from 1, because Perfetto takes thread 0 of process 0 for the idle thread.
    """
    records = {
        rank: Entries.of(state.evidence.flight_record.entries)
        for rank, state in facts.ranks.items()
        if state.evidence.flight_record is not None
    }
    most = min(MOST_CALLS, max(LEAST_CALLS, MOST_EVENTS // max(1, len(records))))
    begins = {rank: max(0, len(ring) - most) for rank, ring in records.items()}
    start = min((ring.created_ns[begins[rank]] for rank, ring in records.items() if ring), default=0)
    newest = max((ring.created_ns[len(ring) - 1] for ring in records.values() if ring), default=0)
    end = newest + int(min(facts.evidence.stall_s, LONGEST_S) * 1e9)
    patterns = ByKind(_pattern)
    events: list[dict[str, Any]] = []
    for rank, ring in records.items():
        events += _of_rank(facts.ranks[rank].evidence, ring, begins[rank], patterns, (start, end))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"exporter": f"safelaunch {__version__}", "bundle": name, "start_unix_ns": str(start)},
    }


def _pattern(rank: RankEvidence, call: Collective) -> tuple[dict[str, Any], dict[str, Any]]:
    place = stack_of(rank, call.frames).user_frame
    arguments: dict[str, Any] = {"call": describe(call), "state": state(call)}
    arguments |= {"at": f"{place.file}:{place.line} {place.function}"} if place is not None else {}
    event = {"ph": "X", "name": op_name(call) or "unknown", "cat": "p2p" if call.is_p2p else "collective"}
    return event if call.completed else {**event, "cname": "terrible"}, arguments


def _of_rank(
    rank: RankEvidence,
    ring: Entries,
    begin: int,
    patterns: ByKind[tuple[dict[str, Any], dict[str, Any]]],
    span: tuple[int, int],
) -> list[dict[str, Any]]:
    start, end = span
    patterns_of = patterns.of(rank, ring)
    used = {kind: ring.kinds.all[kind] for kind in dict.fromkeys(ring.kind_of[begin:])}
    groups = dict.fromkeys(kind.group for kind in used.values())
    threads = {group: number for number, group in enumerate(groups, start=1)}
    titles = {kind.group: f"group {kind.group} {kind.description}".strip() for kind in used.values()}
    where = f" on {rank.host}" if rank.host else ""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": f"rank {rank.rank}{where}"}},
        {"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": {"sort_index": rank.rank}},
    ]
    for group, number in threads.items():
        events.append(
            {"ph": "M", "pid": rank.rank, "tid": number, "name": "thread_name", "args": {"name": titles[group]}}
        )
    following: dict[str, int] = {}
    made = []
    for at in range(len(ring) - 1, begin - 1, -1):
        one, begins = used[ring.kind_of[at]], (ring.created_ns[at] - start) // 1000
        event, arguments = patterns_of[ring.kind_of[at]]
        stops = following.get(one.group, begins if one.completed else (end - start) // 1000)
        following[one.group] = min(begins, stops)  # two threads can each enqueue a call at the same time
        made.append({
            **event,
            "pid": rank.rank,
            "tid": threads[one.group],
            "ts": begins,
            "dur": max(0, stops - begins),
            "args": {"number": ring.p2p_seqs[at] if one.is_p2p else ring.seqs[at], **arguments},
        })  # fmt: skip
    return [*events, *reversed(made)]
