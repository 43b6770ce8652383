"""The state of a sweep: which jobs may start, are skipped, or run again. Pure: no clock, process or file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from safelaunch.addons.sweep.jobs import WORTH_ANOTHER_ATTEMPT, AttemptOutcome, JobState, SweepJob, Track


@dataclass(frozen=True, slots=True)
class Before:
    """A job's history from earlier invocations: its attempts, and its outcome if it need not run again.

    ``with_engine``: its last attempt is still with the engine.
    """

    attempts: int = 0
    outcome: AttemptOutcome | None = None
    with_engine: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """``capacity`` units, ``at_most`` jobs at a time; ``fail_fast``: the first job that fails stops the others.

    ``ahead``: the engine keeps the order of jobs that need each other, so they may be handed over before that.
    """

    capacity: int
    at_most: int
    fail_fast: bool = False
    units: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = False


class Sweep:
    """All jobs of a sweep. Report events with its methods; ``next`` says which job to start."""

    def __init__(self, jobs: Sequence[SweepJob], rules: Rules, before: Mapping[str, Before] | None = None) -> None:
        self._rules = rules
        self._queue = Lineup(rules.capacity, rules.at_most)
        self._queued: set[str] = set()
        self.stopped = ""
        self.tracks = {job.name: Track(job) for job in jobs}
        for name, known in (before or {}).items():
            track = self.tracks[name]
            track.attempts = known.attempts
            if known.outcome is not None:
                track.state, track.outcome = known.outcome.state, known.outcome
            elif known.with_engine:
                self._adopt(track)
        self._settle()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(job.name for job in self._queue.running)

    @property
    def finished(self) -> bool:
        return all(track.is_final for track in self.tracks.values())

    def next(self, free: int | None = None) -> SweepJob | None:
        """The next job to start with ``free`` available units (None: all that our own jobs leave)."""
        name = self._queue.next(free)
        return self.tracks[name].job if name is not None else None

    def began(self, job: SweepJob) -> None:
        """Reports that ``job``, the last one from ``next``, is running."""
        self._queue.start(job.name)
        track = self.tracks[job.name]
        track.state, track.attempts, track.tries = "running", track.attempts + 1, track.tries + 1
        if self._rules.ahead:
            self._settle()

    def returned(self, name: str, state: JobState, why: str = "") -> None:
        """Reports that a job that was handed over has not begun, and will not: it is ``waiting`` again, or final."""
        track = self.tracks[name]
        track.attempts, track.tries = track.attempts - 1, track.tries - 1
        track.state, track.why = ("cancelled", self.stopped) if self.stopped else (state, why)
        self._queue.end(name)
        self._queued.discard(name)
        self._settle()

    def ended(self, name: str, outcome: AttemptOutcome) -> None:
        """Reports the end of an attempt: the job is done, or waits for its next attempt."""
        track = self.tracks[name]
        track.outcome = outcome
        self._queue.end(name)
        again = outcome.state in WORTH_ANOTHER_ATTEMPT and track.tries <= track.job.retries and not self.stopped
        if again:
            track.state = "waiting"
            self._queue.add(name, self._units(track.job))
        else:
            track.state = outcome.state
            if self._rules.fail_fast and outcome.state in WORTH_ANOTHER_ATTEMPT:
                self.stop(f"--fail-fast: {name} {outcome.state}")
        self._settle()

    def stop(self, why: str) -> None:
        """Starts no more jobs, and cancels those that have not started."""
        self.stopped = self.stopped or why
        self._queue.waiting.clear()
        for track in self.tracks.values():
            if track.state == "waiting":
                track.state, track.why = "cancelled", why

    def _adopt(self, track: Track) -> None:
        track.state, track.tries = "running", 1
        self._queued.add(track.job.name)
        self._queue.running.append(Running(track.job.name, self._units(track.job)))

    def _units(self, job: SweepJob) -> int:
        return self._rules.units.get(job.name, job.gpus)

    def _settle(self) -> None:
        """Queues jobs whose needs have succeeded; skips those whose needs have failed, and those that need them."""
        changed = True
        while changed:
            changed = False
            for name, track in self.tracks.items():
                if track.state != "waiting" or name in self._queued:
                    continue
                needs = [self.tracks[need] for need in track.job.needs]
                lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
                if lost is not None:
                    track.state, track.why, changed = "skipped", f"needs {lost.job.name}, which {was(lost)}", True
                elif all(need.state == "succeeded" or self._is_ahead(need) for need in needs):
                    self._queued.add(name)
                    self._queue.add(name, self._units(track.job))

    def _is_ahead(self, need: Track) -> bool:
        """Whether the engine may wait for ``need``: the present attempt is its last."""
        return self._rules.ahead and need.state == "running" and need.tries > need.job.retries


def was(track: Track) -> str:
    return {"hung": "hung", "failed": "failed", "timed-out": "timed out"}.get(track.state, f"was {track.state}")


def cancelled(outcome: AttemptOutcome) -> AttemptOutcome:
    """The outcome as cancelled, for a job that was asked to stop: its end says nothing about the job."""
    return outcome if outcome.state == "succeeded" else replace(outcome, state="cancelled")


# --- which job starts next --------------------------------------------------------------------------------------------
#
# Jobs start in order if they fit. Later jobs that fit overtake one that doesn't, so that no slot stays idle. But a
# large job must get its turn: the first waiting job (the head) may be overtaken only as often as there are slots. From
# then on, room is kept for it: jobs that overtake it may use only what the head leaves over. So it starts, at the
# latest, when the jobs that were running at that moment have ended.


@dataclass(slots=True)
class Waiting:
    """A job whose needs are met. ``overtaken``: how often another job overtook it while it was the head."""

    name: str
    units: int
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """A running job. ``past``: the head with reserved room that this job overtook, or empty."""

    name: str
    units: int
    past: str = ""


@dataclass(slots=True)
class Lineup:
    """``capacity`` units (slots, GPUs), ``at_most`` jobs at a time."""

    capacity: int
    at_most: int
    waiting: list[Waiting] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(job.units for job in self.running)

    def add(self, name: str, units: int) -> None:
        """One more waiting job, at the end."""
        self.waiting.append(Waiting(name, units))

    def end(self, name: str) -> None:
        """A running job has ended."""
        self.running = [job for job in self.running if job.name != name]

    def next(self, free: int | None = None) -> str | None:
        """The next job that fits. ``free``: the available units if others use some; None: all that our jobs leave."""
        left = self.capacity - self.used if free is None else min(free, self.capacity - self.used)
        if len(self.running) >= self.at_most:
            return None
        spare = left
        for job in self.waiting:
            if job.units <= min(left, spare):
                return job.name
            if job is self.waiting[0]:
                spare = self._spare(job, left)
        return None

    def start(self, name: str) -> None:
        """Starts a waiting job, which overtakes the head if it is another one."""
        head = self.waiting[0]
        job = next(job for job in self.waiting if job.name == name)
        self.running.append(Running(name, job.units, head.name if job is not head and self._kept_for(head) else ""))
        self.waiting.remove(job)
        if job is not head:
            head.overtaken += 1

    def _spare(self, head: Waiting, free: int) -> int:
        """The number of units for a job that overtakes ``head``.

        While others use so many that the ends of our own jobs can't make room for the head, nothing is reserved for it.
        """
        ours = self.used + free
        if not self._kept_for(head) or head.units > ours:
            return self.capacity
        late = sum(job.units for job in self.running if job.past == head.name)
        return ours - head.units - late

    def _kept_for(self, head: Waiting) -> bool:
        return head.overtaken >= self.capacity
