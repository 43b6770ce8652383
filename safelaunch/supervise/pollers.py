"""What the supervisor asks now and then while a job is healthy: timeouts, collectives, what slows the job down.

The worker servers' C++ threads answer without the GIL and without running a frame in the rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from safelaunch import addons
from safelaunch.capture import counters, stacks
from safelaunch.capture.counters import Counters
from safelaunch.capture.flight_recorder import arrivals_of, default_timeout_s
from safelaunch.capture.gpu import gpus
from safelaunch.capture.look import Target
from safelaunch.leases.inventory import has_driver
from safelaunch.model import Gpu
from safelaunch.model.words import size
from safelaunch.supervise.looks import ask_each, newest_entries
from safelaunch.supervise.watch import rhythm, work
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.work import Background
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

Answer = TypeVar("Answer")

CAP_AFTER_S, CAP_AGAIN_S = 5.0, 900.0  # groups may be created late
HEALTH_AFTER_S, HEALTH_AGAIN_S = 60.0, 600.0  # of steps: the first ones are always the slowest
_INSTEAD = "the ranks send their stacks themselves, without C frames and without the stacks of child processes"
_FIX = "run 'safelaunch doctor' where the job runs: it shows the fix"
MIB = 1 << 20
NOTICEABLE_BYTES = 256 * MIB  # a CUDA context alone takes as much


class Poller(Generic[Answer]):
    """Asks when due, in a thread, and takes the answer on a later tick. Call ``advance`` on every tick."""

    name: str
    again_s: float

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asking: BackgroundTask[Answer] | None = None
        self._asked_of = self._attempt = -1
        self._next_s = 0.0

    def advance(self, now: float) -> None:
        """``now``: CLOCK_MONOTONIC, seconds. Never blocks. An answer about an ended attempt is dropped."""
        if self._attempt != self._watch.roster.attempt:
            self._attempt, self._next_s = self._watch.roster.attempt, 0.0
            self.reset()
        if self._asking is not None:
            if self._asking.done:
                answer, self._asking = self._asking.result(), None
                if self._asked_of == self._attempt:
                    self.take(answer, now)
            return
        if now < self._next_s or not self.is_due(now):
            return
        self._next_s = now + self.again_s
        self._asked_of = self._attempt
        question = self.question()
        if question is not None:
            self._asking = BackgroundTask(self.name, question)

    def reset(self) -> None:
        """A new attempt has begun."""

    def is_due(self, now: float) -> bool:
        raise NotImplementedError

    def question(self) -> Callable[[], Answer] | None:
        """What to run in a thread; None if there is nobody to ask."""
        raise NotImplementedError

    def take(self, answer: Answer, now: float) -> None:
        raise NotImplementedError

    def has_stepped_for(self, seconds: float, now: float) -> bool:
        first_s = min((p.first_step_ns for p in self._watch.last_progress.values() if p.first_step_ns), default=0) / 1e9
        return bool(first_s) and now >= first_s + seconds


class GroupTimeoutPoller(Poller["float | None"]):
    """Keeps ``watch.cap_s`` as the timeout of the default process group, seen in a rank's Flight Recorder, wants it.

    ``floor_s``: of the thresholds; see ``rhythm.cap_of``.
    """

    name, again_s = "group timeout", CAP_AGAIN_S

    def __init__(self, watch: Watch, floor_s: float) -> None:
        super().__init__(watch)
        self._floor_s = floor_s

    def reset(self) -> None:
        self._watch.cap_s = None

    def is_due(self, now: float) -> bool:
        return self.has_stepped_for(CAP_AFTER_S, now) or self._watch.is_in_loop

    def question(self) -> Callable[[], float | None] | None:
        asked = next((target for target in self._watch.targets() if target.socket is not None), None)
        return partial(default_timeout_s, str(asked.socket)) if asked is not None else None

    def take(self, answer: float | None, now: float) -> None:
        if answer is not None:
            self._watch.cap_s = rhythm.cap_of(answer, self._floor_s)


class Tracing(Poller[str]):
    """Checks once, as soon as there is a rank, if py-spy can read its stacks, and prints a line if it can't.

    No check stops the rank.
    """

    name, again_s = "tracing", math.inf
    _asked = False

    def is_due(self, now: float) -> bool:
        return not self._asked and any(target.has_beacon for target in self._watch.targets())

    def question(self) -> Callable[[], str] | None:
        self._asked = True
        return partial(stacks.refusal, next(target.pid for target in self._watch.targets() if target.has_beacon))

    def take(self, answer: str, now: float) -> None:
        if answer:
            say(f"py-spy can't read the stacks of the ranks: {answer}; {_INSTEAD}; {_FIX}")


class PulseTaker(Poller[dict[int, int]]):
    """Feeds the watch with the ranks' newest collectives. It does not ask a job that steps."""

    name = "pulse"

    @property
    def again_s(self) -> float:  # type: ignore[override]
        return self._watch.pulse_period_s

    def is_due(self, now: float) -> bool:
        return self._watch.has_pulse_only

    def question(self) -> Callable[[], dict[int, int]] | None:
        targets = self._watch.targets()
        return (lambda: newest_entries(targets)) if any(target.socket for target in targets) else None

    def take(self, answer: dict[int, int], now: float) -> None:
        self._watch.hear(answer, now)


# --- what slows a healthy job down ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    """Something that slows the job down. The figures in ``words`` change; ``subject`` stays. ``next``: what to do."""

    subject: Hashable
    words: str
    next: str = ""


class Health(Poller[tuple[Note, ...]]):
    """Keeps ``watch.notes``, and reports once what slows a healthy job down; safelaunch never ends a job for that.

    A straggler, a GPU that ranks share by mistake, another program's memory on a GPU.
    """

    name, again_s = "health", HEALTH_AGAIN_S

    def __init__(self, watch: Watch, own_pids: Callable[[], Collection[int]]) -> None:
        super().__init__(watch)
        self._own_pids = own_pids
        self._subjects: frozenset[Hashable] = frozenset()  # of the newest look

    def reset(self) -> None:
        self._watch.notes, self._subjects = (), frozenset()

    def is_due(self, now: float) -> bool:
        return self.has_stepped_for(HEALTH_AFTER_S, now)

    def question(self) -> Callable[[], tuple[Note, ...]]:
        targets, own = self._watch.targets(), frozenset(self._own_pids())
        return lambda: look(targets, own)

    def take(self, answer: tuple[Note, ...], now: float) -> None:
        for note in answer:
            if note.subject not in self._subjects:
                say(f"{note.words} (the job continues){f'. {note.next}' if note.next else ''}")
        self._subjects = frozenset(note.subject for note in answer)
        self._watch.notes = tuple(note.words for note in answer)


def look(targets: Collection[Target], own: Collection[int]) -> tuple[Note, ...]:
    """Looks once at all ranks of this node and their GPUs; leaves out what does not answer."""
    found: list[Note] = []
    straggler = find_straggler(ask_each(targets, lambda target: arrivals_of(str(target.socket)), deadline_s=5.0))
    if straggler is not None:
        step = f"To see where its time goes: safelaunch record {os.getpid()}" if addons.has_command("record") else ""
        found.append(Note(("straggler", straggler.rank), straggler.words, step))
    driver = gpus().value if has_driver(os.environ) else None  # without one, finding that out starts nothing
    if driver is not None:
        found += notes_on_gpus(driver.gpus, {target.rank: target.pid for target in targets}, own)
    return tuple(found)


def notes_on_gpus(gpus: Sequence[Gpu], ranks: Mapping[int, int], own: Collection[int]) -> list[Note]:
    """Who uses the job's GPUs. ``ranks``: rank → pid; ``own``: the job's pids.

    Empty if the driver numbers processes differently (a container with its own pids).
    """
    by_pid = {pid: rank for rank, pid in ranks.items()}
    found: list[Note] = []
    for gpu in gpus:
        processes = gpu.processes or ()
        here = sorted({by_pid[process.pid] for process in processes if process.pid in by_pid})
        if not here:
            continue
        name = f"GPU {gpu.index}"
        if len(here) > 1:
            both = f"ranks {', '.join(map(str, here))}"
            words = f"{both} are on the same {name}: does each call torch.cuda.set_device(LOCAL_RANK)?"
            found.append(Note(("shared", gpu.index, *here), words))
        for one in processes:
            if one.pid not in own and (one.size or 0) >= NOTICEABLE_BYTES:
                much = f"{size(one.size or 0)} of {name}"
                words = f"pid {one.pid}, not of this job, holds {much}, which rank {here[0]} uses"
                found.append(Note(("stranger", gpu.index, one.pid), words))
    return found


YOUNG_S, WINDOW_S, WINDOW_EVERY_S = 20.0, 1.5, 30.0
QUIET_AFTER_S, QUIET_TIMES = 3.0, 3.0  # or so many usual steps


class WorkTaker(Poller[Counters]):
    """Learns what the job does in the background while it makes steps, and reads its counters once when it is quiet.

    The windows are as short as the time between two looks: a burst would be lost in a longer one. What was done in one
    counts once a step has followed its end: the last step of all may lie within it, and the work that nobody announced
    begin behind that.
    """

    name, again_s = "work", WINDOW_S

    def reset(self) -> None:
        self._before: Counters | None = None
        self._tentative: Background | None = None
        self._end_s = 0.0  # of the last window in it

    def is_due(self, now: float) -> bool:
        """Neither where what is to be known of a quiet time is known, nor often where the job has stepped for long."""
        if not self._watch.last_progress or (self._is_quiet(now) and self._watch.quiet is not None):
            self._before = None
            return False
        return True

    def question(self) -> Callable[[], Counters] | None:
        pids, before = [target.pid for target in self._watch.targets()], self._before
        return (lambda: counters.read(pids, before)) if pids else None

    def take(self, answer: Counters, now: float) -> None:
        watch, before = self._watch, self._before
        if self._tentative is not None and self._mark_s(now) > self._end_s:
            watch.background, self._tentative = self._tentative, None
        if self._is_quiet(now):
            watch.take_quiet(answer)
            self._before = self._tentative = None
            return
        if before is not None:
            self._tentative, self._end_s = work.learn(self._tentative or watch.background, before, answer), answer.at_s
        self._before = answer
        if before is not None and self.has_stepped_for(YOUNG_S, now):
            self._before, self._next_s = None, now + WINDOW_EVERY_S

    def _mark_s(self, now: float) -> float:
        spell = self._watch.spell(now)
        return spell.since_s if spell is not None else now

    def _is_quiet(self, now: float) -> bool:
        return now - self._mark_s(now) > max(QUIET_AFTER_S, QUIET_TIMES * self._watch.usual_step_s)


# --- stragglers -------------------------------------------------------------------------------------------------------


LEAST_COLLECTIVES = 20
LEAST_WINDOW_S = 5.0
LAST_SHARE = 0.8
WAITED_SHARE = 0.1

CollectiveArrivals = Mapping[
    int, Mapping[tuple[str, int], int]
]  # rank → (group, number) → CLOCK_REALTIME in nanoseconds


@dataclass(frozen=True)
class Straggler:
    """``last``: the share of ``collectives`` to which ``rank`` came last.

    ``waited``: the share of ``window_s`` in which the median peer had arrived and it had not.
    """

    rank: int
    last: float
    waited: float
    collectives: int
    window_s: float

    @property
    def words(self) -> str:
        return (
            f"rank {self.rank} is slower than its peers: it came last to {self.last:.0%} of {self.collectives}"
            f" collectives, and they waited for it {self.waited:.0%} of {self.window_s:.0f} s"
        )


def find_straggler(arrivals: CollectiveArrivals) -> Straggler | None:
    """The straggler that costs its peers most, over all groups; None where nobody is late all the time.

    In a synchronous job all ranks step together, at the pace of the slowest, so step counts do not show it. Who comes
    last to nearly every collective, and how much of the time the others have been there already, does.
    """
    groups = {group for numbers in arrivals.values() for group, _ in numbers}
    found = [straggler for group in sorted(groups) if (straggler := _in_group(arrivals, group)) is not None]
    return max(found, key=lambda straggler: straggler.waited, default=None)


def _in_group(arrivals: CollectiveArrivals, group: str) -> Straggler | None:
    members = {
        rank: {number: at for (name, number), at in numbers.items() if name == group}
        for rank, numbers in arrivals.items()
    }
    members = {rank: numbers for rank, numbers in members.items() if numbers}
    common = sorted(set.intersection(*(set(numbers) for numbers in members.values()))) if len(members) > 1 else []
    if len(common) < LEAST_COLLECTIVES:
        return None
    late: dict[int, list[tuple[int, int]]] = {}
    for number in common:
        times = {rank: numbers[number] for rank, numbers in members.items()}
        last = max(times, key=lambda rank: times[rank])
        others = [at for rank, at in times.items() if rank != last]
        late.setdefault(last, []).append((_median(others), times[last]))
    begin = min(numbers[common[0]] for numbers in members.values())
    window = max(numbers[common[-1]] for numbers in members.values()) - begin
    if window < LEAST_WINDOW_S * 1e9:
        return None
    rank = max(late, key=lambda rank: len(late[rank]))
    share = len(late[rank]) / len(common)
    waited = _length_of_union(late[rank]) / window
    if share < LAST_SHARE or waited < WAITED_SHARE:
        return None
    return Straggler(rank, share, waited, len(common), window / 1e9)


def _length_of_union(spans: Iterable[tuple[int, int]]) -> int:
    """The collectives of one backward pass overlap: time is counted once."""
    total, end = 0, 0
    for begin, stop in sorted(spans):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _median(values: list[int]) -> int:
    """The lower one of two: ``statistics`` would bring fractions into a process that lives as long as the job."""
    return sorted(values)[(len(values) - 1) // 2]
