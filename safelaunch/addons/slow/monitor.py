"""Watches the pace of a running job: says which rank slows it down, once, and when that is over. Ends nothing.

A check takes samples for ten seconds or more. So it runs only when the steps have become slower, and a few times after
the start, because a rank can be slow from the first step on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safelaunch.addons.slow.arrivals import Straggler, find_straggler
from safelaunch.addons.slow.step_times import Onset, StepTimes
from safelaunch.capture.flight_recorder import arrivals_of
from safelaunch.model import format_ranks
from safelaunch.supervise.looks import ask_each
from safelaunch.supervise.monitors import MonitoredJob
from safelaunch.supervise.watch.progress import first_step_s
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

if TYPE_CHECKING:  # loaded when a rank is examined: the supervisor stays small
    from safelaunch.addons.record.recording import Sampling
    from safelaunch.addons.slow.late_rank import SlowRank

SOURCE = "slow"
SHORTEST_S, LONGEST_S = 10.0, 40.0  # of the samples
SAMPLES = 160  # of each rank, for a difference of 15 % to exceed its scatter
CHECKS_S = (30.0, 120.0)  # after the first step
CHECK_AGAIN_S = 600.0
APART_S = 600.0  # between two messages
RETRY_S, RETRIES = 60.0, 3  # while the steps stay slow
RECENT_S = 60.0  # of the arrivals, without an onset
MOST_PEERS = 3
ARRIVALS_DEADLINE_S = 5.0
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class _Examination:
    """Examination of the ranks, because of ``onset`` or to see whether one is slow from the start."""

    onset: Onset | None
    task: BackgroundTask[SlowRank | None]
    stop: threading.Event


class SlowMonitor:
    name = "the watch for slow ranks"

    def __init__(self, job: MonitoredJob) -> None:
        self._job, self._watch = job, job.view.watch
        self._attempt = self._watch.attempt
        self._start()

    def _start(self) -> None:
        self._times = StepTimes()
        self._due = _times_of_checks()
        self._next_s = next(self._due)
        self._check: _Examination | None = None
        self._slow: SlowRank | None = None
        self._since: Onset | None = None  # of the slow rank; None if it is slow from the start
        self._said_s = -APART_S
        self._tries, self._retry_s = 0, 0.0
        self._watch.note(SOURCE, ())

    def tick(self) -> None:
        if self._watch.attempt != self._attempt:
            self._attempt = self._watch.attempt
            self.finish(succeeded=False)
            self._start()
        now, before = time.monotonic(), self._times.onset
        self._read_steps()
        if self._check is not None:
            if self._check.task.done:
                check, self._check = self._check, None
                self._take(check, now)
            return
        if self._slow is not None and self._since is not None and self._times.onset is None:
            self._say_end(self._slow)
        is_known = self._slow is not None and self._since is not None
        if (self._is_slower(before, now) or self._is_due(now)) and not is_known:
            self._begin_check(self._times.onset, now)

    def _is_slower(self, before: Onset | None, now: float) -> bool:
        """Returns whether a check is due because of an onset."""
        if self._times.onset is None:
            return False
        if before is None:
            self._tries, self._retry_s = 0, now
        if self._tries >= RETRIES or now < self._retry_s:
            return False
        self._tries, self._retry_s = self._tries + 1, now + RETRY_S
        return True

    def _begin_check(self, onset: Onset | None, now: float) -> None:
        stop, begin_s = threading.Event(), onset.at_s if onset is not None else now - RECENT_S
        since_ns = int((time.time() - (now - begin_s)) * 1e9)
        self._check = _Examination(onset, BackgroundTask("slow ranks", lambda: self._examine(since_ns, stop)), stop)

    def finish(self, *, succeeded: bool) -> None:
        if self._check is not None:
            self._check.stop.set()
            self._check.task.wait(STOP_S)

    def _read_steps(self) -> None:
        ranks = [progress for progress in self._watch.last_progress.values() if progress.step is not None]
        if not ranks:
            return
        if any(progress.paused or progress.phase for progress in ranks):
            self._times = self._times.interrupted()
            return
        first = min(ranks, key=lambda progress: progress.rank)
        self._times = self._times.after(first.last_step_ns / 1e9, first.step or 0)

    def _is_due(self, now: float) -> bool:
        first_s = first_step_s(self._watch.last_progress)
        if not first_s or now < first_s + self._next_s:
            return False
        self._next_s = next(self._due)
        return True

    def _examine(self, since_ns: int, stop: threading.Event) -> SlowRank | None:
        """Asks both witnesses. Runs in a thread. The samples are taken only if the first look names a rank."""
        first = self._straggler(since_ns)
        if first is None or first.rank is None:
            return None
        from safelaunch.addons.record.service import Recorder
        from safelaunch.addons.slow.late_rank import slow_rank

        here = [target.rank for target in self._watch.targets()]
        peers = [rank for rank in here if rank != first.rank][:MOST_PEERS]
        recording = Recorder().here(_sampling([first.rank, *peers]), self._job.view, stop)
        return None if stop.is_set() else slow_rank(recording, (first, self._straggler(since_ns)))

    def _straggler(self, since_ns: int) -> Straggler | None:
        targets = [target for target in self._watch.targets() if target.socket is not None]
        answers = ask_each(targets, lambda target: arrivals_of(str(target.socket)), deadline_s=ARRIVALS_DEADLINE_S)
        return find_straggler(
            {rank: {call: at for call, at in calls.items() if at >= since_ns} for rank, calls in answers.items()}
        )

    def _take(self, check: _Examination, now: float) -> None:
        slow, was = check.task.result(), self._slow
        is_over = check.onset is not None and self._times.onset is None
        self._slow, self._since = (None, None) if slow is None or is_over else (slow, check.onset)
        self._watch.note(SOURCE, (self._slow.words,) if self._slow is not None else ())
        is_known = slow is not None and was is not None and slow.rank == was.rank
        if self._slow is None or is_known or now - self._said_s < APART_S:
            return
        self._said_s = now
        since = ""
        if (onset := check.onset) is not None:
            clock = time.strftime("%H:%M", time.localtime(time.time() - (now - onset.at_s)))
            since = f"slower since step {onset.step:,} ({clock}): {_seconds(onset.before_s)} -> "
            since += f"{_seconds(onset.now_s)} a step; "
        say(f"{since}{self._slow.words}. The job continues.")

    def _say_end(self, slow: SlowRank) -> None:
        self._slow = self._since = None
        self._watch.note(SOURCE, ())
        say(f"back to {_seconds(self._times.usual_s)} a step: rank {slow.rank} no longer slows the job down")


def _sampling(ranks: Sequence[int]) -> Sampling:
    from safelaunch.addons.record import sampling
    from safelaunch.addons.record.recording import Sampling

    passes = len(ranks) * len(sampling.PASSES)
    rate_hz = sampling.rate_for(passes, len(os.sched_getaffinity(0)))
    return Sampling(min(LONGEST_S, max(SHORTEST_S, SAMPLES / rate_hz)), format_ranks(ranks))


def _times_of_checks() -> Iterator[float]:
    yield from CHECKS_S
    at_s = CHECKS_S[-1]
    while True:
        at_s += CHECK_AGAIN_S
        yield at_s


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
