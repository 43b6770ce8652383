"""A recording for two viewers: a timeline of every rank's main thread (Perfetto), and its stacks (speedscope)."""

from __future__ import annotations

from typing import Any

from safelaunch import __version__
from safelaunch.model import Frame
from safelaunch.model.recording import RankRecord, Recording, ThreadRecord
from safelaunch.profiling.shares import Stacks
from safelaunch.report.exports import MOST_EVENTS, SPEEDSCOPE_SCHEMA, profile

_ACTIVITY, _STACK = 1, 2  # threads count from 1: thread 0 of process 0 is the idle one to Perfetto


def perfetto(recording: Recording) -> dict[str, Any]:
    """A process is a rank; its threads are what it does, and the stack in which it was sampled.

    The clocks of several nodes are not compared: each rank begins at 0.
    """
    stacks, events = Stacks(recording), list[dict[str, Any]]()
    most = max(64, MOST_EVENTS // max(1, len(recording.ranks)))
    for rank in recording.ranks:
        main = main_of(rank)
        if main is not None and main.line:
            events += _names(rank)
            events += _activities(rank.rank, main, stacks)[:most]
            events += _frames(rank.rank, main, stacks)[:most]
    other = {"exporter": f"safelaunch {__version__}", "start_unix_ns": str(int(recording.at_unix_s * 1e9))}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**other, "run": recording.name}}


def main_of(rank: RankRecord) -> ThreadRecord | None:
    return next((one for one in (rank.main.threads if rank.main is not None else ()) if one.main), None)


def _names(rank: RankRecord) -> list[dict[str, Any]]:
    where = f" on {rank.host}" if rank.host else ""
    pid = rank.rank
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank.rank}{where}"}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": rank.rank}},
        {"ph": "M", "pid": pid, "tid": _ACTIVITY, "name": "thread_name", "args": {"name": "activity"}},
        {"ph": "M", "pid": pid, "tid": _STACK, "name": "thread_name", "args": {"name": "stack"}},
    ]


def _spans(thread: ThreadRecord) -> list[tuple[int, int, int]]:
    """Begin, end and stack."""
    ends = [at_ms for at_ms, _ in thread.line[1:]]
    return [(at_ms, end, stack) for (at_ms, stack), end in zip(thread.line, ends, strict=False) if stack >= 0]


def _activities(rank: int, thread: ThreadRecord, stacks: Stacks) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for begin, end, number in _spans(thread):
        one = stacks.activity(number)
        place = f"{one.frame.file}:{one.frame.line} {one.frame.function}" if one.frame is not None else ""
        name = one.what or one.kind
        last = made[-1] if made else None
        if last is not None and last["name"] == name and last["ts"] + last["dur"] == begin * 1000:
            last["dur"] += (end - begin) * 1000
            continue
        made.append(_event(rank, _ACTIVITY, name, one.kind, begin, end) | {"args": {"at": place}})
    return made


def _frames(rank: int, thread: ThreadRecord, stacks: Stacks) -> list[dict[str, Any]]:
    """Nested events; a frame that consecutive samples have in common is one."""
    made: list[dict[str, Any]] = []
    open_frames: list[tuple[Frame, dict[str, Any]]] = []
    until = -1
    for begin, end, number in _spans(thread):
        frames = stacks.frames(number)[::-1]
        same = 0
        while until == begin and same < min(len(frames), len(open_frames)) and frames[same] == open_frames[same][0]:
            same += 1
        del open_frames[same:]
        for _, event in open_frames:
            event["dur"] += (end - begin) * 1000
        for frame in frames[same:]:
            event = _event(rank, _STACK, frame.function or "?", "stack", begin, end)
            event["args"] = {"at": f"{frame.file}:{frame.line}"}
            made.append(event)
            open_frames.append((frame, event))
        until = end
    return made


def _event(rank: int, thread: int, name: str, category: str, begin_ms: int, end_ms: int) -> dict[str, Any]:
    span = {"ts": begin_ms * 1000, "dur": (end_ms - begin_ms) * 1000}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, **span}


def speedscope(recording: Recording) -> dict[str, Any]:
    """The main threads of all ranks, and all their threads and children; weights are seconds."""
    frames: list[dict[str, Any]] = [
        {"name": one.function or one.file or "?", "file": one.file, "line": one.line} for one in recording.frames
    ]
    titles: dict[str, int] = {}

    def title(text: str) -> int:
        if text not in titles:
            titles[text] = len(frames)
            frames.append({"name": text})
        return titles[text]

    mains: dict[tuple[int, ...], float] = {}
    everything: dict[tuple[int, ...], float] = {}
    for rank in recording.ranks:
        for process in (rank.main, *rank.children):
            for thread in process.threads if process is not None else ():
                who = thread.name if process is rank.main else f"{process.role} {process.pid}" if process else ""
                for number, seconds in thread.stacks:
                    stack = recording.stacks[number]
                    key = (title(f"rank {rank.rank}"), title(who or "thread"), *stack)
                    everything[key] = everything.get(key, 0.0) + seconds
                    if process is rank.main and thread.main:
                        own = (key[0], *key[2:])
                        mains[own] = mains.get(own, 0.0) + seconds
    return {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": recording.name or "ranks",
        "exporter": f"safelaunch@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": [
            profile("main threads", mains, "seconds"),
            profile("all threads and processes", everything, "seconds"),
        ],
    }
