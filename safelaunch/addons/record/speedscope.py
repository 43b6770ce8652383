"""Converts the stacks of a recording to speedscope's file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safelaunch import __version__
from safelaunch.addons.record.recording import Recording
from safelaunch.report.tables import ItemNumbers

SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(recording: Recording) -> dict[str, Any]:
    """Returns the file's content: two profiles, of all main threads and of all threads and processes; in seconds."""
    frames: list[dict[str, Any]] = [
        {"name": frame.function or frame.file or "?", "file": frame.file, "line": frame.line}
        for frame in recording.frames
    ]
    titles = ItemNumbers[str]()
    mains: dict[tuple[int, ...], float] = {}
    everything: dict[tuple[int, ...], float] = {}
    for rank in recording.ranks:
        for process in (rank.main, *rank.children):
            for thread in process.threads if process is not None else ():
                thread_name = (
                    thread.name if process is rank.main else f"{process.role} {process.pid}" if process else ""
                )
                for number, seconds in thread.stacks:
                    stack = recording.stacks[number]
                    key = (
                        *(len(frames) + titles[text] for text in (f"rank {rank.rank}", thread_name or "thread")),
                        *stack,
                    )
                    everything[key] = everything.get(key, 0.0) + seconds
                    if process is rank.main and thread.main:
                        main_key = (key[0], *key[2:])
                        mains[main_key] = mains.get(main_key, 0.0) + seconds
    return {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": recording.name or "ranks",
        "exporter": f"safelaunch@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": [*frames, *({"name": text} for text in titles)]},
        "profiles": [
            profile("main threads", mains),
            profile("all threads and processes", everything),
        ],
    }


def profile(name: str, stacks: Mapping[tuple[int, ...], float]) -> dict[str, Any]:
    """Returns one profile. ``stacks`` maps a stack (numbers of frames, outermost first) to its weight."""
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": [list(stack) for stack in stacks],
        "weights": list(stacks.values()),
    }
