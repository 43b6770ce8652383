"""The watch over one job's ranks: reads their pages, feeds the stall detector, says what is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from safelaunch.beacon import layout
from safelaunch.capture.look import Target
from safelaunch.launch.process import identify
from safelaunch.model import Progress
from safelaunch.watch import pulse, rhythm, stall
from safelaunch.watch.progress import AgentEvent, Page, Roster, Worker


@dataclass(frozen=True, slots=True)
class Glance:
    """What one tick saw: the agent's news, the stall detector's event, and ranks that ask to be looked at.

    ``raised``: ranks whose uncaught exception has reached the top and that now wait for us. ``damaged``: ranks whose
    page was overwritten just now; their steps are no longer known, and what it says is not believed.
    """

    agent: tuple[AgentEvent, ...]
    event: stall.Event | None
    raised: tuple[int, ...]
    damaged: tuple[int, ...] = ()


class Watch:
    """One job under watch. ``tick`` is cheap: it reads shared memory and stats one file."""

    def __init__(self, roster: Roster, policy: stall.Policy, now: float, bounds: rhythm.Bounds | None = None) -> None:
        """``bounds``: the threshold between steps is learned, within these; None: it is ``policy``'s, for good."""
        self.roster = roster
        self.policy = policy
        self.cap_s: float | None = None
        self.state = stall.started(now)
        self._bounds = bounds
        self._limits = pulse.Limits(policy.startup_s, policy.stall_s, bounds)
        self._pulse = pulse.Pulse()
        self._learned = rhythm.Learned()
        self.last_progress: dict[int, Progress] = {}
        self.notes: tuple[str, ...] = ()  # what slows this attempt down, as somebody found who looked closer
        self._attempt = 0
        self._gone: dict[int, float] = {}

    def tick(self, now: float) -> Glance:
        """Reads everything once. ``now``: CLOCK_MONOTONIC in seconds."""
        events = self.roster.refresh()
        if self.roster.attempt != self._attempt:
            self._attempt = self.roster.attempt
            self.state = stall.started(now)
            self._gone.clear()
            self.last_progress.clear()
            self._learned = rhythm.Learned()
            self._pulse = pulse.Pulse()
            self.policy = replace(self.policy, startup_s=self._limits.startup_s)
        damaged = self.roster.damaged()
        for rank in damaged:
            self.last_progress.pop(rank, None)
        pages = self.roster.pages()
        marks, raised = [], []
        for rank, page in pages.items():
            progress = page.read()
            self.last_progress[rank] = progress
            if progress.exception_ns and not page.acknowledged:
                raised.append(rank)
            marks.append(self._mark(progress, now))
        self._learn(tuple(marks), now)
        self.state, event = stall.tick(self.state, tuple(marks), self.policy, now)
        return Glance(tuple(events), event, tuple(raised), damaged)

    def _learn(self, marks: tuple[stall.Mark, ...], now: float) -> None:
        """The job's own rhythm: how long the mark of its slowest stepping rank stands still."""
        live = [mark for mark in marks if not mark.exited]
        times = [mark.last_step_s for mark in live if mark.last_step_s is not None]
        if self._bounds is None or not times:
            return
        mark_s, step = min(times), min(mark.step or 0 for mark in live if mark.last_step_s is not None)
        excused = any(m.paused or (m.phase and m.phase_timeout_s) for m in live) or self.state.base_s > mark_s
        self._learned = rhythm.learn(self._learned, step, mark_s, now, excused=excused)
        # Below this nobody is suspected whatever the threshold, and it need not be known.
        if now - mark_s >= min(self._bounds.floor_s, self.cap_s or self._bounds.floor_s):
            self._use(self.threshold())

    def threshold(self) -> rhythm.Threshold:
        """How long the job may go without a step just now, and why."""
        if self._bounds is None:
            return rhythm.Threshold(self.policy.stall_s, "--stall-timeout")
        return rhythm.threshold(self._learned, self._bounds, cap_s=self.cap_s)

    @property
    def has_pulse_only(self) -> bool:
        """Whether collectives are all that is to be seen of the job's progress: no rank has marked a step."""
        return bool(self.last_progress) and all(p.step is None for p in self.last_progress.values())

    @property
    def is_in_loop(self) -> bool:
        """Whether a job that marks no step has called collectives for a good while."""
        return self.has_pulse_only and pulse.is_in_loop(self._pulse, self._limits)

    @property
    def pulse_period_s(self) -> float:
        return self._limits.period_s

    def hear(self, newest: Mapping[int, int], now: float) -> None:
        """Takes note of how far the ranks' collectives are: rank → the number of the newest."""
        self._pulse = pulse.heard(self._pulse, newest, now)
        self.policy = replace(self.policy, startup_s=self.threshold_without_steps().seconds)

    def heard_s(self, rank: int) -> float | None:
        """When a rank that marks no step was last found in a new collective (CLOCK_MONOTONIC)."""
        return self._pulse.heard_s.get(rank) if self.has_pulse_only else None

    def threshold_without_steps(self) -> rhythm.Threshold:
        """How long a job that has not marked a step may go without a sign just now, and why."""
        return pulse.threshold(self._pulse, self._limits, self.cap_s)

    def _use(self, threshold: rhythm.Threshold) -> None:
        if threshold.seconds != self.policy.stall_s:
            self.policy = replace(
                self.policy,
                stall_s=threshold.seconds,
                max_stall_s=max(self.policy.max_stall_s, threshold.seconds),
                confirm_s=stall.confirm_after_s(threshold.seconds),
            )

    def _mark(self, progress: Progress, now: float) -> stall.Mark:
        return stall.Mark(
            rank=progress.rank,
            claimed_s=max(progress.claimed_ns / 1e9, self._pulse.last_s or 0.0),
            last_step_s=progress.last_step_ns / 1e9 if progress.last_step_ns else None,
            step=progress.step,
            exited=self._has_ended(progress, now),
            paused=progress.paused,
            phase=progress.phase,
            phase_since_s=max(progress.phase_since_ns, progress.exit_ns) / 1e9,
            phase_timeout_s=progress.phase_timeout_s,
        )

    def _has_ended(self, progress: Progress, now: float) -> bool:
        """Whether a rank has nothing more to do: its process is gone, or its script ended a moment ago.

        A process that is still there long after its script ended hangs in its own shutdown, and is watched on. The
        kernel is asked only about a rank that has been quiet for a while.
        """
        quiet_s = now - max(progress.last_step_ns, progress.claimed_ns, progress.exit_ns) / 1e9
        if progress.pid in self._gone:
            return True
        if quiet_s < self.policy.stall_s:
            return progress.state == "exited"
        found = identify(progress.pid)
        if found is None or found.start_ticks != progress.start_ticks or not found.is_alive():
            self._gone[progress.pid] = now
            return True
        return False

    def conclude(self, suspected: stall.Stall, movement: stall.Movement, now: float) -> stall.Event | None:
        """Feeds the closer look's result to the detector; see ``stall.conclude``."""
        self.state, event = stall.conclude(self.state, suspected, movement, self.policy, now)
        return event

    def targets(self) -> tuple[Target, ...]:
        """Every rank that can be looked at: those with a beacon, and those only the agent knows of."""
        pages = self.roster.pages()
        found = [self._with_beacon(rank, page) for rank, page in pages.items()]
        found += [
            Target(worker.rank, worker.local_rank, worker.pid, identity.start_ticks)
            for rank, worker in self.roster.workers.items()
            if rank not in pages and (identity := identify(worker.pid)) is not None
        ]
        return tuple(sorted(found, key=lambda target: target.rank))

    def _with_beacon(self, rank: int, page: Page) -> Target:
        progress = page.read()
        socket = self.roster.companion(page, layout.SERVER_SUFFIX) if page.server_up else None
        return Target(rank, progress.local_rank, progress.pid, progress.start_ticks, page.name, socket, page)

    def without_beacon(self) -> tuple[Worker, ...]:
        """Workers that the agent started and no beacon speaks for."""
        pages = self.roster.pages()
        return tuple(worker for rank, worker in sorted(self.roster.workers.items()) if rank not in pages)

    def acknowledge(self) -> None:
        """Lets go of ranks, and of the agent, that hold still so that their peers can be looked at."""
        for page in self.roster.pages().values():
            if page.read().exception_ns:
                page.acknowledge()
        if self.roster.agent_page is not None:
            self.roster.agent_page.acknowledge()

    @property
    def world_size(self) -> int:
        sizes = [progress.world_size for progress in self.last_progress.values()]
        return max([*sizes, len(self.roster.workers), 1])

    def ended(self) -> tuple[int, ...]:
        """Ranks whose process ended without saying so."""
        return tuple(rank for rank, progress in self.last_progress.items() if progress.pid in self._gone)

    def stepped_since(self, suspected: stall.Stall) -> bool:
        """Whether one of the ranks that a suspicion rests on has marked progress since."""
        marks = [self.last_progress[rank] for rank in suspected.ranks if rank in self.last_progress]
        newest = max((max(p.last_step_ns, p.phase_since_ns) for p in marks), default=0)
        return newest / 1e9 > suspected.mark_s
