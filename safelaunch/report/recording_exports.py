"""A recording's stacks for speedscope, in the format of its own schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safelaunch import __version__
from safelaunch.model.recording import Recording

SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


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
            profile("main threads", mains),
            profile("all threads and processes", everything),
        ],
    }


def profile(name: str, stacks: Mapping[tuple[int, ...], float]) -> dict[str, Any]:
    """One profile: stacks of numbered frames, outermost first, and their weights."""
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": [list(stack) for stack in stacks],
        "weights": list(stacks.values()),
    }
