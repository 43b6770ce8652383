"""Answers requests to a live run: its status at once, its bundle as soon as it is written. The job continues."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import msgspec

from safelaunch.bundle.staging import name_of
from safelaunch.job.job import Job
from safelaunch.job.paths import working_directory
from safelaunch.model import BundlePlace, Progress
from safelaunch.supervise import publishing
from safelaunch.supervise.cluster.messages import Question, Round
from safelaunch.supervise.control.protocol import (
    Client,
    DumpAnswer,
    RankStatus,
    Request,
    RunStatus,
    Server,
)
from safelaunch.supervise.looks import DUMP, ENDED, Kind
from safelaunch.supervise.on_request import GpuMemory, SilentRanks
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.recording import Recordings
from safelaunch.supervise.respond import Cancelled, Incident, JobView, observe
from safelaunch.supervise.rounds import others_of
from safelaunch.supervise.watch.quiet import UNKNOWN_S, is_quiet
from safelaunch.system.console import say
from safelaunch.system.redaction.redactor import Redactor

RATE_OVER_S = 10.0
SAMPLE_EVERY_S = 2.0
NEWEST = 64  # points of the history of a status
AROUND_S, AROUND_OLD_S = 1.5, 10.0  # for the other nodes' lines in an answer, and how old they may be then


@dataclass
class _Dump:
    """A requested bundle and who asked for it. ``working``: None until its turn. ``kind``: ``ENDED`` if the job has
    ended, so no node has a rank to look at. ``show``: also shows it here, for who has pressed Ctrl-\\.
    """

    bundle_dir: Path
    clients: list[Client] = field(default_factory=list)
    kind: Kind = DUMP
    show: Callable[[Report], None] | None = None
    working: Incident[Report] | None = None

    @property
    def needs_ranks(self) -> bool:
        return self.working is None or self.working.needs_ranks


class Live:
    """Serves the control socket of one run. Call ``tick`` on each tick of the supervisor; it never blocks."""

    def __init__(self, job: Job, view: JobView) -> None:
        assert job.run is not None
        self._job = job
        self._view = view
        self._watch, self._context, self._council = view.watch, view.context, view.council
        self._server = _server(job.run.control)
        self._asking: list[tuple[Client, float]] = []  # for the status, since when
        self._for_another: Incident[None] | None = None  # what another node has asked for
        self._dumps: deque[_Dump] = deque()
        self._silent_ranks = SilentRanks()
        self._gpu_memory = GpuMemory()
        self._cwd = os.fspath(working_directory())
        self._recordings = Recordings(view, tuple(job.plan.script))
        self._attempt = -1
        self._samples: deque[tuple[float, dict[int, int]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._dumps or self._asking or self._recordings.busy)

    def tick(self, now: float) -> None:
        """Answers every request that can be answered now."""
        self._sample(now)
        if self._server is not None:
            self._server.poll(self._handle)
        self._answer_status(now)
        self._advance_dumps()
        self._recordings.tick()
        self._take_for_another(now)

    def _handle(self, request: Request, client: Client) -> None:
        if request.command == "status":
            now = time.monotonic()
            self._gpu_memory.ask(now)
            self._silent_ranks.ask(self._silent_since(now), self._watch.targets(), now)
            self._asking.append((client, now if self._council.look_around() else now - AROUND_S))
            self._answer_status(now)
        elif request.command == "dump":
            self._queue_dump(Path(request.bundle_dir) if request.bundle_dir else self._context.bundle_dir, client)
        elif request.command == "record":
            self._recordings.ask(request, client)
        else:
            client.close()

    def _answer_status(self, now: float) -> None:
        """Answers who asks for the status: at once, or as soon as the other nodes' lines and a look are there."""
        waiting = []
        for client, since_s in self._asking:
            unknown = self._council.around(since_s) is None or self._silent_ranks.busy
            if unknown and now - since_s < AROUND_S:
                waiting.append((client, since_s))
            else:
                client.answer(self._context.redactor.tree(msgspec.to_builtins(self.status(now))))
        self._asking = waiting

    def _queue_dump(self, bundle_dir: Path, client: Client) -> None:
        self._queued(bundle_dir).clients.append(client)

    def _queued(self, bundle_dir: Path) -> _Dump:
        """Queues a bundle. A request for the place that is being written to shares that bundle; others wait."""
        if self._council.rounds.of_several:
            self._recordings.yield_to_dump()
        dump = next((dump for dump in self._dumps if dump.bundle_dir == bundle_dir), None)
        if dump is None:
            dump = _Dump(bundle_dir)
            self._dumps.append(dump)
        return dump

    def dump_here(self, show: Callable[[Report], None], *, ends: bool = False) -> None:
        """Takes a bundle and shows it with ``show``, which ``ends`` the job."""
        dump = self._queued(self._context.bundle_dir)
        if dump.show is None:
            dump.show = show
            then = "and then ending it" if ends else "which continues (Ctrl-C stops it)"
            say(f"writing a bundle of the running job, {then}")

    def dump_late(self, show: Callable[[Report], None]) -> None:
        """Writes a bundle of a job that has ended: what was found, logs, the last progress."""
        dump = self._queued(self._context.bundle_dir)
        if dump.show is None:
            dump.show, dump.kind = show, ENDED if dump.working is None else DUMP
            say("writing a bundle of what was found; the ranks have ended")

    @property
    def owes(self) -> bool:
        """Whether a bundle that is to be shown here isn't written yet."""
        return any(dump.show is not None for dump in self._dumps)

    def _advance_dumps(self) -> None:
        if not self._dumps:
            return
        dump = self._dumps[0]
        if dump.working is None:
            dump.working = Incident("dump", lambda at: self._write_dump(dump, at))
        elif dump.working.done:
            self._dumps.popleft()
            answer = _answer(dump.working, self._context.redactor)
            for client in dump.clients:
                client.answer(answer)
            if dump.show is not None and answer.bundle:
                dump.show(cast("Report", dump.working.result))
            elif dump.show is not None:
                say(f"no bundle could be written: {answer.problem}")

    def _take_for_another(self, now: float) -> None:
        """Takes evidence at the same time as the node that asks for it, which writes the bundle."""
        if self._council.rounds.presses:
            self._recordings.yield_to_dump()
        if self._for_another is not None and not self._for_another.done:
            return
        self._for_another = None
        if (wanted := self._council.rounds.wanted(now)) is None:
            return
        round_, question = wanted
        if question.kind == "record":
            self._for_another = self._recordings.for_another(round_, question)
        else:
            self._for_another = Incident("for another node", lambda at: self._answer_dump(round_, at))

    def _answer_dump(self, round_: Round, at: Incident[None]) -> None:
        found = observe(DUMP, self._view, at)
        try:
            self._council.rounds.answer(round_, found.evidence)
        finally:
            found.discard()

    @property
    def writing(self) -> bool:
        """Whether a bundle is being written for which the ranks are no longer needed."""
        return any(not dump.needs_ranks for dump in self._dumps)

    def finish(self) -> None:
        """The job is being stopped: finishes the bundle that has its evidence, and gives up what needs the ranks."""
        self._recordings.finish()
        for dump in [dump for dump in self._dumps if dump.needs_ranks]:
            if dump.working is not None:
                dump.working.cancel()
            self._dumps.remove(dump)
            if dump.show is not None:
                say("dump cancelled: the job is stopping")
            for client in dump.clients:
                client.answer(DumpAnswer(problem="the job is being stopped"))
        self._advance_dumps()

    def _write_dump(self, dump: _Dump, at: Incident[Report]) -> Report:
        context = replace(self._context, bundle_dir=dump.bundle_dir)
        view, for_finding = replace(self._view, context=context), dump.show is not None
        if dump.kind is ENDED:
            return publishing.finish(observe(ENDED, view, at, for_finding=for_finding))
        with self._council.rounds.asking(Question()) as answers:
            found = observe(DUMP, view, at, for_finding=for_finding)
            if at.cancelled.is_set():
                found.discard()
                raise Cancelled
            others = others_of(answers(threading.Event()), context.host)
        if not others.evidence:
            return publishing.finish(found)
        verdict = publishing.judged(others.with_own(found.evidence), context)
        name = name_of(context.run_name, time.time(), verdict.outcome)
        place = BundlePlace(context.host, os.fspath(context.bundle_dir / name), True)
        return publishing.finish(found, Agreement(msgspec.structs.replace(verdict, bundle=place), name, others))

    # --- status -----------------------------------------------------------------------------------------------------

    def _sample(self, now: float) -> None:
        """Records the steps of the last seconds, for the rate."""
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
        """The run's state at ``now`` (CLOCK_MONOTONIC, seconds)."""
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
            inconsistent=[*self._watch.inconsistent],
            history=self._history(now),
            job=self._council.job,
            nodes=[*(self._council.around(now - AROUND_OLD_S) or ())],  # only answers to ``status`` ask for it
            alone=self._council.why_alone if self._watch.unseen and not self._council.is_covered else "",
        )

    def _history(self, now: float) -> list[tuple[float, int]]:
        stepping = [p for p in self._watch.last_progress.values() if p.step is not None]
        slowest = min(stepping, key=lambda p: p.step or 0, default=None)
        points = self._watch.steps_of(slowest.rank) if slowest is not None else ()
        return [(round(max(0.0, now - at_ns / 1e9), 2), step) for at_ns, step in points[-NEWEST:]]

    def _silent_since(self, now: float) -> dict[int, float]:
        """The ranks that are silent for longer than any step, and have not said so: rank → its newest progress."""
        usual_s = self._watch.usual_step_s
        pages = [one for one in self._watch.last_progress.values() if not (one.paused or one.phase)]
        ages = {one.rank: self._watch.age_s(one, now) for one in pages}
        return {
            one.rank: self._watch.mark_s(one)
            for one in pages
            if is_quiet(ages[one.rank], usual_s) or (not usual_s and ages[one.rank] > UNKNOWN_S)
        }

    def _rank(self, rank: int, progress: Progress, now: float) -> RankStatus:
        signals = ["beacon"]
        if progress.optimizer_steps:
            signals.append("optimizer steps")
        elif progress.step is not None:
            signals.append("safelaunch.step()")
        if self._watch.heard_s(rank) is not None:
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
            phase=self._context.redactor.said(progress.phase),
            signals=", ".join(signals),
            rss_bytes=rss_bytes(progress.pid),
            gpu_bytes=self._gpu_memory.of(progress.pid),
            doing=self._context.redactor.said(self._silent_ranks.words(rank, self._watch.mark_s(progress))),
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


# The stages that a page names, in words for the user.
_STATES = {"started": "starting", "torch": "running", "exception": "failed"}


def state_of(progress: Progress) -> str:
    """What the rank is doing, by its page: ``starting``, ``running``, ``paused``, ``failed`` or ``exited``.

    A rank without torch counts as running once it steps or names a phase.
    """
    if progress.paused:
        return "paused"
    runs = progress.state == "started" and (progress.step is not None or progress.phase)
    return "running" if runs else _STATES.get(progress.state, progress.state)


def rss_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _server(path: Path) -> Server | None:
    try:
        return Server(path)
    except OSError as error:
        say(f"'safelaunch status' and 'safelaunch dump' cannot see this run: {error.strerror or error}")
        return None


def _answer(working: Incident[Report], redactor: Redactor) -> DumpAnswer:
    try:
        report = working.result
    except Exception as error:  # noqa: BLE001 - the client gets the reason, and the job continues
        return DumpAnswer(problem=redactor.text(f"{type(error).__name__}: {error}"))
    if report is None:
        return DumpAnswer(problem="the job is being stopped")
    published = report.published
    path = "" if published.lost else str(published.path)
    return DumpAnswer(path, report.verdict.summary, published.problem)
