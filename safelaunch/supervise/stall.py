"""A stall, from its first sign to its bundle: two looks, an answer, and what follows from it (see ``watch.stall``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from safelaunch.model import JobCondition, format_ranks
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise import judge as answer
from safelaunch.supervise.collecting import Collected, JobSnapshot, Timeline
from safelaunch.supervise.council import OPEN_S
from safelaunch.supervise.council import RoundOutcome as Joint
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
REMIND_EVERY_S = 3600.0  # of a job that makes no step and continues
LONGEST_S = 600.0  # a closer look: all that it does has deadlines, but a system call of its own might not return
AGAIN = 1.5  # a quiet time gets a second bundle only if it lasts so many times as long as one that ended by itself


@dataclass
class _Suspicion:
    """Why a closer look is taken. ``incident``: the number of the one in which all nodes look, 0 for none; ``own``
    False: only others suspect the job. ``steps``: when the ranks had marked their newest steps, at the first look.
    """

    stall: Stall
    threshold: Threshold
    timeline: Timeline
    window_s: float
    incident: int = 0
    own: bool = True
    begun_s: float = field(default_factory=time.monotonic)
    steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _LookResult:
    """What the closer look has found. ``outcome``: what has come of it on all nodes, if these have looked as well;
    ``looks`` None: it was over before this node looked.
    """

    looks: Looks | None = None
    judged: Judgement = field(default_factory=lambda: Judgement("alive"))
    outcome: Joint | None = None


@dataclass
class _Suspect:
    """A bundle of the present quiet time, in which the job goes on."""

    mark_s: float
    report: Report


class StallCase:
    """One stall: suspicion → two looks → answer → bundle. Call ``advance`` on every tick; it never blocks.

    A supervisor that does not see every rank of the job can prove nothing. If the supervisors of all nodes can talk,
    all look and vote, and the evidence of all is judged as one; else this one acts only at a --max-stall of the user's.
    """

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._watch, self._council = job.watch, job.council
        self._suspicion: _Suspicion | None = None
        self._closer: Incident[_LookResult] | None = None  # the closer look
        self._writing: Incident[Report | None] | None = None
        self._written_of = 0.0  # the mark of the stall that is being written about
        self._suspect_bundle: _Suspect | None = None
        self._refuted: tuple[float, float] | None = None  # of the stall with this mark, no proof counts until then
        self._waited_s = 0.0  # the longest quiet time with a bundle that ended by itself
        self._agreed = False
        self._goes_on = False  # all nodes have judged that the job continues, and a bundle of it is there
        self.attempt = (0, 0)  # the attempt that was found to hang, here or by all nodes
        self._looked_at: tuple[int, int] | None = None  # the attempt under suspicion
        self._said_waiting = ""
        self._remind_s = 0.0  # when the answer is to be repeated
        self._look_s = LOOK_S  # grows while processes do not answer in time
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
        """Whether it hangs, and the evidence needs the ranks for a moment yet."""
        return self._writing is not None and self._writing.needs_ranks

    @property
    def agreed(self) -> bool:
        """Whether all nodes have found together that the job hangs: what they do about it makes ranks fail."""
        return self._agreed and self.attempt == self._watch.attempt

    def abandon(self) -> None:
        """Drops the suspicion: a rank has failed meanwhile, or the clock was restarted."""
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is None or self._closer is None:
            return
        self._closer.cancel()
        self._closer = None
        if suspicion.incident:  # the others begin anew, too: without this node's evidence they have no proof
            self._council.vote("paused")
        if suspicion.own:
            self._council.withdraw()

    def advance(self, glance: Glance, now: float) -> Report | None:
        """One tick; returns the report once a bundle is written."""
        event = glance.event
        if event is not None and event.kind == "suspect" and event.stall is not None:
            self._suspect(event.stall)
        elif event is not None and event.kind == "clock-restarted":
            self.abandon()
        elif event is not None and event.kind == "recovered":
            self.note_recovery(now)
        if self.looking and self._looked_at not in (None, self._watch.attempt):
            self.abandon()  # what was suspected is no more
        if self._suspicion is not None and now - self._suspicion.begun_s > LONGEST_S:
            self.abandon()
            self._watch.hold(now + LONGEST_S / 10)
            say(f"a closer look at the ranks has not ended within {LONGEST_S:.0f} s: taking another one")
        self._looked_at = self._watch.attempt if self.looking else None
        if not self.busy and self._council.calls() is not None:
            self._look_for_others(now)
        if self._suspicion is not None and self._closer is not None and self._closer.done:
            self._take(self._suspicion, self._closer.result or _LookResult(), now)
        if self._watch.is_hung and not self.writing and self._suspect_bundle is not None:
            self._watch_again(now)
        return self.written(now)

    def note_goes_on(self, report: Report) -> None:
        """The job hangs, and isn't ended for it (``--on-stall dump``)."""
        self._suspect_bundle = _Suspect(self._written_of, report)

    def _watch_again(self, now: float) -> None:
        """Watches a job again that hung, was not ended, and has made progress."""
        standing = self._watch.standing(now)
        if standing is not None and standing.mark_s > self._written_of:
            self.note_recovery(now)
            self._watch.reset(now)

    def written(self, now: float) -> Report | None:
        """The report, once, when the bundle in progress is written."""
        if self._writing is None or not self._writing.done:
            return None
        writing, self._writing = self._writing, None
        report = writing.result
        ends = report is not None and report.verdict.outcome == "hang" and report.action != "dump"
        self._agreed = self._agreed and ends
        if report is not None and report.verdict.outcome == "suspect":
            self._suspect_bundle = _Suspect(self._written_of, report)
        if self._watch.is_hung and (self._goes_on or (report is not None and report.verdict.outcome == "suspect")):
            self._watch.release(self._written_of, now)
        elif report is None:  # the job moved, or was started anew
            self._watch.reset(now)
        self._goes_on = False
        return report

    # --- two looks --------------------------------------------------------------------------------------------------

    def _suspect(self, stall: Stall) -> None:
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected")
        threshold = Threshold(stall.threshold_s, self._why(stall))
        if self._suspicion is not None and not self._suspicion.own:  # all look, because another node suspects the job
            self._suspicion.stall, self._suspicion.threshold, self._suspicion.own = stall, threshold, True
            return
        self._begin(_Suspicion(stall, threshold, timeline, self._watch.policy.confirm_s))

    def _look_for_others(self, now: float) -> None:
        """All nodes look, whether they suspect the job or not. A rank that has said that it will be quiet for so long
        is no reason to end the job.
        """
        stall = self._watch.standing(now)
        if stall is None or (stall.phase and stall.stalled_s < stall.threshold_s):
            self._council.answer_call()
            self._council.vote("paused")
            return
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected on another node")
        self._begin(_Suspicion(stall, Threshold(stall.threshold_s, self._why(stall)), timeline, 0.0, own=False))

    def _begin(self, suspicion: _Suspicion) -> None:
        self._suspicion = suspicion
        self._closer = Incident("closer look", lambda closer: self._look_closer(suspicion, closer))

    def _why(self, stall: Stall) -> str:
        if stall.proved:
            return "an early look has proved that the job hangs"
        if stall.phase and stall.threshold_s != self._watch.policy.stall_s:
            return f"phase {stall.phase!r}"
        threshold = self._watch.threshold_without_steps() if stall.before_first_step else self._watch.threshold()
        return threshold.why

    def _look_closer(self, suspicion: _Suspicion, closer: Incident[_LookResult]) -> _LookResult:
        """In a thread. When all nodes are called to look, each looks then, whatever it has seen before."""
        if suspicion.own and self._council.suspect(suspicion.window_s):
            outcome = self._await_call(suspicion, closer)
            if outcome is not None:
                return _LookResult(outcome=outcome)
        while True:
            call = self._council.answer_call()
            if call is not None:
                suspicion.incident, suspicion.window_s = call.incident, call.window_s
            looks = self._look(suspicion, closer)
            judged = self._judge(suspicion, looks)
            if self._council.calls() is not None:
                continue
            if not suspicion.incident:
                return _LookResult(looks, judged)
            if self._is_at_limit(suspicion.stall, judged):
                self._council.at_limit()
            self._council.vote(judged.found)
            while self._council.calls() is None:
                outcome = self._council.outcome(suspicion.incident)
                if outcome is not None:
                    return _LookResult(looks, judged, outcome)
                if judged.found != "moving" and self._watch.stepped_since(suspicion.stall):
                    judged = replace(judged, found="moving")
                    self._council.vote("moving")
                closer.pause(STEP_S)

    def _await_call(self, suspicion: _Suspicion, closer: Incident[_LookResult]) -> Joint | None:
        """Waits until all look; returns what came of it where that was over before this node could."""
        until = time.monotonic() + OPEN_S
        while self._council.calls() is None:
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
        # Only a vote asks for the network, of the newest look: a node's table of connections may be long.
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
        """Asks the ranks for their records, and what all of it says."""
        watch, context = self._watch, self._job.context
        targets = tuple(without_the_gil(target, looks.taken[-1]) for target in looks.targets)
        seen = replace(looks, targets=targets)
        evidence = collecting.evidence_of(HANG, seen, self._job.snapshot(), context, patience=self._patience)
        whole, mark_s = self._job.is_whole, suspicion.stall.mark_s
        judged = answer.judge(looks, evidence, watch.background, covers=whole, mark_s=mark_s)
        if looks.resends and judged.found in ("dead", "unknown"):
            judged = replace(judged, found="unseen", unseen="a message between two ranks has not arrived")
        if judged.found == "dead" and self._is_refuted(mark_s):
            judged = replace(judged, found="unseen", unseen="the evidence in full did not prove what a look had")
        watch.read_quiet_again()
        if watch.stepped_since(suspicion.stall):
            return replace(judged, found="moving")
        stepped = any(at > suspicion.steps.get(rank, 0) for rank, at in watch.steps().items())
        return replace(judged, found="alive") if stepped else judged

    def _is_refuted(self, mark_s: float) -> bool:
        """Whether a bundle of this stall did not bear out its proof, and that is not long ago."""
        return self._refuted is not None and mark_s == self._refuted[0] and time.monotonic() < self._refuted[1]

    def _is_at_limit(self, stall: Stall, judged: Judgement) -> bool:
        watch = self._watch
        limit_s = ends_after_s(watch.policy, stall, judged.answer, judged.limits)
        without_s = idle_s(watch.state, watch.policy, stall, judged.answer, time.monotonic())
        return limit_s is not None and without_s >= limit_s

    # --- what follows -----------------------------------------------------------------------------------------------

    def _take(self, suspicion: _Suspicion, seen: _LookResult, now: float) -> None:
        self._suspicion = self._closer = None
        if seen.outcome == "hang" and seen.looks is not None:
            self._watch.mark_hung()
            self._agreed = True
            self._write_with_all(suspicion, seen.looks, seen.judged, now)
            return
        if seen.outcome is not None:
            self._council.withdraw()
        if not suspicion.own:
            return
        if seen.outcome in (None, "alone", "unseen", "hang") and seen.looks is not None:
            self._conclude(suspicion, seen.looks, seen.judged, now)
            return
        stopped = seen.outcome in ("paused", "stopped")
        found: JobCondition = "stopped" if stopped else "moving" if seen.outcome == "moving" else "alive"
        self._told(suspicion.stall, replace(seen.judged, found=found), now)

    def _conclude(self, suspicion: _Suspicion, looks: Looks, judged: Judgement, now: float) -> None:
        if not self._job.is_whole and judged.found == "unknown":
            judged = replace(judged, found="unseen", unseen="the other nodes were not seen")
        event = self._told(suspicion.stall, judged, now)
        if event == "hang":
            self._say_hang(suspicion.stall, judged, now)
            self._write(suspicion, looks, judged, HANG, now)
        elif event == "undecided" and self._is_worth_a_bundle(suspicion.stall, judged, now):
            self._write(suspicion, looks, judged, SUSPECT, now)

    def _told(self, stall: Stall, judged: Judgement, now: float) -> str:
        """Feeds the detector; returns the kind of its event. Prints what the user needs to know."""
        event = self._watch.conclude(stall, judged.found, now, judged.limits)
        if event is None:
            return ""
        if event.kind == "undecided":
            self._say_waiting(stall, judged, now)
        elif event.kind == "recovered":
            self.note_recovery(now)
        return event.kind

    def _is_worth_a_bundle(self, stall: Stall, judged: Judgement, now: float) -> bool:
        due_s = suspect_after_s(self._watch.policy, stall, judged.answer, judged.limits)
        if due_s is None or now - stall.mark_s < max(due_s, AGAIN * self._waited_s):
            return False
        return not self._has_bundle(stall)

    def _has_bundle(self, stall: Stall) -> bool:
        """Whether a bundle of this stall, in which the job goes on, is there."""
        return self._suspect_bundle is not None and self._suspect_bundle.mark_s == stall.mark_s

    def _write(self, suspicion: _Suspicion, looks: Looks, judged: Judgement, kind: IncidentKind, now: float) -> None:
        collect = self._collecting(suspicion, looks, judged, kind, now)
        queries = kind is HANG and self._council.queries_nccl
        spare = self._council.must_keep_ranks_alive
        without_proof = replace(judged, found="unknown")
        by_proof = judged.found == "dead" and not self._is_at_limit(suspicion.stall, without_proof)
        mark_s = suspicion.stall.mark_s
        bundled = self._has_bundle(suspicion.stall)

        def write(writing: Incident[Report | None]) -> Report | None:
            found = collect(writing)
            if kind is HANG and self._watch.stepped_since(suspicion.stall):
                found.discard()
                say(ADVANCED)
                return None
            found = collecting.with_nccl(found, spare=spare) if queries else found
            if by_proof and not answer.proves(found.evidence):
                self._refuted = mark_s, mark_s + AGAIN * (now - mark_s)
                say("the evidence in full does not prove that the job hangs: it continues")
                if bundled:
                    self._goes_on = True
                    found.discard()
                    return None
                return publishing.finish(found.with_facts(answer="unseen"), Agreement(outcome=SUSPECT.outcome))
            return publishing.finish(found, Agreement(outcome=kind.outcome))

        self._writing = Incident("bundle", write)

    def _write_with_all(self, suspicion: _Suspicion, looks: Looks, judged: Judgement, now: float) -> None:
        """Nobody knows yet whether the job ends, so no process is stopped for it."""
        collect = self._collecting(suspicion, looks, judged, SUSPECT, now)
        queries, spare = self._council.queries_nccl, self._council.must_keep_ranks_alive
        ends = self._is_at_limit(suspicion.stall, judged)
        overdue = self._is_at_limit(suspicion.stall, replace(judged, found="unseen"))
        bundled = not self._is_worth_a_bundle(suspicion.stall, replace(judged, found="unknown"), now)
        rounds, number = self._council.rounds, suspicion.incident

        def write(writing: Incident[Report | None]) -> Report | None:
            found = collect(writing)
            found = collecting.with_nccl(found, spare=spare) if queries else found
            found = found.with_facts(ends=ends)
            moves = lambda: self._watch.stepped_since(suspicion.stall)  # noqa: E731
            agreed = rounds.hang(number, found.evidence, found.staging.root, moves, overdue=overdue)
            void = agreed is None or (agreed.verdict is not None and not rounds.all_agree(number, moves))
            self._goes_on = not void and agreed is not None and agreed.outcome == "suspect" and bundled
            if self._goes_on:
                self._say_waiting(suspicion.stall, judged, now)
            if agreed is None or void or self._goes_on:
                found.discard()
                return None
            if agreed.outcome == "hang":
                self._say_hang(suspicion.stall, judged, now)
            return publishing.finish(found, agreed)

        self._writing = Incident("bundle", write)

    def _collecting(
        self, suspicion: _Suspicion, looks: Looks, judged: Judgement, kind: IncidentKind, now: float
    ) -> Callable[[Incident[Report | None]], Collected]:
        """What takes the evidence, in the thread that writes the bundle."""
        self.attempt, self._written_of = self._watch.attempt, suspicion.stall.mark_s
        known: JobSnapshot = self._job.snapshot()
        first, second = looks.taken[-2:]
        timeline = suspicion.timeline.plus("first look", first.end_s).plus("second look", second.end_s)
        timeline = timeline.plus("confirmed")
        stall_s, patience = now - suspicion.stall.mark_s, self._patience

        def collect(writing: Incident[Report | None]) -> Collected:
            found = collecting.take_evidence(
                kind,
                looks,
                known,
                self._job.context,
                on_ranks_done=writing.on_ranks_done,
                timeline=timeline,
                patience=patience,
            )
            work = tuple(one.words for one in judged.work[:8])
            facts = {"stall_s": stall_s, "answer": judged.answer, "work": work, "nodes": self._job.nodes()}
            return found.with_facts(**facts, **suspicion.threshold.facts)

        return collect

    def note_recovery(self, now: float) -> None:
        """The job has made progress, or has ended by itself with success."""
        suspect, self._suspect_bundle = self._suspect_bundle, None
        said, self._said_waiting = self._said_waiting, ""
        if suspect is not None:
            lasted_s = now - suspect.mark_s
            self._waited_s = max(self._waited_s, lasted_s)
            publishing.mark_recovered(suspect.report)
            say(f"the job made progress after {lasted_s:.0f} s: it did not hang ({suspect.report.published.shown})")
        elif said:
            say("progress resumed; still watching")

    # --- what is said -----------------------------------------------------------------------------------------------

    def _say_hang(self, stall: Stall, judged: Judgement, now: float) -> None:
        where = "no step yet" if stall.before_first_step else f"last step {stall.step}"
        stall_s = now - stall.mark_s
        since = f"for {stall_s:.0f} s ({where})"
        pages = self._watch.last_progress
        still = [rank for rank, page in pages.items() if now - page.last_step_ns / 1e9 > stall_s / 2]
        what = f"no progress {since}"
        if still and len(still) < len(pages) and not stall.before_first_step:
            who = f"rank {still[0]} has" if len(still) == 1 else f"ranks {format_ranks(still)} have"
            what = f"{who} made no step {since}, while the others continue"
        why = "" if judged.found == "dead" else f", and {self._no_proof}, but {self._why_ended(stall, judged)}"
        say(f"{what}{why}: collecting evidence from every rank")

    @property
    def _no_proof(self) -> str:
        """The evidence of all nodes may prove it, once it is merged."""
        return "nothing on this node proves a hang" if not self._job.is_whole else "nothing proves a hang"

    def _why_ended(self, stall: Stall, judged: Judgement) -> str:
        policy = self._watch.policy
        if policy.is_given(stall) and judged.found == "unknown":
            at_start = stall.before_first_step and not policy.has_one_limit
            return f"that is {'--startup-timeout' if at_start else '--stall-timeout'}"
        if policy.is_given(stall) or policy.max_stall_given:
            return "that is --max-stall"
        if judged.group:
            return f"the timeout of group {judged.group} expires then"
        return "the nodes of this job have agreed to end it"

    def _say_waiting(self, stall: Stall, judged: Judgement, now: float) -> None:
        """Once for each answer, and then every ``REMIND_EVERY_S``."""
        if self._said_waiting == judged.found and now < self._remind_s:
            return
        self._said_waiting, self._remind_s = judged.found, now + REMIND_EVERY_S
        if judged.found == "alive":
            what = f"the job is working ({judged.work[0].words})" if judged.work else "the job is working"
        else:
            lacks = judged.unseen or judged.free
            what = self._no_proof + (f" ({lacks})" if lacks else "")
        text = f"no step for {now - stall.mark_s:.0f} s, but {what}: it continues"
        limit_s = ends_after_s(self._watch.policy, stall, judged.answer, judged.limits)
        if limit_s is not None:
            idle = idle_s(self._watch.state, self._watch.policy, stall, judged.answer, now)
            after = f"after {limit_s:.0f} s" if idle == now - stall.mark_s else f"{limit_s:.0f} s after it last worked"
            text += f"; without a step, it is ended {after}: {self._why_ended(stall, judged)}"
        say(text)
