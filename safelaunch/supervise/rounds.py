"""Rounds in which all nodes submit evidence, and one node decides or answers.

Hangs, crashes, dumps and add-on services differ in which node judges, how long it waits for the other nodes, and what
ends the round without a decision.
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

from safelaunch.bundle.publication import name_of
from safelaunch.model import BundlePlace, Evidence, NodeEvidence
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.codec import pack, share_of
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.evidence import condense
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS, PeerStatus, PeerView, Submissions
from safelaunch.supervise.cluster.leader import ACKNOWLEDGE_S, EVIDENCE_S
from safelaunch.supervise.cluster.membership import CROWD
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

SETTLE_S = 75.0  # from a node's evidence to the leader's decision
AGREED_S = ACKNOWLEDGE_S + 4.0  # longer than the leader waits, as its page takes some rounds to arrive
FEW = 16  # up to this many nodes, whole Flight Recorders are sent
CRASH_S = 4.0  # torchrun's agents, of which one hosts the store, are held for 6 s, including the look at the ranks
HEAR_S = 2.5  # for the evidence of other failing nodes
EFFECTS_S = 2.8  # for a node to report a root failure
HOSTS_S = 1.0  # for other nodes to read the verdict, if this node's agent hosts the store
PEERS_ANSWER_S = 30.0
ASKED_EVERY_S = 5.0  # between two other nodes' questions


@dataclass(frozen=True, slots=True)
class _Course:
    patience_s: float
    over: Callable[[PeerView], bool]  # ends the round without a decision
    judges: Callable[[PeerView, LeaderPage, float], bool]  # this node judges all submissions
    complete: Callable[[PeerView, LeaderPage, Submissions, float], bool]  # no submission is worth waiting for
    with_answer: Callable[[Evidence], Evidence]
    action: Action


@dataclass(frozen=True, slots=True)
class _SharedVerdict:
    decision: Decision
    agreed: Agreement
    is_whole: bool


class Rounds:
    """This node's part in all rounds.

    ``decide_hang``, ``all_agree``, ``decide_crash`` and the function that ``asking`` yields wait for other nodes.
    """

    def __init__(
        self, channel: Channel, context: JobContext, nodes: Callable[[], tuple[NodeEvidence, ...]], action: Action
    ) -> None:
        self._channel = channel
        self._context = context
        self._nodes = nodes
        self._action: Action = action  # wanted if the job hangs
        self._past: int | None = None  # number of crashes with a verdict when the ranks started
        self._answered: set[Round] = set()
        self._next_s = 0.0
        self._number = 0
        self._one_at_a_time = threading.Lock()

    @property
    def page(self) -> LeaderPage | None:
        view = self._channel.view
        return view.page if view.silent_s < SILENT_S else None

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
        """Submits this node's evidence, judges all evidence if this node leads, and waits for the decision.

        Returns None if the job moves after all.

        Args:
            root: This node's bundle; its small files are submitted, too.
            moves: Function that returns True once a rank of this node has completed a step.
            overdue: Whether to end the job even if some ranks are unseen.
        """
        nodes = node_count(self._channel.view.page)
        files = small_files(root, records=1 < nodes <= FEW) if root is not None else {}
        own = self._context.cleaned(evidence)

        def over(view: PeerView) -> bool:
            page = view.page
            if moves():
                self._channel.update(vote="moving")
            return page is None or page.incident > incident or (page.incident == incident and page.phase == "idle")

        course = _Course(
            SETTLE_S,
            over,
            judges=lambda view, page, past_s: view.leads,
            complete=lambda view, page, submissions, past_s: submissions.is_complete or past_s >= EVIDENCE_S,
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
        """Waits until all nodes know the decision. Returns False if the decision became void.

        No node acts earlier, because one node's action ends ranks on other nodes, and perhaps the store. The decision
        becomes void if torchrun restarts ranks or a rank moves.
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
        if self._past is None and page is not None:
            self._past = page.crash

    def report_trouble(self, text: str) -> None:
        if not self._channel.beat.trouble:
            self._channel.update(trouble=text[:LONGEST_TEXT])

    @property
    def has_trouble(self) -> bool:
        return bool(self._channel.beat.trouble)

    def reset(self) -> None:
        self._past = None
        self._channel.update(trouble="", restarting=False)
        self._channel.withdraw("crash")

    def announce_restart(self) -> str:
        """Announces that torchrun will restart healthy ranks of this node. Returns the reason for the restart."""
        self._channel.update(restarting=True)
        troubles = self._channel.view.status.troubles
        return f"on another node, {troubles[0]}" if troubles else "nodes have joined or left"

    def decide_crash(self, local: Evidence) -> Agreement:
        """Returns the common verdict about a failure on this node, after a little more than ``CRASH_S``.

        A node with a root failure judges; if there is no root failure, the leader judges. The first verdict stored
        counts.
        """
        if self._past is None:
            return Agreement()
        now = time.time()
        local = with_relative_times(self._context.cleaned(local), now)

        def own() -> Evidence:
            return replace(local, nodes=self._context.cleaned(self._nodes()))

        def over(view: PeerView) -> bool:
            status = view.status
            excused = status.restarting and not status.troubles and not self.has_trouble
            return status.stopping or excused or view.page is None

        course = _Course(
            CRASH_S,
            over,
            self._may_judge,
            self._needs_no_more,
            with_answer=lambda whole: replace(whole, outcome="crash"),
            action="dump",
        )
        agreed = self._decide_together(f"crash.{self._past + 1}", own, condense(own()), course)
        status = self._channel.view.status
        if agreed is None or agreed.verdict is None or (self.has_trouble and not agreed.verdict.culprits):
            return Agreement(status=status)  # no verdict, or one without this node's failure
        if self._channel.view.is_local:
            time.sleep(HOSTS_S)
        here = tuple(with_relative_times(evidence, -now) for evidence in agreed.others.evidence)  # by this node's clock
        return dataclasses.replace(agreed, others=dataclasses.replace(agreed.others, evidence=here))

    def _may_judge(self, view: PeerView, page: LeaderPage, past_s: float) -> bool:
        # Before EFFECTS_S, the first node with a root failure judges; later, any node or, in a large job, the leader.
        failing = [slot for slot, _ in page.troubles if slot in page.failed]
        if failing and past_s < EFFECTS_S:
            return view.slot == failing[0]
        crowd = page.nodes > CROWD and view.slot != page.leader
        return past_s >= HEAR_S and not crowd

    def _needs_no_more(self, view: PeerView, page: LeaderPage, submissions: Submissions, past_s: float) -> bool:
        if self.has_trouble or any(slot in page.failed for slot, _ in page.troubles):
            complete = len(page.failed) >= page.nodes and submissions.is_complete
            return past_s >= (HEAR_S if self.has_trouble else EFFECTS_S) or complete
        silent = any(peer.silent_s for peer in view.peers)
        return past_s >= (EFFECTS_S if silent and view.slot == page.leader else CRASH_S - 0.4)

    # --- a round with a decision ------------------------------------------------------------------------------------

    def _decide_together(
        self, round_: Round, own: Callable[[], Evidence], chunks: list[bytes], course: _Course
    ) -> Agreement | None:
        """Submits ``chunks`` and returns the decision; None if there is none.

        Args:
            own: Function that returns this node's evidence at the time of judging.
        """
        channel, begin_s = self._channel, time.monotonic()
        own_verdict: _SharedVerdict | None = None
        channel.submit(round_, chunks)
        while (past_s := time.monotonic() - begin_s) < course.patience_s:
            view = channel.view
            decision = view.decisions.get(round_)
            if decision is not None:
                return self._agreement(decision, own_verdict, view.status)
            if course.over(view) or view.page is None:
                return None
            if own_verdict is None and course.judges(view, view.page, past_s):
                channel.gather(round_)
                submissions = view.submissions.get(round_, NO_SUBMISSIONS)
                if course.complete(view, view.page, submissions, past_s):
                    own_verdict = self._judge(own(), submissions, course)
                    channel.decide(round_, own_verdict.decision)
            time.sleep(0.02)
        return None

    def _judge(self, own: Evidence, submissions: Submissions, course: _Course) -> _SharedVerdict:
        peers = read_evidence(submissions, self._context.host)
        whole = course.with_answer(peers.with_own(own))
        verdict = verdict_of(whole, self._context)
        name = name_of(self._context.run_name, time.time(), verdict.outcome)
        path = os.fspath(self._context.bundle_dir / name)
        steps = [rank.progress.step for rank in whole.ranks if rank.progress and rank.progress.step]
        action: Action = course.action if verdict.outcome == "hang" else "dump"
        decision = Decision(verdict, action, self._context.host[:255], path[:4096], min(steps, default=None))
        return _SharedVerdict(
            decision, Agreement(name=name, others=peers, answer=whole.answer), not whole.missing_ranks
        )

    def _agreement(self, decision: Decision, own_verdict: _SharedVerdict | None, status: PeerStatus) -> Agreement:
        outcome, whole = decision.verdict.outcome, False
        if own_verdict is not None and (decision.host, decision.path) == (
            own_verdict.decision.host,
            own_verdict.decision.path,
        ):
            agreed, whole = own_verdict.agreed, own_verdict.is_whole
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

    # --- requests ---------------------------------------------------------------------------------------------------

    @contextmanager
    def asking(self, question: NodeQuestion) -> Iterator[Callable[[threading.Event], Submissions]]:
        """Sends a question to all nodes.

        Yields a function that waits for the answers, for at most ``PEERS_ANSWER_S`` or until its event is set.
        """
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
        while (view := self._channel.view).page is not None and time.monotonic() < until:
            if view.submissions.get(round_, NO_SUBMISSIONS).is_complete or stop.wait(0.05):
                break
        return self._channel.view.submissions.get(round_, NO_SUBMISSIONS)

    @property
    def has_peers(self) -> bool:
        page = self.page
        return page is not None and page.nodes > 1

    @property
    def has_pending_dump(self) -> bool:
        return any(question.kind == "dump" for question in self._new().values())

    def next_question(self, now: float) -> tuple[Round, NodeQuestion] | None:
        """Returns an open question from another node, dumps first; None if there is none."""
        new = self._new() if now >= self._next_s else {}
        if not new:
            return None
        round_ = min(new, key=lambda round_: (new[round_].kind != "dump", round_))
        self._answered.add(round_)
        self._next_s = now + ASKED_EVERY_S
        return round_, new[round_]

    def _new(self) -> dict[Round, NodeQuestion]:
        page = self.page
        return {round_: what for round_, what in page.questions.items() if round_ not in self._answered} if page else {}

    def answer(self, round_: Round, evidence: Evidence) -> None:
        own = self._context.cleaned(evidence)
        self._channel.submit(round_, condense(own, share=share_of(node_count(self.page))))

    def answer_part(self, round_: Round, service: Service[Any, Part], part: Part) -> None:
        share = share_of(node_count(self.page))
        small = service.bounded(part, lambda smaller: pack(msgspec.msgpack.encode(smaller), share) is not None)
        self._channel.submit(round_, pack(msgspec.msgpack.encode(small)) or [])

    def answer_nothing(self, round_: Round) -> None:
        self._channel.submit(round_, [])


def with_answer(evidence: Evidence, *, overdue: bool) -> Evidence:
    """Adds the common answer: proved dead, or else the answer of the node that knows least.

    If there is no proof, the job ends only if that node ends it or, if a rank is missing, once ``overdue``.
    """
    if evidence.answer in (None, "unknown") and proves(evidence):
        return replace(evidence, answer="dead", outcome="hang")
    if evidence.missing_ranks and evidence.answer in (None, "unknown"):
        evidence = replace(evidence, answer="unseen", ends=overdue)
    return replace(evidence, outcome="hang" if evidence.ends else "suspect")
