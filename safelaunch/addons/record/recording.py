"""Defines recordings (sampled stacks of all ranks of a run), and merges them.

Each stack and frame has one number per recording. Seconds are sampled time, not CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from safelaunch.model.ranks import Frame
from safelaunch.system.decoding import from_json

LONGEST_S = 300.0


class Sampling(msgspec.Struct, frozen=True):
    duration_s: Annotated[float, Meta(ge=1.0, le=LONGEST_S)]
    ranks: Annotated[str, Meta(max_length=4096)] = ""  # like ``0-3,5``; empty: all
    share: Annotated[float, Meta(gt=0.0, le=0.2)] = 0.01  # of the node's CPUs, for py-spy
    children: bool = True  # sample DataLoader workers, too


class ThreadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thread. Each list contains pairs: the number of a stack, and the seconds spent in it.

    The three lists are sampled independently, so a stack can have slightly more time in ``active`` than in ``stacks``.
    """

    name: str = ""
    main: bool = False
    stacks: list[tuple[int, float]] = []
    active: list[tuple[int, float]] = []  # on a CPU or runnable
    gil: list[tuple[int, float]] = []


class ProcessRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    pid: int
    role: str = "main"
    threads: list[ThreadRecord] = []
    problem: str = ""
    tells_active: bool = False  # threads on a CPU were sampled, so others were not on one


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    rank: int
    host: str = ""
    main: ProcessRecord | None = None
    children: list[ProcessRecord] = []
    steps: int | None = None  # made during the recording; None if the rank marks none
    missing: str = ""  # why it has no usable samples


class Recording(msgspec.Struct, frozen=True, omit_defaults=True):
    run: str = ""
    name: str = ""
    at_unix_s: float = 0.0
    duration_s: float = 0.0
    rate_hz: float = 0.0  # lowest of any node
    world_size: int = 0
    frames: list[Frame] = []
    stacks: list[tuple[int, ...]] = []  # numbers of ``frames``, outermost first
    ranks: list[RankRecord] = []
    code_roots: tuple[str, ...] = ()  # directories of installed packages
    notes: list[str] = []
    command: list[str] = []
    on_gpu: bool = False  # some node has a GPU driver
    elapsed_s: float = 0.0  # time in which steps were counted; exceeds ``duration_s`` on a busy node


def decode(data: bytes) -> Recording:
    recording = from_json(data, Recording)
    check(recording)
    return recording


def check(recording: Recording) -> None:
    """Raises msgspec.ValidationError if the number of a frame or stack, the rate or the duration is out of range."""
    frames, stacks = len(recording.frames), len(recording.stacks)
    whole = all(0 <= number < frames for stack in recording.stacks for number in stack)
    for thread in threads_of(recording):
        pairs = (*thread.stacks, *thread.active, *thread.gil)
        whole = whole and all(0 <= stack < stacks for stack, _ in pairs)
    whole = whole and all(0.0 <= value < 1e9 for value in (recording.rate_hz, recording.duration_s))  # also not NaN
    if not whole:
        raise msgspec.ValidationError("a recording whose numbers lead nowhere")


def threads_of(recording: Recording) -> list[ThreadRecord]:
    processes = [process for rank in recording.ranks for process in (rank.main, *rank.children) if process is not None]
    return [thread for process in processes for thread in process.threads]


class StackNumbering:
    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def of(self, frames: tuple[Frame, ...]) -> int:
        key = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(key, len(self.stacks))


def merge(recordings: list[Recording]) -> Recording:
    """Merges recordings of several nodes, without unused stacks.

    The head comes from the first, and so does a rank that several contain.
    """
    numbers = StackNumbering()
    ranks: dict[int, RankRecord] = {}
    for recording in recordings:
        pairs = (pair for one in threads_of(recording) for pair in (*one.stacks, *one.active, *one.gil))
        used = [(number, recording.stacks[number]) for number in sorted({number for number, _ in pairs})]
        new = {number: numbers.of(tuple(recording.frames[frame] for frame in stack)) for number, stack in used}
        for rank in recording.ranks:
            ranks.setdefault(rank.rank, _renumbered(rank, new))
    return msgspec.structs.replace(
        recordings[0],
        frames=list(numbers.frames),
        stacks=list(numbers.stacks),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        rate_hz=min(recording.rate_hz for recording in recordings),
        notes=list(dict.fromkeys(note for recording in recordings for note in recording.notes)),
        on_gpu=any(recording.on_gpu for recording in recordings),
        code_roots=tuple(dict.fromkeys(root for recording in recordings for root in recording.code_roots)),
    )


def _renumbered(rank: RankRecord, new: Mapping[int, int]) -> RankRecord:
    def renumbered(thread: ThreadRecord) -> ThreadRecord:
        return msgspec.structs.replace(
            thread,
            stacks=[(new[stack], s) for stack, s in thread.stacks],
            active=[(new[stack], s) for stack, s in thread.active],
            gil=[(new[stack], s) for stack, s in thread.gil],
        )

    return _with_threads(rank, lambda threads: [renumbered(thread) for thread in threads])


def shrink(recording: Recording, fits: Callable[[Recording], bool]) -> Recording:
    """Removes children, then threads and rare stacks, until ``fits`` accepts the recording."""
    if fits(recording):
        return recording
    for most in (None, 200, 30):
        ranks = [_shrink_rank(rank, most, len(recording.stacks)) for rank in recording.ranks]
        smaller = merge([msgspec.structs.replace(recording, ranks=ranks, stacks=[*recording.stacks, ()])])
        if fits(smaller):
            return _noted(smaller)
    ranks = [
        RankRecord(rank.rank, rank.host, missing="its samples were too many to be sent") for rank in recording.ranks
    ]
    return _noted(msgspec.structs.replace(recording, ranks=ranks, frames=[], stacks=[]))


def _noted(recording: Recording) -> Recording:
    return msgspec.structs.replace(recording, notes=[*recording.notes, "of many samples, the most frequent were kept"])


def _shrink_rank(rank: RankRecord, most: int | None, rest: int) -> RankRecord:
    """Removes a rank's children and, if ``most`` is given, all but ``most`` stacks of its main threads.

    The stack ``rest`` gets their time: a rank with many rare stacks has no larger shares of the others.
    """

    def first(stacks: list[tuple[int, float]]) -> list[tuple[int, float]]:
        rare_s = sum(seconds for _, seconds in stacks[most:]) if most is not None else 0.0
        return [*stacks[:most], *([(rest, rare_s)] if rare_s else [])]

    def fewer(threads: list[ThreadRecord]) -> list[ThreadRecord]:
        return [
            msgspec.structs.replace(
                thread, stacks=first(thread.stacks), active=first(thread.active), gil=first(thread.gil)
            )
            for thread in threads
            if thread.main or most is None
        ]

    return _with_threads(msgspec.structs.replace(rank, children=[]), fewer)


def _with_threads(rank: RankRecord, change: Callable[[list[ThreadRecord]], list[ThreadRecord]]) -> RankRecord:
    def changed(process: ProcessRecord) -> ProcessRecord:
        return msgspec.structs.replace(process, threads=change(process.threads))

    main = changed(rank.main) if rank.main is not None else None
    return msgspec.structs.replace(rank, main=main, children=[changed(child) for child in rank.children])
