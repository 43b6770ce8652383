"""A round of all nodes of a job: each submits its evidence, and one of them decides, or reads it for who asks.

There is one kind of round, whatever it is about: ``hang``, ``crash``, a dump or a recording that somebody asks for.
They differ in who judges, how long that waits for the others, and what ends the round without a decision.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from safelaunch.bundle.staging import name_of
from safelaunch.model import BundlePlace, Evidence, NodeEvidence
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.codec import pack, share_of
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.evidence import condense
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS, PeerStatus, PeerView, Submissions
from safelaunch.supervise.cluster.leader import ACKNOWLEDGE_S, EVIDENCE_S
from safelaunch.supervise.cluster.merge import with_relative_times
from safelaunch.supervise.cluster.messages import (
    LONGEST_TEXT,
    Action,
    Decision,
    LeaderPage,
    NodeQuestion,
    Round,
    ask_round,
    node_count,
)
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.judge import proves
from safelaunch.supervise.publishing import Agreement, verdict_of
from safelaunch.supervise.submissions import Part, read_evidence, small_files

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Service

SETTLE_S = 75.0  # from a node's evidence of a hang to the leader's decision
AGREED_S = ACKNOWLEDGE_S + 4.0  # a node waits longer than the leader, whose page takes some rounds to arrive
FEW = 16  # nodes whose Flight Recorders travel as they are
CRASH_S = 4.0  # torchrun's agents, in one of which the nodes talk, are held for 6 s, the look at the ranks included
HEAR_S = 2.5  # for the evidence of the others whose ranks fail
EFFECTS_S = 2.8  # nobody's own failure is known by then
HOSTS_S = 1.0  # the others read the verdict where this node's agent hosts the store
CROWD = 64  # nodes; of more, not every one reads what all others know
PEERS_ANSWER_S = 30.0  # for the answers of other nodes to a question
ASKED_EVERY_S = 5.0  # between two questions of others


@dataclass(frozen=True, slots=True)
class _Course:
    """How a round goes. ``over``: it ends without a decision. ``judges``: this node reads what the others submit, and,
    once ``complete``, judges all of it by ``with_answer`` of the whole evidence.
    """

    patience_s: float
    over: Callable[[PeerView], bool]
    judges: Callable[[PeerView, LeaderPage, float], bool]
    complete: Callable[[PeerView, LeaderPage, Submissions, float], bool]
    with_answer: Callable[[Evidence], Evidence]
    action: Action


@dataclass(frozen=True, slots=True)
class _SharedVerdict:
    """What this node has made of the evidence of all, and writes itself; ``is_whole``: no rank is missing."""

    decision: Decision
    agreed: Agreement
    is_whole: bool


class Rounds:
    """This node's part. ``nodes``: what it knows of all of them. ``hang``, ``crash`` and what ``asking`` gives wait for
    the others; everything else returns at once.
    """

    def __init__(
        self, channel: Channel, context: JobContext, nodes: Callable[[], tuple[NodeEvidence, ...]], action: Action
    ) -> None:
        """``action``: what this node wants to be done about a job that hangs."""
        self._channel = channel
        self._context = context
        self._nodes = nodes
        self._action: Action = action
        self._past: int | None = None  # crashes that had their verdict as the ranks were started
        self._answered: set[Round] = set()
        self._next_s = 0.0
        self._number = 0  # of this node's newest question
        self._one_at_a_time = threading.Lock()

    @property
    def page(self) -> LeaderPage | None:
        """What the leader says, if it is heard."""
        seen = self._channel.view
        return seen.page if seen.silent_s < SILENT_S else None

    # --- a hang -----------------------------------------------------------------------------------------------------

    def decide_hang(
        self,
        incident: int,
        evidence: Evidence,
        root: Path | None = None,
        moves: Callable[[], bool] = lambda: False,
        *,
        overdue: bool = False,
    ) -> Agreement | None:
        """Submits this node's evidence, judges all of it where this node leads, and waits for the decision.

        ``root``: this node's bundle, of which small files travel. ``moves``: a rank here has made a step meanwhile, of
        which the others have to know. ``overdue``: the job is ended even if not every rank is seen. None: the job moves
        after all.
        """
        nodes = node_count(self._channel.view.page)
        files = small_files(root, records=1 < nodes <= FEW) if root is not None else {}
        own = self._context.cleaned(evidence)

        def over(seen: PeerView) -> bool:
            page = seen.page
            if moves():
                self._channel.update(vote="moving")
            return page is None or page.incident > incident or (page.incident == incident and page.phase == "idle")

        course = _Course(
            SETTLE_S,
            over,
            judges=lambda seen, page, past_s: seen.leads,
            complete=lambda seen, page, found, past_s: found.is_complete or past_s >= EVIDENCE_S,
            with_answer=lambda whole: with_answer(whole, overdue=overdue),
            action=self._action,
        )
        chunks = condense(own, files, share_of(nodes))
        agreed = self._decide_together(f"hang.{incident}", lambda: own, chunks, course)
        if agreed is not None:
            self._channel.update(agrees=True, doing="watching", at_limit=False)
            return agreed
        page = self._channel.view.page
        if page is not None and page.incident == incident and page.phase == "idle":
            return None
        if overdue:
            return Agreement(action=self._action, outcome="hang")
        return Agreement(action="dump", outcome="suspect")

    def all_agree(self, incident: int, moves: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all others know the decision; nobody acts before. False: it is void, as torchrun has begun
        another round, or a rank moves.

        What one node does ends ranks on others, which torchrun may start anew; so only what comes before is a reason to
        go on, and those who host the store, or its ranks, do not take it from under the others.
        """
        until = time.monotonic() + AGREED_S
        while time.monotonic() < until:
            page = self.page
            if moves():
                self._channel.update(vote="moving")
            if page is None or page.incident != incident or page.phase in ("idle", "agreed"):
                return page is None or page.incident != incident or page.phase == "agreed"
            time.sleep(0.05)
        return True

    # --- a crash ----------------------------------------------------------------------------------------------------

    def note(self, page: LeaderPage | None) -> None:
        """What the leader says, on each tick."""
        if self._past is None and page is not None:
            self._past = page.crash

    def report_trouble(self, text: str) -> None:
        """Tells the others what has failed here on its own account; the first failure counts."""
        if not self._channel.beat.trouble:
            self._channel.update(trouble=text[:LONGEST_TEXT])

    @property
    def has_trouble(self) -> bool:
        return bool(self._channel.beat.trouble)

    def reset(self) -> None:
        """The ranks have been started anew."""
        self._past = None
        self._channel.update(trouble="", restarting=False)
        self._channel.withdraw("crash")

    def announce_restart(self) -> str:
        """torchrun has ended the ranks here, none of which had failed: it is about to start others. Returns why."""
        self._channel.update(restarting=True)
        troubles = self._channel.view.status.troubles
        return f"on another node, {troubles[0]}" if troubles else "nodes have joined or left"

    def decide_crash(self, local: Evidence) -> Agreement:
        """What all nodes make of a failure that ranks of this one are part of. Takes ``CRASH_S``, and a little more.

        Whose ranks failed on their own account judges the evidence of all; where nobody's did, the leader. The first
        verdict that is stored is everybody's.
        """
        if self._past is None:
            return Agreement()
        now = time.time()
        local = with_relative_times(self._context.cleaned(local), now)

        def own() -> Evidence:
            return replace(local, nodes=self._context.cleaned(self._nodes()))

        def over(seen: PeerView) -> bool:
            status = seen.status
            excused = status.restarting and not status.troubles and not self.has_trouble
            return status.stopping or excused or seen.page is None

        course = _Course(
            CRASH_S,
            over,
            self._may_judge,
            self._is_ready,
            with_answer=lambda whole: replace(whole, outcome="crash"),
            action="dump",
        )
        agreed = self._decide_together(f"crash.{self._past + 1}", own, condense(own()), course)
        status = self._channel.view.status
        if agreed is None or agreed.verdict is None or (self.has_trouble and not agreed.verdict.culprits):
            return Agreement(status=status)  # nothing, or they have not heard of what failed here
        if self._channel.view.is_local:
            time.sleep(HOSTS_S)
        here = tuple(
            with_relative_times(one, -now) for one in agreed.others.evidence
        )  # by this node's clock, like the bundle's own
        return dataclasses.replace(agreed, others=dataclasses.replace(agreed.others, evidence=here))

    def _may_judge(self, seen: PeerView, page: LeaderPage, past_s: float) -> bool:
        """Of those with a failure of their own the first in the order of the nodes, later the leader, last anybody."""
        failing = [slot for slot, _ in page.troubles if slot in page.failed]
        if failing and past_s < EFFECTS_S:
            return seen.slot == failing[0]
        crowd = page.nodes > CROWD and seen.slot != page.leader
        return past_s >= HEAR_S and not crowd

    def _is_ready(self, seen: PeerView, page: LeaderPage, found: Submissions, past_s: float) -> bool:
        """Whether the evidence is complete, or need not be waited for any longer."""
        if self.has_trouble or any(slot in page.failed for slot, _ in page.troubles):
            complete = len(page.failed) >= page.nodes and found.is_complete
            return past_s >= (HEAR_S if self.has_trouble else EFFECTS_S) or complete
        silent = any(peer.silent_s for peer in seen.peers)
        return past_s >= (EFFECTS_S if silent and seen.slot == page.leader else CRASH_S - 0.4)

    # --- a round that ends with a decision --------------------------------------------------------------------------

    def _decide_together(
        self, round_: Round, own: Callable[[], Evidence], chunks: list[bytes], course: _Course
    ) -> Agreement | None:
        """``own``: this node's evidence, as it is when all is judged; ``chunks``: what it submits.

        None: there is no decision, and nobody waits for one any longer.
        """
        channel, begin_s = self._channel, time.monotonic()
        mine: _SharedVerdict | None = None
        channel.submit(round_, chunks)
        while (past_s := time.monotonic() - begin_s) < course.patience_s:
            seen = channel.view
            decision = seen.decisions.get(round_)
            if decision is not None:
                return self._agreement(decision, mine, seen.status)
            if course.over(seen) or seen.page is None:
                return None
            if mine is None and course.judges(seen, seen.page, past_s):
                channel.gather(round_)
                found = seen.submissions.get(round_, NO_SUBMISSIONS)
                if course.complete(seen, seen.page, found, past_s):
                    mine = self._judge(own(), found, course)
                    channel.decide(round_, mine.decision)
            time.sleep(0.02)
        return None

    def _judge(self, own: Evidence, found: Submissions, course: _Course) -> _SharedVerdict:
        """Everything that any node has seen, and the verdict over it."""
        others = read_evidence(found, self._context.host)
        whole = course.with_answer(others.with_own(own))
        verdict = verdict_of(whole, self._context)
        name = name_of(self._context.run_name, time.time(), verdict.outcome)
        path = os.fspath(self._context.bundle_dir / name)
        steps = [rank.progress.step for rank in whole.ranks if rank.progress and rank.progress.step]
        action: Action = course.action if verdict.outcome == "hang" else "dump"
        decision = Decision(verdict, action, self._context.host[:255], path[:4096], min(steps, default=None))
        return _SharedVerdict(
            decision, Agreement(name=name, others=others, answer=whole.answer), not whole.missing_ranks
        )

    def _agreement(self, decision: Decision, mine: _SharedVerdict | None, status: PeerStatus) -> Agreement:
        outcome, whole = decision.verdict.outcome, False
        if mine is not None and (decision.host, decision.path) == (mine.decision.host, mine.decision.path):
            agreed, whole = mine.agreed, mine.is_whole
        else:
            agreed = Agreement(name=name_of(f"{self._context.run_name}-{self._context.host}", time.time(), outcome))
        return dataclasses.replace(
            agreed,
            verdict=replace(decision.verdict, bundle=BundlePlace(decision.host, decision.path, whole)),
            action=decision.action,
            step=decision.step,
            outcome=outcome,
            status=status,
        )

    # --- what somebody asks for -------------------------------------------------------------------------------------

    @contextmanager
    def asking(self, question: NodeQuestion) -> Iterator[Callable[[threading.Event], Submissions]]:
        """Asks all nodes, now; what it gives waits for their answers, ``PEERS_ANSWER_S`` at most, or until a stop."""
        if not self.has_peers:
            yield lambda stop: Submissions(missing=0)
            return
        with self._one_at_a_time:
            self._number += 1
            question = replace(question, number=self._number)
            round_ = ask_round(self._channel.view.slot, question)
            self._answered.add(round_)
            self._channel.update(asks=question)
            self._channel.gather(round_)
            try:
                yield lambda stop: self._answers(round_, stop)
            finally:
                self._channel.update(asks=None)
                self._channel.withdraw(round_)

    def _answers(self, round_: Round, stop: threading.Event) -> Submissions:
        until = time.monotonic() + PEERS_ANSWER_S
        while (seen := self._channel.view).page is not None and time.monotonic() < until:
            if seen.submissions.get(round_, NO_SUBMISSIONS).is_complete or stop.wait(0.05):
                break
        return self._channel.view.submissions.get(round_, NO_SUBMISSIONS)

    @property
    def has_peers(self) -> bool:
        """Whether there are other nodes, all of which take part in one dump or recording at a time."""
        page = self.page
        return page is not None and page.nodes > 1

    @property
    def has_pending_dump(self) -> bool:
        """Whether another node asks for a dump that this one has not taken part in yet."""
        return any(question.kind == "dump" for question in self._new().values())

    def next_question(self, now: float) -> tuple[Round, NodeQuestion] | None:
        """What another node asks for, and this one has not taken part in. Dumps come first."""
        new = self._new() if now >= self._next_s else {}
        if not new:
            return None
        round_ = min(new, key=lambda one: (new[one].kind != "dump", one))
        self._answered.add(round_)
        self._next_s = now + ASKED_EVERY_S
        return round_, new[round_]

    def _new(self) -> dict[Round, NodeQuestion]:
        page = self.page
        return {one: what for one, what in page.questions.items() if one not in self._answered} if page else {}

    def answer(self, round_: Round, evidence: Evidence) -> None:
        """This node's evidence, for another one that asks for it."""
        own = self._context.cleaned(evidence)
        self._channel.submit(round_, condense(own, share=share_of(node_count(self.page))))

    def answer_part(self, round_: Round, service: Service[Any, Part], part: Part) -> None:
        """``part``: what an add-on's service answers for this node, without secrets."""
        share = share_of(node_count(self.page))
        small = service.bounded(part, lambda smaller: pack(msgspec.msgpack.encode(smaller), share) is not None)
        self._channel.submit(round_, pack(msgspec.msgpack.encode(small)) or [])

    def answer_nothing(self, round_: Round) -> None:
        self._channel.submit(round_, [])


def with_answer(evidence: Evidence, *, overdue: bool) -> Evidence:
    """The evidence of all nodes, with the answer of them all: proved dead, or as the node says that knows the least.

    Without a proof the job ends only if a node says so whose answer is the one of all; if a rank is missing, whose
    supervisor may have been stopped, only once it is ``overdue``.
    """
    if evidence.answer in (None, "unknown") and proves(evidence):
        return replace(evidence, answer="dead", outcome="hang")
    if evidence.missing_ranks and evidence.answer in (None, "unknown"):
        evidence = replace(evidence, answer="unseen", ends=overdue)
    return replace(evidence, outcome="hang" if evidence.ends else "suspect")
