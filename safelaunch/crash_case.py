"""A crash, from the first failure to its bundle.

The peers are looked at while they live and still stand where the failure met them; then the failing rank, and the agent
that wants to end the others, are let go. The bundle is written when it is known how each rank ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from . import incident
from .capture.collect import ask_server
from .capture.flight_recorder import FlightCapture
from .capture.look import Target
from .capture.parallel import gather
from .incident import Circumstances, Known, Looks, Report
from .model import RankExit
from .progress import AgentEvent
from .task import Task
from .watch import Glance, Watch

Exits = Callable[[], Mapping[int, RankExit]]
Seen = tuple[Looks, dict[int, FlightCapture]]

# All ranks and the agent wait for us meanwhile, 3 s at most.
FLIGHT_DEADLINE_S = 1.0


class CrashCase:
    """first failure → one look at the peers → they are let go → how each ended → bundle."""

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits) -> None:
        self._watch = watch
        self._about = about
        self._exits = exits
        self._begun = False
        self._attempt = -1
        self._looking: Task[Seen] | None = None
        self._seen: Seen = (Looks(()), {})
        self._known: Known | None = None
        self._writing: Task[Report] | None = None
        self._told = False  # it is known how the ranks ended
        self._due = False  # the bundle can be written

    @property
    def busy(self) -> bool:
        return self._looking is not None or self._writing is not None or self._due

    @property
    def begun(self) -> bool:
        """Whether this attempt has failed, as far as is known."""
        return self._begun

    def on_agent(self, event: AgentEvent) -> None:
        """One event of the agent, in their order."""
        if event.event == "started":
            self._begun = False
        elif event.event == "failing":
            self._begin()
        elif event.event == "closed" and self._begun and not self._told:
            self._told = True  # torchrun closes its workers more than once
            self._remember()
            self._due = True

    def on_end(self) -> None:
        """The job is over. Where no agent tells how ranks ended (``exec``), this is all that will be known."""
        if self._begun and not self._told:
            self._told = True
            self._remember()
            self._due = True

    def begin_late(self) -> None:
        """The job failed without any rank saying so: killed, or ended from native code."""
        self._begin()

    def advance(self, glance: Glance) -> Report | None:
        """One tick; returns the report when the bundle is written. Never blocks."""
        if glance.raised:
            self._begin()
        if self._looking is not None and self._looking.done:
            self._seen, self._looking = self._looking.result(), None
        if self._begun and self._looking is None:
            self._watch.acknowledge()
        if self._begun and not self._told:
            self._remember()
        if self._due and self._looking is None and self._writing is None:
            self._due = False
            self._begin_writing()
        if self._writing is not None and self._writing.done:
            writing, self._writing = self._writing, None
            return writing.result()
        return None

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun, self._told, self._known = True, False, None
        self._attempt = self._watch.roster.attempt
        targets = self._watch.targets()

        def look() -> Seen:
            try:
                return incident.look_at(targets, None), _flight_records(targets)
            finally:
                self._watch.acknowledge()

        self._looking = Task("look", look)

    def _remember(self) -> None:
        """What pages and exceptions say now: when the next attempt has begun, they speak of that."""
        if self._watch.roster.attempt == self._attempt:
            self._known = incident.known_of(self._watch, self._exits())

    def _begin_writing(self) -> None:
        looks, flights = self._seen
        known = self._known or incident.known_of(self._watch, self._exits())
        ranks = {rank: replace(item, flight=flights.get(rank)) for rank, item in known.ranks.items()}
        known = replace(known, ranks=ranks)
        self._seen = (Looks(()), {})
        self._writing = Task("bundle", lambda: incident.write("crash", looks, known, self._about, ask=False))


def _flight_records(targets: tuple[Target, ...]) -> dict[int, FlightCapture]:
    """The Flight Recorders of the ranks that still answer: where each stood when the first one failed."""
    asked = [target for target in targets if target.socket is not None]

    def one(target: Target) -> FlightCapture:
        return ask_server(target, deadline_s=FLIGHT_DEADLINE_S / 2)[1]

    calls: list[Callable[[], FlightCapture]] = [partial(one, target) for target in asked]
    answers = gather(calls, deadline_s=FLIGHT_DEADLINE_S)
    return {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer is not None}
