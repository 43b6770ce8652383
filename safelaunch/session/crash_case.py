"""A crash, from the first failure to its bundle.

The peers are looked at while they live and still stand where the failure met them; then the failing rank, and the agent
that wants to end the others, are let go. The bundle is written when it is known how each rank ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from safelaunch.capture.collect import ask_server
from safelaunch.capture.flight_recorder import FlightCapture
from safelaunch.capture.look import Target
from safelaunch.capture.parallel import gather
from safelaunch.model import RankExit
from safelaunch.session import incident
from safelaunch.session.incident import Circumstances, Known, Report
from safelaunch.session.looks import Looks, look_at
from safelaunch.task import Task
from safelaunch.watch.progress import AgentEvent
from safelaunch.watch.watch import Glance, Watch

Exits = Callable[[], Mapping[int, RankExit]]
Seen = tuple[Looks, dict[int, FlightCapture]]

# All ranks and the agent wait for us meanwhile, 3 s at most.
FLIGHT_DEADLINE_S = 1.0


@dataclass
class _Failure:
    """An attempt that failed. ``looking``: the look at its ranks is under way; ``told``: it is known how they ended."""

    attempt: int
    looking: Task[Seen] | None
    seen: Seen = (Looks(()), {})
    known: Known | None = None
    told: bool = False

    def settle(self) -> None:
        """Takes the look's result once it is there."""
        if self.looking is not None and self.looking.done:
            self.seen, self.looking = self.looking.result(), None


class CrashCase:
    """first failure → one look at the peers → they are let go → how each ended → bundle.

    Attempts may fail faster than a bundle is written: each failure keeps what was seen of it until its turn comes.
    """

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits) -> None:
        self._watch = watch
        self._about = about
        self._exits = exits
        self._failure: _Failure | None = None  # of the attempt that is under way
        self._due: deque[_Failure] = deque()  # whose bundle can be written
        self._writing: Task[Report] | None = None

    @property
    def busy(self) -> bool:
        looking = self._failure is not None and self._failure.looking is not None
        return looking or self._writing is not None or bool(self._due)

    @property
    def begun(self) -> bool:
        """Whether this attempt has failed, as far as is known."""
        return self._failure is not None

    @property
    def writing(self) -> bool:
        return self._writing is not None and not self._writing.done

    def on_agent(self, event: AgentEvent) -> None:
        """One event of the agent, in their order."""
        if event.event == "started":
            self._failure = None
        elif event.event == "failing":
            self._begin()
        elif event.event == "closed":
            self._tell()

    def on_end(self) -> None:
        """The job is over. Where no agent tells how ranks ended (``exec``), this is all that will be known."""
        self._tell()

    def begin_late(self) -> None:
        """The job failed without any rank saying so: killed, or ended from native code."""
        self._begin()

    def advance(self, glance: Glance) -> Report | None:
        """One tick; returns the report when the bundle is written. Never blocks."""
        if glance.raised:
            self._begin()
        if self._failure is not None:
            self._failure.settle()
            if self._failure.looking is None:
                self._watch.acknowledge()
            if not self._failure.told:
                self._remember(self._failure)
        if self._due and self._writing is None:
            self._due[0].settle()
            if self._due[0].looking is None:
                self._begin_writing(self._due.popleft())
        if self._writing is not None and self._writing.done:
            writing, self._writing = self._writing, None
            return writing.result()
        return None

    def _begin(self) -> None:
        if self._failure is not None:
            return
        targets = self._watch.targets()

        def look() -> Seen:
            try:
                return look_at(targets, None), _flight_records(targets)
            finally:
                self._watch.acknowledge()

        self._failure = _Failure(self._watch.roster.attempt, Task("look", look))

    def _tell(self) -> None:
        failure = self._failure
        if failure is None or failure.told:  # torchrun closes its workers more than once
            return
        failure.told = True
        self._remember(failure)
        self._due.append(failure)

    def _remember(self, failure: _Failure) -> None:
        """What pages and exceptions say now: when the next attempt has begun, they speak of that."""
        if self._watch.roster.attempt == failure.attempt:
            failure.known = incident.known_of(self._watch, self._exits())

    def _begin_writing(self, failure: _Failure) -> None:
        looks, flights = failure.seen
        known = failure.known or incident.known_of(self._watch, self._exits())
        ranks = {rank: replace(item, flight=flights.get(rank)) for rank, item in known.ranks.items()}
        known = replace(known, ranks=ranks)
        self._writing = Task("bundle", lambda: incident.write("crash", looks, known, self._about, ask=False))


def _flight_records(targets: tuple[Target, ...]) -> dict[int, FlightCapture]:
    """The Flight Recorders of the ranks that still answer: where each stood when the first one failed."""
    asked = [target for target in targets if target.socket is not None]

    def one(target: Target) -> FlightCapture:
        return ask_server(target, deadline_s=FLIGHT_DEADLINE_S / 2)[1]

    calls: list[Callable[[], FlightCapture]] = [partial(one, target) for target in asked]
    answers = gather(calls, deadline_s=FLIGHT_DEADLINE_S)
    return {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer is not None}
