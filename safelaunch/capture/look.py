"""One look at all ranks at once: the kernel's view of every process and thread, then the Python stacks.

Two looks some seconds apart show what moves; both stay in the bundle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec

from safelaunch.capture import inside, proc, sockets, stacks, waits
from safelaunch.capture.flight_recorder import Questions
from safelaunch.capture.result import gather, late
from safelaunch.job import process
from safelaunch.model import ProcessEvidence, ProcessState, StackSample
from safelaunch.system.errors import CaptureError

from .result import NO_ANSWER, Result, within_or

T = TypeVar("T")

LOCK_DEADLINE_S = 0.5
LEAST_ENDS_S = 0.5
RETURN_S = 0.2  # what has been read of a rank has to be returned before the look is over
INSIDE_S = 2.0
LEAST_STATE_S = 0.3
# What such a sample lacks, with the reason after it.
INSTEAD = "read from inside the rank, without C frames and without the stacks of its child processes"
MAX_CHILDREN = 48  # per rank: a loader's worker pool is smaller, and the look must stay short


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to look at. ``socket``: its worker server's path, None if that is not running. ``pid`` and
    ``start_ticks`` identify the process.
    """

    rank: int
    local_rank: int
    pid: int
    start_ticks: int
    page_name: str = ""
    socket: Path | None = None
    questions: Questions | None = None

    @property
    def has_beacon(self) -> bool:
        return bool(self.page_name)


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """One process at one moment; ``state`` None: it is gone, or was not seen in time (``is_late``). ``role``: what its
    rank has started it for, if that was asked.
    """

    pid: int
    state: ProcessState | None
    stack: Result[StackSample]
    role: str = ""

    @property
    def is_late(self) -> bool:
        """Its stack did not come in time, or what the kernel says of it."""
        no_stack = self.stack.value is None and self.stack.kind == "timeout"
        return no_stack or (self.state is not None and NO_ANSWER in self.state.note)


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank and its children at one moment, among them orphans, whose parent has ended.

    ``main`` None: nothing could be read within the deadline.
    """

    rank: int
    main: ProcessLook | None
    children: tuple[ProcessLook, ...] = ()

    @property
    def processes(self) -> tuple[ProcessLook, ...]:
        return (self.main, *self.children) if self.main is not None else ()

    def with_each(self, known: Callable[[ProcessLook], ProcessLook]) -> RankLook:
        """The same rank, with each of its processes as ``known`` gives it."""
        if self.main is None:
            return self
        return replace(self, main=known(self.main), children=tuple(map(known, self.children)))


@dataclass(frozen=True, slots=True)
class Look:
    """All ranks at one moment; ``begin_s`` and ``end_s`` are CLOCK_MONOTONIC."""

    begin_s: float
    end_s: float
    ranks: dict[int, RankLook] = field(default_factory=dict)


def take(targets: Sequence[Target], *, deadline_s: float) -> Look:
    """Looks at all ``targets`` in parallel, within ``deadline_s`` seconds; never raises. No process is stopped.

    A rank's main process has up to half of that, but 3 seconds where there are as many; its children have the rest.
    """
    begin = time.monotonic()
    table = process.process_table()
    # Where these can't be read in time, each process is asked for its own, and says so if it is late.
    locks = within_or(None, deadline_s / 4, "the file locks", waits.lock_table)
    until = begin + deadline_s - RETURN_S
    calls = [partial(_rank, target, table, locks, deadline_s, until) for target in targets]
    results = gather(calls, deadline_s=deadline_s)
    ranks = {
        target.rank: result or RankLook(target.rank, None) for target, result in zip(targets, results, strict=True)
    }
    left_s = begin + deadline_s - time.monotonic()
    ranks = _with_ends(ranks, table, max(LEAST_ENDS_S, left_s, deadline_s / 4))
    return Look(begin, time.monotonic(), ranks)


def with_c_frames(targets: Sequence[Target], last: Look, *, deadline_s: float) -> Look:
    """The ``last`` look once more, with the C frames of the main processes of ``targets``; never raises.

    Takes at most ``deadline_s`` seconds. One rank of each Python stack is read first, for where many wait alike, one
    tells of all. A rank that is not read in time keeps what it has, with a note.
    """
    begin = time.monotonic()
    ordered = _one_of_each_stack_first(targets, last)
    calls = [partial(_with_c_frames, last.ranks[target.rank], begin + deadline_s) for target in ordered]
    results = gather(calls, deadline_s=deadline_s, workers=4)
    read = {
        target.rank: result or _noting(last.ranks[target.rank], late(deadline_s))
        for target, result in zip(ordered, results, strict=True)
    }
    return Look(begin, time.monotonic(), read)


def _one_of_each_stack_first(targets: Sequence[Target], last: Look) -> list[Target]:
    seen: Counter[object] = Counter()

    def alike(target: Target) -> int:
        main = last.ranks[target.rank].main
        thread = main.stack.value.main_thread if main is not None and main.stack.value is not None else None
        key = tuple((frame.file, frame.line) for frame in thread.frames) if thread is not None else None
        seen[key] += 1
        return seen[key]

    return sorted(targets, key=alike)


def _with_c_frames(rank: RankLook, until: float) -> RankLook:
    left_s = until - time.monotonic()
    if rank.main is None or left_s <= 0:
        return _noting(rank, "not read: others took all the time")
    stack = stacks.with_c_frames_of(rank.main.pid, rank.main.state, deadline_s=left_s)
    if stack.value is None:
        return _noting(rank, stack.missing)
    return replace(rank, main=replace(rank.main, stack=stack))


def _noting(rank: RankLook, why: str) -> RankLook:
    if rank.main is None:
        return rank
    said = "; ".join(filter(None, (rank.main.stack.note, f"without the C frames: {why}")))
    return replace(rank, main=replace(rank.main, stack=replace(rank.main.stack, note=said)))


def _with_ends(ranks: dict[int, RankLook], table: Iterable[int], deadline_s: float) -> dict[int, RankLook]:
    """The looks with what the ranks' pipes and connections lead to, the job's own processes before all others."""
    seen = [process.state for rank in ranks.values() for process in rank.processes if process.state is not None]
    own = [state.pid for state in seen]
    pids = [*own, *sorted(set(table) - set(own))]
    told = {state.pid: state for state in sockets.with_ends(seen, pids, deadline_s=deadline_s)}

    def known(one: ProcessLook) -> ProcessLook:
        return replace(one, state=told.get(one.pid)) if one.state is not None else one

    return {number: rank.with_each(known) for number, rank in ranks.items()}


def _rank(
    target: Target,
    table: process.ProcessTable,
    locks: tuple[waits.LockRow, ...] | None,
    deadline_s: float,
    until: float,
) -> RankLook:
    each_s = min(deadline_s, max(stacks.DEADLINE_S, deadline_s / 2))
    main = _process(target.pid, each_s, locks)
    if main.state is not None and main.state.start_ticks != target.start_ticks:
        main = ProcessLook(target.pid, None, Result(None, "py-spy dump", 0.0, missing="the process has ended"))
    main, roles = _from_inside(target, main, locks, until)
    family = [*process.descendants([target.pid], table=table), *proc.orphans(target.pid, table)]
    below = [one.pid for one in family[:MAX_CHILDREN]]
    left_s = max(0.0, until - time.monotonic())
    looks = gather([partial(_child, target, pid, each_s, locks) for pid in below], deadline_s=left_s, workers=4)
    late_one = Result[StackSample](None, "py-spy dump", left_s, missing=late(left_s), kind="timeout")
    children = (one or ProcessLook(pid, None, late_one) for pid, one in zip(below, looks, strict=True))
    known = (replace(child, role=roles.get(child.pid, "")) for child in children)
    return RankLook(target.rank, main, tuple(one for one in known if one.state is not None or one.is_late))


def _from_inside(
    target: Target, main: ProcessLook, locks: tuple[waits.LockRow, ...] | None, until: float
) -> tuple[ProcessLook, Mapping[int, str]]:
    """The rank's main process with its stacks as it tells them itself, if they could not be read from outside; and the
    roles of its children.
    """
    state, questions, left_s = main.state, target.questions, until - time.monotonic()
    if main.stack.value is not None or state is None or target.socket is None or questions is None or left_s <= 0:
        return main, {}
    if state.state in "TtZX" or state.frozen or questions.owes_answer:
        return main, {}  # it would not answer, and a question without an answer delays its end
    with inside.asked(target.socket, target.pid, questions, deadline_s=min(left_s, INSIDE_S)) as told:
        if told.stack.value is None:
            missing = f"{main.stack.missing}; {told.stack.missing}"
            return replace(main, stack=replace(main.stack, missing=missing)), {}
        if all(thread.syscall is None for thread in state.threads):  # the kernel shows them to the rank alone
            with suppress(CaptureError):
                left_s = max(LEAST_STATE_S, until - time.monotonic())
                state = proc.read_process(target.pid, deadline_s=left_s, locks=locks, own=told.own)
        stack = replace(told.stack, note=f"{INSTEAD}: {main.stack.missing}")
        return replace(main, state=_with_polled_lock(state, stack), stack=stack), told.roles


def _process(pid: int, deadline_s: float, locks: tuple[waits.LockRow, ...] | None) -> ProcessLook:
    try:
        state = proc.read_process(pid, deadline_s=deadline_s * 2 / 3, locks=locks)
    except CaptureError as error:
        return ProcessLook(pid, None, Result(None, "py-spy dump", 0.0, missing=error.message))
    stack = stacks.stack_of(pid, state, deadline_s=deadline_s)
    return ProcessLook(pid, _with_polled_lock(state, stack), stack)


def _child(target: Target, pid: int, deadline_s: float, locks: tuple[waits.LockRow, ...] | None) -> ProcessLook:
    found = _process(pid, deadline_s, locks)
    if found.state is None or not target.page_name:
        return found
    is_fork = within_or(False, LOCK_DEADLINE_S, f"/proc/{pid}", lambda: proc.is_fork(pid, target.page_name))
    return replace(found, state=msgspec.structs.replace(found.state, is_fork=is_fork))


def _with_polled_lock(state: ProcessState, stack: Result[StackSample]) -> ProcessState:
    """With the lock that the main thread asks for through a library, which has the file open only as it asks."""
    main = stack.value.main_thread if stack.value is not None else None
    if main is None or not main.lock_file:
        return state
    lock = within_or(None, LOCK_DEADLINE_S, "a file lock", lambda: waits.lock_on(state.pid, main.lock_file))
    known = lock is None or any((one.path, one.pid) == (lock.path, lock.pid) for one in state.locks)
    return state if lock is None or known else msgspec.structs.replace(state, locks=(*state.locks, lock))


def evidence_of(looks: Sequence[Look], rank: int) -> tuple[ProcessEvidence | None, tuple[ProcessEvidence, ...]]:
    """The rank's main process and its children over several looks, oldest first."""
    mains = [look.ranks[rank].main for look in looks if rank in look.ranks]
    children: dict[int, list[ProcessLook]] = {}
    for look in looks:
        for child in look.ranks[rank].children if rank in look.ranks else ():
            children.setdefault(child.pid, []).append(child)
    main = _merge([process for process in mains if process is not None], "main")
    return main, tuple(merged for c in children.values() if (merged := _merge(c, "")) is not None)


def _merge(looks: Sequence[ProcessLook], role: str) -> ProcessEvidence | None:
    states = _once_each(look.state for look in looks if look.state is not None)
    samples = _once_each(look.stack.value for look in looks if look.stack.value is not None)
    if not states and not samples:
        return None
    told = next((look.role for look in looks if look.role), "")
    return ProcessEvidence(role or told or proc.role_of(states[-1] if states else None, samples), states, samples)


def _once_each(values: Iterable[T]) -> tuple[T, ...]:
    """Without the repetitions of a look for C frames, which has what it has not read anew from the look before."""
    return tuple(value for value, _ in groupby(values))
