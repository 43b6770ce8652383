"""A crash, from the first failure to its bundle.

safelaunch looks at the peers while they are alive and still where the failure met them. Then it releases the failing
rank, and the agent that wants to end the others. It writes the bundle once it knows how each rank ended.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from safelaunch.capture.collect import ServerReply, ask_server
from safelaunch.capture.look import Target
from safelaunch.capture.pages import AgentEvent
from safelaunch.model import GilTest, RankEvidence, RankException
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise.cluster.exchange import PeerStatus
from safelaunch.supervise.collecting import Collected, JobSnapshot
from safelaunch.supervise.kinds import CRASH
from safelaunch.supervise.looks import Looks, ask_each
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import Incident, JobView, look
from safelaunch.supervise.watch.progress import Glance
from safelaunch.supervise.watch.restart import Kin, kin_of
from safelaunch.system.console import say

# All ranks and the agent wait for us during this time, for at most 3 s.
FLIGHT_DEADLINE_S = 1.0

EXIT_S = 20.0  # for a rank that raised to exit, and for its launcher to notice
CLOSE_S = 45.0  # for torchrun to end the other ranks: it kills them after 30 s

# Those that no launcher and no communication sends.
_OWN_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass
class _FailedAttempt:
    """An attempt that failed, and what is known of it; see ``CrashCase``."""

    attempt: tuple[int, int]
    quiet_s: float
    """without a step before the failure; 0 if that is no longer than usual"""
    begun_s: float = field(default_factory=time.monotonic)
    due_s: float = 0.0
    """when the ranks should have ended; those that haven't are watched again"""
    error: str = ""
    """what torchrun's agent itself has failed of, before a rank did"""
    known: JobSnapshot | None = None
    looked: bool = False
    """the ranks need not wait any longer"""
    met: bool = False
    """the nodes have agreed on a verdict, or there is no need: the agent need not wait any longer"""
    exits_known: bool = False
    """the agent has said which rank ended first, and how"""
    told: bool = False
    """it is known how each rank ended"""


class CrashCase:
    """One crash: first failure → one look at the peers → their release → the exit of each → bundle.

    On several nodes, torchrun's agents are released only once the nodes have agreed on a verdict, or cannot: in one of
    the agents is the store where they talk.

    Attempts may fail faster than bundles are written, so each failure has a thread, which waits for its turn.
    """

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._watch, self._rounds = job.watch, job.council.rounds
        self._failure: _FailedAttempt | None = None  # of the current attempt
        self._open: list[tuple[_FailedAttempt, Incident[Report | None]]] = []  # without a bundle yet
        self._ended_for = ""  # why torchrun has ended ranks none of which had failed; if it starts others, that is all
        self._turn = threading.Lock()
        self._written: dict[Kin, tuple[int, Report]] = {}  # the first attempt that failed so, counted from 1

    @property
    def busy(self) -> bool:
        return any(failure.told or not failure.looked for failure, _ in self._open)

    @property
    def begun(self) -> bool:
        """Whether this attempt is known to have failed."""
        return self._failure is not None

    def begun_before(self, at_s: float) -> bool:
        """Whether this attempt had failed by then (CLOCK_MONOTONIC)."""
        return self._failure is not None and self._failure.begun_s < at_s

    @property
    def due_s(self) -> float:
        """When the ranks of the failed attempt should have ended (CLOCK_MONOTONIC); 0 if it hasn't failed."""
        return self._failure.due_s if self._failure is not None else 0.0

    def holds(self, at_s: float) -> bool:
        """Returns whether the failure still has time to end the ranks. A rank that outlives it hangs."""
        return at_s < self.due_s

    def yield_to_hang(self) -> None:
        """Drops the failure: a rank that raised never exited, and the verdict on that hang names it."""
        self._forget()

    @property
    def unfinished(self) -> bool:
        """Whether there is a failure without its bundle."""
        return bool(self._open)

    @property
    def writing(self) -> bool:
        return any(failure.told and not responding.done for failure, responding in self._open)

    def on_agent(self, event: AgentEvent) -> None:
        """Handles one event of the agent; call it in their order."""
        if event.event == "started":
            if self._ended_for:
                say(f"torchrun restarted this node's ranks although none had failed: {self._ended_for}")
            self._forget()
            self._ended_for = ""
            self._rounds.reset()
        elif event.event == "failing":
            failure = self.begin()
            failure.error = failure.error or self._job.context.redactor.said(event.error)
            failure.exits_known = True
            failure.due_s = time.monotonic() + CLOSE_S
        elif event.event == "closed" and not self._exits_known and any(event.exits.values()):
            # Of a failure it would have told. A rank that lost its peers on the way may have raised an exception.
            self._ended_for = self._ended_for or self._rounds.another_round()
        elif event.event == "closed":
            self.on_end()

    @property
    def _exits_known(self) -> bool:
        return self._failure is not None and self._failure.exits_known

    def advance(self, glance: Glance) -> Report | None:
        """One tick; returns the report when a bundle is written. Never blocks.

        None also where another node was told to stop: nobody is accused of what that did to the ranks of this one.
        """
        if glance.raised:
            self.begin()
        failure = self._failure
        if failure is not None and failure.looked:
            self._watch.acknowledge(agent=failure.met)
        if failure is not None and not failure.told:
            self._remember(failure)
        for one in self._open:
            if one[1].done:
                self._open.remove(one)
                return one[1].result
        return None

    def begin(self) -> _FailedAttempt:
        """Handles a failure; also one that no rank reported: it was killed, or native code ended it."""
        if self._failure is None:
            failure = _FailedAttempt(self._watch.attempt, self._watch.quiet_s(time.monotonic()))
            failure.due_s = failure.begun_s + EXIT_S
            self._failure = failure
            self._open.append((failure, Incident("crash", lambda at: self._respond(failure, at))))
        return self._failure

    def _forget(self) -> None:
        """Other ranks have been started. A failure of which nobody has said how it ended was none."""
        for one in self._open:
            if one[0] is self._failure and not one[0].told:
                one[1].cancel()
        self._open = [one for one in self._open if not one[1].cancelled.is_set()]
        self._failure = None

    def on_end(self) -> None:
        """Handles the end of the ranks, or of a job without an agent (``exec``): nothing more will be known of them."""
        failure = self._failure
        if failure is not None and not failure.told:  # torchrun closes its workers more than once
            self._remember(failure)
            failure.told = True

    def _remember(self, failure: _FailedAttempt) -> None:
        """Keeps what pages and exceptions say now; once the next attempt has begun, they describe that one."""
        if self._watch.attempt == failure.attempt:
            failure.known = self._job.snapshot()

    # --- in the thread of a failure ---------------------------------------------------------------------------------

    def _respond(self, failure: _FailedAttempt, at: Incident[Report | None]) -> Report | None:
        targets = self._watch.targets()
        try:
            looks, answers = look(CRASH, self._job, at), _answers(targets)
        finally:
            self._watch.acknowledge(agent=self._job.is_whole)
            failure.looked = True
        agreed = self._agree(failure, looks, answers, at)
        failure.met = True
        at.until(lambda: failure.told)
        with self._turn:
            return self._write(failure, looks, answers, agreed)

    def _agree(
        self, failure: _FailedAttempt, looks: Looks, answers: Mapping[int, ServerReply], at: Incident[Report | None]
    ) -> Agreement:
        """With the other nodes, as soon as it is known how the ranks of this one failed."""
        if self._job.is_whole or failure.attempt != self._watch.attempt:
            return Agreement()
        at.until(lambda: failure.exits_known or failure.told)
        context = self._job.context
        local = collecting.local_evidence(looks, self._known_of(failure, answers), context)
        exits = {rank.rank: rank.exit.returncode for rank in local.ranks if rank.exit and rank.exit.before_close}
        exceptions = {rank.rank: rank.exception for rank in local.ranks if rank.exception is not None}
        text = own_failure(context.host, exits, exceptions)
        if text:
            self._rounds.trouble(context.redactor.said(text))
        return self._rounds.crash(local)

    def _known_of(self, failure: _FailedAttempt, answers: Mapping[int, ServerReply]) -> JobSnapshot:
        known = failure.known or self._job.snapshot()
        ranks = {rank: replace(item, answer=answers.get(rank)) for rank, item in known.ranks.items()}
        return replace(known, ranks=ranks)

    def _write(
        self, failure: _FailedAttempt, looks: Looks, answers: Mapping[int, ServerReply], agreed: Agreement
    ) -> Report | None:
        whole, context = self._job.is_whole, self._job.context
        notes = (f"torchrun itself failed: {failure.error}",) if failure.error else ()
        found = collecting.take_evidence(CRASH, looks, self._known_of(failure, answers), context)
        why_not = ""
        if whole:
            error = context.redactor.said(unreadable_script(found.evidence.ranks))
            why_not = f"Python can't read the code: {error}. No bundle: nothing of it ran" if error else ""
        else:
            found = found.with_facts(stall_s=failure.quiet_s, nodes=self._job.council.nodes())
            if agreed.verdict is None:
                known = self._rounds.has_trouble or agreed.status.anew
                status = agreed.status if known else self._job.council.final_status()
                notes = (*notes, *notes_of(status))
                if status.anew and not (status.troubles or self._rounds.has_trouble):
                    why_not = "torchrun restarted the ranks of another node, which ended this node's"
                elif status.stopping:
                    why_not = "the job was stopped on another node, which ended this node's ranks"
        if why_not:
            found.discard()
            say(why_not)
            return None
        earlier = self._earlier(failure, found) if whole and self._written else None
        if earlier is not None:
            found.discard()
            return earlier
        for note in notes:
            say(note)
        report = publishing.finish(found.with_facts(notes=(*found.evidence.notes, *notes)), agreed)
        if (kin := kin_of(report.verdict, report.evidence)) is not None and not report.published.lost:
            self._written.setdefault(kin, (failure.attempt[0] + 1, report))
        return report

    def _earlier(self, failure: _FailedAttempt, found: Collected) -> Report | None:
        """Returns the report of an earlier attempt that failed in the same way, if its bundle is still there."""
        context = self._job.context
        verdict = publishing.verdict_of(found.evidence, context)
        kin = kin_of(verdict, found.evidence)
        first, report = self._written.get(kin, (0, None)) if kin is not None else (0, None)
        if report is None or not report.published.path.is_dir():
            return None
        number, many = failure.attempt[0] + 1, context.attempts
        which = f"{number} of {many}" if many >= number else f"{number}"
        text = f"the same failure as attempt {first} ({which}): {verdict.culprits[0].reason} No new bundle; that of"
        return replace(report, verdict=verdict, repeats=f"{text} attempt {first} is {report.published.shown}")


def notes_of(status: PeerStatus) -> tuple[str, ...]:
    """What the other nodes say of themselves."""
    notes = [f"on another node, {text}" for text in status.troubles]
    if status.lost:
        notes.append("the node that hosts the store of torchrun's agents can no longer be reached, or has ended")
    elif status.quiet:
        nodes = "a node is" if status.quiet == 1 else f"{status.quiet} nodes are"
        notes.append(f"{nodes} no longer heard: the node is gone, or its safelaunch has stopped or was killed")
    return tuple(notes)


def own_failure(host: str, exits: Mapping[int, int], exceptions: Mapping[int, RankException]) -> str:
    """What failed here, where that is no consequence of what failed elsewhere; empty where nothing is known to have."""
    from safelaunch.stacks.tracebacks import gathered
    from safelaunch.verdict.exceptions import is_consequence, one_line, root_of
    from safelaunch.verdict.exits import signal_name

    for rank, exception in sorted(exceptions.items()):
        if not is_consequence(exception) or gathered(exception.message):  # of whom, only all nodes together tell
            root = root_of(exception)
            return f"rank {rank} on {host} raised {root.type}: {one_line(root.message)}"
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
    raised = {f"{rank.exception.type}: {rank.exception.message}" for rank in ranks if rank.exception is not None}
    began = any(rank.progress is not None and rank.progress.step for rank in ranks)
    error = min(raised, default="")
    return error if len(raised) == 1 and not began and error.startswith(_UNREADABLE) else ""


def _answers(targets: Sequence[Target]) -> dict[int, ServerReply]:
    """What the ranks that still answer say of themselves: where each was when the first one failed."""

    def one(target: Target) -> ServerReply:
        told, flight = ask_server(target, deadline_s=FLIGHT_DEADLINE_S / 2)
        # Who has no answer in so short a time need not be stuck.
        return GilTest(groups=told.groups, called=told.called, batches=told.batches), flight

    return ask_each(targets, one, deadline_s=FLIGHT_DEADLINE_S)
