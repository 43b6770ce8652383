"""Answers requests to a running job: status, bundles, and add-ons' services. The supervisor never waits."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from safelaunch.bundle.publication import name_of
from safelaunch.job.job import Job
from safelaunch.model import BundlePlace
from safelaunch.supervise import publishing
from safelaunch.supervise.cluster.messages import NodeQuestion, Round
from safelaunch.supervise.control.protocol import Client, ControlRequest, DumpAnswer, Server, ServiceAnswer
from safelaunch.supervise.kinds import DUMP, ENDED, IncidentKind
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import Cancelled, Incident, JobView, observe
from safelaunch.supervise.services import Services, Take
from safelaunch.supervise.status import StatusRequests
from safelaunch.supervise.submissions import read_evidence
from safelaunch.system.console import say
from safelaunch.system.redaction.redactor import Redactor

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Service


@dataclass
class _RequestedDump:
    bundle_dir: Path
    clients: list[Client] = field(default_factory=list)
    kind: IncidentKind = DUMP
    """``ENDED`` if no rank is left"""
    show: Callable[[Report], None] | None = None
    r"""takes the report here, after Ctrl-\ or for a monitor"""
    working: Incident[Report] | None = None

    @property
    def needs_ranks(self) -> bool:
        return self.working is None or self.working.needs_ranks


class ControlServer:
    def __init__(self, job: Job, view: JobView) -> None:
        assert job.run is not None
        self._job = job
        self._view = view
        self._watch, self._context, self._council = view.watch, view.context, view.council
        self._server = _server(job.run.control)
        self._status = StatusRequests(job, view)
        self._for_another: Incident[None] | None = None
        self._dumps: deque[_RequestedDump] = deque()
        self._services = Services(view)

    @property
    def busy(self) -> bool:
        return bool(self._dumps or self._status.busy or self._services.busy)

    def tick(self, now: float) -> None:
        if self._server is not None:
            self._server.poll(self._handle)
        self._status.tick(now)
        self._advance_dumps()
        self._services.tick()
        self._take_for_another(now)

    def _handle(self, request: ControlRequest, client: Client) -> None:
        if request.command == "status":
            self._status.ask(client)
        elif request.command == "dump":
            bundle_dir = Path(request.bundle_dir) if request.bundle_dir else self._context.bundle_dir
            self._queued(bundle_dir).clients.append(client)
        else:
            self._services.ask(request, client)

    def _queued(self, bundle_dir: Path) -> _RequestedDump:
        """Queues a bundle. If one for the same directory is already queued, returns that."""
        if self._council.rounds.has_peers:
            self._services.yield_to_dump()
        dump = next((dump for dump in self._dumps if dump.bundle_dir == bundle_dir), None)
        if dump is None:
            dump = _RequestedDump(bundle_dir)
            self._dumps.append(dump)
        return dump

    def ask_nodes(self, service: Service[Any, Any], ask: Any, take: Take) -> None:
        """Asks a service on behalf of a monitor; any other request comes first."""
        if self._dumps:
            take(ServiceAnswer(problem="a bundle is being written"))
            return
        self._services.ask_for_monitor(service, ask, take)

    def dump_here(self, show: Callable[[Report], None], *, ends: bool = False) -> None:
        """Writes a bundle and passes it to ``show``. If ``ends``, ``show`` ends the job."""
        dump = self._queued(self._context.bundle_dir)
        if dump.show is None:
            dump.show = show
            then = "and then ending it" if ends else "which continues (Ctrl-C stops it)"
            say(f"writing a bundle of the running job, {then}")

    def dump_late(self, show: Callable[[Report], None]) -> None:
        """Writes a bundle after the job's end, with findings, logs and the last progress."""
        dump = self._queued(self._context.bundle_dir)
        if dump.show is None:
            dump.show, dump.kind = show, ENDED if dump.working is None else DUMP
            say("writing a bundle of what was found; the ranks have ended")

    @property
    def has_unshown_bundle(self) -> bool:
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
        """Takes evidence for another node, which takes its own at the same time and writes the bundle."""
        if self._council.rounds.has_pending_dump:
            self._services.yield_to_dump()
        if self._for_another is not None and not self._for_another.done:
            return
        self._for_another = None
        if (wanted := self._council.rounds.next_question(now)) is None:
            return
        round_, question = wanted
        if question.kind == "dump":
            self._for_another = Incident("for another node", lambda at: self._answer_dump(round_, at))
        else:
            self._for_another = self._services.for_another(round_, question)

    def _answer_dump(self, round_: Round, at: Incident[None]) -> None:
        collected = observe(DUMP, self._view, at)
        try:
            self._council.rounds.answer(round_, collected.evidence)
        finally:
            collected.discard()

    @property
    def writing(self) -> bool:
        """True while a bundle is being written that no longer needs the ranks."""
        return any(not dump.needs_ranks for dump in self._dumps)

    def finish(self) -> None:
        """Completes bundles that already have their evidence, and drops all others."""
        self._services.finish()
        for dump in [dump for dump in self._dumps if dump.needs_ranks]:
            if dump.working is not None:
                dump.working.cancel()
            self._dumps.remove(dump)
            if dump.show is not None:
                say("dump cancelled: the job is stopping")
            for client in dump.clients:
                client.answer(DumpAnswer(problem="the job is being stopped"))
        self._advance_dumps()

    def _write_dump(self, dump: _RequestedDump, at: Incident[Report]) -> Report:
        context = replace(self._context, bundle_dir=dump.bundle_dir)
        view, for_finding = replace(self._view, context=context), dump.show is not None
        if dump.kind is ENDED:
            return publishing.finish(observe(ENDED, view, at, for_finding=for_finding))
        with self._council.rounds.asking(NodeQuestion()) as answers:
            collected = observe(DUMP, view, at, for_finding=for_finding)
            if at.cancelled.is_set():
                collected.discard()
                raise Cancelled
            remote = read_evidence(answers(threading.Event()), context.host)
        if not remote.evidence:
            return publishing.finish(collected)
        verdict = publishing.verdict_of(remote.with_own(collected.evidence), context)
        name = name_of(context.run_name, time.time(), verdict.outcome)
        place = BundlePlace(context.host, os.fspath(context.bundle_dir / name), True)
        return publishing.finish(collected, Agreement(msgspec.structs.replace(verdict, bundle=place), name, remote))


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
