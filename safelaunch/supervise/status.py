"""Answers requests for a live run's status.

GPU memory, silent ranks and other nodes take a moment to read. An answer contains the facts that are available by then;
the next answer contains the rest.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import msgspec

from safelaunch.job.job import Job
from safelaunch.job.paths import working_directory
from safelaunch.model import Progress
from safelaunch.supervise.control.protocol import Client, RankStatus, RunStatus
from safelaunch.supervise.gpu_memory import GpuMemory
from safelaunch.supervise.respond import JobView
from safelaunch.supervise.silent_ranks import SilentRanks
from safelaunch.supervise.watch.quiet import UNKNOWN_S, is_quiet

RATE_OVER_S = 10.0
SAMPLE_EVERY_S = 2.0
NEWEST = 64
SURVEY_S, SURVEY_AGE_S = 1.5, 10.0  # to wait for other nodes' lines; their greatest age


class StatusRequests:
    def __init__(self, job: Job, view: JobView) -> None:
        self._job = job
        self._watch, self._context, self._council = view.watch, view.context, view.council
        self._asking: list[tuple[Client, float]] = []
        self._silent_ranks = SilentRanks()
        self._gpu_memory = GpuMemory()
        self._cwd = os.fspath(working_directory())
        self._attempt = -1
        self._samples: deque[tuple[float, dict[int, int]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._asking)

    def ask(self, client: Client) -> None:
        now = time.monotonic()
        self._gpu_memory.ask(now)
        self._silent_ranks.ask(self._silent_since(now), self._watch.targets(), now)
        self._asking.append((client, now if self._council.request_survey() else now - SURVEY_S))
        self.tick(now)

    def tick(self, now: float) -> None:
        """Answers clients, possibly after waiting for a look and for the other nodes' lines."""
        self._sample(now)
        waiting = []
        for client, since_s in self._asking:
            unknown = self._council.survey(since_s) is None or self._silent_ranks.busy
            if unknown and now - since_s < SURVEY_S:
                waiting.append((client, since_s))
            else:
                client.answer(self._context.redactor.tree(msgspec.to_builtins(self.status(now))))
        self._asking = waiting

    def _sample(self, now: float) -> None:
        if self._watch.roster.attempt != self._attempt:
            self._attempt = self._watch.roster.attempt
            self._samples.clear()
        if self._samples and now - self._samples[-1][0] < SAMPLE_EVERY_S:
            return
        steps = {rank: p.step for rank, p in self._watch.last_progress.items() if p.step is not None}
        self._samples.append((now, steps))
        while now - self._samples[0][0] > RATE_OVER_S + SAMPLE_EVERY_S:
            self._samples.popleft()

    def status(self, now: float) -> RunStatus:
        plan, settings = self._job.plan, self._job.plan.settings
        stepping = any(p.step is not None for p in self._watch.last_progress.values())
        threshold = self._watch.threshold() if stepping else self._watch.threshold_without_steps()
        threshold_s, why = round(threshold.seconds, 1), threshold.why
        if stepping:
            why = f"auto: {why}" if settings.stall_timeout_s is None else settings.origin("stall-timeout")
        elif threshold_s == settings.startup_timeout_s:
            why = f"before the first step: {settings.origin('startup-timeout')}"
        return RunStatus(
            run=self._context.run_dir.name,
            name=plan.run_name,
            supervisor_pid=os.getpid(),
            cwd=self._cwd,
            command=self._context.redactor.argv(plan.script),
            started_unix_s=self._job.started_unix_s,
            attempt=self._watch.roster.attempt,
            world_size=self._watch.world_size,
            watch=self._watch.state.status.value,
            threshold_s=threshold_s,
            threshold_why=why,
            usual_step_s=round(self._watch.usual_step_s, 4),
            ranks=[
                *(self._rank(rank, p, now) for rank, p in sorted(self._watch.last_progress.items())),
                *self._silent(),
            ],
            notes=[*self._watch.notes],
            early=[*self._watch.early],
            wrong_results=[*self._watch.wrong_results],
            history=self._history(now),
            job=self._council.job,
            bundle_dir=os.fspath(self._context.bundle_dir),
            nodes=[*(self._council.survey(now - SURVEY_AGE_S) or ())],
            alone=self._council.why_alone if self._watch.unseen and not self._council.is_covered else "",
        )

    def _history(self, now: float) -> list[tuple[float, int]]:
        stepping = [p for p in self._watch.last_progress.values() if p.step is not None]
        slowest = min(stepping, key=lambda p: p.step or 0, default=None)
        points = self._watch.steps_of(slowest.rank) if slowest is not None else ()
        return [(round(max(0.0, now - at_ns / 1e9), 2), step) for at_ns, step in points[-NEWEST:]]

    def _silent_since(self, now: float) -> dict[int, float]:
        usual_s = self._watch.usual_step_s
        pages = [page for page in self._watch.last_progress.values() if not (page.paused or page.phase)]
        ages = {page.rank: self._watch.age_s(page, now) for page in pages}
        return {
            page.rank: self._watch.mark_s(page)
            for page in pages
            if is_quiet(ages[page.rank], usual_s) or (not usual_s and ages[page.rank] > UNKNOWN_S)
        }

    def _rank(self, rank: int, progress: Progress, now: float) -> RankStatus:
        signals = ["beacon"]
        if progress.optimizer_steps:
            signals.append("optimizer steps")
        elif progress.step is not None:
            signals.append("safelaunch.step()")
        if self._watch.last_collective_s(rank) is not None:
            signals.append("collectives")
        pages = self._watch.roster.pages()
        if rank in pages and pages[rank].server_up:
            signals.append("worker server")
        return RankStatus(
            rank=rank,
            pid=progress.pid,
            state=state_of(progress),
            step=progress.step,
            steps_per_s=self._rate(rank, progress, now),
            age_s=round(self._watch.age_s(progress, now), 3),
            phase=self._context.redactor.job_text(progress.phase),
            signals=", ".join(signals),
            rss_bytes=rss_bytes(progress.pid),
            gpu_bytes=self._gpu_memory.of(progress.pid),
            doing=self._context.redactor.job_text(self._silent_ranks.words(rank, self._watch.mark_s(progress))),
        )

    def _rate(self, rank: int, progress: Progress, now: float) -> float | None:
        then, steps = self._samples[0] if self._samples else (now, {})
        if progress.step is None or rank not in steps or now - then < SAMPLE_EVERY_S / 2:
            return None
        return round((progress.step - steps[rank]) / (now - then), 3)

    def _silent(self) -> list[RankStatus]:
        return [
            RankStatus(worker.rank, worker.pid, "no beacon", signals="none") for worker in self._watch.without_beacon()
        ]


# in the user's words
_STATES = {"started": "starting", "torch": "running", "exception": "failed"}


def state_of(progress: Progress) -> str:
    """Returns a rank's state: ``starting``, ``running``, ``paused``, ``failed`` or ``exited``.

    A rank without torch counts as running once it marks a step or names a phase.
    """
    if progress.paused:
        return "paused"
    runs = progress.state == "started" and (progress.step is not None or progress.phase)
    return "running" if runs else _STATES.get(progress.state, progress.state)


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
