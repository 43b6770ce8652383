"""Handles a stall, from its first sign to its bundle: two looks, a judgement, and the action (see ``watch.stall``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from safelaunch.model import JobCondition, format_ranks
from safelaunch.supervise import collecting, judge, publishing
from safelaunch.supervise.collecting import DraftBundle, JobSnapshot, Timeline
from safelaunch.supervise.council import OPEN_S, RoundOutcome
from safelaunch.supervise.early import without_the_gil
from safelaunch.supervise.judge import Judgement
from safelaunch.supervise.kinds import HANG, LOOK_S, SUSPECT, IncidentKind
from safelaunch.supervise.looks import Looks, Starvation
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import ADVANCED, STEP_S, Incident, JobView, look
from safelaunch.supervise.watch.progress import Glance
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.supervise.watch.stall import Stall, ends_after_s, idle_s, suspect_after_s
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

MOST_LOOK_S = 24.0
REMIND_EVERY_S = 3600.0  # between two messages about a job that makes no step
LONGEST_S = 600.0  # for a closer look, because a system call might never return
AGAIN = 1.5  # a quiet time gets another bundle if it is this many times as long as an earlier one


@dataclass
class _Suspicion:
    stall: Stall
    threshold: Threshold
    timeline: Timeline
    window_s: float
    incident: int = 0
    """number of the incident in which all nodes look; 0: none"""
    own: bool = True
    """False: only other nodes suspect the job"""
    begun_s: float = field(default_factory=time.monotonic)
    steps: Mapping[int, int] = field(default_factory=dict)
    """times of the ranks' latest steps before the first look"""


@dataclass(frozen=True)
class _LookResult:
    looks: Looks | None = None
    """None: the nodes decided earlier"""
    judgement: Judgement = field(default_factory=lambda: Judgement("alive"))
    outcome: RoundOutcome | None = None
    """the nodes' decision, if all looked"""


@dataclass
class _Suspect:
    mark_s: float
    report: Report


class StallCase:
    """A stall: suspicion → two looks → judgement → bundle. ``advance`` runs on every tick and never blocks.

    A supervisor that sees only some ranks can't prove a hang. If the supervisors of all nodes can communicate, all of
    them look and vote, and one judges the merged evidence. Otherwise, this supervisor acts only at --max-stall.
    """

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._watch, self._council = job.watch, job.council
        self._suspicion: _Suspicion | None = None
        self._closer: Incident[_LookResult] | None = None
        self._writing: Incident[Report | None] | None = None
        self._written_of = 0.0
        self._suspect_bundle: _Suspect | None = None
        self._refuted: tuple[float, float] | None = None  # (mark, deadline): ignore proofs of this stall until then
        self._waited_s = 0.0  # longest quiet time with a bundle that ended by itself
        self._agreed = False
        self._continues = False  # the job isn't proved dead and has its bundle
        self.attempt = (0, 0)  # attempt that hangs
        self._looked_at: tuple[int, int] | None = None
        self._last_reported = ""
        self._remind_s = 0.0
        self._look_s = LOOK_S  # grows while processes respond too late
        self._starvation, self._patience = Starvation(), 1.0

    @property
    def busy(self) -> bool:
        return self.looking or self.writing

    @property
    def looking(self) -> bool:
        return self._suspicion is not None

    @property
    def writing(self) -> bool:
        return self._writing is not None

    @property
    def needs_ranks(self) -> bool:
        return self._writing is not None and self._writing.needs_ranks

    @property
    def agreed(self) -> bool:
        """True if the nodes agreed that the job hangs. Their reaction will make ranks fail."""
        return self._agreed and self.attempt == self._watch.attempt

    def abandon(self) -> None:
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is None or self._closer is None:
            return
        self._closer.cancel()
        self._closer = None
        if suspicion.incident:  # other nodes start over, because they lack this node's evidence
            self._council.vote("paused")
        if suspicion.own:
            self._council.withdraw()

    def advance(self, glance: Glance, now: float) -> Report | None:
        event = glance.event
        if event is not None and event.kind == "suspect" and event.stall is not None:
            self._suspect(event.stall)
        elif event is not None and event.kind == "clock-restarted":
            self.abandon()
        elif event is not None and event.kind == "recovered":
            self.note_recovery(now)
        if self.looking and self._looked_at not in (None, self._watch.attempt):
            self.abandon()
        if self._suspicion is not None and now - self._suspicion.begun_s > LONGEST_S:
            self.abandon()
            self._watch.hold(now + LONGEST_S / 10)
            say(f"a closer look at the ranks didn't finish within {LONGEST_S:.0f} s: taking another one")
        self._looked_at = self._watch.attempt if self.looking else None
        if not self.busy and self._council.pending_call() is not None:
            self._look_for_others(now)
        if self._suspicion is not None and self._closer is not None and self._closer.done:
            self._on_look_done(self._suspicion, self._closer.result or _LookResult(), now)
        if self._watch.is_hung and not self.writing and self._suspect_bundle is not None:
            self._watch_again(now)
        return self.take_report(now)

    def note_continues(self, report: Report) -> None:
        self._suspect_bundle = _Suspect(self._written_of, report)

    def _watch_again(self, now: float) -> None:
        # The hung job wasn't ended, and might have made progress.
        standing = self._watch.current_stall(now)
        if standing is not None and standing.mark_s > self._written_of:
            self.note_recovery(now)
            self._watch.reset(now)

    def take_report(self, now: float) -> Report | None:
        if self._writing is None or not self._writing.done:
            return None
        writing, self._writing = self._writing, None
        report = writing.result
        ends = report is not None and report.verdict.outcome == "hang" and report.action != "dump"
        self._agreed = self._agreed and ends
        if report is not None and report.verdict.outcome == "suspect":
            self._suspect_bundle = _Suspect(self._written_of, report)
        if self._watch.is_hung and (self._continues or (report is not None and report.verdict.outcome == "suspect")):
            self._watch.resume(self._written_of, now)
        elif report is None:  # it moved, or was restarted
            self._watch.reset(now)
        self._continues = False
        return report

    # --- two looks --------------------------------------------------------------------------------------------------

    def _suspect(self, stall: Stall) -> None:
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected")
        threshold = Threshold(stall.threshold_s, self._why(stall))
        if self._suspicion is not None and not self._suspicion.own:
            self._suspicion.stall, self._suspicion.threshold, self._suspicion.own = stall, threshold, True
            return
        self._begin(_Suspicion(stall, threshold, timeline, self._watch.policy.confirm_s))

    def _look_for_others(self, now: float) -> None:
        """Joins a look of all nodes. During a rank's timed phase, votes against ending the job instead."""
        stall = self._watch.current_stall(now)
        if stall is None or (stall.phase and stall.stalled_s < stall.threshold_s):
            self._council.join_call()
            self._council.vote("paused")
            return
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected on another node")
        self._begin(_Suspicion(stall, Threshold(stall.threshold_s, self._why(stall)), timeline, 0.0, own=False))

    def _begin(self, suspicion: _Suspicion) -> None:
        self._suspicion = suspicion
        self._closer = Incident("closer look", lambda closer: self._look_closer(suspicion, closer))

    def _why(self, stall: Stall) -> str:
        if stall.proved:
            return "an early look proved a hang"
        if stall.phase and stall.threshold_s != self._watch.policy.stall_s:
            return f"phase {stall.phase!r}"
        threshold = self._watch.threshold_without_steps() if stall.before_first_step else self._watch.threshold()
        return threshold.why

    def _look_closer(self, suspicion: _Suspicion, closer: Incident[_LookResult]) -> _LookResult:
        """Looks in a thread. Looks again when the leader calls all nodes, so that they look at the same time."""
        if suspicion.own and self._council.suspect(suspicion.window_s):
            outcome = self._await_call(suspicion, closer)
            if outcome is not None:
                return _LookResult(outcome=outcome)
        while True:
            call = self._council.join_call()
            if call is not None:
                suspicion.incident, suspicion.window_s = call.incident, call.window_s
            looks = self._look(suspicion, closer)
            judgement = self._judge(suspicion, looks)
            if self._council.pending_call() is not None:
                continue
            if not suspicion.incident:
                return _LookResult(looks, judgement)
            if self._is_at_limit(suspicion.stall, judgement):
                self._council.report_limit()
            self._council.vote(judgement.condition)
            while self._council.pending_call() is None:
                outcome = self._council.outcome(suspicion.incident)
                if outcome is not None:
                    return _LookResult(looks, judgement, outcome)
                if judgement.condition != "moving" and self._watch.stepped_since(suspicion.stall):
                    judgement = replace(judgement, condition="moving")
                    self._council.vote("moving")
                closer.pause(STEP_S)

    def _await_call(self, suspicion: _Suspicion, closer: Incident[_LookResult]) -> RoundOutcome | None:
        until = time.monotonic() + OPEN_S
        while self._council.pending_call() is None:
            outcome = self._council.outcome(0)
            if outcome == "alone" or time.monotonic() > until:
                self._council.withdraw()
                return None
            if outcome is not None:
                return outcome
            if self._watch.stepped_since(suspicion.stall):
                return "moving"
            closer.pause(STEP_S)
        return None

    def _look(self, suspicion: _Suspicion, closer: Incident[_LookResult]) -> Looks:
        suspicion.steps = self._watch.steps()
        self._patience = self._starvation.factor()
        look_s = min(MOST_LOOK_S, self._look_s * self._patience)
        kind = replace(HANG, look_s=look_s, between_s=suspicion.window_s)
        # Connection tables can be long: read them only if nodes vote.
        looks = look(
            kind,
            self._job,
            closer,
            quiet=self._watch.quiet,
            network=suspicion.incident > 0,
            between=lambda: BackgroundTask("prepare", publishing.prepare),
        )
        closer.pause(0.0)
        self._look_s = min(2 * self._look_s, MOST_LOOK_S) if looks.is_late else LOOK_S
        return looks

    def _judge(self, suspicion: _Suspicion, looks: Looks) -> Judgement:
        watch, context = self._watch, self._job.context
        targets = tuple(without_the_gil(target, looks.taken[-1]) for target in looks.targets)
        asked = replace(looks, targets=targets)
        evidence = collecting.evidence_of(HANG, asked, self._job.snapshot(), context, patience=self._patience)
        whole, mark_s = self._job.is_whole, suspicion.stall.mark_s
        judgement = judge.judge(looks, evidence, watch.background, covers=whole, mark_s=mark_s)
        if looks.resends and judgement.condition in ("dead", "unknown"):
            judgement = replace(judgement, condition="unseen", unseen="a message between two ranks hasn't arrived")
        if judgement.condition == "dead" and self._is_refuted(mark_s):
            judgement = replace(judgement, condition="unseen", unseen="the full evidence didn't prove a hang")
        watch.drop_quiet_counters()
        if watch.stepped_since(suspicion.stall):
            return replace(judgement, condition="moving")
        stepped = any(at > suspicion.steps.get(rank, 0) for rank, at in watch.steps().items())
        return replace(judgement, condition="alive") if stepped else judgement

    def _is_refuted(self, mark_s: float) -> bool:
        # The full evidence of this stall recently failed to confirm a proof.
        return self._refuted is not None and mark_s == self._refuted[0] and time.monotonic() < self._refuted[1]

    def _is_at_limit(self, stall: Stall, judgement: Judgement) -> bool:
        watch = self._watch
        limit_s = ends_after_s(watch.policy, stall, judgement.answer, judgement.limits)
        without_s = idle_s(watch.state, watch.policy, stall, judgement.answer, time.monotonic())
        return limit_s is not None and without_s >= limit_s

    # --- action -----------------------------------------------------------------------------------------------------

    def _on_look_done(self, suspicion: _Suspicion, result: _LookResult, now: float) -> None:
        self._suspicion = self._closer = None
        if result.outcome == "hang" and result.looks is not None:
            self._watch.mark_hung()
            self._agreed = True
            self._write_with_all(suspicion, result.looks, result.judgement, now)
            return
        if result.outcome is not None:
            self._council.withdraw()
        if not suspicion.own:
            return
        if result.outcome in (None, "alone", "unseen", "hang") and result.looks is not None:
            self._conclude(suspicion, result.looks, result.judgement, now)
            return
        stopped = result.outcome in ("paused", "stopped")
        condition: JobCondition = "stopped" if stopped else "moving" if result.outcome == "moving" else "alive"
        self._feed_detector(suspicion.stall, replace(result.judgement, condition=condition), now)

    def _conclude(self, suspicion: _Suspicion, looks: Looks, judgement: Judgement, now: float) -> None:
        if not self._job.is_whole and judgement.condition == "unknown":
            judgement = replace(judgement, condition="unseen", unseen="the other nodes were not seen")
        event = self._feed_detector(suspicion.stall, judgement, now)
        if event == "hang":
            self._say_hang(suspicion.stall, judgement, now)
            self._write(suspicion, looks, judgement, HANG, now)
        elif event == "undecided" and self._is_worth_a_bundle(suspicion.stall, judgement, now):
            self._write(suspicion, looks, judgement, SUSPECT, now)

    def _feed_detector(self, stall: Stall, judgement: Judgement, now: float) -> str:
        event = self._watch.conclude(stall, judgement.condition, now, judgement.limits)
        if event is None:
            return ""
        if event.kind == "undecided":
            self._say_waiting(stall, judgement, now)
        elif event.kind == "recovered":
            self.note_recovery(now)
        return event.kind

    def _is_worth_a_bundle(self, stall: Stall, judgement: Judgement, now: float) -> bool:
        due_s = suspect_after_s(self._watch.policy, stall, judgement.answer, judgement.limits)
        if due_s is None or now - stall.mark_s < max(due_s, AGAIN * self._waited_s):
            return False
        return not self._has_bundle(stall)

    def _has_bundle(self, stall: Stall) -> bool:
        return self._suspect_bundle is not None and self._suspect_bundle.mark_s == stall.mark_s

    def _write(self, suspicion: _Suspicion, looks: Looks, judgement: Judgement, kind: IncidentKind, now: float) -> None:
        collect = self._collecting(suspicion, looks, judgement, kind, now)
        queries = kind is HANG and self._council.queries_nccl
        spare = self._council.why_ranks_must_live
        without_proof = replace(judgement, condition="unknown")
        by_proof = judgement.condition == "dead" and not self._is_at_limit(suspicion.stall, without_proof)
        mark_s = suspicion.stall.mark_s
        bundled = self._has_bundle(suspicion.stall)

        def write(writing: Incident[Report | None]) -> Report | None:
            collected = collect(writing)
            if kind is HANG and self._watch.stepped_since(suspicion.stall):
                collected.discard()
                say(ADVANCED)
                return None
            collected = collecting.with_nccl(collected, spare=spare) if queries else collected
            if by_proof and not judge.proves(collected.evidence):
                self._refuted = mark_s, mark_s + AGAIN * (now - mark_s)
                say("the full evidence doesn't prove a hang; the job continues")
                if bundled:
                    self._continues = True
                    collected.discard()
                    return None
                return publishing.finish(collected.with_facts(answer="unseen"), Agreement(outcome=SUSPECT.outcome))
            return publishing.finish(collected, Agreement(outcome=kind.outcome))

        self._writing = Incident("bundle", write)

    def _write_with_all(self, suspicion: _Suspicion, looks: Looks, judgement: Judgement, now: float) -> None:
        """Writes the bundle of a stall that all nodes judge. Doesn't stop any process."""
        collect = self._collecting(suspicion, looks, judgement, SUSPECT, now)
        queries, spare = self._council.queries_nccl, self._council.why_ranks_must_live
        ends = self._is_at_limit(suspicion.stall, judgement)
        overdue = self._is_at_limit(suspicion.stall, replace(judgement, condition="unseen"))
        bundled = not self._is_worth_a_bundle(suspicion.stall, replace(judgement, condition="unknown"), now)
        rounds, number = self._council.rounds, suspicion.incident

        def write(writing: Incident[Report | None]) -> Report | None:
            collected = collect(writing)
            collected = collecting.with_nccl(collected, spare=spare) if queries else collected
            collected = collected.with_facts(ends=ends)
            moves = lambda: self._watch.stepped_since(suspicion.stall)  # noqa: E731
            agreed = rounds.decide_hang(number, collected.evidence, collected.staging.root, moves, overdue=overdue)
            void = agreed is None or (agreed.verdict is not None and not rounds.all_agree(number, moves))
            self._continues = not void and agreed is not None and agreed.outcome == "suspect" and bundled
            if self._continues:
                self._say_waiting(suspicion.stall, judgement, now)
            if agreed is None or void or self._continues:
                collected.discard()
                return None
            if agreed.outcome == "hang":
                self._say_hang(suspicion.stall, judgement, now)
            return publishing.finish(collected, agreed)

        self._writing = Incident("bundle", write)

    def _collecting(
        self, suspicion: _Suspicion, looks: Looks, judgement: Judgement, kind: IncidentKind, now: float
    ) -> Callable[[Incident[Report | None]], DraftBundle]:
        self.attempt, self._written_of = self._watch.attempt, suspicion.stall.mark_s
        snapshot: JobSnapshot = self._job.snapshot()
        first, second = looks.taken[-2:]
        timeline = suspicion.timeline.plus("first look", first.end_s).plus("second look", second.end_s)
        timeline = timeline.plus("confirmed")
        stall_s, patience = now - suspicion.stall.mark_s, self._patience

        def collect(writing: Incident[Report | None]) -> DraftBundle:
            collected = collecting.take_evidence(
                kind,
                looks,
                snapshot,
                self._job.context,
                on_ranks_done=writing.on_ranks_done,
                timeline=timeline,
                patience=patience,
            )
            work = tuple(piece.words for piece in judgement.work[:8])
            facts = {"stall_s": stall_s, "answer": judgement.answer, "work": work, "nodes": self._job.nodes()}
            return collected.with_facts(**facts, **suspicion.threshold.facts)

        return collect

    def note_recovery(self, now: float) -> None:
        suspect, self._suspect_bundle = self._suspect_bundle, None
        reported, self._last_reported = self._last_reported, ""
        if suspect is not None:
            lasted_s = now - suspect.mark_s
            self._waited_s = max(self._waited_s, lasted_s)
            publishing.mark_recovered(suspect.report)
            say(f"the job made progress after {lasted_s:.0f} s: it did not hang ({suspect.report.published.shown})")
        elif reported:
            say("progress resumed; still watching")

    # --- messages ---------------------------------------------------------------------------------------------------

    def _say_hang(self, stall: Stall, judgement: Judgement, now: float) -> None:
        where = "no step yet" if stall.before_first_step else f"last step {stall.step}"
        stall_s = now - stall.mark_s
        since = f"for {stall_s:.0f} s ({where})"
        pages = self._watch.last_progress
        still = [rank for rank, page in pages.items() if now - page.last_step_ns / 1e9 > stall_s / 2]
        what = f"no progress {since}"
        if still and len(still) < len(pages) and not stall.before_first_step:
            ranks = f"rank {still[0]} has" if len(still) == 1 else f"ranks {format_ranks(still)} have"
            what = f"{ranks} made no step {since}, while the others continue"
        why = ": "
        if judgement.condition != "dead":
            limit = self._limit(stall, judgement)
            reached = f"{limit} has been reached" if limit else "the nodes of this job have agreed to end it"
            why = f": {self._no_proof}, but {reached}; "
        say(f"{what}{why}collecting evidence from every rank")

    @property
    def _no_proof(self) -> str:
        # Merged evidence can still prove it.
        return "no proof of a hang" if self._job.is_whole else "no proof of a hang on this node"

    def _limit(self, stall: Stall, judgement: Judgement) -> str:
        """Names the limit at which the job ends without a proof; empty if only an agreement between nodes ends it."""
        policy = self._watch.policy
        if policy.is_given(stall) and judgement.condition == "unknown":
            at_start = stall.before_first_step and not policy.has_one_limit
            return "--startup-timeout" if at_start else "--stall-timeout"
        if policy.is_given(stall) or policy.max_stall_given:
            return "--max-stall"
        return f"the timeout of {judgement.group}" if judgement.group else ""

    def _say_waiting(self, stall: Stall, judgement: Judgement, now: float) -> None:
        if self._last_reported == judgement.condition and now < self._remind_s:
            return
        self._last_reported, self._remind_s = judgement.condition, now + REMIND_EVERY_S
        if judgement.condition == "alive":
            work = f" ({judgement.work[0].words})" if judgement.work else ""
            what = f"the job is working{work}; it continues"
        else:
            lacks = judgement.unseen or judgement.free
            what = f"there is {self._no_proof}{f' ({lacks})' if lacks else ''}; the job continues"
        text = f"no step for {now - stall.mark_s:.0f} s, but {what}"
        limit_s = ends_after_s(self._watch.policy, stall, judgement.answer, judgement.limits)
        if limit_s is not None:
            idle = idle_s(self._watch.state, self._watch.policy, stall, judgement.answer, now)
            after = f"after {limit_s:.0f} s" if idle == now - stall.mark_s else f"{limit_s:.0f} s after it last worked"
            limit = self._limit(stall, judgement) or "as the nodes have agreed"
            text += f". Without a step, it is ended {after} ({limit})"
        say(text)
