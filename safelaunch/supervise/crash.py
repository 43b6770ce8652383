"""A crash, from the first failure to its bundle.

safelaunch looks at the peers while they are alive and still where the failure met them. Then it releases the failing
rank, and the agent that wants to end the others. It writes the bundle once it knows how each rank ended.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from safelaunch.capture.collect import Answer, ask_server
from safelaunch.capture.look import Target
from safelaunch.capture.pages import AgentEvent
from safelaunch.capture.result import gather
from safelaunch.model import GilTest, RankEvidence, RankException
from safelaunch.supervise import incident
from safelaunch.supervise.cluster.seen import PeerStatus
from safelaunch.supervise.council import Council
from safelaunch.supervise.incident import Agreement, Circumstances, Collected, Exits, Known, Report
from safelaunch.supervise.looks import Looks, look_at
from safelaunch.supervise.watch.job import Glance, Watch
from safelaunch.system.console import say
from safelaunch.system.task import Task

Seen = tuple[Looks, dict[int, Answer]]

# All ranks and the agent wait for us during this time, for at most 3 s.
FLIGHT_DEADLINE_S = 1.0

# Those that no launcher and no communication sends.
_OWN_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass
class _Failure:
    """An attempt that failed. ``looking``: the look at its ranks is in progress; ``told``: their exits are known.

    ``meeting``: the nodes are about to agree on a verdict; ``met``: what has come of it, or that there is no need.
    ``quiet_s``: time without a step before the failure, in seconds; 0 if that is no longer than usual. ``error``: what
    torchrun's agent itself has failed of, before a rank did.
    """

    attempt: tuple[int, int]
    looking: Task[Seen] | None
    quiet_s: float = 0.0
    error: str = ""
    begun_s: float = 0.0
    seen: Seen = (Looks(()), {})
    known: Known | None = None
    told: bool = False
    meeting: Task[Agreement] | None = None
    met: Agreement | None = None

    def settle(self) -> None:
        """Takes the results of the look and of the meeting once they are available."""
        if self.looking is not None and self.looking.done:
            self.seen, self.looking = self.looking.result(), None
        if self.meeting is not None and self.meeting.done:
            self.met, self.meeting = self.meeting.result(), None

    @property
    def is_settled(self) -> bool:
        return self.looking is None and self.met is not None


class CrashCase:
    """One crash: first failure → one look at the peers → their release → the exit of each → bundle.

    On several nodes, torchrun's agents are released only once the nodes have agreed on a verdict, or cannot: in one of
    the agents is the store where they talk.

    Attempts may fail faster than bundles are written, so each failure keeps its evidence until its turn comes.
    """

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits, council: Council) -> None:
        self._watch = watch
        self._council = council
        self._about = about
        self._exits = exits
        self._failure: _Failure | None = None  # of the current attempt
        self._exits_known = False  # the agent has said which rank ended first, and how
        self._ended_for = ""  # why torchrun has ended ranks none of which had failed; if it starts others, that is all
        self._due: deque[_Failure] = deque()  # ready for their bundle
        self._writing: Task[Report | None] | None = None

    @property
    def busy(self) -> bool:
        looking = self._failure is not None and self._failure.looking is not None
        return looking or self._writing is not None or bool(self._due)

    @property
    def begun(self) -> bool:
        """Whether this attempt is known to have failed."""
        return self._failure is not None

    def begun_before(self, at_s: float) -> bool:
        """Whether this attempt had failed by then (CLOCK_MONOTONIC)."""
        return self._failure is not None and self._failure.begun_s < at_s

    @property
    def unfinished(self) -> bool:
        """Whether there is a failure without its bundle."""
        return self._writing is not None or bool(self._due) or (self._failure is not None and not self._failure.told)

    @property
    def writing(self) -> bool:
        return self._writing is not None and not self._writing.done

    def on_agent(self, event: AgentEvent) -> None:
        """Handles one event of the agent; call it in their order."""
        if event.event == "started":
            if self._ended_for:
                say(f"torchrun restarted this node's ranks although none had failed: {self._ended_for}")
            self._failure, self._exits_known, self._ended_for = None, False, ""
            self._council.rounds.reset()
        elif event.event == "failing":
            failure = self._begin()
            failure.error = failure.error or self._about.redactor.said(event.error)
            self._exits_known = True
        elif event.event == "closed" and not self._exits_known and any(event.exits.values()):
            # Of a failure it would have told. A rank that lost its peers on the way may have raised an exception.
            self._ended_for = self._ended_for or self._council.rounds.another_round()
        elif event.event == "closed":
            self._tell()

    def on_end(self) -> None:
        """Handles the end of the job. Without an agent (``exec``), nothing more will be known about its ranks."""
        self._tell()

    def begin_late(self) -> None:
        """Handles a failure that no rank reported: it was killed, or native code ended it."""
        self._begin()

    def advance(self, glance: Glance) -> Report | None:
        """One tick; returns the report when the bundle is written. Never blocks.

        None also where another node was told to stop: nobody is accused of what that did to the ranks of this one.
        """
        if glance.raised:
            self._begin()
        if self._failure is not None:
            self._failure.settle()
            if self._failure.looking is None:
                self._meet(self._failure)
                self._watch.acknowledge(agent=self._failure.met is not None)
            if not self._failure.told:
                self._remember(self._failure)
        if self._due and self._writing is None:
            self._due[0].settle()
            if self._due[0].looking is None:
                self._meet(self._due[0])
            if self._due[0].is_settled:
                self._begin_writing(self._due.popleft())
        if self._writing is not None and self._writing.done:
            writing, self._writing = self._writing, None
            return writing.result()
        return None

    def _meet(self, failure: _Failure) -> None:
        """Begins to agree with the other nodes, as soon as it is known how the ranks of this one failed."""
        if failure.meeting is not None or failure.met is not None:
            return
        if not self._watch.unseen or failure.attempt != self._watch.attempt:
            failure.met = Agreement()
        elif self._exits_known or failure.told:
            looks, _ = failure.seen
            known = self._known_of(failure)
            failure.meeting = Task("meeting", lambda: self._agree(looks, known))

    def _agree(self, looks: Looks, known: Known) -> Agreement:
        half = incident.half_of(looks, known, self._about)
        exits = {rank.rank: rank.exit.returncode for rank in half.ranks if rank.exit and rank.exit.before_close}
        exceptions = {rank.rank: rank.exception for rank in half.ranks if rank.exception is not None}
        text = own_failure(self._about.host, exits, exceptions)
        if text:
            self._council.rounds.trouble(self._about.redactor.said(text))
        return self._council.rounds.crash(half)

    def _known_of(self, failure: _Failure) -> Known:
        known = failure.known or incident.known_of(self._watch, self._exits())
        answers = failure.seen[1]
        ranks = {rank: replace(item, answer=answers.get(rank)) for rank, item in known.ranks.items()}
        return replace(known, ranks=ranks)

    def _begin(self) -> _Failure:
        if self._failure is not None:
            return self._failure
        targets = self._watch.targets()

        def look() -> Seen:
            try:
                return look_at(targets, None), _answers(targets)
            finally:
                self._watch.acknowledge(agent=not self._watch.unseen)

        quiet_s = self._watch.quiet_s(time.monotonic())
        self._failure = _Failure(self._watch.attempt, Task("look", look), quiet_s, begun_s=time.monotonic())
        return self._failure

    def _tell(self) -> None:
        failure = self._failure
        if failure is None or failure.told:  # torchrun closes its workers more than once
            return
        failure.told = True
        self._remember(failure)
        self._due.append(failure)

    def _remember(self, failure: _Failure) -> None:
        """Keeps what pages and exceptions say now; once the next attempt has begun, they describe that one."""
        if self._watch.attempt == failure.attempt:
            failure.known = incident.known_of(self._watch, self._exits())

    def _begin_writing(self, failure: _Failure) -> None:
        looks, _ = failure.seen
        known = self._known_of(failure)
        stall_s = failure.quiet_s if self._watch.unseen else 0.0
        met = failure.met or Agreement()
        notes = (f"torchrun itself failed: {failure.error}",) if failure.error else ()

        def write() -> Report | None:
            found = incident.take_evidence("crash", looks, known, self._about, stall_s=stall_s, ask=False)
            if not self._watch.unseen and (error := unreadable_script(found.evidence.ranks)):
                incident.discard(found)
                say(f"Python can't read the code: {self._about.redactor.said(error)}. No bundle: nothing of it ran")
                return None
            if not self._watch.unseen:
                return incident.finish(_with_notes(found, notes))
            found = incident.with_nodes(found, self._council.nodes())
            if met.verdict is not None:
                return incident.finish(_with_notes(found, notes), met)
            rounds = self._council.rounds
            is_known = rounds.has_trouble or met.status.anew
            status = met.status if is_known else self._council.final_status()
            if status.anew and not (status.troubles or rounds.has_trouble):
                incident.discard(found)
                say("torchrun restarted the ranks of another node, which ended this node's")
                return None
            if status.stopping:
                incident.discard(found)
                say("the job was stopped on another node, which ended this node's ranks")
                return None
            return incident.finish(_with_notes(found, (*notes, *notes_of(status))))

        self._writing = Task("bundle", write)


def notes_of(status: PeerStatus) -> tuple[str, ...]:
    """What the other nodes say of themselves."""
    notes = [f"on another node, {text}" for text in status.troubles]
    if status.lost:
        notes.append("the node that hosts the store of torchrun's agents can no longer be reached, or has ended")
    elif status.quiet:
        nodes = "a node is" if status.quiet == 1 else f"{status.quiet} nodes are"
        notes.append(f"{nodes} no longer heard: the node is gone, or its safelaunch has stopped or was killed")
    return tuple(notes)


def _with_notes(found: Collected, notes: tuple[str, ...]) -> Collected:
    for note in notes:
        say(note)
    evidence = msgspec.structs.replace(found.evidence, notes=(*found.evidence.notes, *notes))
    return replace(found, evidence=evidence)


def own_failure(host: str, exits: Mapping[int, int], exceptions: Mapping[int, RankException]) -> str:
    """What failed here, where that is no consequence of what failed elsewhere; empty where nothing is known to have."""
    from safelaunch.verdict.exits import is_consequence, one_line, signal_name  # late: most jobs never fail

    for rank, exception in sorted(exceptions.items()):
        if not is_consequence(exception):
            return f"rank {rank} on {host} raised {exception.type}: {one_line(exception.message)}"
    for rank, code in sorted(exits.items()):
        if code < 0 and -code in _OWN_SIGNALS:
            return f"rank {rank} on {host} was ended by {signal_name(code)}"
        if code > 0 and rank not in exceptions:
            return f"rank {rank} on {host} ended with exit code {code}"
    return ""


_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")


def unreadable_script(ranks: Sequence[RankEvidence]) -> str:
    """The error of a script that Python could not read, the same on all ranks that raised any, before the first step;
    empty where it is another crash. The traceback says all that there is to know about it.
    """
    raised = {f"{one.exception.type}: {one.exception.message}" for one in ranks if one.exception is not None}
    began = any(one.progress is not None and one.progress.step for one in ranks)
    error = min(raised, default="")
    return error if len(raised) == 1 and not began and error.startswith(_UNREADABLE) else ""


def _answers(targets: tuple[Target, ...]) -> dict[int, Answer]:
    """What the ranks that still answer say of themselves: where each was when the first one failed."""
    asked = [target for target in targets if target.socket is not None]

    def one(target: Target) -> Answer:
        told, flight = ask_server(target, deadline_s=FLIGHT_DEADLINE_S / 2)
        # Who has no answer in so short a time need not be stuck.
        return GilTest(groups=told.groups, called=told.called, batches=told.batches), flight

    calls: list[Callable[[], Answer]] = [partial(one, target) for target in asked]
    answers = gather(calls, deadline_s=FLIGHT_DEADLINE_S)
    return {target.rank: answer for target, answer in zip(asked, answers, strict=True) if answer is not None}
