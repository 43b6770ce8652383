"""The watch over one job's ranks: reads their pages, feeds the stall detector, and returns its events."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from safelaunch.beacon import layout
from safelaunch.capture.counters import Counters
from safelaunch.capture.look import Target
from safelaunch.capture.pages import AgentEvent, ProgressPage, Roster, Worker
from safelaunch.job.process import identify
from safelaunch.model import EarlyLook, JobCondition, Progress, WrongResult
from safelaunch.settings.options import STALL_CEILING_S, STARTUP_MAX_STALL_S, Settings
from safelaunch.supervise.watch import quiet, rhythm, stall
from safelaunch.supervise.watch.work import Background

# Longer than this, and this many times longer than a usual step: the job was stalled.
QUIET_S, QUIET_TIMES = 2.0, 5.0
MISSED_S = 30.0  # after a gap, for so long what has ended may have ended during it


def policy_of(settings: Settings) -> stall.Policy:
    """The thresholds of a run until its rhythm is known."""
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
    """The bounds of the learned threshold; None if the user gave a fixed one."""
    if settings.stall_timeout_s is not None:
        return None
    floor_s = settings.stall_floor_s
    ceiling_s = max(floor_s, STALL_CEILING_S)
    return rhythm.ThresholdBounds(floor_s, ceiling_s, min(ceiling_s, max(floor_s, settings.effective_stall_timeout_s)))


@dataclass(frozen=True, slots=True)
class Glance:
    """What one tick saw: the agent's events, the stall detector's event, and ranks that need a look.

    ``raised``: ranks with an uncaught exception that now wait for us. ``damaged``: ranks whose page was just
    overwritten; safelaunch no longer knows their steps and ignores the page.
    """

    agent: tuple[AgentEvent, ...]
    event: stall.StallEvent | None
    raised: tuple[int, ...]
    damaged: tuple[int, ...] = ()


class Watch:
    """The watch over one job. ``tick`` is cheap: it reads shared memory and stats one file."""

    def __init__(
        self, roster: Roster, policy: stall.Policy, now: float, bounds: rhythm.ThresholdBounds | None = None
    ) -> None:
        """``bounds``: the threshold between steps is learned within these; None: ``policy``'s threshold is fixed."""
        self.roster = roster
        self.policy = policy
        self.cap_s: float | None = None
        self.background = Background()  # of this attempt, learned by ``BackgroundPoller`` while it makes steps
        # Since when the job is quiet, and what it had done some time later.
        self._quiet: tuple[float, Counters] | None = None
        self.state = stall.initial_state(now)
        self._bounds = bounds
        self._given_start = policy.startup_given
        self._limits = rhythm.PulseLimits(policy.startup_s, policy.stall_s, bounds)
        self._pulse = rhythm.Pulse()
        self._learned = rhythm.Learned()
        self.last_progress: dict[int, Progress] = {}
        self._strides: dict[int, Strides] = {}
        self.notes: tuple[str, ...] = ()  # what slows this attempt down, found by ``HealthPoller``
        self.attempt = (0, 0)  # ``roster.attempt`` and ``roster.starts``
        self._gone: dict[int, float] = {}
        self._damaged: set[int] = set()
        self._gap = (0.0, 0.0)  # the last time that this supervisor did not run itself: until when, and how long
        self._pages: dict[int, ProgressPage] = {}  # of the newest tick
        self._marks: tuple[stall.ProgressMark, ...] = ()
        self.early: tuple[EarlyLook, ...] = ()  # the newest of this attempt, found by ``EarlyLooks``
        self.wrong_results: tuple[WrongResult, ...] = ()  # of all attempts; written by monitors

    def tick(self, now: float) -> Glance:
        """Reads everything once. ``now``: CLOCK_MONOTONIC in seconds."""
        events = self.roster.refresh()
        if (self.roster.attempt, self.roster.starts) != self.attempt:
            self.attempt = self.roster.attempt, self.roster.starts
            self.state = stall.initial_state(now)
            self._gone.clear()
            self._damaged.clear()
            self.last_progress.clear()
            self._strides.clear()
            self.early = ()
            self._learned = rhythm.Learned()
            self._pulse = rhythm.Pulse()
            self.background, self._quiet = Background(), None
            self.policy = replace(self.policy, startup_s=self._limits.startup_s, startup_given=self._given_start)
        damaged = self.roster.damaged()
        for rank in damaged:
            self.last_progress.pop(rank, None)
        self._damaged.update(damaged)
        self._pages = self.roster.pages()
        marks, raised = [], []
        heard_s = self._pulse.last_s or 0.0
        for rank, page in self._pages.items():
            progress = page.read()
            self.last_progress[rank] = progress
            if progress.step is not None:
                self._strides.setdefault(rank, Strides()).saw(progress.last_step_ns, progress.step)
            if progress.exception_ns and not page.acknowledged:
                raised.append(rank)
            marks.append(self._mark(progress, now, heard_s))
        self._marks = tuple(marks)
        self._learn(self._marks, now)
        if now - self.state.last_tick_s > stall.CLOCK_GAP_S:
            self._gap = now, now - self.state.last_tick_s
        self.state, event = stall.tick(self.state, self._marks, self.policy, now)
        return Glance(tuple(events), event, tuple(raised), damaged)

    def _learn(self, marks: tuple[stall.ProgressMark, ...], now: float) -> None:
        """Learns the job's rhythm: the time between marks of its slowest stepping rank."""
        live = [mark for mark in marks if not mark.exited]
        times = [mark.last_step_s for mark in live if mark.last_step_s is not None]
        if not times:
            return
        mark_s, step = min(times), min(mark.step or 0 for mark in live if mark.last_step_s is not None)
        excused = any(m.paused or (m.phase and m.phase_timeout_s) for m in live) or self.state.base_s > mark_s
        if self._learned.last_step is None and not excused:
            self._learned = self._begun(mark_s)
        self._learned = rhythm.learn(self._learned, step, mark_s, now, excused=excused)
        # Below this, no threshold suspects anybody, so it need not be computed.
        if self._bounds is not None and now - mark_s >= min(self._bounds.floor_s, self.cap_s or self._bounds.floor_s):
            self._use(self.threshold())

    def _begun(self, mark_s: float) -> rhythm.Learned:
        """What the first step tells, which the pages keep: a quick job has made many before it is seen first."""
        stepping = [p for p in self.last_progress.values() if p.step is not None and not p.exit_ns and p.first_step_ns]
        first_s = max((p.first_step_ns / 1e9 for p in stepping), default=0.0)
        known = rhythm.Learned()
        return rhythm.learn(known, 1, first_s, first_s) if 0.0 < first_s < mark_s else known

    @property
    def learns(self) -> bool:
        """Whether the threshold between steps is learned, not set."""
        return self._bounds is not None

    def steps_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Some of the steps that this rank has marked: when, and which."""
        strides = self._strides.get(rank)
        return strides.points() if strides is not None else ()

    def threshold(self) -> rhythm.Threshold:
        """How long the job may currently go without a step, and why."""
        if self._bounds is None:
            return rhythm.Threshold(self.policy.stall_s, "--stall-timeout")
        return rhythm.threshold(self._learned, self._bounds, cap_s=self.cap_s)

    @property
    def usual_step_s(self) -> float:
        """The median of the recent ordinary steps; 0 while too few are known."""
        return rhythm.usual_s(self._learned)[0]

    @property
    def has_pulse_only(self) -> bool:
        """Whether collectives are the only visible progress: no rank has marked a step."""
        return bool(self.last_progress) and all(p.step is None for p in self.last_progress.values())

    @property
    def is_in_loop(self) -> bool:
        """Whether a job that marks no step has called collectives for a good while."""
        return self.has_pulse_only and self._pulse.is_in_loop(self._limits)

    @property
    def pulse_period_s(self) -> float:
        return self._limits.period_s

    def hear(self, newest: Mapping[int, int], now: float) -> None:
        """Records how far the ranks' collectives are: rank → number of the newest."""
        self._pulse = self._pulse.heard(newest, now)
        given = self._given_start or (not self.learns and self.is_in_loop)  # the threshold is that of steps then
        self.policy = replace(self.policy, startup_s=self.threshold_without_steps().seconds, startup_given=given)

    def heard_s(self, rank: int) -> float | None:
        """When a rank that marks no step was last found in a new collective (CLOCK_MONOTONIC)."""
        return self._pulse.heard_s.get(rank) if self.has_pulse_only else None

    def threshold_without_steps(self) -> rhythm.Threshold:
        """How long a job that has marked no step may currently go without a sign of progress, and why."""
        return self._pulse.threshold(self._limits, self.cap_s)

    def _use(self, threshold: rhythm.Threshold) -> None:
        if threshold.seconds != self.policy.stall_s:
            self.policy = replace(
                self.policy,
                stall_s=threshold.seconds,
                max_stall_s=max(self.policy.max_stall_s, threshold.seconds),
                confirm_s=stall.confirm_after_s(threshold.seconds),
            )

    def _mark(self, progress: Progress, now: float, heard_s: float) -> stall.ProgressMark:
        # What begins or ends within a phase that has a timeout is progress, and doesn't give that phase more time.
        timed = progress.phase and progress.phase_timeout_s and not progress.paused
        marked_ns = progress.phase_since_ns if timed else progress.marked_ns
        return stall.ProgressMark(
            rank=progress.rank,
            claimed_s=max(progress.claimed_ns / 1e9, heard_s),
            last_step_s=progress.last_step_ns / 1e9 if progress.last_step_ns else None,
            step=progress.step,
            exited=self._has_ended(progress, now),
            paused=progress.paused,
            phase=progress.phase,
            phase_since_s=max(marked_ns, progress.exit_ns, self._all_returned_ns) / 1e9,
            phase_timeout_s=progress.phase_timeout_s,
        )

    def _has_ended(self, progress: Progress, now: float) -> bool:
        """Whether a rank has nothing more to do: its process is gone, or its script ended a moment ago.

        A process that outlives its script for long hangs in its own shutdown, so the watch continues. A rank whose
        function has returned waits for those of its peers. The kernel is asked only about a rank that has been quiet
        for a while.
        """
        returned_ns = self._all_returned_ns
        marks_ns = max(progress.last_step_ns, progress.claimed_ns, progress.exit_ns, returned_ns)
        if progress.pid in self._gone or (progress.returned_ns and not returned_ns):
            return True
        if now - marks_ns / 1e9 < self.policy.stall_s:
            return progress.state == "exited" or bool(progress.returned_ns)
        found = identify(progress.pid)
        if found is None or found.start_ticks != progress.start_ticks or not found.is_alive():
            self._gone[progress.pid] = now
            return True
        return False

    @property
    def _all_returned_ns(self) -> int:
        """When the last function of a rank returned; 0 while one of them runs."""
        living = [one for one in self.last_progress.values() if one.pid not in self._gone]
        return max((one.returned_ns for one in living), default=0) if all(one.returned_ns for one in living) else 0

    @property
    def paused(self) -> dict[int, float]:
        """The ranks that suspend the watch → since when."""
        return {mark.rank: mark.phase_since_s for mark in self._marks if mark.paused and not mark.exited}

    @property
    def has_ended(self) -> bool:
        """Whether no rank of this attempt has anything more to do: the launcher is about to end, or to start others."""
        pages = self.last_progress.values()
        return bool(pages) and all(page.state == "exited" or page.returned_ns or not _lives(page.pid) for page in pages)

    def conclude(
        self, suspected: stall.Stall, found: JobCondition, now: float, limits: stall.Limits = stall.UNLIMITED
    ) -> stall.StallEvent | None:
        """Feeds the closer look's result to the detector; see ``stall.conclude``."""
        self.state, event = stall.conclude(self.state, suspected, found, self.policy, now, limits)
        return event

    def standing(self, now: float) -> stall.Stall | None:
        """How far behind the slowest rank is, whether or not that is long; None when there is nobody to judge.

        Ranks without a beacon are seen as well: they raise no suspicion, and others may wait for them.
        """
        heard_s = self._pulse.last_s or 0.0
        marks = [self._mark(progress, now, heard_s) for progress in self.last_progress.values()]
        marks += [
            stall.ProgressMark(worker.rank, claimed_s=self.state.base_s, exited=not _lives(worker.pid))
            for worker in self.without_beacon()
        ]
        return stall.slowest(tuple(marks), self.policy, 0.0, now)

    def spell(self, now: float) -> quiet.Spell | None:
        """How long the job has been quiet; None if nobody is to be judged, or a rank has said that it will be quiet."""
        live = [mark for mark in self._marks if not mark.exited]
        if any(mark.paused or (mark.phase and mark.phase_timeout_s) for mark in live):
            return None
        found = stall.slowest(self._marks, self.policy, self.state.base_s, now)
        if found is None:
            return None
        made = found.mark_s > self.state.base_s
        if found.before_first_step:
            return quiet.Spell(found.mark_s, "start", made=made)
        usual_s, longest_s = rhythm.usual_s(self._learned)
        if not usual_s:
            usual_s = longest_s = self._mean_step_s(found.ranks[0])
        return quiet.Spell(found.mark_s, "steps" if usual_s else "first steps", usual_s, longest_s, made)

    def _mean_step_s(self, rank: int) -> float:
        """Of all steps so far, which the first ones make too long; 0 while these are all."""
        progress = self.last_progress[rank]
        steps = progress.step or 0
        return progress.mean_step_s(steps) if steps > rhythm.WARM_UP else 0.0

    def mark_hung(self) -> None:
        """It hangs, as all nodes have found together: nothing is suspected any more."""
        self.state = replace(self.state, status=stall.Status.HUNG)

    def hold(self, until_s: float) -> None:
        """Suspects nothing until then: a failure has time to end the ranks."""
        is_suspected = self.state.status is stall.Status.CONFIRMING
        status = stall.Status.WATCHING if is_suspected else self.state.status
        self.state = replace(self.state, status=status, look_again_s=max(self.state.look_again_s, until_s))

    @property
    def is_hung(self) -> bool:
        return self.state.status is stall.Status.HUNG

    def release(self, mark_s: float, now: float) -> None:
        """What was held goes on, and is looked at again later."""
        held = self.standing(now)
        again_s = now + (stall.next_look_after_s(self.policy, held, now) if held is not None else 0.0)
        self.state = replace(self.state, status=stall.Status.UNDECIDED, mark_s=mark_s, look_again_s=again_s)

    def is_proved_dead(self, mark_s: float) -> None:
        """An early look has proved it, of the quiet time since ``mark_s``."""
        self.state = replace(self.state, proved_mark_s=mark_s)

    def saw_work(self, at_s: float) -> None:
        """Records that an early look saw the job work."""
        self.state = replace(self.state, worked_s=max(self.state.worked_s, at_s))

    @property
    def quiet(self) -> Counters | None:
        """What the job had done some time after it became quiet; None while that is not known."""
        return self._quiet[1] if self._quiet is not None and self._quiet[0] == self._slowest_s else None

    @property
    def _slowest_s(self) -> float:
        found = stall.slowest(self._marks, self.policy, self.state.base_s, 0.0)
        return found.mark_s if found is not None else 0.0

    def take_quiet(self, used: Counters) -> None:
        self._quiet = (self._slowest_s, used)

    def read_quiet_again(self) -> None:
        """A look is over. What the ranks did to answer it is no work; nor is what they did before it, at the next."""
        self._quiet = None

    def reset(self, now: float) -> None:
        """The clock is started again."""
        self.state = stall.initial_state(now)

    def targets(self) -> tuple[Target, ...]:
        """Every rank that can be looked at: those with a beacon, and those that only the agent knows."""
        pages = self.roster.pages()
        found = [self._with_beacon(rank, page) for rank, page in pages.items()]
        found += [
            Target(worker.rank, worker.local_rank, worker.pid, identity.start_ticks)
            for rank, worker in self.roster.workers.items()
            if rank not in pages and (identity := identify(worker.pid)) is not None
        ]
        return tuple(sorted(found, key=lambda target: target.rank))

    def _with_beacon(self, rank: int, page: ProgressPage) -> Target:
        progress = page.read()
        socket = self.roster.companion(page, layout.SERVER_SUFFIX) if page.server_up else None
        return Target(rank, progress.local_rank, progress.pid, progress.start_ticks, page.name, socket, page)

    def without_beacon(self) -> tuple[Worker, ...]:
        """Workers that the agent started and that have no beacon."""
        pages = self.roster.pages()
        return tuple(worker for rank, worker in sorted(self.roster.workers.items()) if rank not in pages)

    def acknowledge(self, *, agent: bool = True) -> None:
        """Releases the ranks, and the agent, that wait so that safelaunch can look at their peers."""
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
        """The ranks that this supervisor does not see, because they run on other nodes."""
        seen = {*self._pages, *self.roster.workers, *self._damaged}
        return tuple(rank for rank in range(self.world_size) if rank not in seen)

    @property
    def seen(self) -> tuple[int, ...]:
        """The ranks that are this supervisor's, once one of them or torchrun has said how many there are in all."""
        if not (self.last_progress or self.roster.world_size):
            return ()
        unseen = set(self.unseen)
        return tuple(rank for rank in range(self.world_size) if rank not in unseen)

    def quiet_s(self, now: float) -> float:
        """Seconds since the last step if that is far longer than usual steps; else 0."""
        stepping = [progress for progress in self.last_progress.values() if progress.last_step_ns]
        slowest = min(stepping, key=lambda progress: progress.last_step_ns, default=None)
        if slowest is None:
            return 0.0
        usual_s = slowest.mean_step_s(slowest.step or 1)
        waited_s = now - slowest.last_step_ns / 1e9
        return waited_s if waited_s > max(QUIET_S, QUIET_TIMES * usual_s) else 0.0

    def missed_s(self, now: float) -> float:
        """How long this supervisor itself was stopped until a moment ago, and did not hear what others said; else 0."""
        until_s, seconds = self._gap
        return seconds if now - until_s < MISSED_S else 0.0

    def ended(self) -> tuple[int, ...]:
        """Ranks whose process ended without reporting it."""
        return tuple(rank for rank, progress in self.last_progress.items() if progress.pid in self._gone)

    def steps(self) -> dict[int, int]:
        """When each rank marked its newest step (CLOCK_MONOTONIC, ns), as its page says now."""
        return {rank: page.read().last_step_ns for rank, page in self._pages.items()}

    def marks(self) -> dict[int, tuple[int, int, int, int]]:
        """What each rank's page says now of its progress: another value, and it has made some."""
        return {rank: page.marks() for rank, page in self.roster.pages().items()}

    def mark_s(self, progress: Progress) -> float:
        """When the rank last showed progress (CLOCK_MONOTONIC)."""
        marks_ns = max(progress.last_step_ns, progress.claimed_ns)
        return max(marks_ns / 1e9, self.heard_s(progress.rank) or 0.0)

    def age_s(self, progress: Progress, now: float) -> float:
        """How long the rank has shown no progress."""
        return now - self.mark_s(progress)

    def stepped_since(self, suspected: stall.Stall) -> bool:
        """Whether one of the ranks under suspicion has marked progress since."""
        marks = [self.last_progress[rank] for rank in suspected.ranks if rank in self.last_progress]
        newest = max((max(p.last_step_ns, p.marked_ns) for p in marks), default=0)
        return newest / 1e9 > suspected.mark_s


def _lives(pid: int) -> bool:
    found = identify(pid)
    return found is not None and found.is_alive()


MOST_POINTS = 128


class Strides:
    """When a rank marked which step. However long the job runs, at most ``most`` points are kept, the newest with them.

    Full, it forgets every second point, and takes half as many from then on, so that the points stay evenly spread over
    the steps.
    """

    __slots__ = ("_every", "_most", "_newest", "_points")

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._every = 1  # so many steps apart
        self._points = array("q")  # time, step, time, step, ...
        self._newest = (0, 0)

    def saw(self, at_ns: int, step: int) -> None:
        """Takes what a progress page says now; most of the time, nothing is new."""
        if at_ns <= self._newest[0]:
            return
        self._newest = (at_ns, step)
        if self._points and step - self._points[-1] < self._every:
            return
        self._points.extend((at_ns, step))
        if len(self._points) >= 2 * self._most:
            pairs = [self._points[at : at + 2] for at in range(0, len(self._points), 4)]
            self._points = array("q", [number for pair in pairs for number in pair])
            first, last = self._points[1], self._points[-1]
            self._every = max(2 * self._every, (last - first) // self._most)

    def points(self) -> tuple[tuple[int, int], ...]:
        """Oldest first, as ``(nanoseconds of CLOCK_MONOTONIC, step)``."""
        kept = [(self._points[at], self._points[at + 1]) for at in range(0, len(self._points), 2)]
        return tuple(kept if kept and kept[-1] == self._newest else [*kept, *([self._newest] if kept else [])])
