"""Looks at all ranks of a live job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from safelaunch.capture import counters
from safelaunch.capture.counters import Counters
from safelaunch.capture.flight_recorder import newest_entry
from safelaunch.capture.gather import gather
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target, take, with_c_frames
from safelaunch.capture.node import environment_of
from safelaunch.capture.result import Result
from safelaunch.capture.sockets import resends
from safelaunch.model import Thread
from safelaunch.supervise.kinds import LOOK_S

T = TypeVar("T")
MOST_PATIENCE = 4.0
LATE_DEADLINE_S = 12.0
NATIVE_DEADLINE_S = 10.0  # for libraries of gigabytes on a shared disk
ENTRIES_DEADLINE_S = 1.5
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Looks:
    """The observed ranks, and all looks at them, oldest first."""

    targets: tuple[Target, ...]
    taken: tuple[Look, ...] = ()
    entries: tuple[Mapping[int, int], ...] = ()
    """newest Flight Recorder entry of each rank, for each look"""
    counters: tuple[tuple[Counters, Counters], ...] = ()
    """work done until the start and until the end of each look, so that the look's own work can be left out"""
    quiet: Counters | None = None
    """work done until shortly before the first look"""
    env: Result[dict[str, str]] | None = None
    """environment of the first rank"""
    resends: bool = False
    """a message between two ranks hadn't arrived at the last look"""

    @property
    def windows(self) -> tuple[tuple[Counters, Counters], ...]:
        """Returns the counters at both ends of each period without a look: between the last two, before the first."""
        between = [(before[1], after[0]) for before, after in pairwise(self.counters[-2:])]
        return (*between, *([(self.quiet, self.counters[0][0])] if self.quiet is not None and self.counters else []))

    @property
    def is_late(self) -> bool:
        return bool(self.taken) and any(_lacks(self.taken[-1].ranks.get(target.rank)) for target in self.targets)

    @property
    def collectives_moved(self) -> bool:
        """True if a rank entered a collective between the last two looks."""
        if len(self.entries) < 2:
            return False
        before, after = self.entries[-2:]
        return any(number > before.get(rank, -1) for rank, number in after.items())


def _run_and_waited_ns() -> tuple[int, int]:
    try:
        run, waited, _ = Path("/proc/self/schedstat").read_text().split()
        return int(run), int(waited)
    except (OSError, ValueError):
        return 0, 0


class Starvation:
    """Measures how busy the machine is by how long this process has to wait for a core."""

    def __init__(self, read: Callable[[], tuple[int, int]] = _run_and_waited_ns) -> None:
        self._read = read
        self._before = 0, 0

    def factor(self) -> float:
        """Returns the slowdown since the last call, from 1.0 to ``MOST_PATIENCE``."""
        now = self._read()
        run, waited = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        return min(MOST_PATIENCE, 1.0 + waited / run) if run > 0 else 1.0


def look_at(
    targets: Sequence[Target],
    looks: Looks | None,
    *,
    collectives: bool = False,
    network: bool = False,
    quiet: Counters | None = None,
    deadline_s: float = LOOK_S,
) -> Looks:
    """Takes another look at the ranks.

    Args:
        looks: Earlier looks; None if this is the first look.
        collectives: Whether to read the newest Flight Recorder entries. False in a crash, when all ranks wait for
            safelaunch.
        network: Whether to check that messages between ranks arrive.
    """
    if looks is None:  # while the rank lives
        looks = Looks(tuple(targets), quiet=quiet, env=environment_of(targets[0].pid) if targets else None)
    else:
        # A rank might have imported torch, and started its worker server, since the first look.
        newest = {target.rank: target for target in (*looks.targets, *targets)}
        looks = replace(looks, targets=tuple(newest[rank] for rank in sorted(newest)))
    pids = [target.pid for target in looks.targets]
    begin = counters.read(pids, looks.counters[-1][1] if looks.counters else looks.quiet)
    with _one_at_a_time:  # a native look stops a process
        look = _with_rest(take(targets, deadline_s=deadline_s), looks.quiet, begin)
    entries = newest_entries(looks.targets) if collectives else {}
    return replace(
        looks,
        taken=(*looks.taken, look)[-4:],
        entries=(*looks.entries, entries)[-4:],
        counters=(*looks.counters, (begin, counters.read(pids, begin)))[-4:],
        resends=network and any(resends(pid) for pid in pids),
    )


def _with_rest(look: Look, before: Counters | None, now: Counters) -> Look:
    def since(process: ProcessLook, tid: int) -> float | None:
        key = (process.pid, process.state.start_ticks) if process.state is not None else (0, 0)
        if before is None or key not in before.processes or key not in now.processes:
            return None
        was, is_now = (each.processes[key].threads.get(tid) for each in (before, now))
        return None if was is None or is_now is None else now.at_s - before.at_s if was == is_now else 0.0

    def with_rest(process: ProcessLook) -> ProcessLook:
        if process.state is None:
            return process
        threads = [structs.replace(thread, rested_s=since(process, thread.tid)) for thread in process.state.threads]
        return replace(process, state=structs.replace(process.state, threads=tuple(threads)))

    return replace(look, ranks={number: rank.with_each(with_rest) for number, rank in look.ranks.items()})


def newest_entries(targets: Sequence[Target]) -> dict[int, int]:
    return ask_each(targets, lambda target: newest_entry(str(target.socket)), deadline_s=ENTRIES_DEADLINE_S)


def ask_each(targets: Iterable[Target], question: Callable[[Target], T | None], *, deadline_s: float) -> dict[int, T]:
    """Queries all worker servers in parallel. Returns the replies that arrive in time, by rank."""
    asked = [target for target in targets if target.socket is not None]
    answers = gather([partial(question, target) for target in asked], deadline_s=deadline_s)
    return {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer is not None}


def main_thread(look: ProcessLook | None) -> Thread | None:
    return look.stack.value.main_thread if look is not None and look.stack.value is not None else None


def with_late_processes(looks: Looks) -> Looks:
    """Repeats the look, with more time, for ranks that the last look missed. Use it for confirmed hangs only."""
    if not looks.is_late:
        return looks
    last = looks.taken[-1]
    late = [target for target in looks.targets if _lacks(last.ranks.get(target.rank))]
    with _one_at_a_time:
        more = take(late, deadline_s=LATE_DEADLINE_S)
    return replace(looks, taken=(*looks.taken, replace(more, ranks={**last.ranks, **more.ranks})))


def _lacks(look: RankLook | None) -> bool:
    return look is None or look.main is None or any(process.is_late for process in look.processes)


def with_native_frames(looks: Looks) -> Looks:
    """Reads the C frames of ranks that wait in a futex called from a line outside c10d.

    Only C frames distinguish ``with lock:`` from ``work.wait()``. Reading them pauses the job and takes a few hundred
    megabytes per process, so use it only after a hang is confirmed.
    """
    last = looks.taken[-1] if looks.taken else None
    if last is None:
        return looks
    unclear = [target for target in looks.targets if _is_unclear(last.ranks.get(target.rank))]
    if not unclear:
        return looks
    with _one_at_a_time:
        native = with_c_frames(unclear, last, deadline_s=NATIVE_DEADLINE_S)
    return replace(looks, taken=(*looks.taken, native))


def _is_unclear(look: RankLook | None) -> bool:
    from safelaunch.stacks.calls import torch_wait
    from safelaunch.stacks.frames import Stack
    from safelaunch.stacks.kernel import kind_of

    main = look.main if look is not None else None
    if main is None or main.state is None:
        return False
    kernel, thread = main.state.main_thread, main_thread(main)
    # Reading a stack interrupts a timed wait: it shows ``restart_syscall``.
    rests = kernel is not None and kernel.state == "S" and (kind_of(kernel) == "lock" or not kernel.syscall_name)
    polls = any(lock.pid != main.pid for lock in main.state.locks)  # or sleeps next to a locked file
    return (rests or polls) and thread is not None and torch_wait(Stack(thread.frames)) is None
