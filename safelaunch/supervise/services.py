"""Serves add-ons' requests to a live run (see ``addons.protocols.Service``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from safelaunch import addons
from safelaunch.supervise.cluster.messages import NodeQuestion, Round
from safelaunch.supervise.control.protocol import LARGEST_ANSWER, Client, ControlRequest, ServiceAnswer
from safelaunch.supervise.respond import Incident, JobView
from safelaunch.supervise.submissions import read_parts
from safelaunch.system.decoding import from_json, from_msgpack

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Service


Take = Callable[[ServiceAnswer[Any]], None]


@dataclass
class _ServiceRequest:
    service: Service[Any, Any]
    ask: Any
    takers: list[Take]
    working: Incident[Any]
    gives_way: bool = False
    """another request cancels it"""


class Services:
    """Serves one request at a time; each node serves it for its own ranks. No method blocks."""

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._request: _ServiceRequest | None = None
        self._for_another: Incident[None] | None = None

    def ask(self, request: ControlRequest, client: Client) -> None:
        """Begins a request, joins an identical one that is in progress, or refuses the request."""
        service = addons.service(request.command)
        if service is None:
            client.answer(ServiceAnswer(problem=f"this run has no add-on for {request.command[:40]!r}"))
            return
        try:
            ask = from_json(bytes(request.ask), service.ask)
        except (msgspec.DecodeError, RecursionError) as error:
            client.answer(ServiceAnswer(problem=str(error)))
            return
        if self._request is not None and self._request.gives_way:
            self._drop("another request came")
        current = self._request or self._begin(service, ask)
        if (current.service.name, current.ask) != (service.name, ask):
            client.answer(ServiceAnswer(problem=f"another {current.service.noun} of this run is in progress"))
            return
        current.takers.append(client.answer)

    def ask_for_monitor(self, service: Service[Any, Any], ask: Any, take: Take) -> None:
        """Begins a request that gives way to clients' requests and to dumps. ``take`` gets the answer, or a problem."""
        if self._request is not None or self._job.council.rounds.has_pending_dump:
            take(ServiceAnswer(problem="this run serves another request"))
            return
        self._begin(service, ask, gives_way=True).takers.append(take)

    def _begin(self, service: Service[Any, Any], ask: Any, *, gives_way: bool = False) -> _ServiceRequest:
        working = Incident(service.name, lambda at: self._everywhere(service, ask, at))
        self._request = _ServiceRequest(service, ask, [], working, gives_way)
        return self._request

    @property
    def busy(self) -> bool:
        return self._request is not None and self._request.working.done

    def tick(self) -> None:
        if self._request is None or not self._request.working.done:
            return
        request, self._request = self._request, None
        try:
            part = request.working.result
            gave_way = f"a bundle of this run was requested; {request.service.name} again once it is written"
            place = os.fspath(self._job.context.bundle_dir)
            answer = ServiceAnswer(problem=gave_way) if part is None else ServiceAnswer(part, place)
        except Exception as error:  # noqa: BLE001 - the client gets the reason, and the job continues
            answer = ServiceAnswer(problem=self._job.context.redactor.text(f"{type(error).__name__}: {error}"))
        for take in request.takers:
            take(answer)

    def finish(self) -> None:
        self.yield_to_dump()
        self._drop("the job is being stopped")

    def _drop(self, problem: str) -> None:
        if self._request is None:
            return
        request, self._request = self._request, None
        request.working.cancel()
        for take in request.takers:
            take(ServiceAnswer(problem=problem))

    def yield_to_dump(self) -> None:
        """Cancels all requests because the nodes must write a dump."""
        for incident in (self._request.working if self._request is not None else None, self._for_another):
            if incident is not None:
                incident.cancel()

    def for_another(self, round_: Round, question: NodeQuestion) -> Incident[None]:
        name = f"{question.kind} for another node"
        self._for_another = Incident(name, lambda at: self._answer_node(round_, question, at))
        return self._for_another

    def _answer_node(self, round_: Round, question: NodeQuestion, at: Incident[None]) -> None:
        """Answers a request from another node. The answer is empty if this node lacks that version of the add-on."""
        rounds, service = self._job.council.rounds, addons.service(question.kind)
        try:
            ask = from_msgpack(question.ask, service.ask) if service is not None else None
        except (msgspec.DecodeError, RecursionError, OverflowError):
            service = None
        if service is None:
            rounds.answer_nothing(round_)
            return
        part = service.here(ask, self._job, at.cancelled)
        at.pause(0.0)
        rounds.answer_part(round_, service, part)

    def _everywhere(self, service: Service[Any, Any], ask: Any, at: Incident[Any]) -> Any:
        """Returns the merged answer of all nodes, reduced to the size that a client accepts."""
        question = NodeQuestion(0, service.name, msgspec.msgpack.encode(ask))
        with self._job.council.rounds.asking(question) as answers:
            own = service.here(ask, self._job, at.cancelled)
            parts, notes = read_parts(answers(at.cancelled), service)
        at.pause(0.0)
        return service.bounded(service.merged(ask, [own, *parts], notes), _fits)


def _fits(part: Any) -> bool:
    return len(msgspec.json.encode(part)) < LARGEST_ANSWER - (1 << 16)
