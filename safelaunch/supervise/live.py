"""Answers requests to a live run: its status, a bundle once it is written, samples of where the time goes.

The job continues, and the supervisor does not wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import msgspec

from safelaunch.addons.record import sampling
from safelaunch.addons.record.recording import Numbers, ProcessRecord, RankRecord, Recording, bounded, merged
from safelaunch.addons.record.sampling import Sampled
from safelaunch.beacon import layout
from safelaunch.bundle.staging import name_of
from safelaunch.capture.look import Target
from safelaunch.capture.pages import read_meta
from safelaunch.job.job import Job
from safelaunch.job.process import process_table
from safelaunch.model import BundlePlace
from safelaunch.model.words import ranks_in
from safelaunch.supervise import publishing
from safelaunch.supervise.cluster.messages import Question, Round
from safelaunch.supervise.control.protocol import (
    LARGEST_ANSWER,
    Client,
    DumpAnswer,
    RecordAnswer,
    Request,
    Server,
)
from safelaunch.supervise.kinds import DUMP, ENDED, Kind
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import Cancelled, Incident, JobView, observe
from safelaunch.supervise.rounds import others_of, recordings_of
from safelaunch.supervise.status import Statuses
from safelaunch.system.console import say
from safelaunch.system.redaction.redactor import Redactor


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
        self._status = Statuses(job, view)
        self._for_another: Incident[None] | None = None  # what another node has asked for
        self._dumps: deque[_Dump] = deque()
        self._recordings = Recordings(view, tuple(job.plan.script))

    @property
    def busy(self) -> bool:
        return bool(self._dumps or self._status.busy or self._recordings.busy)

    def tick(self, now: float) -> None:
        """Answers every request that can be answered now."""
        if self._server is not None:
            self._server.poll(self._handle)
        self._status.tick(now)
        self._advance_dumps()
        self._recordings.tick()
        self._take_for_another(now)

    def _handle(self, request: Request, client: Client) -> None:
        if request.command == "status":
            self._status.ask(client)
        elif request.command == "dump":
            bundle_dir = Path(request.bundle_dir) if request.bundle_dir else self._context.bundle_dir
            self._queued(bundle_dir).clients.append(client)
        elif request.command == "record":
            self._recordings.ask(request, client)
        else:
            client.close()

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


# --- samples, for who asks where the time goes ------------------------------------------------------------------------


LONGEST_S = 300.0
GAVE_WAY = "a bundle of this run was requested; record again once it is written"


@dataclass
class _Asked:
    request: Request
    clients: list[Client]
    working: Incident[Recording]


@dataclass
class Recordings:
    """This node's part in the samples. ``ask`` and ``tick`` never block.

    On several nodes every supervisor samples its own ranks, at the same time. What it keeps are counted stacks: a few
    hundred kilobytes; the page and the verdict are made by who asks.
    """

    job: JobView
    command: tuple[str, ...] = ()
    _asked: _Asked | None = None
    _for_another: Incident[None] | None = None

    def ask(self, request: Request, client: Client) -> None:
        """Begins a recording, or joins the one that is the same; another one is refused meanwhile."""
        if self._asked is None:
            self._asked = _Asked(request, [], Incident("record", lambda at: self._everywhere(request, at)))
        elif self._asked.request != request:
            client.answer(RecordAnswer(problem="another recording of this run is in progress"))
            return
        self._asked.clients.append(client)

    @property
    def busy(self) -> bool:
        return self._asked is not None and self._asked.working.done

    def tick(self) -> None:
        """Answers as soon as the recording is there."""
        if self._asked is None or not self._asked.working.done:
            return
        asked, self._asked = self._asked, None
        try:
            found, place = asked.working.result, os.fspath(self.job.context.bundle_dir)
            answer = RecordAnswer(found, place) if found is not None else RecordAnswer(problem=GAVE_WAY)
        except Exception as error:  # noqa: BLE001 - the client gets the reason, and the job continues
            answer = RecordAnswer(problem=self.job.context.redactor.text(f"{type(error).__name__}: {error}"))
        for client in asked.clients:
            client.answer(answer)

    def finish(self) -> None:
        """The job is being stopped: gives up what needs its ranks."""
        self.yield_to_dump()
        if self._asked is not None:
            for client in self._asked.clients:
                client.answer(RecordAnswer(problem="the job is being stopped"))
            self._asked = None

    def yield_to_dump(self) -> None:
        """A dump of all nodes is asked for: gives up the samples that are being taken, here and for other nodes."""
        for one in (self._asked.working if self._asked is not None else None, self._for_another):
            if one is not None:
                one.cancel()

    def for_another(self, round_: Round, question: Question) -> Incident[None]:
        """Takes this node's samples, for another one that asks for them."""
        self._for_another = Incident("record for another node", lambda at: self._answer(round_, question, at))
        return self._for_another

    def _answer(self, round_: Round, question: Question, at: Incident[None]) -> None:
        recording = self._here(question, at.cancelled)
        at.pause(0.0)
        self.job.council.rounds.answer_recording(round_, recording)

    def _everywhere(self, request: Request, at: Incident[Recording]) -> Recording:
        """The samples of all nodes."""
        question = Question(0, "record", min(max(request.duration_s, 1.0), LONGEST_S), request.ranks[:4096])
        with self.job.council.rounds.asking(question) as answers:
            own = self._here(question, at.cancelled)
            others, notes = recordings_of(answers(at.cancelled))
        at.pause(0.0)
        whole = merged([own, *others]) if others else own
        whole = msgspec.structs.replace(whole, notes=[*whole.notes, *notes])
        return bounded(_with_unseen(whole, ranks_in(question.ranks)), _fits)

    def _here(self, question: Question, stop: threading.Event) -> Recording:
        """The samples of this node's ranks, without secrets."""
        wanted = set(ranks_in(question.ranks))
        targets = [target for target in self.job.watch.targets() if not wanted or target.rank in wanted]
        table = process_table()
        children = {target.rank: sampling.children_of(target.pid, table) for target in targets}
        processes = _chosen(targets, children)
        passes = sum(len(process.passes) for process in processes)
        rate_hz = sampling.rate_for(passes, len(os.sched_getaffinity(0)))
        numbers, at_unix_s = Numbers(), time.time()
        before, begin_s = self._steps(), time.monotonic()
        records = sampling.sample(
            processes,
            numbers,
            self.job.context.run_dir,
            duration_s=question.duration_s,
            rate_hz=rate_hz,
            stop=stop,
        )
        after, elapsed_s = self._steps(), time.monotonic() - begin_s
        by_pid = {record.pid: record for record in records}
        made = {rank: after[rank] - step for rank, step in before.items() if rank in after and after[rank] >= step}
        recording = Recording(
            run=self.job.context.run_dir.name,
            name=self.job.context.run_name,
            at_unix_s=round(at_unix_s, 3),
            duration_s=question.duration_s,
            rate_hz=rate_hz,
            world_size=self.job.watch.world_size,
            frames=list(numbers.frames),
            stacks=list(numbers.stacks),
            ranks=[self._rank(target, by_pid, children[target.rank], made.get(target.rank)) for target in targets],
            code_roots=self._code_roots(),
            command=self.job.context.redactor.argv(self.command),
            elapsed_s=round(elapsed_s, 2),
        )
        return self.job.context.cleaned(recording)

    def _rank(
        self, target: Target, by_pid: Mapping[int, ProcessRecord], children: list[Sampled], steps: int | None
    ) -> RankRecord:
        main = by_pid.get(target.pid)
        seen = main is not None and any(thread.stacks for thread in main.threads)
        problem = main.problem if main is not None else "it was not sampled"
        missing = problem if problem == sampling.STOPPED or not seen else ""
        missing = missing or ("" if seen else "py-spy saw no Python thread")
        others = [by_pid[child.pid] for child in children if child.pid in by_pid and by_pid[child.pid].threads]
        return RankRecord(target.rank, self.job.context.host, main, others, steps, missing)

    def _steps(self) -> dict[int, int]:
        read = {rank: page.read().step for rank, page in self.job.watch.roster.pages().items()}
        return {rank: step for rank, step in read.items() if step is not None}

    def _code_roots(self) -> tuple[str, ...]:
        roster = self.job.watch.roster
        found = (read_meta(roster.companion(page, layout.META_SUFFIX)).code_roots for page in roster.pages().values())
        return next((roots for roots in found if roots), ())


def _chosen(targets: list[Target], children: Mapping[int, list[Sampled]]) -> list[Sampled]:
    """All ranks, then of their children as many as the node's share allows, one of each rank after the other."""
    mains = [Sampled(target.pid, target.start_ticks) for target in targets]
    rounds = [of[at] for at in range(sampling.MOST_CHILDREN) for of in children.values() if at < len(of)]
    return [*mains, *rounds[: max(0, sampling.MOST_PROCESSES - len(mains))]]


def _with_unseen(recording: Recording, wanted: tuple[int, ...]) -> Recording:
    """With the ranks that no node has brought, and that they are missing."""
    seen = {rank.rank for rank in recording.ranks}
    everybody = [rank for rank in wanted or range(recording.world_size) if rank not in seen]
    unseen = [RankRecord(rank, missing="no reachable supervisor has this rank") for rank in everybody]
    ranks = sorted([*recording.ranks, *unseen], key=lambda one: one.rank)
    return msgspec.structs.replace(recording, ranks=ranks)


def _fits(recording: Recording) -> bool:
    return len(msgspec.json.encode(recording)) < LARGEST_ANSWER - (1 << 16)
