"""Samples the ranks of a live run for who asks where its time goes. The job continues; the supervisor does not wait.

On several nodes every supervisor samples its own ranks, at the same time. What it keeps are counted stacks: a few
hundred kilobytes; the page and the verdict are made by who asks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from safelaunch.beacon import layout
from safelaunch.capture import proc, sampling
from safelaunch.capture.look import Target
from safelaunch.capture.pages import read_meta
from safelaunch.capture.sampling import Sampled
from safelaunch.model.recording import Numbers, ProcessRecord, RankRecord, Recording, bounded, merged
from safelaunch.model.words import ranks_in
from safelaunch.supervise.cluster.messages import Question, Round
from safelaunch.supervise.control.protocol import LARGEST_ANSWER, Client, RecordAnswer, Request
from safelaunch.supervise.respond import Incident, JobView
from safelaunch.supervise.rounds import recordings_of

LONGEST_S = 300.0
GAVE_WAY = "a bundle of this run was requested; record again once it is written"


@dataclass
class _Asked:
    request: Request
    clients: list[Client]
    working: Incident[Recording]


@dataclass
class Recordings:
    """This node's part. ``ask`` and ``tick`` never block."""

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
        targets = [one for one in self.job.watch.targets() if not wanted or one.rank in wanted]
        table = proc.process_table()
        children = {one.rank: sampling.children_of(one.pid, table) for one in targets}
        processes = _chosen(targets, children)
        passes = sum(len(one.passes) for one in processes)
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
        by_pid = {one.pid: one for one in records}
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
            ranks=[self._rank(one, by_pid, children[one.rank], made.get(one.rank)) for one in targets],
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
        others = [by_pid[one.pid] for one in children if one.pid in by_pid and by_pid[one.pid].threads]
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
    mains = [Sampled(one.pid, one.start_ticks) for one in targets]
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
