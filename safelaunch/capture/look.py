"""Samples all ranks at once: the kernel's view of each process and thread, then the Python stacks.

Two looks some seconds apart show what moves; the bundle keeps both.
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

from safelaunch.capture import descriptor_holders, file_locks, inside, proc, stacks
from safelaunch.capture.gather import gather, late
from safelaunch.capture.worker_server import Questions
from safelaunch.job import process
from safelaunch.model import ProcessEvidence, ProcessState, StackSample
from safelaunch.system.errors import CaptureError

from .result import NO_ANSWER, Result, within_or

T = TypeVar("T")

LOCK_DEADLINE_S = 0.5
LEAST_ENDS_S = 0.5
RETURN_S = 0.2  # for returning results before the deadline
INSIDE_S = 2.0
LEAST_STATE_S = 0.3
# Limits of a sample from inside the rank; the reason follows.
INSTEAD = "read from inside the rank, without C frames and without the stacks of its child processes"
MAX_CHILDREN = 48  # per rank: more than a usual DataLoader's pool


@dataclass(frozen=True, slots=True)
class Target:
    rank: int
    local_rank: int
    pid: int
    start_ticks: int
    page_name: str = ""
    socket: Path | None = None  # of its worker server; None if it isn't running
    questions: Questions | None = None

    @property
    def has_beacon(self) -> bool:
        return bool(self.page_name)


@dataclass(frozen=True, slots=True)
class ProcessLook:
    pid: int
    state: ProcessState | None  # None if it is gone, or wasn't read in time (is_late)
    stack: Result[StackSample]
    role: str = ""  # its rank's purpose for it, if the rank was queried

    @property
    def is_late(self) -> bool:
        """True if the rank's stack or its kernel state missed the deadline."""
        no_stack = self.stack.value is None and self.stack.kind == "timeout"
        return no_stack or (self.state is not None and NO_ANSWER in self.state.note)


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank and its children, including orphaned ones, at one moment."""

    rank: int
    main: ProcessLook | None  # None if unreadable within the deadline
    children: tuple[ProcessLook, ...] = ()

    @property
    def processes(self) -> tuple[ProcessLook, ...]:
        return (self.main, *self.children) if self.main is not None else ()

    def with_each(self, change: Callable[[ProcessLook], ProcessLook]) -> RankLook:
        if self.main is None:
            return self
        return replace(self, main=change(self.main), children=tuple(map(change, self.children)))


@dataclass(frozen=True, slots=True)
class Look:
    """All ranks at one moment; ``begin_s`` and ``end_s`` are CLOCK_MONOTONIC."""

    begin_s: float
    end_s: float
    ranks: dict[int, RankLook] = field(default_factory=dict)


def take(targets: Sequence[Target], *, deadline_s: float) -> Look:
    """Looks at all ``targets`` in parallel, within ``deadline_s`` seconds; doesn't stop processes; never raises.

    A rank's main process gets half of ``deadline_s``, but at least 3 seconds if available; its children get the rest.
    """
    begin = time.monotonic()
    table = process.process_table()
    # If this is late, each process's own locks are read; if these are late too, its state has a note.
    locks = within_or(None, deadline_s / 4, "the file locks", file_locks.lock_table)
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
    """Repeats the ``last`` look, adding C frames to the main processes of ``targets``; never raises.

    Takes at most ``deadline_s`` seconds. First reads one rank for each distinct Python stack. A rank that can't be read
    in time keeps its previous stack, with a note.
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
    counts: Counter[object] = Counter()

    def position(target: Target) -> int:
        main = last.ranks[target.rank].main
        thread = main.stack.value.main_thread if main is not None and main.stack.value is not None else None
        key = tuple((frame.file, frame.line) for frame in thread.frames) if thread is not None else None
        counts[key] += 1
        return counts[key]

    return sorted(targets, key=position)


def _with_c_frames(rank: RankLook, until: float) -> RankLook:
    left_s = until - time.monotonic()
    if rank.main is None or left_s <= 0:
        return _noting(rank, "not read: other ranks took all the time")
    stack = stacks.with_c_frames_of(rank.main.pid, rank.main.state, deadline_s=left_s)
    if stack.value is None:
        return _noting(rank, stack.missing)
    return replace(rank, main=replace(rank.main, stack=stack))


def _noting(rank: RankLook, why: str) -> RankLook:
    if rank.main is None:
        return rank
    note = "; ".join(filter(None, (rank.main.stack.note, f"without the C frames: {why}")))
    return replace(rank, main=replace(rank.main, stack=replace(rank.main.stack, note=note)))


def _with_ends(ranks: dict[int, RankLook], table: Iterable[int], deadline_s: float) -> dict[int, RankLook]:
    states = [process.state for rank in ranks.values() for process in rank.processes if process.state is not None]
    own = [state.pid for state in states]
    pids = [*own, *sorted(set(table) - set(own))]
    by_pid = {state.pid: state for state in descriptor_holders.with_ends(states, pids, deadline_s=deadline_s)}

    def with_ends(process: ProcessLook) -> ProcessLook:
        return replace(process, state=by_pid.get(process.pid)) if process.state is not None else process

    return {number: rank.with_each(with_ends) for number, rank in ranks.items()}


def _rank(
    target: Target,
    table: process.ProcessTable,
    locks: tuple[file_locks.LockRow, ...] | None,
    deadline_s: float,
    until: float,
) -> RankLook:
    each_s = min(deadline_s, max(stacks.DEADLINE_S, deadline_s / 2))
    main = _process(target.pid, each_s, locks)
    if main.state is not None and main.state.start_ticks != target.start_ticks:
        main = ProcessLook(target.pid, None, Result(None, "py-spy dump", 0.0, missing="the process has ended"))
    main, roles = _from_inside(target, main, locks, until)
    family = [*process.descendants([target.pid], table=table), *proc.orphans(target.pid, table)]
    below = [member.pid for member in family[:MAX_CHILDREN]]
    left_s = max(0.0, until - time.monotonic())
    looks = gather([partial(_child, target, pid, each_s, locks) for pid in below], deadline_s=left_s, workers=4)
    too_late = Result[StackSample](None, "py-spy dump", left_s, missing=late(left_s), kind="timeout")
    children = (child or ProcessLook(pid, None, too_late) for pid, child in zip(below, looks, strict=True))
    with_roles = (replace(child, role=roles.get(child.pid, "")) for child in children)
    return RankLook(target.rank, main, tuple(child for child in with_roles if child.state is not None or child.is_late))


def _from_inside(
    target: Target, main: ProcessLook, locks: tuple[file_locks.LockRow, ...] | None, until: float
) -> tuple[ProcessLook, Mapping[int, str]]:
    """Asks the rank for its stacks if they couldn't be read from outside; returns its children's roles, too."""
    state, questions, left_s = main.state, target.questions, until - time.monotonic()
    if main.stack.value is not None or state is None or target.socket is None or questions is None or left_s <= 0:
        return main, {}
    if state.state in "TtZX" or state.frozen or questions.owes_answer:
        return main, {}  # it wouldn't respond, and an unanswered request delays its exit
    with inside.asked(target.socket, target.pid, questions, deadline_s=min(left_s, INSIDE_S)) as answer:
        if answer.stack.value is None:
            missing = f"{main.stack.missing}; {answer.stack.missing}"
            return replace(main, stack=replace(main.stack, missing=missing)), {}
        if all(thread.syscall is None for thread in state.threads):  # the kernel shows system calls only to the rank
            with suppress(CaptureError):
                left_s = max(LEAST_STATE_S, until - time.monotonic())
                state = proc.read_process(target.pid, deadline_s=left_s, locks=locks, own=answer.own)
        stack = replace(answer.stack, note=f"{INSTEAD}: {main.stack.missing}")
        return replace(main, state=_with_polled_lock(state, stack), stack=stack), answer.roles


def _process(pid: int, deadline_s: float, locks: tuple[file_locks.LockRow, ...] | None) -> ProcessLook:
    try:
        state = proc.read_process(pid, deadline_s=deadline_s * 2 / 3, locks=locks)
    except CaptureError as error:
        return ProcessLook(pid, None, Result(None, "py-spy dump", 0.0, missing=error.message))
    stack = stacks.stack_of(pid, state, deadline_s=deadline_s)
    return ProcessLook(pid, _with_polled_lock(state, stack), stack)


def _child(target: Target, pid: int, deadline_s: float, locks: tuple[file_locks.LockRow, ...] | None) -> ProcessLook:
    child = _process(pid, deadline_s, locks)
    if child.state is None or not target.page_name:
        return child
    is_fork = within_or(False, LOCK_DEADLINE_S, f"/proc/{pid}", lambda: proc.is_fork(pid, target.page_name))
    return replace(child, state=msgspec.structs.replace(child.state, is_fork=is_fork))


def _with_polled_lock(state: ProcessState, stack: Result[StackSample]) -> ProcessState:
    """Adds the lock that the main thread polls for through a library, which opens the file only for each attempt."""
    main = stack.value.main_thread if stack.value is not None else None
    if main is None or not main.lock_file:
        return state
    lock = within_or(None, LOCK_DEADLINE_S, "a file lock", lambda: file_locks.lock_on(state.pid, main.lock_file))
    if lock is None or any((row.path, row.pid) == (lock.path, lock.pid) for row in state.locks):
        return state
    return msgspec.structs.replace(state, locks=(*state.locks, lock))


def process_evidence(looks: Sequence[Look], rank: int) -> tuple[ProcessEvidence | None, tuple[ProcessEvidence, ...]]:
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
    reported = next((look.role for look in looks if look.role), "")
    return ProcessEvidence(role or reported or proc.role_of(states[-1] if states else None, samples), states, samples)


def _once_each(values: Iterable[T]) -> tuple[T, ...]:
    # A look for C frames copies what it hasn't read again.
    return tuple(value for value, _ in groupby(values))
