"""Looks at all ranks of a live job, repeatedly."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from safelaunch.capture.flight_recorder import newest_entry
from safelaunch.capture.look import Look, RankLook, Target, take, with_c_frames
from safelaunch.capture.node import environment_of
from safelaunch.capture.parallel import gather
from safelaunch.capture.proc import times_scheduled
from safelaunch.capture.result import Result
from safelaunch.capture.sockets import resends
from safelaunch.watch.stall import Movement

LOOK_DEADLINE_S = 6.0
NATIVE_DEADLINE_S = 10.0  # libraries of gigabytes, on a disk that many read
ENTRIES_DEADLINE_S = 1.5
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Looks:
    """The ranks under observation, and each look at them, oldest first.

    ``entries``: for each look, the newest entry of each rank's Flight Recorder. ``env``: the first rank's environment.
    ``resends``: at the newest look, some rank's words to another had not arrived.
    """

    targets: tuple[Target, ...]
    taken: tuple[Look, ...] = ()
    entries: tuple[Mapping[int, int], ...] = ()
    env: Result[dict[str, str]] | None = None
    resends: bool = False

    def plus(self, look: Look, entries: Mapping[int, int], *, resends: bool = False) -> Looks:
        taken, known = (*self.taken, look)[-4:], (*self.entries, entries)[-4:]
        return replace(self, taken=taken, entries=known, resends=resends)

    @property
    def collectives_moved(self) -> bool:
        """Whether some rank has entered a collective between the last two looks.

        A rank with no earlier entry, or one that answered too late, counts as moving: the next look comes soon.
        """
        if len(self.entries) < 2:
            return False
        before, after = self.entries[-2:]
        return any(number > before.get(rank, -1) for rank, number in after.items())


def look_at(
    targets: Sequence[Target],
    looks: Looks | None,
    *,
    collectives: bool = False,
    network: bool = False,
    stop: bool = False,
    deadline_s: float = LOOK_DEADLINE_S,
) -> Looks:
    """Takes one more look at the ranks; the first one with ``looks`` None.

    ``collectives``: also reads how far each rank's Flight Recorder is. Not in a crash, where all ranks wait for us.
    ``network``: also reads whether its words arrive, for a vote of several nodes. ``stop``: as for ``look.take``.
    """
    earlier = looks.taken[-1] if looks is not None and looks.taken else None
    if looks is None:  # its environment now, while it is alive
        looks = Looks(tuple(targets), env=environment_of(targets[0].pid) if targets else None)
    else:
        looks = replace(looks, targets=_as_known_now(looks.targets, targets))
    with _one_at_a_time:  # two py-spies that stop one process: the second is refused
        look = take(targets, deadline_s=deadline_s, earlier=earlier, stop=stop)
    entries = newest_entries(looks.targets) if collectives else {}
    return looks.plus(look, entries, resends=network and any(resends(each.pid) for each in looks.targets))


def _as_known_now(before: Sequence[Target], now: Sequence[Target]) -> tuple[Target, ...]:
    """A rank that had not imported torch at the first look may have its worker server by now."""
    newest = {target.rank: target for target in (*before, *now)}
    return tuple(newest[rank] for rank in sorted(newest))


def newest_entries(targets: Sequence[Target]) -> dict[int, int]:
    """rank → the newest entry of its Flight Recorder. Ranks that don't answer in time are left out."""
    asked = [target for target in targets if target.socket is not None]
    calls = [partial(newest_entry, str(target.socket)) for target in asked]
    answers = gather(calls, deadline_s=ENTRIES_DEADLINE_S)
    return {target.rank: number for target, number in zip(asked, answers, strict=True) if number is not None}


def movement_of(looks: Looks, *, without_steps: bool = False) -> tuple[Movement, tuple[int, ...]]:
    """What moved between the last two looks (see ``movement.judge``), and the ranks that compute, read or write."""
    from safelaunch.watch import movement

    before, after = looks.taken[-2:]
    found = movement.judge(before, after, outputs(), without_steps=without_steps)
    if found == "still" and looks.collectives_moved:
        return "active", ()
    active = (rank for rank, look in after.ranks.items() if look.main is not None and look.main.state is not None)
    if found != "active":
        return found, ()
    return found, tuple(
        rank for rank in active if movement.judge_rank(before.ranks.get(rank), after.ranks[rank]) == found
    )


def outputs() -> frozenset[str]:
    """The targets of our stdout and stderr, which the job inherits, if their reader can block a writer."""
    found = []
    for descriptor in (1, 2):
        with suppress(OSError):
            found.append(os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return frozenset(target for target in found if target.startswith(("pipe:", "socket:", "/dev/")))


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
    from safelaunch.reading.calls import torch_wait
    from safelaunch.reading.frames import Stack
    from safelaunch.reading.kernel import kind_of

    main = look.main if look is not None else None
    if main is None or main.state is None or main.stack.value is None:
        return False
    kernel, thread = main.state.main_thread, main.stack.value.main_thread
    # A stack reader that stopped a wait with a time limit leaves ``restart_syscall`` behind.
    rests = kernel is not None and kernel.state == "S" and (kind_of(kernel) == "lock" or not kernel.syscall_name)
    polls = any(lock.pid != main.pid for lock in main.state.locks)  # or sleeps beside a file that somebody has locked
    return (rests or polls) and thread is not None and torch_wait(Stack(thread.frames)) is None


# --- patience ---------------------------------------------------------------------------------------------------------

LEAST_S, MOST_S = 6.0, 15.0
PART = 0.75  # of the threshold
SETTLE_S = 0.5  # the previous look stopped and continued them
EVERY_S = 0.5
STEADILY = 3  # times


class Patience:
    """Watches ``pids`` for a while and finds out whether one of them moved. ``advance`` never blocks.

    Between two looks a few seconds apart, a DataLoader worker that sleeps has used no CPU and is on the same line. But
    it wakes up: a worker stuck in a lock, a read or an endless sleep is not scheduled once. Nothing attaches to the
    processes here, so one that is scheduled woke up by itself. This also tells a rank that polls a computing child from
    one stuck in a sleep beside such a child.

    ``receiving``: processes that move if they wake up ``STEADILY``, not once: a signal may wake up who waits in vain.
    """

    def __init__(
        self,
        pids: Sequence[int],
        threshold_s: float,
        now: float,
        *,
        most_s: float = MOST_S,
        receiving: Sequence[int] = (),
    ) -> None:
        self._least = {**dict.fromkeys(receiving, STEADILY), **dict.fromkeys(pids, 1)}
        self._seen: dict[int, int] = {}
        self._changes: Counter[int] = Counter()
        self._next_s = now + SETTLE_S
        self._until_s = self._next_s + min(most_s, max(LEAST_S, PART * threshold_s))

    def advance(self, now: float) -> Movement | None:
        """Whether one of them moved; None while undecided."""
        if now < self._next_s:
            return None
        self._next_s = now + EVERY_S
        for pid, least in self._least.items():
            times = times_scheduled(pid)
            self._changes[pid] += self._seen.setdefault(pid, times) != times
            self._seen[pid] = times
            if self._changes[pid] >= least:
                return "active"
        return "still" if now >= self._until_s else None
