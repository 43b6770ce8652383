"""One look at all ranks at once: the kernel's view of every process and thread, then the Python stacks.

Two looks some seconds apart show what moves; both stay in the bundle.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from safelaunch.errors import CaptureError
from safelaunch.model import ProcessEvidence, ProcessState, StackSample

from . import filelocks, other_ends, proc, stacks
from .parallel import gather
from .result import Result, within

LOCK_DEADLINE_S = 0.5
MAX_CHILDREN = 48  # per rank: a loader's worker pool is smaller, and the look must stay short


class Questions(Protocol):
    """The part of a rank's page that its Python handlers need; see ``progress.Page``."""

    def begin_question(self) -> bool: ...

    def end_question(self, answered: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to look at. ``socket``: its worker server's path, None if that is not running. ``pid`` and
    ``start_ticks`` identify the process."""

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
    """One process at one moment; ``state`` None: it is gone.

    ``files``: the sizes of what it has open to read, where its main thread sleeps: it may be waiting for more.
    """

    pid: int
    state: ProcessState | None
    stack: Result[StackSample]
    files: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank and its children at one moment; ``main`` None: nothing could be read within the deadline."""

    rank: int
    main: ProcessLook | None
    children: tuple[ProcessLook, ...] = ()

    @property
    def processes(self) -> tuple[ProcessLook, ...]:
        return (self.main, *self.children) if self.main is not None else ()


@dataclass(frozen=True, slots=True)
class Look:
    """All ranks at one moment; ``begin_s`` and ``end_s`` are CLOCK_MONOTONIC."""

    begin_s: float
    end_s: float
    ranks: dict[int, RankLook] = field(default_factory=dict)


def take(targets: Sequence[Target], *, deadline_s: float, earlier: Look | None = None, native: bool = False) -> Look:
    """Looks at all ``targets`` in parallel, within ``deadline_s`` seconds; never raises.

    ``earlier`` shows which D states last, so that py-spy does not wait for those.
    """
    begin = time.monotonic()
    table = proc.process_table()
    before = _states(earlier)

    def one(target: Target) -> RankLook:
        return _rank(target, table, before, deadline_s if native else min(deadline_s, stacks.DEADLINE_S), native)

    results = gather([lambda target=target: one(target) for target in targets], deadline_s=deadline_s)  # type: ignore[misc]
    ranks = {
        target.rank: result or RankLook(target.rank, None) for target, result in zip(targets, results, strict=True)
    }
    ranks = _with_ends(ranks, table)
    return Look(begin, time.monotonic(), ranks)


def _with_ends(ranks: dict[int, RankLook], table: Iterable[int]) -> dict[int, RankLook]:
    """The looks with what the ranks' pipes and connections lead to, the job's own processes before all others."""
    seen = [one.state for rank in ranks.values() for one in rank.processes if one.state is not None]
    own = [state.pid for state in seen]
    told = {state.pid: state for state in other_ends.with_ends(seen, [*own, *sorted(set(table) - set(own))])}

    def known(one: ProcessLook) -> ProcessLook:
        return replace(one, state=told.get(one.pid)) if one.state is not None else one

    return {
        number: replace(rank, main=known(rank.main), children=tuple(map(known, rank.children)))
        if rank.main is not None
        else rank
        for number, rank in ranks.items()
    }


def _states(look: Look | None) -> dict[int, ProcessState]:
    found: dict[int, ProcessState] = {}
    for rank in look.ranks.values() if look else ():
        for process in rank.processes:
            if process.state is not None:
                found[process.pid] = process.state
    return found


def _rank(
    target: Target,
    table: dict[int, tuple[int, int]],
    before: dict[int, ProcessState],
    deadline_s: float,
    native: bool,
) -> RankLook:
    main = _process(target.pid, before, deadline_s, native)
    if main.state is not None and main.state.start_ticks != target.start_ticks:
        main = ProcessLook(target.pid, None, Result(None, "py-spy dump", 0.0, missing="the process has ended"))
    below = proc.process_tree(target.pid, table)[:MAX_CHILDREN]
    looks = gather(
        [lambda pid=pid: _process(pid, before, deadline_s, False) for pid, _ in below],  # type: ignore[misc]
        deadline_s=2 * deadline_s,
        workers=4,
    )
    return RankLook(target.rank, main, tuple(look for look in looks if look is not None and look.state is not None))


def _process(pid: int, before: dict[int, ProcessState], deadline_s: float, native: bool) -> ProcessLook:
    try:
        state = proc.read_process(pid)
    except CaptureError as error:
        return ProcessLook(pid, None, Result(None, "py-spy dump", 0.0, missing=error.message))
    stack = stacks.stack_of(pid, before.get(pid, state), deadline_s=deadline_s, native=native)
    return ProcessLook(pid, _with_polled_lock(state, stack), stack, proc.files_to_read(state))


def _with_polled_lock(state: ProcessState, stack: Result[StackSample]) -> ProcessState:
    """With the lock that the main thread asks for through a library, which has the file open only as it asks."""
    main = stack.value.main_thread if stack.value is not None else None
    if main is None or not main.lock_file:
        return state
    try:
        lock = within(LOCK_DEADLINE_S, "a file lock", lambda: filelocks.lock_on(state.pid, main.lock_file))
    except CaptureError:
        return state
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
    states = tuple(look.state for look in looks if look.state is not None)
    samples = tuple(look.stack.value for look in looks if look.stack.value is not None)
    if not states and not samples:
        return None
    return ProcessEvidence(role or proc.role_of(states[-1] if states else None, samples), states, samples)
