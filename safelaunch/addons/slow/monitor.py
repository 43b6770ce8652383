"""Watches the pace of a running job: says which rank slows it down, once, and when that is over. Ends nothing.

An examination takes samples for ten seconds or more. So it runs only when the steps have become slower, and a few times
after the start, because a rank can be slow from the first step on. On several nodes, the leader examines all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelaunch.addons.slow.step_times import Onset, StepTimes
from safelaunch.model import rank_words
from safelaunch.supervise.control.protocol import ServiceAnswer
from safelaunch.supervise.hooks import variables
from safelaunch.supervise.monitors import MonitoredJob
from safelaunch.supervise.watch.progress import first_step_s
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

if TYPE_CHECKING:  # loaded when a rank is examined: the supervisor stays small
    from safelaunch.addons.slow.late_rank import SlowRanks
    from safelaunch.addons.slow.service import Examination
    from safelaunch.bundle.publication import Publication
    from safelaunch.model import Verdict

SOURCE = "slow"
CHECKS_S = (30.0, 120.0)  # after the first step
CHECK_AGAIN_S = 600.0
APART_S = 600.0  # between two messages
RETRY_S, RETRIES = 30.0, 4  # while the steps stay slow
REFUSED_S = 20.0  # until the next attempt, after another request came first
RECENT_S, RECENT_STEPS = 60.0, 8  # the larger: arrivals to compare without an onset
PAUSES = 0.5  # share of the usual number of steps in the samples, below which the job does something else
WORTH_SAYING = 0.05  # share of a run's time that was lost, for a line at its end
STOP_S = 2.0
WRITE_S = 15.0  # at the end of the job, for the bundle


@dataclass
class _Inquiry:
    """Examinations of the ranks, because of ``onset`` or to see whether one is slow from the start."""

    onset: Onset | None
    since_unix_s: float
    examinations: list[Examination]
    judging: BackgroundTask[SlowRanks | bool | None] | None = None
    """its result is True if it needs another examination"""


@dataclass(frozen=True, slots=True)
class _SlowTime:
    """Time in which a rank is slow."""

    slow: SlowRanks
    onset: Onset | None
    begin_s: float
    is_said: bool


class SlowMonitor:
    name = "the watch for slow ranks"

    def __init__(self, job: MonitoredJob) -> None:
        self._job, self._watch = job, job.view.watch
        self._topic = job.topic(SOURCE)
        self._topic.gather()  # so that the other nodes leave it to the leader
        self._attempt = self._watch.attempt
        self._writing: BackgroundTask[tuple[Verdict, Publication]] | None = None
        self._said_s = -APART_S
        self._lost_s: dict[tuple[int, ...], float] = {}
        self._words: dict[tuple[int, ...], str] = {}
        self._began_s = 0.0
        self._start()

    def _start(self) -> None:
        self._times, self._unit = StepTimes(), "step"
        self._first_s = 0.0
        self._counted_s = 0.0  # until then, it is known how much time was lost
        self._next_s = CHECKS_S[0]
        self._check: _Inquiry | None = None
        self._slow: _SlowTime | None = None
        self._tries, self._retry_s, self._refusals = 0, 0.0, 0
        self._note("")

    def tick(self) -> None:
        now = time.monotonic()
        self._finish_writing()
        if self._watch.attempt != self._attempt:
            self._attempt = self._watch.attempt
            self._end_spell(now)
            self._start()
        before = self._times.onset
        self._read_pace(now)
        if self._topic.has_others and self._topic.is_led and not self._topic.leads:
            published = self._topic.published.decode("utf-8", "replace")
            self._watch.note(SOURCE, (published,) if published else ())
            return
        if self._check is not None:
            if self._check.judging is not None and self._check.judging.done:
                self._conclude(self._check, self._check.judging.result(), now)
            return
        if self._slow is not None and self._slow.onset is not None and self._times.onset is None:
            self._end_slow(self._slow, now)
        is_known = self._slow is not None and self._slow.onset is not None
        if not self._is_in_phase and (self._is_slower(before, now) or self._is_due(now)) and not is_known:
            onset = self._times.onset
            begin_s = onset.at_s if onset is not None else now - max(RECENT_S, RECENT_STEPS * self._times.usual_s)
            self._check = _Inquiry(onset, time.time() - (now - begin_s), [])
            self._ask(self._check)

    def finish(self, *, succeeded: bool) -> None:
        now = time.monotonic()
        self._end_spell(now)
        if self._writing is not None and self._writing.wait(WRITE_S):
            self._finish_writing()
        seconds = now - self._began_s if self._began_s else 0.0
        for ranks, lost_s in self._lost_s.items():
            if seconds and lost_s >= WORTH_SAYING * seconds:
                share = f"{100 * lost_s / seconds:.0f}%"
                say(f"{share} of the run's time was lost: {self._words[ranks]}")

    # --- the pace -----------------------------------------------------------------------------------------------------

    def _read_pace(self, now: float) -> None:
        ranks = [progress for progress in self._watch.last_progress.values() if progress.step is not None]
        if not ranks:
            self._read_collectives(now)
            return
        self._unit, self._first_s = "step", first_step_s(self._watch.last_progress)
        self._began_s = self._began_s or self._first_s
        if self._is_in_phase:
            self._times = self._times.interrupted()
            return
        first = min(ranks, key=lambda progress: progress.rank)
        self._times = self._times.after(first.last_step_ns / 1e9, first.step or 0)

    @property
    def _is_in_phase(self) -> bool:
        return any(progress.paused or progress.phase for progress in self._watch.last_progress.values())

    def _read_collectives(self, now: float) -> None:
        newest = self._watch.newest_collective if self._watch.has_pulse_only else None
        if newest is None:
            return
        self._unit, self._first_s = "collective", self._first_s or now
        self._began_s = self._began_s or now
        self._times = self._times.after(*newest)

    @property
    def _pace_s(self) -> float:
        return self._times.onset.now_s if self._times.onset is not None else self._times.usual_s

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

    def _is_due(self, now: float) -> bool:
        if not self._first_s or now < self._first_s + self._next_s:
            return False
        self._next_s = _next_check_s(now - self._first_s)
        return True

    # --- examinations -------------------------------------------------------------------------------------------------

    def _ask(self, check: _Inquiry) -> None:
        from safelaunch.addons.slow.service import Examine, Examiner

        def take(answer: ServiceAnswer[Any]) -> None:
            if self._check is not check:
                return  # of an ended attempt
            if answer.part is None:
                self._check = None
                self._try_again_soon(check)
                return
            self._refusals = 0
            if not answer.part.recording.ranks:  # no rank arrives late: spare the modules that judge samples
                self._check = None
                self._take(check, None, time.monotonic())
                return
            check.examinations.append(answer.part)
            self._judge(check)

        self._job.actions.ask_nodes(Examiner(), Examine(check.since_unix_s), take)

    def _try_again_soon(self, check: _Inquiry) -> None:
        now = time.monotonic()
        wait_s = min(REFUSED_S * 2**self._refusals, CHECK_AGAIN_S)  # it might fail each time
        self._refusals += 1
        if check.onset is not None:
            self._tries, self._retry_s = self._tries - 1, now + wait_s
        else:
            self._next_s = now - self._first_s + wait_s

    def _judge(self, check: _Inquiry) -> None:
        from safelaunch.addons.slow.late_rank import needs_another, slow_ranks

        pace_s = self._pace_s

        def judge() -> SlowRanks | bool | None:
            seen = check.examinations
            if _pauses(seen[-1], pace_s):
                return None
            return needs_another(seen) or slow_ranks(seen, since_start=check.onset is None)

        check.judging = BackgroundTask("slow ranks", judge)

    def _conclude(self, check: _Inquiry, slow: SlowRanks | bool | None, now: float) -> None:
        check.judging = None
        if isinstance(slow, bool):
            self._ask(check)  # a second witness
            return
        self._check = None
        self._take(check, slow, now)

    def _take(self, check: _Inquiry, slow: SlowRanks | None, now: float) -> None:
        was = self._slow
        is_over = check.onset is not None and self._times.onset is None
        self._end_spell(now)
        if slow is None or is_over:
            self._counted_s = now
            self._note("")
            return
        since_s = check.onset.at_s if check.onset is not None else now if self._counted_s else self._first_s
        known = was if was is not None and slow.ranks == was.slow.ranks else None
        says = known is None and now - self._said_s >= APART_S and self._writing is None
        is_said = says if known is None else known.is_said
        self._slow = _SlowTime(slow, check.onset, max(since_s, self._counted_s), is_said)
        self._note(slow.words)
        if says:
            self._said_s = now
            self._write(check, slow)

    def _write(self, check: _Inquiry, slow: SlowRanks) -> None:
        from safelaunch.addons.slow.bundle import FoundSlow, write_bundle

        found = FoundSlow(slow, check.onset, check.examinations[-1], self._pace_s, self._unit, check.since_unix_s)
        self._writing = BackgroundTask("bundle of a slow rank", lambda: write_bundle(found, self._job.view))

    def _finish_writing(self) -> None:
        if self._writing is None or not self._writing.done:
            return
        task, self._writing = self._writing, None
        verdict, published = task.result()
        say(f"{verdict.summary[0].lower()}{verdict.summary[1:]} The job continues.")
        say(f"bundle: {published.shown}" + (f" ({published.problem})" if published.problem else ""))
        context = self._job.view.context
        ranks = ",".join(str(culprit.rank) for culprit in verdict.culprits)
        context.suspects.start({**variables(verdict, published.path, context.run_name), "SAFELAUNCH_RANKS": ranks})

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end_slow(self, spell: _SlowTime, now: float) -> None:
        self._end_spell(now)
        self._note("")
        if spell.is_said:
            from safelaunch.addons.slow.bundle import seconds

            slows = "slows" if len(spell.slow.ranks) == 1 else "slow"
            pace = f"{seconds(self._times.normal[-1].step_s)} a {self._unit}"
            say(f"back to {pace}: {rank_words(spell.slow.ranks)} no longer {slows} the job down")

    def _end_spell(self, now: float) -> None:
        if self._slow is None:
            return
        spell, self._slow, self._counted_s = self._slow, None, now
        ranks = spell.slow.ranks
        self._lost_s[ranks] = self._lost_s.get(ranks, 0.0) + spell.slow.lost * (now - spell.begin_s)
        self._words[ranks] = spell.slow.words

    def _note(self, words: str) -> None:
        self._watch.note(SOURCE, (words,) if words else ())
        if self._topic.has_others and self._topic.leads:
            self._topic.publish(words.encode())


def _pauses(examination: Examination, pace_s: float) -> bool:
    # For example, rank 0 evaluates while the others wait.
    steps = [rank.steps for rank in examination.recording.ranks if rank.steps is not None]
    return bool(steps) and max(steps) * pace_s < PAUSES * examination.recording.elapsed_s


def _next_check_s(passed_s: float) -> float:
    # seconds since the first step
    last_s = CHECKS_S[-1]
    later_s = last_s + CHECK_AGAIN_S * ((passed_s - last_s) // CHECK_AGAIN_S + 1)
    return next((check_s for check_s in CHECKS_S if check_s > passed_s), later_s)
