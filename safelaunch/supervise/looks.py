"""Looks at all ranks of a live job, repeatedly."""

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
LATE_DEADLINE_S = 12.0  # of a machine that is too busy for the looks
NATIVE_DEADLINE_S = 10.0  # libraries of gigabytes, on a disk that many read
ENTRIES_DEADLINE_S = 1.5
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Looks:
    """The ranks under observation, and each look at them, oldest first.

    ``entries``: for each look, the newest entry of each rank's Flight Recorder. ``counters``: what the job had done at
    the beginning and at the end of each look, so that what a look costs the ranks lies between no two of them;
    ``quiet``: some time before. ``env``: the first rank's environment. ``resends``: at the newest look, a message from
    one rank to another had not arrived.
    """

    targets: tuple[Target, ...]
    taken: tuple[Look, ...] = ()
    entries: tuple[Mapping[int, int], ...] = ()
    counters: tuple[tuple[Counters, Counters], ...] = ()
    quiet: Counters | None = None
    env: Result[dict[str, str]] | None = None
    resends: bool = False

    @property
    def windows(self) -> tuple[tuple[Counters, Counters], ...]:
        """The times in which nobody looked: between the last two looks, and before the first."""
        between = [(before[1], after[0]) for before, after in pairwise(self.counters[-2:])]
        return (*between, *([(self.quiet, self.counters[0][0])] if self.quiet is not None and self.counters else []))

    @property
    def is_late(self) -> bool:
        """Whether some process did not answer within the newest look."""
        return bool(self.taken) and any(_lacks(self.taken[-1].ranks.get(target.rank)) for target in self.targets)

    @property
    def collectives_moved(self) -> bool:
        """Whether some rank has entered a collective between the last two looks.

        A rank with no earlier entry, or one that answered too late, counts as moving: the next look comes soon.
        """
        if len(self.entries) < 2:
            return False
        before, after = self.entries[-2:]
        return any(number > before.get(rank, -1) for rank, number in after.items())


def _run_and_waited_ns() -> tuple[int, int]:
    """How long the main thread has run, and how long it has waited for a core."""
    try:
        run, waited, _ = Path("/proc/self/schedstat").read_text().split()
        return int(run), int(waited)
    except (OSError, ValueError):
        return 0, 0  # a lean kernel


class Starvation:
    """How much longer than on an idle machine everything takes, as far as this process itself waits for a core."""

    def __init__(self, read: Callable[[], tuple[int, int]] = _run_and_waited_ns) -> None:
        self._read = read
        self._before = 0, 0

    def factor(self) -> float:
        """Since it was last asked: 1.0, nothing has to wait, to ``MOST_PATIENCE``."""
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
    """Takes one more look at the ranks; the first one with ``looks`` None.

    ``collectives``: also reads how far each rank's Flight Recorder is. Not in a crash, where all ranks wait for us.
    ``network``: also reads whether its words arrive, for a vote of several nodes.
    ``quiet``: of the first look, see ``Looks``.
    """
    if looks is None:  # its environment now, while it is alive
        looks = Looks(tuple(targets), quiet=quiet, env=environment_of(targets[0].pid) if targets else None)
    else:
        # A rank that had not imported torch at the first look may have its worker server by now.
        newest = {target.rank: target for target in (*looks.targets, *targets)}
        looks = replace(looks, targets=tuple(newest[rank] for rank in sorted(newest)))
    pids = [target.pid for target in looks.targets]
    begin = counters.read(pids, looks.counters[-1][1] if looks.counters else looks.quiet)
    with _one_at_a_time:  # one reader of a process at a time, as a native look stops it
        look = _rested(take(targets, deadline_s=deadline_s), looks.quiet, begin)
    entries = newest_entries(looks.targets) if collectives else {}
    return replace(
        looks,
        taken=(*looks.taken, look)[-4:],
        entries=(*looks.entries, entries)[-4:],
        counters=(*looks.counters, (begin, counters.read(pids, begin)))[-4:],
        resends=network and any(resends(pid) for pid in pids),
    )


def _rested(look: Look, before: Counters | None, now: Counters) -> Look:
    """The look, with how long each thread has not run."""

    def since(process: ProcessLook, tid: int) -> float | None:
        key = (process.pid, process.state.start_ticks) if process.state is not None else (0, 0)
        if before is None or key not in before.processes or key not in now.processes:
            return None
        was, is_now = (each.processes[key].threads.get(tid) for each in (before, now))
        return None if was is None or is_now is None else now.at_s - before.at_s if was == is_now else 0.0

    def one(process: ProcessLook) -> ProcessLook:
        if process.state is None:
            return process
        threads = [structs.replace(thread, rested_s=since(process, thread.tid)) for thread in process.state.threads]
        return replace(process, state=structs.replace(process.state, threads=tuple(threads)))

    return replace(look, ranks={number: rank.with_each(one) for number, rank in look.ranks.items()})


def newest_entries(targets: Sequence[Target]) -> dict[int, int]:
    """rank → the newest entry of its Flight Recorder. Ranks that don't answer in time are left out."""
    return ask_each(targets, lambda target: newest_entry(str(target.socket)), deadline_s=ENTRIES_DEADLINE_S)


def ask_each(targets: Iterable[Target], question: Callable[[Target], T | None], *, deadline_s: float) -> dict[int, T]:
    """rank → the answer of its worker server; all are asked at once. Ranks that don't answer in time are left out."""
    asked = [target for target in targets if target.socket is not None]
    answers = gather([partial(question, target) for target in asked], deadline_s=deadline_s)
    return {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer is not None}


def main_thread(look: ProcessLook | None) -> Thread | None:
    """The main thread of a process, as its stack was read."""
    return look.stack.value.main_thread if look is not None and look.stack.value is not None else None


def with_the_late(looks: Looks) -> Looks:
    """Looks once more, with more time, at the ranks of which the newest look lacks a process that did not answer.

    Only after a hang is confirmed: till then, the next looks tell.
    """
    if not looks.is_late:
        return looks
    last = looks.taken[-1]
    late = [target for target in looks.targets if _lacks(last.ranks.get(target.rank))]
    with _one_at_a_time:
        more = take(late, deadline_s=LATE_DEADLINE_S)
    return replace(looks, taken=(*looks.taken, replace(more, ranks={**last.ranks, **more.ranks})))


def _lacks(look: RankLook | None) -> bool:
    return look is None or look.main is None or any(process.is_late for process in look.processes)


def native_where_it_tells(looks: Looks) -> Looks:
    """Takes one native look at the ranks that wait in a futex called from a line outside c10d.

    ``with lock:`` and ``work.wait()`` look alike from Python; only the C frames distinguish them. Reading C frames
    pauses the job and takes a few hundred megabytes for each process, so it is done only after a hang is confirmed.
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
    # A stack reader that stopped a wait with a time limit leaves ``restart_syscall`` behind.
    rests = kernel is not None and kernel.state == "S" and (kind_of(kernel) == "lock" or not kernel.syscall_name)
    polls = any(lock.pid != main.pid for lock in main.state.locks)  # or sleeps beside a file that somebody has locked
    return (rests or polls) and thread is not None and torch_wait(Stack(thread.frames)) is None
