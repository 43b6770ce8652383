"""A stall, from its first sign to its bundle: two looks, an answer, and what follows from it (see ``watch.stall``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from safelaunch.model import Outcome, format_ranks
from safelaunch.supervise import answer, incident
from safelaunch.supervise.answer import Judged
from safelaunch.supervise.cluster.messages import Vote
from safelaunch.supervise.council import OPEN_S, Council
from safelaunch.supervise.council import Outcome as Joint
from safelaunch.supervise.early import without_the_gil
from safelaunch.supervise.incident import Agreement, Circumstances, Collected, Exits, Known, Report, Timeline
from safelaunch.supervise.looks import LOOK_DEADLINE_S, Looks, Starvation, look_at
from safelaunch.supervise.watch.job import Glance, Watch
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.supervise.watch.stall import Found, Stall, ends_after_s, suspect_after_s
from safelaunch.system.console import say
from safelaunch.system.task import Task

MOST_LOOK_S = 24.0
AGAIN = 1.5  # a quiet time gets a second bundle only if it lasts so many times as long as one that ended by itself


@dataclass
class _Suspicion:
    """A closer look in progress: the suspicion, the looks so far, and when the second one is due.

    ``asked_s``: since when this node waits for the others to look as well. ``incident``: the number of the one in which
    all look; ``own`` False: only others suspect the job. ``judged``: the answer, once there is one.
    """

    stall: Stall
    threshold: Threshold
    timeline: Timeline
    looks: Looks | None = None
    steps: dict[int, int] | None = None  # when the ranks had marked their newest steps, at the first look
    second_look_s: float | None = None
    window_s: float = 0.0
    asked_s: float | None = None
    incident: int = 0
    own: bool = True
    judging: Task[Judged] | None = None
    judged: Judged | None = None


@dataclass
class _Suspect:
    """A bundle of the present quiet time, in which the job goes on."""

    mark_s: float
    report: Report


class StallCase:
    """One stall: suspicion → two looks → answer → bundle. Call ``advance`` on every tick; it never blocks.

    A supervisor that does not see every rank of the job can prove nothing. If the supervisors of all nodes can talk,
    all look and vote, and the evidence of all is judged as one; else this one acts only at --max-stall.
    """

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits, council: Council) -> None:
        self._council = council
        self._watch = watch
        self._about = about
        self._exits = exits
        self._suspicion: _Suspicion | None = None
        self._looking: Task[Looks] | None = None
        self._writing: Task[Report | None] | None = None
        self._written_of = 0.0  # the mark of the stall that is being written about
        self._suspect_bundle: _Suspect | None = None
        self._waited_s = 0.0  # the longest quiet time with a bundle that ended by itself
        self._ranks_seen = threading.Event()  # the evidence in progress needs nothing more of the ranks
        self._agreed = False
        self._goes_on = False  # all nodes have judged that the job continues, and a bundle of it is there
        self.attempt = (0, 0)  # the attempt that was found to hang, here or by all nodes
        self._looked_at: tuple[int, int] | None = None  # the attempt under suspicion
        self._said_waiting = ""
        self._look_s = LOOK_DEADLINE_S  # grows while processes do not answer in time
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
        return self.writing and not self._ranks_seen.is_set()

    @property
    def agreed(self) -> bool:
        """Whether all nodes have found together that the job hangs: what they do about it makes ranks fail."""
        return self._agreed and self.attempt == self._watch.attempt

    def abandon(self) -> None:
        """Drops the suspicion: a rank has failed meanwhile, or the clock was restarted."""
        if self._suspicion is not None:
            self._leave(self._suspicion)
        self._suspicion = None
        self._looking = None

    def ended_well(self, now: float) -> None:
        """The job has ended by itself, with success."""
        self._note_recovery(now)

    def advance(self, glance: Glance, now: float) -> Report | None:
        """One tick; returns the report once a bundle is written."""
        event = glance.event
        if event is not None and event.kind == "suspect" and event.stall is not None:
            self._suspect(event.stall, now)
        elif event is not None and event.kind == "clock-restarted":
            self.abandon()
        elif event is not None and event.kind == "recovered":
            self._note_recovery(now)
        if self.looking and self._looked_at not in (None, self._watch.attempt):
            self.abandon()  # what was suspected is no more
        self._looked_at = self._watch.attempt if self.looking else None
        if not self.writing:
            self._answer_call(now)
        if self._suspicion is not None and not self.writing:
            self._advance_suspicion(self._suspicion, now)
        return self.written(now)

    def written(self, now: float) -> Report | None:
        """The report, once, when the bundle in progress is written."""
        if self._writing is None or not self._writing.done:
            return None
        writing, self._writing = self._writing, None
        report = writing.result()
        ends = report is not None and report.verdict.outcome == "hang" and report.action != "dump"
        self._agreed = self._agreed and ends
        if report is not None and report.verdict.outcome == "suspect":
            self._suspect_bundle = _Suspect(self._written_of, report)
        if self._watch.is_held and (self._goes_on or (report is not None and report.verdict.outcome == "suspect")):
            self._watch.release(self._written_of, now)
        elif report is None:  # the job moved, or was started anew
            self._watch.start_again(now)
        self._goes_on = False
        return report

    # --- two looks --------------------------------------------------------------------------------------------------

    def _suspect(self, stall: Stall, now: float) -> None:
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected")
        threshold = Threshold(stall.threshold_s, self._why(stall))
        if self._suspicion is not None and not self._suspicion.own:  # all look, because another node suspects the job
            self._suspicion.stall, self._suspicion.threshold, self._suspicion.own = stall, threshold, True
            return
        self._suspicion = _Suspicion(stall, threshold, timeline, window_s=self._watch.policy.confirm_s)
        if self._council.suspect(self._suspicion.window_s):
            self._suspicion.asked_s = now
        else:
            self._look(self._suspicion)

    def _why(self, stall: Stall) -> str:
        if stall.proved:
            return "an early look has proved that the job hangs"
        if stall.phase and stall.threshold_s != self._watch.policy.stall_s:
            return f"phase {stall.phase!r}"
        threshold = self._watch.threshold_without_steps() if stall.before_first_step else self._watch.threshold()
        return threshold.why

    def _look(self, suspicion: _Suspicion) -> None:
        targets, looks, quiet = self._watch.targets(), suspicion.looks, self._watch.quiet
        self._patience = self._starvation.factor()
        deadline_s = min(MOST_LOOK_S, self._look_s * self._patience)
        if looks is None:
            suspicion.steps = self._watch.steps()
        # Only a vote asks for the network, of the newest look: a node's table of connections may be long.
        network = looks is not None and suspicion.incident > 0
        self._looking = Task(
            "look",
            lambda: look_at(targets, looks, collectives=True, network=network, quiet=quiet, deadline_s=deadline_s),
        )

    def _advance_suspicion(self, suspicion: _Suspicion, now: float) -> None:
        if suspicion.asked_s is not None:
            self._await_others(suspicion, suspicion.asked_s, now)
            return
        if suspicion.judged is not None:
            self._await_outcome(suspicion, now)
            return
        if suspicion.second_look_s is not None and now >= suspicion.second_look_s:
            suspicion.second_look_s = None
            self._look(suspicion)
        if suspicion.judging is not None:
            if suspicion.judging.done:
                self._conclude(suspicion, suspicion.judging.result(), now)
            return
        if self._looking is None or not self._looking.done:
            return
        first = suspicion.looks is None
        suspicion.looks = self._looking.result()
        self._looking = None
        if first:
            suspicion.second_look_s = now + suspicion.window_s
            Task("prepare", incident.prepare)
        else:
            is_late = suspicion.looks.is_late
            self._look_s = min(2 * self._look_s, MOST_LOOK_S) if is_late else LOOK_DEADLINE_S
            suspicion.judging = self._judge(suspicion, suspicion.looks)

    def _judge(self, suspicion: _Suspicion, looks: Looks) -> Task[Judged]:
        """Asks the ranks for their records, and what all of it says."""
        watch, about, mark_s = self._watch, self._about, suspicion.stall.mark_s
        known, background, covers = incident.known_of(watch, self._exits()), watch.background, not watch.unseen
        patience = self._patience
        looks = replace(looks, targets=tuple(without_the_gil(target, looks.taken[-1]) for target in looks.targets))

        def judge() -> Judged:
            evidence = incident.evidence_of("hang", looks, known, about, ask=True, patience=patience)
            found = answer.judge(looks, evidence, background, covers=covers, mark_s=mark_s)
            if looks.resends and found.found in ("dead", "unknown"):
                return replace(found, found="unseen", unseen="a message between two ranks has not arrived")
            return found

        return Task("judge", judge)

    def _conclude(self, suspicion: _Suspicion, judged: Judged, now: float) -> None:
        self._watch.read_quiet_again()
        steps = self._watch.steps()
        if self._watch.stepped_since(suspicion.stall):
            judged = replace(judged, found="moving")
        elif suspicion.steps is not None and any(at > suspicion.steps.get(rank, 0) for rank, at in steps.items()):
            judged = replace(judged, found="alive")
        if suspicion.incident:
            suspicion.judged = judged
            if self._is_at_limit(suspicion.stall, judged, now):
                self._council.at_limit()
            self._council.vote(_vote(judged.found))
            return
        self._suspicion = None
        if self._watch.unseen and judged.found == "unknown":
            judged = replace(judged, found="unseen", unseen="the other nodes were not seen")
        assert suspicion.looks is not None
        event = self._told(suspicion.stall, judged, now)
        if event == "hang":
            self._say_hang(suspicion.stall, judged, now)
            self._write(suspicion, suspicion.looks, judged, "hang", now)
        elif event == "undecided" and self._is_worth_a_bundle(suspicion.stall, judged, now):
            self._write(suspicion, suspicion.looks, judged, "suspect", now)

    def _told(self, stall: Stall, judged: Judged, now: float) -> str:
        """Feeds the detector; returns the kind of its event. Prints what the user needs to know."""
        event = self._watch.conclude(stall, judged.found, now, judged.limits)
        if event is None:
            return ""
        if event.kind == "undecided":
            self._say_waiting(stall, judged, now)
        elif event.kind == "recovered":
            self._note_recovery(now)
        return event.kind

    # --- bundles ----------------------------------------------------------------------------------------------------

    def _is_worth_a_bundle(self, stall: Stall, judged: Judged, now: float) -> bool:
        due_s = suspect_after_s(self._watch.policy, stall, judged.answer, judged.limits)
        if due_s is None or now - stall.mark_s < max(due_s, AGAIN * self._waited_s):
            return False
        return self._suspect_bundle is None or self._suspect_bundle.mark_s != stall.mark_s

    def _write(self, suspicion: _Suspicion, looks: Looks, judged: Judged, outcome: Outcome, now: float) -> None:
        self.attempt, self._written_of = self._watch.attempt, suspicion.stall.mark_s
        known = incident.known_of(self._watch, self._exits())
        evidence = self._evidence_of(suspicion, looks, known, judged, outcome, now)
        ask = self._asking_nccl() if outcome == "hang" else None
        agreement = Agreement(outcome=outcome)
        self._writing = Task("bundle", lambda: incident.finish(ask(evidence()) if ask else evidence(), agreement))

    def _evidence_of(
        self, suspicion: _Suspicion, looks: Looks, known: Known, judged: Judged, outcome: Outcome, now: float
    ) -> Callable[[], Collected]:
        first, second = looks.taken[-2:]
        timeline = suspicion.timeline.plus("first look", first.end_s).plus("second look", second.end_s)
        timeline = timeline.plus("confirmed")
        stalled_s, threshold = now - suspicion.stall.mark_s, suspicion.threshold
        seen, patience = threading.Event(), self._patience
        self._ranks_seen = seen

        def take() -> Collected:
            found = incident.take_evidence(
                outcome,
                looks,
                known,
                self._about,
                stall_s=stalled_s,
                threshold=threshold,
                native=outcome == "hang",
                ranks_seen=seen.set,
                timeline=timeline,
                patience=patience,
            )
            evidence = structs.replace(
                found.evidence, answer=judged.answer, work=tuple(one.words for one in judged.work[:8])
            )
            found = replace(found, evidence=evidence)
            return incident.with_nodes(found, self._council.nodes()) if self._watch.unseen else found

        return take

    def _asking_nccl(self) -> Callable[[Collected], Collected]:
        """One node asks, once, what all of them would hear."""
        asks, spare = self._council.queries_nccl, self._council.must_keep_ranks_alive
        return lambda found: incident.with_nccl(found, spare=spare) if asks else found

    def _note_recovery(self, now: float) -> None:
        suspect, self._suspect_bundle = self._suspect_bundle, None
        said, self._said_waiting = self._said_waiting, ""
        if suspect is not None:
            lasted_s = now - suspect.mark_s
            self._waited_s = max(self._waited_s, lasted_s)
            incident.mark_recovered(suspect.report)
            say(f"the job made progress after {lasted_s:.0f} s: it did not hang ({suspect.report.published.shown})")
        elif said:
            say("progress resumed; still watching")

    # --- together with the other nodes ------------------------------------------------------------------------------

    def _answer_call(self, now: float) -> None:
        """All nodes look now, whether they suspect the job or not, and whatever this one has seen before."""
        call = self._council.calls()
        if call is None:
            return
        self._council.join(call.incident)
        suspicion = self._suspicion or self._witness(now)
        if suspicion is None:
            self._council.vote("paused")
            return
        suspicion.looks = suspicion.second_look_s = suspicion.judging = suspicion.asked_s = suspicion.judged = None
        suspicion.incident, suspicion.window_s = call.incident, call.window_s
        self._suspicion = suspicion
        self._look(suspicion)

    def _witness(self, now: float) -> _Suspicion | None:
        """None: a rank of this node has said that it will be quiet for so long."""
        stall = self._watch.standing(now)
        if stall is None or (stall.phase and stall.stalled_s < stall.threshold_s):
            return None
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected on another node")
        return _Suspicion(stall, Threshold(stall.threshold_s, self._why(stall)), timeline, own=False)

    def _await_others(self, suspicion: _Suspicion, asked_s: float, now: float) -> None:
        outcome = self._council.outcome(0)
        if outcome == "alone" or now - asked_s > OPEN_S:
            suspicion.asked_s = None
            self._council.withdraw()
            self._look(suspicion)
        elif outcome is not None:
            self._take(suspicion, outcome, now)
        elif self._watch.stepped_since(suspicion.stall):
            self._take(suspicion, "moving", now)

    def _await_outcome(self, suspicion: _Suspicion, now: float) -> None:
        judged = suspicion.judged
        if judged is not None and judged.found != "moving" and self._watch.stepped_since(suspicion.stall):
            suspicion.judged = replace(judged, found="moving")
            self._council.vote("moving")
        outcome = self._council.outcome(suspicion.incident)
        if outcome is not None:
            self._take(suspicion, outcome, now)

    def _take(self, suspicion: _Suspicion, outcome: Joint, now: float) -> None:
        """What all nodes have found, or that they cannot: then each is alone."""
        self._suspicion, incident_number = None, suspicion.incident
        stall, looks, judged = suspicion.stall, suspicion.looks, suspicion.judged
        if outcome == "hang" and looks is not None and judged is not None:
            self._watch.hold()
            self._agreed = True
            self.attempt, self._written_of = self._watch.attempt, stall.mark_s
            self._write_together(suspicion, looks, judged, incident_number, now)
            return
        self._council.withdraw()
        if not suspicion.own:
            return
        if outcome in ("alone", "elsewhere", "hang") and looks is not None and judged is not None:
            suspicion.incident, suspicion.judged = 0, None
            self._conclude(suspicion, judged, now)
            return
        found: Found = "stopped" if outcome in ("paused", "stopped") else "moving" if outcome == "moving" else "alive"
        self._told(stall, replace(judged or Judged(found), found=found), now)

    def _is_at_limit(self, stall: Stall, judged: Judged, now: float) -> bool:
        limit_s = ends_after_s(self._watch.policy, stall, judged.answer, judged.limits)
        return limit_s is not None and now - stall.mark_s >= limit_s

    def _leave(self, suspicion: _Suspicion) -> None:
        if suspicion.incident:
            self._council.vote("unknown")
        if suspicion.own:
            self._council.withdraw()

    def _write_together(self, suspicion: _Suspicion, looks: Looks, judged: Judged, number: int, now: float) -> None:
        """Nobody knows yet whether the job ends, so no process is stopped for it."""
        ask = self._asking_nccl()
        known = incident.known_of(self._watch, self._exits())
        evidence = self._evidence_of(suspicion, looks, known, judged, "suspect", now)
        ends = self._is_at_limit(suspicion.stall, judged, now)
        bundled = not self._is_worth_a_bundle(suspicion.stall, replace(judged, found="unknown"), now)

        def write() -> Report | None:
            found = ask(evidence())
            found = replace(found, evidence=structs.replace(found.evidence, ends=ends))
            agreed = self._council.rounds.hang(number, found.evidence, found.staging.root)
            if agreed is None or (agreed.verdict is not None and not self._council.rounds.all_agree(number)):
                incident.discard(found)
                return None
            if agreed.outcome == "suspect" and bundled:
                incident.discard(found)
                self._goes_on = True
                return None
            if agreed.outcome == "hang":
                self._say_hang(suspicion.stall, judged, now)
            return incident.finish(found, agreed)

        self._writing = Task("bundle", write)

    # --- what is said -----------------------------------------------------------------------------------------------

    def _say_hang(self, stall: Stall, judged: Judged, now: float) -> None:
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
        return "nothing on this node proves a hang" if self._watch.unseen else "nothing proves a hang"

    def _why_ended(self, stall: Stall, judged: Judged) -> str:
        policy, limits = self._watch.policy, judged.limits
        if policy.is_given(stall) and judged.found == "unknown":
            at_start = stall.before_first_step and not policy.has_one_limit
            return f"that is {'--startup-timeout' if at_start else '--stall-timeout'}"
        before_s, limit_s = limits.before_abort_s, ends_after_s(policy, stall, judged.answer, limits)
        if before_s is not None and limit_s is not None and before_s <= limit_s < policy.max_stall_s:
            return f"the timeout of group {judged.group} expires then"
        return "that is --max-stall"

    def _say_waiting(self, stall: Stall, judged: Judged, now: float) -> None:
        """Once for each answer."""
        if self._said_waiting == judged.found:
            return
        self._said_waiting = judged.found
        if judged.found == "alive":
            what = f"the job is working ({judged.work[0].words})" if judged.work else "the job is working"
        else:
            what = self._no_proof + (f" ({judged.unseen})" if judged.unseen else "")
        text = f"no step for {now - stall.mark_s:.0f} s, but {what}: it continues"
        limit_s = ends_after_s(self._watch.policy, stall, judged.answer, judged.limits)
        if limit_s is not None:
            text += f"; without a step, it is ended after {limit_s:.0f} s: {self._why_ended(stall, judged)}"
        say(text)


_VOTES: Mapping[Found, Vote] = {
    "moving": "moving",
    "stopped": "stopped",
    "alive": "active",
    "dead": "still",
    "unknown": "still",
    "unseen": "unknown",
}


def _vote(found: Found) -> Vote:
    """As it travels: a node that runs an older safelaunch reads it as well."""
    return _VOTES[found]
