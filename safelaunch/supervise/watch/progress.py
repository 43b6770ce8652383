"""Watches a job's ranks: reads their pages, feeds the stall detector, and returns its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from safelaunch.beacon import layout
from safelaunch.capture.counters import Counters
from safelaunch.capture.look import Target
from safelaunch.capture.node import Links
from safelaunch.capture.pages import AgentEvent, ProgressPage, Roster, Worker
from safelaunch.job.process import identify
from safelaunch.model import EarlyLook, Gpu, JobCondition, Progress, WrongResult
from safelaunch.settings.options import STALL_CEILING_S, STARTUP_MAX_STALL_S, Settings
from safelaunch.supervise.watch import pulse, quiet, rhythm, stall
from safelaunch.supervise.watch.strides import Strides
from safelaunch.supervise.watch.work import Background

# A stall is longer than both limits; the second is in usual steps.
QUIET_S, QUIET_TIMES = 2.0, 5.0
MISSED_S = 30.0  # a process that is gone after a gap might have ended during it


def policy_of(settings: Settings) -> stall.Policy:
    stall_s = settings.effective_stall_timeout_s
    return stall.Policy(
        stall_s=stall_s,
        startup_s=settings.startup_timeout_s,
        max_stall_s=max(settings.effective_max_stall_s or STARTUP_MAX_STALL_S, stall_s),
        confirm_s=stall.confirm_after_s(stall_s),
        stall_given=settings.stall_timeout_s is not None,
        startup_given=settings.is_explicit("startup-timeout"),
        max_stall_given=settings.is_explicit("max-stall"),
        proved_s=settings.stall_timeout_s or settings.stall_floor_s,
    )


def bounds_of(settings: Settings) -> rhythm.ThresholdBounds | None:
    """Returns the bounds of the learned threshold; None if the user set a fixed threshold."""
    if settings.stall_timeout_s is not None:
        return None
    floor_s = settings.stall_floor_s
    ceiling_s = max(floor_s, STALL_CEILING_S)
    return rhythm.ThresholdBounds(floor_s, ceiling_s, min(ceiling_s, max(floor_s, settings.effective_stall_timeout_s)))


def first_step_s(last_progress: Mapping[int, Progress]) -> float:
    """Returns when a rank made the first step (CLOCK_MONOTONIC); 0 before that."""
    return (
        min((progress.first_step_ns for progress in last_progress.values() if progress.first_step_ns), default=0) / 1e9
    )


@dataclass(frozen=True, slots=True)
class Glance:
    agent: tuple[AgentEvent, ...]
    event: stall.StallEvent | None
    raised: tuple[int, ...]
    """ranks with an uncaught exception, which wait for safelaunch"""
    damaged: tuple[int, ...] = ()
    """ranks with an overwritten page: their steps are unknown from now on"""


class Watch:
    def __init__(
        self, roster: Roster, policy: stall.Policy, now: float, bounds: rhythm.ThresholdBounds | None = None
    ) -> None:
        # Without bounds, the policy's threshold is fixed.
        self.roster = roster
        self.policy = policy
        self.cap_s: float | None = None
        self.background = Background()  # of this attempt
        # Start of the quiet time, and counters from shortly after.
        self._quiet: tuple[float, Counters] | None = None
        self._links: tuple[float, Links] | None = None
        self._gpus: list[tuple[float, tuple[Gpu, ...]]] = []
        self.state = stall.initial_state(now)
        self._bounds = bounds
        self._given_start = policy.startup_given
        self._limits = pulse.PulseLimits(policy.startup_s, policy.stall_s, bounds)
        self._pulse = pulse.Pulse()
        self._step_rhythm = rhythm.StepRhythm()
        self.last_progress: dict[int, Progress] = {}
        self._strides: dict[int, Strides] = {}
        self._notes: dict[str, tuple[str, ...]] = {}
        self.attempt = (0, 0)  # torchrun's restarts, and starts of the agent's workers
        self._gone: dict[int, float] = {}
        self._damaged: set[int] = set()
        self._gap = (0.0, 0.0)  # end and length of this supervisor's last interruption
        self._pages: dict[int, ProgressPage] = {}
        self._marks: tuple[stall.ProgressMark, ...] = ()
        self.early: tuple[EarlyLook, ...] = ()
        self.wrong_results: tuple[WrongResult, ...] = ()

    def tick(self, now: float) -> Glance:
        """Reads all pages once. Times are seconds of CLOCK_MONOTONIC."""
        events = self.roster.refresh()
        if (self.roster.attempt, self.roster.starts) != self.attempt:
            self.attempt = self.roster.attempt, self.roster.starts
            self.state = stall.initial_state(now)
            self._gone.clear()
            self._damaged.clear()
            self.last_progress.clear()
            self._strides.clear()
            self.early = ()
            self._step_rhythm = rhythm.StepRhythm()
            self._pulse = pulse.Pulse()
            self.background, self._quiet = Background(), None
            self._links, self._gpus = None, []
            self.policy = replace(self.policy, startup_s=self._limits.startup_s, startup_given=self._given_start)
        damaged = self.roster.damaged()
        for rank in damaged:
            self.last_progress.pop(rank, None)
        self._damaged.update(damaged)
        self._pages = self.roster.pages()
        marks, raised = [], []
        pulse_s = self._pulse.last_s or 0.0
        for rank, page in self._pages.items():
            progress = page.read()
            self.last_progress[rank] = progress
            if progress.step is not None:
                self._strides.setdefault(rank, Strides()).add(progress.last_step_ns, progress.step)
            if progress.exception_ns and not page.acknowledged:
                raised.append(rank)
            marks.append(self._mark(progress, now, pulse_s))
        self._marks = tuple(marks)
        self._learn(self._marks, now)
        if now - self.state.last_tick_s > stall.CLOCK_GAP_S:
            self._gap = now, now - self.state.last_tick_s
        self.state, event = stall.tick(self.state, self._marks, self.policy, now)
        return Glance(tuple(events), event, tuple(raised), damaged)

    def _learn(self, marks: tuple[stall.ProgressMark, ...], now: float) -> None:
        live = [mark for mark in marks if not mark.exited]
        times = [mark.last_step_s for mark in live if mark.last_step_s is not None]
        if not times:
            return
        mark_s, step = min(times), min(mark.step or 0 for mark in live if mark.last_step_s is not None)
        excused = any(m.paused or (m.phase and m.phase_timeout_s) for m in live) or self.state.base_s > mark_s
        if self._step_rhythm.last_step is None and not excused:
            self._step_rhythm = self._first_rhythm(mark_s)
        self._step_rhythm = rhythm.learn(self._step_rhythm, step, mark_s, now, excused=excused)
        # No threshold is lower, so don't compute it earlier.
        if self._bounds is not None and now - mark_s >= min(self._bounds.floor_s, self.cap_s or self._bounds.floor_s):
            self._use(self.threshold())

    def _first_rhythm(self, mark_s: float) -> rhythm.StepRhythm:
        # A fast job makes many steps before the first tick: its pages have the time of the first.
        stepping = [p for p in self.last_progress.values() if p.step is not None and not p.exit_ns and p.first_step_ns]
        first_s = max((p.first_step_ns / 1e9 for p in stepping), default=0.0)
        empty = rhythm.StepRhythm()
        return rhythm.learn(empty, 1, first_s, first_s) if 0.0 < first_s < mark_s else empty

    @property
    def notes(self) -> tuple[str, ...]:
        """Causes of slowness, in words."""
        return tuple(note for notes in self._notes.values() for note in notes)

    def note(self, source: str, notes: tuple[str, ...]) -> None:
        """Replaces the notes of one source."""
        self._notes[source] = notes

    @property
    def learns(self) -> bool:
        return self._bounds is not None

    def steps_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        strides = self._strides.get(rank)
        return strides.points() if strides is not None else ()

    def threshold(self) -> rhythm.Threshold:
        if self._bounds is None:
            return rhythm.Threshold(self.policy.stall_s, "--stall-timeout")
        return rhythm.threshold(self._step_rhythm, self._bounds, cap_s=self.cap_s)

    @property
    def usual_step_s(self) -> float:
        """Returns the median duration of recent steps; 0 if unknown."""
        return rhythm.usual_s(self._step_rhythm)[0]

    @property
    def has_pulse_only(self) -> bool:
        """True if no rank has marked a step, so collectives are the only visible progress."""
        return bool(self.last_progress) and all(p.step is None for p in self.last_progress.values())

    @property
    def is_in_loop(self) -> bool:
        return self.has_pulse_only and self._pulse.is_in_loop(self._limits)

    @property
    def pulse_period_s(self) -> float:
        return self._limits.period_s

    def note_collectives(self, newest: Mapping[int, int], now: float) -> None:
        self._pulse = self._pulse.after_look(newest, now)
        is_given = self._given_start or (not self.learns and self.is_in_loop)
        self.policy = replace(self.policy, startup_s=self.threshold_without_steps().seconds, startup_given=is_given)

    @property
    def newest_collective(self) -> tuple[float, int] | None:
        """Returns the time at which the first rank's newest collective was seen, and its number; None if unknown."""
        first = min(self._pulse.seen_s, default=None)
        return (self._pulse.seen_s[first], self._pulse.newest[first]) if first is not None else None

    def last_collective_s(self, rank: int) -> float | None:
        """Returns when a new collective of a rank was last seen; None if ranks mark steps."""
        return self._pulse.seen_s.get(rank) if self.has_pulse_only else None

    def threshold_without_steps(self) -> rhythm.Threshold:
        return self._pulse.threshold(self._limits, self.cap_s)

    def _use(self, threshold: rhythm.Threshold) -> None:
        if threshold.seconds != self.policy.stall_s:
            self.policy = replace(
                self.policy,
                stall_s=threshold.seconds,
                max_stall_s=max(self.policy.max_stall_s, threshold.seconds),
                confirm_s=stall.confirm_after_s(threshold.seconds),
            )

    def _mark(self, progress: Progress, now: float, pulse_s: float) -> stall.ProgressMark:
        # Marks within a timed phase don't extend its timeout.
        timed = progress.phase and progress.phase_timeout_s and not progress.paused
        marked_ns = progress.phase_since_ns if timed else progress.marked_ns
        return stall.ProgressMark(
            rank=progress.rank,
            claimed_s=max(progress.claimed_ns / 1e9, pulse_s),
            last_step_s=progress.last_step_ns / 1e9 if progress.last_step_ns else None,
            step=progress.step,
            exited=self._has_ended(progress, now),
            paused=progress.paused,
            phase=progress.phase,
            phase_since_s=max(marked_ns, progress.exit_ns, self._all_returned_ns) / 1e9,
            phase_timeout_s=progress.phase_timeout_s,
        )

    def _has_ended(self, progress: Progress, now: float) -> bool:
        # A process that far outlives its script hangs in its shutdown, so it hasn't ended. Ranks that return early wait
        # for their peers. The kernel is asked only about quiet ranks.
        returned_ns = self._all_returned_ns
        marks_ns = max(progress.last_step_ns, progress.claimed_ns, progress.exit_ns, returned_ns)
        if progress.pid in self._gone or (progress.returned_ns and not returned_ns):
            return True
        if now - marks_ns / 1e9 < self.policy.stall_s:
            return progress.state == "exited" or bool(progress.returned_ns)
        process = identify(progress.pid)
        if process is None or process.start_ticks != progress.start_ticks or not process.is_alive():
            self._gone[progress.pid] = now
            return True
        return False

    @property
    def _all_returned_ns(self) -> int:
        living = [progress for progress in self.last_progress.values() if progress.pid not in self._gone]
        times = [progress.returned_ns for progress in living]
        return max(times, default=0) if all(times) else 0

    @property
    def paused(self) -> dict[int, float]:
        """Returns the ranks that have paused the watch, with the start of each pause."""
        return {mark.rank: mark.phase_since_s for mark in self._marks if mark.paused and not mark.exited}

    @property
    def has_ended(self) -> bool:
        pages = self.last_progress.values()
        return bool(pages) and all(page.state == "exited" or page.returned_ns or not _lives(page.pid) for page in pages)

    def conclude(
        self, suspected: stall.Stall, condition: JobCondition, now: float, limits: stall.Limits = stall.UNLIMITED
    ) -> stall.StallEvent | None:
        self.state, event = stall.conclude(self.state, suspected, condition, self.policy, now, limits)
        return event

    def current_stall(self, now: float) -> stall.Stall | None:
        """Returns the slowest rank's time without progress, even if short; None if no rank can be judged.

        Ranks without a beacon count, because other ranks might be waiting for them.
        """
        pulse_s = self._pulse.last_s or 0.0
        marks = [self._mark(progress, now, pulse_s) for progress in self.last_progress.values()]
        marks += [
            stall.ProgressMark(worker.rank, claimed_s=self.state.base_s, exited=not _lives(worker.pid))
            for worker in self.without_beacon()
        ]
        return stall.slowest(tuple(marks), self.policy, 0.0, now)

    def spell(self, now: float) -> quiet.Spell | None:
        """Returns the current time without progress; None if no rank can be judged, or if a rank announced it."""
        live = [mark for mark in self._marks if not mark.exited]
        if any(mark.paused or (mark.phase and mark.phase_timeout_s) for mark in live):
            return None
        slowest = stall.slowest(self._marks, self.policy, self.state.base_s, now)
        if slowest is None:
            return None
        made = slowest.mark_s > self.state.base_s
        if slowest.before_first_step:
            return quiet.Spell(slowest.mark_s, "start", made=made)
        usual_s, longest_s = rhythm.usual_s(self._step_rhythm)
        if not usual_s:
            usual_s = longest_s = self._mean_step_s(slowest.ranks[0])
        return quiet.Spell(slowest.mark_s, "steps" if usual_s else "first steps", usual_s, longest_s, made)

    def _mean_step_s(self, rank: int) -> float:
        # The first steps would distort the mean.
        progress = self.last_progress[rank]
        steps = progress.step or 0
        return progress.mean_step_s(steps) if steps > rhythm.WARM_UP else 0.0

    def mark_hung(self) -> None:
        self.state = replace(self.state, status=stall.Status.HUNG)

    def hold(self, until_s: float) -> None:
        is_suspected = self.state.status is stall.Status.CONFIRMING
        status = stall.Status.WATCHING if is_suspected else self.state.status
        self.state = replace(self.state, status=status, look_again_s=max(self.state.look_again_s, until_s))

    @property
    def is_hung(self) -> bool:
        return self.state.status is stall.Status.HUNG

    def resume(self, mark_s: float, now: float) -> None:
        present = self.current_stall(now)
        again_s = now + (stall.next_look_after_s(self.policy, present, now) if present is not None else 0.0)
        self.state = replace(self.state, status=stall.Status.UNDECIDED, mark_s=mark_s, look_again_s=again_s)

    def note_proof(self, mark_s: float) -> None:
        self.state = replace(self.state, proved_mark_s=mark_s)

    def note_work(self, at_s: float) -> None:
        self.state = replace(self.state, worked_s=max(self.state.worked_s, at_s))

    @property
    def quiet(self) -> Counters | None:
        """Returns the counters read soon after the job became quiet; None if unknown."""
        return self._quiet[1] if self._quiet is not None and self._quiet[0] == self._slowest_s else None

    @property
    def _slowest_s(self) -> float:
        slowest = stall.slowest(self._marks, self.policy, self.state.base_s, 0.0)
        return slowest.mark_s if slowest is not None else 0.0

    def keep_quiet_counters(self, used: Counters) -> None:
        self._quiet = (self._slowest_s, used)

    @property
    def quiet_links(self) -> Links | None:
        """Returns the error counters of links, read soon after the job became quiet; None if unknown."""
        return self._links[1] if self._links is not None and self._links[0] == self._slowest_s else None

    def keep_links(self, links: Links) -> None:
        self._links = (self._slowest_s, links)

    @property
    def usual_gpus(self) -> tuple[Gpu, ...]:
        """Returns the newest reading of the GPUs that a step of every rank followed."""
        return self._usual_reading[1]

    @property
    def _usual_reading(self) -> tuple[float, tuple[Gpu, ...]]:
        return next((reading for reading in reversed(self._gpus) if reading[0] < self._slowest_s), (0.0, ()))

    def keep_gpus(self, gpus: tuple[Gpu, ...], at_s: float) -> None:
        self._gpus = [self._usual_reading, (at_s, gpus)]

    def drop_quiet_counters(self) -> None:
        """Forgets the quiet job's counters after a look, because a rank's response to the look isn't work."""
        self._quiet = None

    def reset(self, now: float) -> None:
        self.state = stall.initial_state(now)

    def targets(self) -> tuple[Target, ...]:
        """Returns every rank that can be looked at, even without a beacon."""
        pages = self.roster.pages()
        targets = [self._with_beacon(rank, page) for rank, page in pages.items()]
        targets += [
            Target(worker.rank, worker.local_rank, worker.pid, identity.start_ticks)
            for rank, worker in self.roster.workers.items()
            if rank not in pages and (identity := identify(worker.pid)) is not None
        ]
        return tuple(sorted(targets, key=lambda target: target.rank))

    def _with_beacon(self, rank: int, page: ProgressPage) -> Target:
        progress = page.read()
        socket = self.roster.companion(page, layout.SERVER_SUFFIX) if page.server_up else None
        return Target(rank, progress.local_rank, progress.pid, progress.start_ticks, page.name, socket, page)

    def without_beacon(self) -> tuple[Worker, ...]:
        pages = self.roster.pages()
        return tuple(worker for rank, worker in sorted(self.roster.workers.items()) if rank not in pages)

    def acknowledge(self, *, agent: bool = True) -> None:
        """Releases the ranks and the agent, which wait while safelaunch looks at their peers."""
        for page in self.roster.pages().values():
            if page.read().exception_ns:
                page.acknowledge()
        if agent and self.roster.agent_page is not None:
            self.roster.agent_page.acknowledge()

    @property
    def world_size(self) -> int:
        sizes = [progress.world_size for progress in self.last_progress.values()]
        return max([*sizes, self.roster.world_size, len(self.roster.workers), 1])

    @property
    def unseen(self) -> tuple[int, ...]:
        """Returns the ranks of other nodes."""
        local = {*self._pages, *self.roster.workers, *self._damaged}
        return tuple(rank for rank in range(self.world_size) if rank not in local)

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """Returns the ranks of this node; empty until the world size is known."""
        if not (self.last_progress or self.roster.world_size):
            return ()
        unseen = set(self.unseen)
        return tuple(rank for rank in range(self.world_size) if rank not in unseen)

    def quiet_s(self, now: float) -> float:
        """Returns the seconds since the last step if that is unusually long, else 0."""
        stepping = [progress for progress in self.last_progress.values() if progress.last_step_ns]
        slowest = min(stepping, key=lambda progress: progress.last_step_ns, default=None)
        if slowest is None:
            return 0.0
        usual_s = slowest.mean_step_s(slowest.step or 1)
        waited_s = now - slowest.last_step_ns / 1e9
        return waited_s if waited_s > max(QUIET_S, QUIET_TIMES * usual_s) else 0.0

    def missed_s(self, now: float) -> float:
        """Returns how long this supervisor itself was interrupted, if that was recent; else 0."""
        until_s, seconds = self._gap
        return seconds if now - until_s < MISSED_S else 0.0

    def ended(self) -> tuple[int, ...]:
        return tuple(rank for rank, progress in self.last_progress.items() if progress.pid in self._gone)

    def steps(self) -> dict[int, int]:
        """Returns the time of each rank's newest step (CLOCK_MONOTONIC, ns)."""
        return {rank: page.read().last_step_ns for rank, page in self._pages.items()}

    def marks(self) -> dict[int, tuple[int, int, int, int]]:
        """Returns each rank's marks. Any change in them is progress."""
        return {rank: page.marks() for rank, page in self.roster.pages().items()}

    def mark_s(self, progress: Progress) -> float:
        marks_ns = max(progress.last_step_ns, progress.claimed_ns)
        return max(marks_ns / 1e9, self.last_collective_s(progress.rank) or 0.0)

    def age_s(self, progress: Progress, now: float) -> float:
        return now - self.mark_s(progress)

    def stepped_since(self, suspected: stall.Stall) -> bool:
        marks = [self.last_progress[rank] for rank in suspected.ranks if rank in self.last_progress]
        newest = max((max(p.last_step_ns, p.marked_ns) for p in marks), default=0)
        return newest / 1e9 > suspected.mark_s


def _lives(pid: int) -> bool:
    process = identify(pid)
    return process is not None and process.is_alive()
