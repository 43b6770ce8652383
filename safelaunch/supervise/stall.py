"""A stall, from its first sign to its bundle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from safelaunch.cluster.messages import Vote
from safelaunch.model import Outcome, format_ranks
from safelaunch.supervise import incident
from safelaunch.supervise.incident import Circumstances, Collected, Exits, Known, Report, Timeline
from safelaunch.supervise.looks import Looks, Patience, look_at, movement_of
from safelaunch.supervise.together import OPEN_S, Together
from safelaunch.supervise.together import Outcome as Joint
from safelaunch.supervise.watch import Glance, Watch
from safelaunch.system.console import say
from safelaunch.system.task import Task
from safelaunch.watch.rhythm import Threshold
from safelaunch.watch.stall import Movement, Stall
from safelaunch.watch.stall import limit_s as limit_of

# Before safelaunch ends a job of several nodes for a rank of this one, it watches that rank for another threshold, at
# most this long. If the process groups have a timeout, the evidence must be taken before that.
STUCK_S = 60.0
STUCK_PART_OF_CAP = 0.2
DISCARD_PATIENCE_S = 15.0


@dataclass
class _Suspicion:
    """A closer look in progress: the suspicion, the looks so far, and when the second one is due.

    ``patience``: both looks are taken, and the workers that a rank waits for get some time to wake up.
    ``asked_s``: since when this node waits for the others to look as well. ``incident``: the number of the one in which
    all look; ``own`` False: only others suspect the job. ``vote``: what this node has said.
    """

    stall: Stall
    threshold: Threshold
    timeline: Timeline
    looks: Looks | None = None
    second_look_s: float | None = None
    patience: Patience | None = None
    window_s: float = 0.0
    asked_s: float | None = None
    incident: int = 0
    own: bool = True
    vote: Movement | None = None


@dataclass
class _Judgement:
    """Nothing moves on this node, which lacks some ranks: is one of its own stuck whatever other nodes do?

    ``collecting``: the evidence, and the ranks that are stuck by it. ``patience``: these are watched for a while.
    """

    suspicion: _Suspicion
    collecting: Task[tuple[Collected, Mapping[int, int]]]
    patience: Patience | None = None

    def discarded(self) -> Task[None]:
        """Removes the evidence, including what is still being collected."""
        return Task("discard", lambda: incident.discard(self.collecting.joined()[0]))


class StallCase:
    """One stall: suspicion → two looks → conclusion → bundle. Call ``advance`` on every tick; it never blocks.

    A supervisor that does not see every rank of the job can't distinguish a hang from a long evaluation on another
    node. It acts if a rank of its own is stuck whatever the others do, and at --max-stall. Before that it takes the
    evidence once, blames nobody, and lets the job continue. If the supervisors of all nodes can talk, it does none of
    this by itself: all look, vote, and act together.
    """

    def __init__(self, watch: Watch, about: Circumstances, exits: Exits, together: Together) -> None:
        self._together = together
        self._watch = watch
        self._about = about
        self._exits = exits
        self._suspicion: _Suspicion | None = None
        self._looking: Task[Looks] | None = None
        self._judgement: _Judgement | None = None
        self._discarding: Task[None] | None = None
        self._judged = (0.0, 0.0)  # the mark of the newest judgement, and its age then
        self._dumped_s = 0.0  # the mark of the newest dump
        self._waited_s = 0.0  # the longest wait that the job recovered from
        self._writing: Task[Report | None] | None = None
        self._ranks_seen = threading.Event()  # the evidence in progress needs nothing more of the ranks
        self._agreed = False
        self.attempt = (0, 0)  # the attempt that was found to hang, here or by all nodes
        self._looked_at: tuple[int, int] | None = None  # the attempt under suspicion
        self._said_undecided = False

    @property
    def busy(self) -> bool:
        return self.looking or self.writing

    @property
    def looking(self) -> bool:
        return self._suspicion is not None or self._judgement is not None

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
        if self._judgement is not None:
            self._discarding = self._judgement.discarded()
            self._judgement = None

    def tidy_up(self) -> None:
        """Removes, at the end of the job, evidence that turned out to be no incident."""
        self.abandon()
        if self._discarding is not None:
            self._discarding.wait(DISCARD_PATIENCE_S)

    def advance(self, glance: Glance, now: float) -> Report | None:
        """One tick; returns the report once a hang is confirmed and its bundle is written."""
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
        if self._judgement is not None and not self.writing:
            self._advance_judgement(self._judgement, now)
        return self.written(now)

    def written(self, now: float) -> Report | None:
        """The report, once, when the bundle in progress is written."""
        if self._writing is None or not self._writing.done:
            return None
        writing, self._writing = self._writing, None
        report = writing.result()
        if report is None or report.action == "dump":
            self._agreed = False
        if report is None:  # the job moved, or was started anew
            self._watch.start_again(now)
        return report

    def _suspect(self, stall: Stall, now: float) -> None:
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected")
        threshold = Threshold(stall.threshold_s, self._why(stall))
        if self._suspicion is not None and not self._suspicion.own:  # all look, because another node suspects the job
            self._suspicion.stall, self._suspicion.threshold, self._suspicion.own = stall, threshold, True
            return
        self._suspicion = _Suspicion(stall, threshold, timeline, window_s=self._watch.policy.confirm_s)
        if self._together.suspect(self._suspicion.window_s):
            self._suspicion.asked_s = now
        else:
            self._look(None)

    def _why(self, stall: Stall) -> str:
        if stall.phase and stall.threshold_s != self._watch.policy.stall_s:
            return f"phase {stall.phase!r}"
        threshold = self._watch.threshold_without_steps() if stall.before_first_step else self._watch.threshold()
        return threshold.why

    def _look(self, looks: Looks | None) -> None:
        targets, suspicion = self._watch.targets(), self._suspicion
        # Only a vote asks for the network, of the newest look: a node's table of connections may be long.
        network = looks is not None and suspicion is not None and suspicion.incident > 0
        self._looking = Task("look", lambda: look_at(targets, looks, collectives=True, network=network))

    def _advance_suspicion(self, suspicion: _Suspicion, now: float) -> None:
        if suspicion.asked_s is not None:
            self._await_others(suspicion, suspicion.asked_s, now)
            return
        if suspicion.vote is not None:
            self._await_outcome(suspicion, now)
            return
        if suspicion.second_look_s is not None and now >= suspicion.second_look_s:
            suspicion.second_look_s = None
            self._look(suspicion.looks)
        if suspicion.patience is not None and suspicion.looks is not None:
            movement = suspicion.patience.advance(now)
            if movement is not None:
                self._conclude(suspicion, suspicion.looks, movement, now)
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
            movement = self._movement(suspicion.stall, suspicion.looks)
            if movement == "still":
                suspicion.patience = self._patience(suspicion, suspicion.looks, now)
            if suspicion.patience is not None:
                return
            self._conclude(suspicion, suspicion.looks, movement, now)

    def _conclude(self, suspicion: _Suspicion, looks: Looks, movement: Movement, now: float) -> None:
        stall = suspicion.stall
        if suspicion.incident:
            suspicion.vote = movement
            if suspicion.own and self._is_at_limit(stall, now):
                self._together.at_limit()
            self._together.vote(_vote(movement, looks))
            return
        self._suspicion = None
        if movement == "still" and self._watch.unseen:
            movement = "elsewhere"
            if self._is_to_be_judged(stall, now):
                self._begin_judging(suspicion, looks, now)
                return
        event = self._told(stall, movement, now)
        if event == "hang":
            known = incident.known_of(self._watch, self._exits())
            self._say_hang(stall, now)
            self._write(self._evidence_of(suspicion, looks, known, now), "hang")

    def _told(self, stall: Stall, movement: Movement, now: float) -> str:
        """Feeds the detector; returns the kind of its event. Prints what the user needs to know."""
        if self._watch.stepped_since(stall):
            movement = "moving"
        event = self._watch.conclude(stall, movement, now)
        if event is None:
            return ""
        if event.kind == "undecided":
            self._say_undecided(stall, movement, now)
        elif event.kind == "recovered":
            self._note_recovery(now)
        return event.kind

    def _evidence_of(self, suspicion: _Suspicion, looks: Looks, known: Known, now: float) -> Callable[[], Collected]:
        first, second = looks.taken[-2:]
        timeline = suspicion.timeline.plus("first look", first.end_s).plus("second look", second.end_s)
        timeline = timeline.plus("confirmed")
        stalled_s, threshold = now - suspicion.stall.mark_s, suspicion.threshold
        seen = self._ranks_seen = threading.Event()

        def take() -> Collected:
            found = incident.take_evidence(
                "hang",
                looks,
                known,
                self._about,
                stall_s=stalled_s,
                threshold=threshold,
                ranks_seen=seen.set,
                timeline=timeline,
            )
            return incident.with_nodes(found, self._together.nodes()) if self._watch.unseen else found

        return take

    def _write(self, evidence: Callable[[], Collected], outcome: Outcome) -> None:
        self.attempt = self._watch.attempt
        ask = self._asking_nccl() if outcome == "hang" else None
        self._writing = Task("bundle", lambda: incident.finish(ask(evidence()) if ask else evidence(), outcome))

    def _asking_nccl(self) -> Callable[[Collected], Collected]:
        """One node asks, once, what all of them would hear."""
        asks, spare = self._together.asks_nccl, self._together.spares_the_ranks
        return lambda found: incident.with_nccl(found, spare=spare) if asks else found

    def _note_recovery(self, now: float) -> None:
        mark_s, _ = self._judged
        self._waited_s = max(self._waited_s, now - mark_s if mark_s else 0.0)
        self._judged = (0.0, 0.0)
        if self._said_undecided:
            self._said_undecided = False
            say("progress resumed; still watching")

    # --- together with the other nodes ------------------------------------------------------------------------------

    def _answer_call(self, now: float) -> None:
        """All nodes look now, whether they suspect the job or not, and whatever this one has seen before."""
        call = self._together.calls()
        if call is None:
            return
        if self._judgement is not None:
            self._suspicion = self._judgement.suspicion
            self._discarding = self._judgement.discarded()
            self._judgement = None
        self._together.join(call.incident)
        suspicion = self._suspicion or self._witness(now)
        if suspicion is None:
            self._together.vote("paused")
            return
        suspicion.looks = suspicion.second_look_s = suspicion.patience = suspicion.asked_s = suspicion.vote = None
        suspicion.incident, suspicion.window_s = call.incident, call.window_s
        self._suspicion = suspicion
        self._look(None)

    def _witness(self, now: float) -> _Suspicion | None:
        """None: a rank of this node has said that it will be quiet for so long."""
        stall = self._watch.standing(now)
        if stall is None or (stall.phase and stall.stalled_s < stall.threshold_s):
            return None
        timeline = Timeline().plus("last progress", stall.mark_s).plus("suspected on another node")
        return _Suspicion(stall, Threshold(stall.threshold_s, self._why(stall)), timeline, own=False)

    def _await_others(self, suspicion: _Suspicion, asked_s: float, now: float) -> None:
        outcome = self._together.outcome(0)
        if outcome == "alone" or now - asked_s > OPEN_S:
            suspicion.asked_s = None
            self._together.let_go()
            self._look(None)
        elif outcome is not None:
            self._take(suspicion, outcome, now)
        elif self._watch.stepped_since(suspicion.stall):
            self._take(suspicion, "moving", now)

    def _await_outcome(self, suspicion: _Suspicion, now: float) -> None:
        if suspicion.vote != "moving" and self._watch.stepped_since(suspicion.stall):
            suspicion.vote = "moving"
            self._together.vote("moving")
        outcome = self._together.outcome(suspicion.incident)
        if outcome is not None:
            self._take(suspicion, outcome, now)

    def _take(self, suspicion: _Suspicion, outcome: Joint, now: float) -> None:
        """What all nodes have found, or that they cannot: then each is alone."""
        self._suspicion, incident_number = None, suspicion.incident
        stall, looks, vote = suspicion.stall, suspicion.looks, suspicion.vote
        if outcome == "hang" and looks is not None:
            self._watch.hold()
            self._agreed = True
            self.attempt = self._watch.attempt
            self._say_hang(stall, now)
            known = incident.known_of(self._watch, self._exits())
            self._write_together(self._evidence_of(suspicion, looks, known, now), incident_number)
            return
        self._together.let_go()
        if not suspicion.own:
            return
        if outcome in ("alone", "elsewhere", "hang") and looks is not None and vote is not None:
            suspicion.incident, suspicion.vote = 0, None
            self._conclude(suspicion, looks, vote, now)
            return
        movement: Movement = "stopped" if outcome == "paused" else "moving" if outcome == "moving" else "active"
        if movement == "active" and self._is_at_limit(stall, now):
            self._watch.look_again()  # the limit is for all nodes to act upon
        else:
            self._told(stall, "stopped" if outcome == "stopped" else movement, now)

    def _is_at_limit(self, stall: Stall, now: float) -> bool:
        limit_s = limit_of(self._watch.policy, stall, "active")
        return limit_s is not None and now - stall.mark_s >= limit_s

    def _leave(self, suspicion: _Suspicion) -> None:
        if suspicion.incident:
            self._together.vote("unknown")
        if suspicion.own:
            self._together.let_go()

    def _write_together(self, evidence: Callable[[], Collected], number: int) -> None:
        ask = self._asking_nccl()

        def write() -> Report | None:
            found = ask(evidence())
            settled = self._together.settle(number, found.evidence, found.staging.root)
            if settled is None or (settled.common is not None and not self._together.all_agree(number)):
                incident.discard(found)
                return None
            report = incident.finish(found, "hang", settled.common)
            return replace(report, action=settled.action, step=settled.step)

        self._writing = Task("bundle", write)

    # --- a node that does not see every rank ------------------------------------------------------------------------

    def _is_to_be_judged(self, stall: Stall, now: float) -> bool:
        """Whether to collect evidence now: ever more rarely while the stall lasts, never after --max-stall."""
        mark_s, stood_s = self._judged
        stalled_s = now - stall.mark_s
        limit_s = limit_of(self._watch.policy, stall, "elsewhere")
        again = mark_s != stall.mark_s or stalled_s >= 2 * stood_s
        return again and (limit_s is None or stalled_s < limit_s) and not self._watch.stepped_since(stall)

    def _begin_judging(self, suspicion: _Suspicion, looks: Looks, now: float) -> None:
        self._judged = (suspicion.stall.mark_s, now - suspicion.stall.mark_s)
        evidence = self._evidence_of(suspicion, looks, incident.known_of(self._watch, self._exits()), now)

        def collect() -> tuple[Collected, Mapping[int, int]]:
            found = evidence()
            return found, incident.stuck_for_good(found)

        self._judgement = _Judgement(suspicion, Task("evidence", collect))

    def _advance_judgement(self, judgement: _Judgement, now: float) -> None:
        stall = judgement.suspicion.stall
        if self._watch.stepped_since(stall):
            self._settle(judgement, "moving", now)
        elif not judgement.collecting.done:
            return
        elif judgement.patience is None:
            _, stuck = judgement.collecting.result()
            if not stuck:
                self._settle(judgement, "elsewhere", now)
                return
            cap_s = self._watch.cap_s
            most_s = STUCK_S if cap_s is None else min(STUCK_S, STUCK_PART_OF_CAP * cap_s)
            threshold_s = judgement.suspicion.threshold.seconds
            judgement.patience = Patience(tuple(stuck.values()), threshold_s, now, most_s=most_s)
        else:
            movement = judgement.patience.advance(now)
            if movement is not None:
                self._settle(judgement, movement, now)

    def _settle(self, judgement: _Judgement, movement: Movement, now: float) -> None:
        """Ends a judgement: a rank of ours is stuck, or one moved, or no rank here is to blame, which gives one dump.

        A wait gets no dump unless it is twice as long as those that this job recovered from.
        """
        self._judgement = None
        stall = judgement.suspicion.stall
        kind = self._told(stall, movement, now)
        if kind == "hang":
            self._say_hang(stall, now)
            self._write(lambda: judgement.collecting.result()[0], "hang")
        elif kind == "undecided" and movement == "elsewhere" and self._is_worth_a_dump(stall, now):
            self._dumped_s = stall.mark_s
            self._write(lambda: judgement.collecting.result()[0], "dump")
        else:
            self._discarding = judgement.discarded()

    def _is_worth_a_dump(self, stall: Stall, now: float) -> bool:
        return stall.mark_s != self._dumped_s and now - stall.mark_s >= 2 * self._waited_s

    # --- what is seen, and what is said -----------------------------------------------------------------------------

    def _movement(self, stall: Stall, looks: Looks) -> Movement:
        if self._watch.stepped_since(stall):
            return "moving"
        # A limit that the user set for the time before the first step holds.
        without_steps = self._watch.has_pulse_only and self._watch.policy.startup_max_s is None
        return movement_of(looks, without_steps=without_steps)[0]

    def _patience(self, suspicion: _Suspicion, looks: Looks, now: float) -> Patience | None:
        from safelaunch.watch import movement

        before, after = looks.taken[-2:]
        pids = (*movement.working_workers(after), *movement.perhaps_polling(before, after))
        # A limit that the user set holds: whoever receives a line now and then has had its time.
        receiving = movement.perhaps_receiving(after) if self._watch.learns else ()
        return Patience(pids, suspicion.threshold.seconds, now, receiving=receiving) if pids or receiving else None

    def _say_hang(self, stall: Stall, now: float) -> None:
        where = "no step yet" if stall.before_first_step else f"last step {stall.step}"
        stall_s = now - stall.mark_s
        since = f"for {stall_s:.0f} s ({where})"
        pages = self._watch.last_progress
        still = [rank for rank, page in pages.items() if now - page.last_step_ns / 1e9 > stall_s / 2]
        what = f"nothing has moved {since}"
        if still and len(still) < len(pages) and not stall.before_first_step:
            who = f"rank {still[0]} has" if len(still) == 1 else f"ranks {format_ranks(still)} have"
            what = f"{who} made no step {since}, while the others go on"
        say(f"{what}: collecting evidence from every rank")

    def _say_undecided(self, stall: Stall, movement: Movement, now: float) -> None:
        if self._said_undecided:
            return
        self._said_undecided = True
        limit = limit_of(self._watch.policy, stall, movement)
        until = (
            f"acting at --max-stall, {limit:.0f} s" if limit is not None else "safelaunch does not act before step 1"
        )
        what = "something computes, writes or serves"
        if movement == "elsewhere":
            unseen = format_ranks(self._watch.unseen)
            word = "rank" if unseen.isdigit() else "ranks"
            what = f"it may be waiting for another node, with {word} {unseen}: the job continues"
        say(f"no step for {now - stall.mark_s:.0f} s, but {what} ({until})")


def _vote(movement: Movement, looks: Looks) -> Vote:
    """A rank whose words to another have not arrived may go on when they do: after an outage, long after nodes talk."""
    return "unknown" if movement == "elsewhere" or (movement == "still" and looks.resends) else movement
