"""Handles a crash from the first failure to its bundle.

safelaunch first looks at the live peers. Then it releases the failing rank, and the agent, which wants to end the other
ranks. It writes the bundle once it knows how each rank ended.
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
from safelaunch.supervise.collecting import DraftBundle, JobSnapshot
from safelaunch.supervise.kinds import CRASH
from safelaunch.supervise.looks import Looks, ask_each
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import Incident, JobView, look
from safelaunch.supervise.watch.progress import Glance
from safelaunch.supervise.watch.restart import FailureKey, failure_key
from safelaunch.system.console import say

# The part for Flight Recorders of the 3 s that ranks and agent wait, at most.
FLIGHT_DEADLINE_S = 1.0

EXIT_S = 20.0  # for a rank that raised to exit, and for its launcher to notice
CLOSE_S = 45.0  # for torchrun to end the other ranks: it kills them after 30 s

# Signals that neither a launcher nor a communication library sends.
_OWN_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass
class _FailedAttempt:
    attempt: tuple[int, int]
    quiet_s: float
    """unusual time without a step before the failure"""
    begun_s: float = field(default_factory=time.monotonic)
    due_s: float = 0.0
    """deadline for the ranks to end; later, they are watched again"""
    error: str = ""
    """error of torchrun's agent itself, before a rank failed"""
    snapshot: JobSnapshot | None = None
    ranks_released: bool = False
    agent_released: bool = False
    """the nodes agreed, or don't need to"""
    first_exit_known: bool = False
    exits_complete: bool = False


class CrashCase:
    """A crash, in order: first failure, a look at the peers, their release, the exit of each rank, the bundle.

    On several nodes, torchrun's agents are released once the nodes have agreed on a verdict or can't agree, because one
    agent hosts the store that they need.

    Each failure has a thread that waits for its turn, because attempts can fail faster than bundles are written.
    """

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._watch, self._rounds = job.watch, job.council.rounds
        self._failure: _FailedAttempt | None = None
        self._open: list[tuple[_FailedAttempt, Incident[Report | None]]] = []
        self._ended_for = ""  # why ranks were restarted without a failure here; printed when new ones start
        self._turn = threading.Lock()
        self._written: dict[FailureKey, tuple[int, Report]] = {}  # first attempt (from 1) with each failure

    @property
    def busy(self) -> bool:
        return any(failure.exits_complete or not failure.ranks_released for failure, _ in self._open)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def failed_before(self, at_s: float) -> bool:
        return self._failure is not None and self._failure.begun_s < at_s

    @property
    def due_s(self) -> float:
        return self._failure.due_s if self._failure is not None else 0.0

    def holds(self, at_s: float) -> bool:
        """Returns whether the failure might still end the ranks.

        Ranks that are alive after that time count as hanging.
        """
        return at_s < self.due_s

    def yield_to_hang(self) -> None:
        """Drops a failure that never ended its rank, because the hang's verdict names that rank."""
        self._forget()

    @property
    def unfinished(self) -> bool:
        return bool(self._open)

    @property
    def writing(self) -> bool:
        return any(failure.exits_complete and not responding.done for failure, responding in self._open)

    def on_agent(self, event: AgentEvent) -> None:
        if event.event == "started":
            if self._ended_for:
                say(f"torchrun restarted this node's ranks although none had failed: {self._ended_for}")
            self._forget()
            self._ended_for = ""
            self._rounds.reset()
        elif event.event == "failing":
            failure = self.begin()
            failure.error = failure.error or self._job.context.redactor.job_text(event.error)
            failure.first_exit_known = True
            failure.due_s = time.monotonic() + CLOSE_S
        elif event.event == "closed" and not self._first_exit_known and any(event.exits.values()):
            # This is a restart: the agent reports a failed rank first. A rank that lost its peers might have raised.
            self._ended_for = self._ended_for or self._rounds.announce_restart()
        elif event.event == "closed":
            self.on_end()

    @property
    def _first_exit_known(self) -> bool:
        return self._failure is not None and self._failure.first_exit_known

    def advance(self, glance: Glance) -> Report | None:
        if glance.raised:
            self.begin()
        failure = self._failure
        if failure is not None and failure.ranks_released:
            self._watch.acknowledge(agent=failure.agent_released)
        if failure is not None and not failure.exits_complete:
            self._remember(failure)
        for entry in self._open:
            if entry[1].done:
                self._open.remove(entry)
                return entry[1].result
        return None

    def begin(self) -> _FailedAttempt:
        """Begins to handle a failure, even if the rank was killed and couldn't report it."""
        if self._failure is None:
            failure = _FailedAttempt(self._watch.attempt, self._watch.quiet_s(time.monotonic()))
            failure.due_s = failure.begun_s + EXIT_S
            self._failure = failure
            self._open.append((failure, Incident("crash", lambda at: self._respond(failure, at))))
        return self._failure

    def _forget(self) -> None:
        # New ranks have started: without reported exits, there was no failure.
        for failure, responding in self._open:
            if failure is self._failure and not failure.exits_complete:
                responding.cancel()
        self._open = [entry for entry in self._open if not entry[1].cancelled.is_set()]
        self._failure = None

    def on_end(self) -> None:
        failure = self._failure
        if failure is not None and not failure.exits_complete:  # torchrun closes its workers repeatedly
            self._remember(failure)
            failure.exits_complete = True

    def _remember(self, failure: _FailedAttempt) -> None:
        # Once the next attempt has begun, pages and exceptions belong to it.
        if self._watch.attempt == failure.attempt:
            failure.snapshot = self._job.snapshot()

    # --- in the thread of a failure ---------------------------------------------------------------------------------

    def _respond(self, failure: _FailedAttempt, at: Incident[Report | None]) -> Report | None:
        targets = self._watch.targets()
        try:
            looks, answers = look(CRASH, self._job, at), _answers(targets)
        finally:
            self._watch.acknowledge(agent=self._job.is_whole)
            failure.ranks_released = True
        agreed = self._agree(failure, looks, answers, at)
        failure.agent_released = True
        at.wait_until(lambda: failure.exits_complete)
        with self._turn:
            return self._write(failure, looks, answers, agreed)

    def _agree(
        self, failure: _FailedAttempt, looks: Looks, answers: Mapping[int, ServerReply], at: Incident[Report | None]
    ) -> Agreement:
        if self._job.is_whole or failure.attempt != self._watch.attempt:
            return Agreement()
        at.wait_until(lambda: failure.first_exit_known or failure.exits_complete)
        context = self._job.context
        local = collecting.local_evidence(looks, self._snapshot(failure, answers), context)
        exits = {rank.rank: rank.exit.returncode for rank in local.ranks if rank.exit and rank.exit.before_close}
        exceptions = {rank.rank: rank.exception for rank in local.ranks if rank.exception is not None}
        text = own_failure(context.host, exits, exceptions)
        if text:
            self._rounds.report_trouble(context.redactor.job_text(text))
        return self._rounds.decide_crash(local)

    def _snapshot(self, failure: _FailedAttempt, answers: Mapping[int, ServerReply]) -> JobSnapshot:
        snapshot = failure.snapshot or self._job.snapshot()
        ranks = {rank: replace(item, answer=answers.get(rank)) for rank, item in snapshot.ranks.items()}
        return replace(snapshot, ranks=ranks)

    def _write(
        self, failure: _FailedAttempt, looks: Looks, answers: Mapping[int, ServerReply], agreed: Agreement
    ) -> Report | None:
        whole, context = self._job.is_whole, self._job.context
        notes = (f"torchrun itself failed: {failure.error}",) if failure.error else ()
        collected = collecting.take_evidence(CRASH, looks, self._snapshot(failure, answers), context)
        why_not = ""
        if whole:
            error = context.redactor.job_text(unreadable_script(collected.evidence.ranks))
            why_not = f"Python can't read the code: {error}. No bundle, because none of it ran" if error else ""
        else:
            collected = collected.with_facts(stall_s=failure.quiet_s, nodes=self._job.council.nodes())
            if agreed.verdict is None:
                trouble = self._rounds.has_trouble or agreed.status.restarting
                status = agreed.status if trouble else self._job.council.final_status()
                notes = (*notes, *peer_notes(status))
                if status.restarting and not (status.troubles or self._rounds.has_trouble):
                    why_not = "torchrun restarted the ranks of another node, which ended this node's"
                elif status.stopping:
                    why_not = "the job was stopped on another node, which ended this node's ranks"
        if why_not:
            collected.discard()
            say(why_not)
            return None
        earlier = self._earlier(failure, collected) if whole and self._written else None
        if earlier is not None:
            collected.discard()
            return earlier
        for note in notes:
            say(note)
        report = publishing.finish(collected.with_facts(notes=(*collected.evidence.notes, *notes)), agreed)
        if (key := failure_key(report.verdict, report.evidence)) is not None and not report.published.lost:
            self._written.setdefault(key, (failure.attempt[0] + 1, report))
        return report

    def _earlier(self, failure: _FailedAttempt, collected: DraftBundle) -> Report | None:
        context = self._job.context
        verdict = publishing.verdict_of(collected.evidence, context)
        key = failure_key(verdict, collected.evidence)
        first, report = self._written.get(key, (0, None)) if key is not None else (0, None)
        if report is None or not report.published.path.is_dir():
            return None
        number, many = failure.attempt[0] + 1, context.attempts
        which = f"{number} of {many}" if many >= number else f"{number}"
        text = f"the same failure as attempt {first} ({which}): {verdict.culprits[0].reason} No new bundle; see"
        return replace(report, verdict=verdict, repeats=f"{text} attempt {first}'s: {report.published.shown}")


def peer_notes(status: PeerStatus) -> tuple[str, ...]:
    notes = [f"on another node, {text}" for text in status.troubles]
    if status.lost:
        notes.append("the node that hosts the store of torchrun's agents can no longer be reached, or has ended")
    elif status.quiet:
        nodes = "a node no longer responds" if status.quiet == 1 else f"{status.quiet} nodes no longer respond"
        notes.append(f"{nodes}: the node is gone, or its safelaunch has stopped or was killed")
    return tuple(notes)


def own_failure(host: str, exits: Mapping[int, int], exceptions: Mapping[int, RankException]) -> str:
    """Returns the root failure on this node; empty if its failures might be consequences of another node's failure."""
    from safelaunch.stacks.tracebacks import gathered
    from safelaunch.verdict.exceptions import is_consequence, one_line, root_of
    from safelaunch.verdict.exits import signal_name

    for rank, exception in sorted(exceptions.items()):
        if not is_consequence(exception) or gathered(exception.message):  # only all nodes together know its rank
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
    """Returns the syntax error that all failed ranks raised before the first step, or "" if there isn't one."""
    raised = {f"{rank.exception.type}: {rank.exception.message}" for rank in ranks if rank.exception is not None}
    began = any(rank.progress is not None and rank.progress.step for rank in ranks)
    error = min(raised, default="")
    return error if len(raised) == 1 and not began and error.startswith(_UNREADABLE) else ""


def _answers(targets: Sequence[Target]) -> dict[int, ServerReply]:

    def ask(target: Target) -> ServerReply:
        test, flight = ask_server(target, deadline_s=FLIGHT_DEADLINE_S / 2)
        # The rank might not be stuck: drop the result of the GIL test after so short a time.
        return GilTest(groups=test.groups, called=test.called, batches=test.batches), flight

    return ask_each(targets, ask, deadline_s=FLIGHT_DEADLINE_S)
