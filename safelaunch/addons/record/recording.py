"""The records of where the time of a live run goes: the stacks of all ranks, sampled for a while.

Stacks and frames are numbered once for a whole recording. Seconds are those of the sampling, not of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from safelaunch.model.ranks import Frame
from safelaunch.system.decoding import from_json

LONGEST_S = 300.0


class Sampling(msgspec.Struct, frozen=True):
    """A request for samples. ``ranks``: ``0-3,5``; empty: all."""

    duration_s: Annotated[float, Meta(ge=1.0, le=LONGEST_S)]
    ranks: Annotated[str, Meta(max_length=4096)] = ""


class ThreadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thread: ``stacks``, ``active`` and ``gil`` are pairs of a stack's number and the seconds spent in it.

    ``active``: of these on a CPU or runnable; ``gil``: holding the interpreter's lock. Each is sampled on its own, so
    a stack may have a little more of one than of another.
    """

    name: str = ""
    main: bool = False
    stacks: list[tuple[int, float]] = []
    active: list[tuple[int, float]] = []
    gil: list[tuple[int, float]] = []


class ProcessRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's main process, or a child of it. ``problem``: why there are no samples, or not all.

    ``tells_active``: who was on a CPU was sampled, so that a thread without such samples was not.
    """

    pid: int
    role: str = "main"
    threads: list[ThreadRecord] = []
    problem: str = ""
    tells_active: bool = False


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank; ``steps``: those that it made meanwhile, None if it marks none. ``missing``: why it has no samples, or
    why what there is does not count.
    """

    rank: int
    host: str = ""
    main: ProcessRecord | None = None
    children: list[ProcessRecord] = []
    steps: int | None = None
    missing: str = ""


class Recording(msgspec.Struct, frozen=True, omit_defaults=True):
    """All ranks of a run. ``stacks``: numbers of ``frames``, outermost first. ``rate_hz``: the lowest of any node.

    ``code_roots``: the directories of installed packages, as the ranks name them. ``elapsed_s``: over which the ranks'
    steps were counted; more than was asked for on a busy node.
    """

    run: str = ""
    name: str = ""
    at_unix_s: float = 0.0
    duration_s: float = 0.0
    rate_hz: float = 0.0
    world_size: int = 0
    frames: list[Frame] = []
    stacks: list[tuple[int, ...]] = []
    ranks: list[RankRecord] = []
    code_roots: tuple[str, ...] = ()
    notes: list[str] = []
    command: list[str] = []
    elapsed_s: float = 0.0


def decode(data: bytes) -> Recording:
    """Reads ``recording.json``. Raises msgspec.DecodeError for what is none, also if its numbers lead nowhere."""
    found = from_json(data, Recording)
    check(found)
    return found


def check(recording: Recording) -> None:
    """Raises msgspec.ValidationError unless every number in it leads to a frame or a stack."""
    frames, stacks = len(recording.frames), len(recording.stacks)
    whole = all(0 <= number < frames for stack in recording.stacks for number in stack)
    for thread in threads_of(recording):
        pairs = (*thread.stacks, *thread.active, *thread.gil)
        whole = whole and all(0 <= stack < stacks for stack, _ in pairs)
    if not whole:
        raise msgspec.ValidationError("a recording whose numbers lead nowhere")


def threads_of(recording: Recording) -> list[ThreadRecord]:
    processes = [one for rank in recording.ranks for one in (rank.main, *rank.children) if one is not None]
    return [thread for process in processes for thread in process.threads]


class StackNumbering:
    """Numbers frames and stacks as they come, for one recording. ``of``: a stack, outermost first."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def of(self, frames: tuple[Frame, ...]) -> int:
        key = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(key, len(self.stacks))


def merged(recordings: list[Recording]) -> Recording:
    """The recordings of several nodes as one, with the head of the first. Of a rank that several bring, the first."""
    numbers = StackNumbering()
    ranks: dict[int, RankRecord] = {}
    for recording in recordings:
        new = [numbers.of(tuple(recording.frames[number] for number in stack)) for stack in recording.stacks]
        for rank in recording.ranks:
            ranks.setdefault(rank.rank, _renumbered(rank, new))
    return msgspec.structs.replace(
        recordings[0],
        frames=list(numbers.frames),
        stacks=list(numbers.stacks),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        rate_hz=min(recording.rate_hz for recording in recordings),
        notes=list(dict.fromkeys(note for recording in recordings for note in recording.notes)),
        code_roots=tuple(dict.fromkeys(root for recording in recordings for root in recording.code_roots)),
    )


def _renumbered(rank: RankRecord, new: list[int]) -> RankRecord:
    def renumbered(thread: ThreadRecord) -> ThreadRecord:
        return msgspec.structs.replace(
            thread,
            stacks=[(new[stack], s) for stack, s in thread.stacks],
            active=[(new[stack], s) for stack, s in thread.active],
            gil=[(new[stack], s) for stack, s in thread.gil],
        )

    return _with_threads(rank, lambda threads: [renumbered(thread) for thread in threads])


def bounded(recording: Recording, fits: Callable[[Recording], bool]) -> Recording:
    """The recording with less and less of it until it ``fits``: children, then threads and rare stacks."""
    if fits(recording):
        return recording
    for most in (None, 200, 30):
        ranks = [_fewer(rank, most) for rank in recording.ranks]
        smaller = merged([msgspec.structs.replace(recording, ranks=ranks)])
        if fits(smaller):
            return _noted(smaller)
    ranks = [
        RankRecord(rank.rank, rank.host, missing="its samples were too many to be sent") for rank in recording.ranks
    ]
    return _noted(msgspec.structs.replace(recording, ranks=ranks, frames=[], stacks=[]))


def _noted(recording: Recording) -> Recording:
    return msgspec.structs.replace(recording, notes=[*recording.notes, "of many samples, the most frequent were kept"])


def _fewer(rank: RankRecord, most: int | None) -> RankRecord:
    """Without its children; ``most``: of its main threads alone, so many stacks."""

    def fewer(threads: list[ThreadRecord]) -> list[ThreadRecord]:
        return [
            msgspec.structs.replace(
                thread, stacks=thread.stacks[:most], active=thread.active[:most], gil=thread.gil[:most]
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
