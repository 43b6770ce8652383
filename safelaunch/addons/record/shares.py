"""Computes, from a rank's samples, the share of its time that each activity and each line takes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

from safelaunch.addons.record.recording import ProcessRecord, RankRecord, Recording, ThreadRecord
from safelaunch.capture import user_source
from safelaunch.model import Frame
from safelaunch.stacks.calls import C10D, LOADER_WAIT, LibraryCall, leaving, loader_on_stack, torch_wait, worker_idle
from safelaunch.stacks.frames import Stack, normal, short

# --- activity of a sampled main thread: computing, waiting for peers, waiting for data --------------------------------


TimeKind = Literal[
    "collective",
    "send or receive",
    "data loading",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "device",
    "script",
]
KINDS: tuple[TimeKind, ...] = (
    "forward", "backward", "optimizer", "collective", "send or receive", "data loading", "checkpoint", "device",
    "script",
)  # fmt: skip
WAITS: tuple[TimeKind, ...] = ("collective", "send or receive")
OWN_CODE = "own code"  # of the user, in a backward pass: if it doesn't run, it doesn't wait for peers

# File (its end, or a directory in its path) and functions of a frame; no functions: any. The first row that matches a
# frame of the stack wins: a checkpointed forward inside a backward is part of the backward.
_BY_FRAME: tuple[tuple[TimeKind, str, frozenset[str]], ...] = (
    ("checkpoint", "torch/serialization.py", frozenset({"save", "load"})),
    ("checkpoint", "torch/distributed/checkpoint/", frozenset()),
    ("backward", "torch/autograd/graph.py", frozenset({"_engine_run_backward"})),
    ("backward", "torch/autograd/__init__.py", frozenset({"backward", "grad"})),
    ("device", "torch/cuda/__init__.py", frozenset({"synchronize"})),
    ("device", "torch/cuda/streams.py", frozenset({"synchronize"})),
    ("optimizer", "torch/optim/lr_scheduler.py", frozenset()),
    ("optimizer", "torch/optim/", frozenset()),
    ("forward", "torch/nn/modules/module.py", frozenset({"_call_impl", "_wrapped_call_impl"})),
)


@dataclass(frozen=True, slots=True)
class Activity:
    kind: TimeKind
    what: str  # for example, the name of a collective
    frame: Frame | None  # innermost frame of the user's code


PIPELINE_WAIT = LibraryCall(("/torch/distributed/pipelining/schedules.py",), frozenset({"_wait_batch_p2p"}))
LineReader = Callable[[str, int], str | None]
_WAITS = re.compile(r"^[^#]*(?<!\bos)\.wait\(")  # not for a child process
_COPIES = re.compile(r"\.(item|cpu|tolist|numpy)\(")  # waits until the GPU has computed the value


def activity_of(
    frames: Sequence[Frame],
    code_roots: tuple[str, ...] = (),
    read_line: LineReader = user_source.line,
    *,
    on_gpu: bool = False,
) -> Activity:
    stack = Stack(tuple(frames), code_roots)
    kind, what = _kind(stack, read_line, on_gpu=on_gpu)
    return Activity(kind, what, stack.user_frame)


def _kind(stack: Stack, read_line: LineReader, *, on_gpu: bool) -> tuple[TimeKind, str]:
    wait = torch_wait(stack)
    if wait is not None:
        return ("send or receive" if wait.kind == "p2p" else "collective"), wait.op
    if PIPELINE_WAIT.on(stack.frames[:1]):
        return "send or receive", "a pipeline's transfer"
    if LOADER_WAIT.on(stack.called):
        return "data loading", "DataLoader"
    activity = _by_frame(stack.frames)
    if activity is None and C10D.on(stack.called):
        return "collective", ""
    if activity is None and loader_on_stack(stack.frames):
        return "data loading", "dataset"
    if activity is None and leaving(stack.frames):
        return "script", "exit"
    line = _line_inside_c(stack, read_line) if activity in (None, "backward") else ""
    if _WAITS.search(line):
        return "collective", "wait"
    if on_gpu and activity is None and (copies := _COPIES.search(line)) is not None:
        return "device", copies[1]
    if activity == "backward" and _by_frame(stack.called) != "backward":
        return activity, OWN_CODE  # called by the backward pass
    return (activity, "") if activity is not None else ("script", "")


def _line_inside_c(stack: Stack, read_line: LineReader) -> str:
    # In C, no Python frame shows that ``work.wait()`` is in c10d.
    frame = stack.user_frame
    return (read_line(frame.file, frame.line) or "") if frame is not None and not stack.called else ""


def _by_frame(frames: Sequence[Frame]) -> TimeKind | None:
    inner = [(normal(frame.file), short(frame.function)) for frame in frames if "/torch/" in normal(frame.file)]
    for kind, part, functions in _BY_FRAME:
        for file, function in inner:
            in_it = part in file if part.endswith("/") else file.endswith(part)
            if in_it and (not functions or function in functions):
                return kind
    return None


WORKER = "dataloader worker"


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """A function in the user's code, and its activity. ``waits`` marks the part of a backward pass spent waiting."""

    kind: TimeKind
    what: str
    file: str
    function: str
    waits: bool = False


@dataclass(frozen=True, slots=True)
class GilHolder:
    """A thread, other than the rank's main thread, that holds the GIL; most samples show it at ``frame``."""

    thread: str
    share: float
    frame: Frame | None


@dataclass(frozen=True)
class RankTime:
    """Shares of a rank's recorded time (0 to 1)."""

    rank: int
    samples: int
    kinds: Mapping[TimeKind, float]
    places: Mapping[CodeLocation, float]
    lines: Mapping[CodeLocation, Mapping[int, float]]
    waits: float  # for peers or the device
    gil: float  # held by the main thread
    holders: tuple[GilHolder, ...] = ()
    steps: int | None = None
    margin: float = field(default=0.0)  # two standard errors of a share of one half


@dataclass(frozen=True)
class WorkerTime:
    count: int
    idle: float  # share of time waiting for the next index
    frame: Frame | None  # most frequent position


class StackIndex:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._known: dict[int, Activity] = {}

    def frames(self, number: int) -> tuple[Frame, ...]:
        return tuple(self._recording.frames[at] for at in reversed(self._recording.stacks[number]))

    def activity(self, number: int) -> Activity:
        if number not in self._known:
            recording = self._recording
            self._known[number] = activity_of(self.frames(number), recording.code_roots, on_gpu=recording.on_gpu)
        return self._known[number]

    def user_frame(self, number: int) -> Frame | None:
        return Stack(self.frames(number), self._recording.code_roots).user_frame


def times_of(recording: Recording, stacks: StackIndex | None = None) -> list[RankTime]:
    stacks = stacks or StackIndex(recording)
    times = [_rank(rank, recording, stacks) for rank in recording.ranks if not rank.missing]
    return [time for time in times if time is not None]


def _rank(rank: RankRecord, recording: Recording, stacks: StackIndex) -> RankTime | None:
    main = next((thread for thread in (rank.main.threads if rank.main else ()) if thread.main), None)
    total_s = sum(seconds for _, seconds in main.stacks) if main is not None else 0.0
    if main is None or rank.main is None or total_s <= 0.0:
        return None
    kinds: dict[TimeKind, float] = defaultdict(float)
    places: dict[CodeLocation, float] = defaultdict(float)
    lines: dict[CodeLocation, dict[int, float]] = {}
    for number, seconds in main.stacks:
        activity = stacks.activity(number)
        place = _place(activity)
        kinds[activity.kind] += seconds / total_s
        places[place] += seconds / total_s
        lines.setdefault(place, defaultdict(float))[activity.frame.line if activity.frame else 0] += seconds / total_s
    if rank.main.tells_active:
        _split_backward(main, stacks, total_s, places, lines)
    waits = sum(share for place, share in places.items() if place.waits)
    samples = max(1, round(recording.duration_s * recording.rate_hz))
    return RankTime(
        rank=rank.rank,
        samples=samples,
        kinds=kinds,
        places=places,
        lines=lines,
        waits=waits,
        gil=sum(seconds for _, seconds in main.gil) / total_s,
        holders=_holders(rank.main, total_s, stacks),
        steps=rank.steps,
        margin=2 * sqrt(0.25 / samples),
    )


def _place(activity: Activity) -> CodeLocation:
    file, function = (activity.frame.file, activity.frame.function) if activity.frame is not None else ("", "")
    return CodeLocation(activity.kind, activity.what, file, function, waits=activity.kind in (*WAITS, "device"))


def _split_backward(
    main: ThreadRecord,
    stacks: StackIndex,
    total_s: float,
    places: dict[CodeLocation, float],
    lines: dict[CodeLocation, dict[int, float]],
) -> None:
    """Splits a backward pass: while off the CPU, it waits for peers' gradients or a device; the rest computes."""
    active: dict[CodeLocation, float] = defaultdict(float)
    for number, seconds in main.active:
        active[_place(stacks.activity(number))] += seconds / total_s
    for place in [place for place in places if place.kind == "backward" and place.what != OWN_CODE]:
        idle = places[place] - active[place]
        if idle <= 0.0:
            continue
        waiting = CodeLocation("backward", "", place.file, place.function, waits=True)
        places[place] -= idle
        places[waiting] += idle
        lines[waiting] = lines[place]


def _holders(main: ProcessRecord, total_s: float, stacks: StackIndex) -> tuple[GilHolder, ...]:
    """Returns other threads, ordered by how long they hold the GIL; threads with the same name count as one."""
    stacks_by_name: dict[str, list[tuple[int, float]]] = {}
    for thread in main.threads:
        if not thread.main:
            stacks_by_name.setdefault(thread.name, []).extend(thread.gil)
    holders = [
        GilHolder(
            name, sum(s for _, s in samples) / total_s, stacks.user_frame(max(samples, key=lambda item: item[1])[0])
        )
        for name, samples in stacks_by_name.items()
        if samples
    ]
    return tuple(sorted(holders, key=lambda holder: -holder.share))


def workers_of(recording: Recording, stacks: StackIndex) -> WorkerTime | None:
    """Returns how the DataLoader workers spend their time; None if none were sampled."""
    children = [child for rank in recording.ranks for child in rank.children if child.role == WORKER]
    mains = [thread for child in children for thread in child.threads if thread.main]
    total_s = sum(seconds for thread in mains for _, seconds in thread.stacks)
    if not total_s:
        return None
    idle_s = 0.0
    busy: dict[Frame, float] = defaultdict(float)
    for thread in mains:
        for number, seconds in thread.stacks:
            frame = stacks.user_frame(number)
            if worker_idle(stacks.frames(number)):
                idle_s += seconds
            elif frame is not None:
                busy[frame] += seconds
    return WorkerTime(len(children), idle_s / total_s, max(busy, key=lambda frame: busy[frame]) if busy else None)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def share_of(times: Sequence[RankTime], kind: TimeKind) -> float:
    return mean([time.kinds.get(kind, 0.0) for time in times])


def place_share(times: Sequence[RankTime], place: CodeLocation) -> float:
    return mean([time.places.get(place, 0.0) for time in times])


def line_share(times: Sequence[RankTime], place: CodeLocation, frame: Frame | None) -> float:
    return mean([time.lines.get(place, {}).get(frame.line if frame is not None else 0, 0.0) for time in times])


def frame_of(times: Sequence[RankTime], place: CodeLocation, others: Sequence[RankTime] = ()) -> Frame | None:
    """Returns the line of the place with the largest share; with ``others``, by how much it exceeds theirs."""
    lines: dict[int, float] = defaultdict(float)
    for group, sign in ((times, 1.0), (others, -1.0)):
        for time in group:
            for line, share in time.lines.get(place, {}).items():
                lines[line] += sign * share / len(group)
    if not place.file or not lines:
        return None
    return Frame(place.file, max(lines, key=lambda line: lines[line]), place.function)
