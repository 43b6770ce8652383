"""Early looks: a first word within seconds of a stop, long before the threshold.

Two looks at the ranks, a moment apart, and a line about what they do. Nothing is ever ended for it, and no bundle is
written; a proof that the job is dead brings the ordinary suspicion forward. Where that begins, it has the word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from safelaunch.bundle.onbundle import variables_of_look
from safelaunch.capture.look import Look, Target
from safelaunch.capture.redaction import without_secrets
from safelaunch.job.paths import RunPaths
from safelaunch.model import EarlyLook, RankExit
from safelaunch.report import early as shown
from safelaunch.supervise import answer, early_verdict, incident
from safelaunch.supervise.incident import Circumstances
from safelaunch.supervise.looks import Looks, look_at
from safelaunch.supervise.watch import quiet
from safelaunch.supervise.watch.job import Watch
from safelaunch.supervise.watch.quiet import Quiet, Spell
from safelaunch.supervise.watch.stall import Status
from safelaunch.system.console import say
from safelaunch.system.errors import internal_error
from safelaunch.system.files import replace_file
from safelaunch.system.task import Task

BETWEEN_S = 2.0
NEARLY_DUE_S = 4.0  # so near, the ordinary suspicion is left to itself
KEPT = 8
QUESTION_FILE = "early"


@dataclass
class _Looking:
    """A look in progress. ``second_s``: when the second one is due; ``word``: what both found, and whether that is a
    proof of death."""

    spell: Spell
    begin_s: float
    task: Task[Looks]
    looks: Looks | None = None
    second_s: float | None = None
    word: Task[tuple[EarlyLook | None, bool]] | None = None


class EarlyLooks:
    """Looks early at a quiet job. Call ``advance`` on every tick; it never blocks and never raises."""

    def __init__(self, watch: Watch, about: Circumstances, exits: Callable[[], Mapping[int, RankExit]]) -> None:
        self._watch = watch
        self._about = about
        self._exits = exits
        self._quiet = Quiet()
        self._attempt = watch.attempt
        self._under_way: _Looking | None = None
        self._left: Task[Looks] | Task[tuple[EarlyLook | None, bool]] | None = None  # of a look that was given up
        self._failed = False
        self._kept: tuple[EarlyLook, ...] = ()

    @property
    def quiet(self) -> Quiet:
        """What earlier spells of quiet tell."""
        return self._quiet

    def advance(self, now: float, *, free: bool) -> None:
        """One tick. ``free`` False: the job is suspected, has failed or is being stopped."""
        if self._failed:
            return
        try:
            self._advance(now, free=free and self._watch.state.status is Status.WATCHING)
        except Exception as error:  # noqa: BLE001 - the watch goes on without early looks
            self._failed = True
            say(internal_error(error, "the early looks", "Still watching."))

    def _advance(self, now: float, *, free: bool) -> None:
        if self._watch.attempt != self._attempt:
            self._attempt, self._quiet = self._watch.attempt, Quiet()
            self._keep()
        spell, before = self._watch.spell(now), self._quiet
        self._quiet = quiet.follow(before, spell, now)
        if before.begin_s and self._quiet.begin_s != before.begin_s:
            end_s = self._quiet.begin_s or now
            self._note_end(end_s - before.begin_s)
        if self._under_way is not None:
            if free and self._under_way.begin_s == self._quiet.begin_s:
                self._go_on(self._under_way, now)
            else:
                self._leave(self._under_way)
        elif free and spell is not None and self._may_look(now) and quiet.is_due(self._quiet, spell, now):
            self._quiet = quiet.looking(self._quiet, now)
            self._under_way = _Looking(spell, self._quiet.begin_s, self._look(None))

    def _leave(self, looking: _Looking) -> None:
        """The job goes on, or others look at it."""
        self._under_way, self._left = None, looking.word or looking.task

    def _may_look(self, now: float) -> bool:
        due_s = self._watch.state.due_s
        return (self._left is None or self._left.done) and (not due_s or due_s - now > NEARLY_DUE_S)

    def _look(self, looks: Looks | None) -> Task[Looks]:
        targets, quiet_then = self._watch.targets(), self._watch.quiet
        return Task("early look", lambda: look_at(targets, looks, collectives=True, quiet=quiet_then))

    def _go_on(self, looking: _Looking, now: float) -> None:
        if looking.word is not None:
            if looking.word.done:
                found, proved = looking.word.result()
                self._end()
                if proved:
                    self._watch.is_proved_dead(looking.spell.since_s)
                self._tell(looking, found, now)
        elif looking.second_s is not None:
            if now >= looking.second_s:
                looking.second_s, looking.task = None, self._look(looking.looks)
        elif looking.task.done:
            first, looking.looks = looking.looks is None, looking.task.result()
            if first:
                looking.second_s = now + BETWEEN_S
            else:
                self._judge(looking, looking.looks)

    def _judge(self, looking: _Looking, looks: Looks) -> None:
        done = answer.work_in(looks, self._watch.background)
        ranks = {target.pid: target.rank for target in looks.targets}
        active = tuple(sorted({ranks[one.rank] for one in done if one.rank in ranks}))
        alone = not self._watch.unseen
        if answer.all_are_stopped(looks.taken[-1]):
            self._end()
        elif not (done or looks.collectives_moved):
            looking.word = self._word(looking.spell, looks, None)
        elif active and alone and looking.spell.stage == "steps":
            looking.word = self._word(looking.spell, looks, active)
        else:
            self._end()

    def _end(self) -> None:
        self._under_way = None
        self._watch.read_quiet_again()

    def _word(self, spell: Spell, looks: Looks, active: tuple[int, ...] | None) -> Task[tuple[EarlyLook | None, bool]]:
        """Finds what to say, in a thread. ``active``: the ranks that compute, read or write; None: none moves."""
        known, still = incident.known_of(self._watch, self._exits()), active is None
        prove = still and not self._watch.unseen and not answer.what_was_not_seen(looks.taken[-1], looks)
        looks = replace(looks, targets=tuple(without_the_gil(target, looks.taken[-1]) for target in looks.targets))

        def find() -> tuple[EarlyLook | None, bool]:
            evidence = incident.evidence_of("hang", looks, known, self._about, ask=still)
            found = early_verdict.ask(evidence, active, self._about.run_dir / QUESTION_FILE, prove=prove)
            found = without_secrets(found, self._about.redactor)
            if not found.words or (found.common and spell.stage != "steps"):
                return None, found.proved
            look = EarlyLook(
                unix_s=round(time.time(), 3),
                quiet_s=0.0,
                usual_s=round(spell.usual_s, 4),
                movement="still" if still else "active",
                words=found.words,
                cause=found.cause,
                places=found.places,
            )
            return look, found.proved

        return Task("early word", find)

    def _tell(self, looking: _Looking, look: EarlyLook | None, now: float) -> None:
        if look is None:
            return
        look = structs.replace(look, quiet_s=round(now - looking.begin_s, 1))
        before = next((one for one in reversed(self._watch.early) if not one.lasted_s), None)
        part = bool(self._watch.unseen)
        said = self._is_worth_a_line(look, before, part=part)
        self._watch.early = (*self._watch.early, structs.replace(look, said=said))[-KEPT:]
        self._keep()
        if said:
            say(shown.line(look, before, part=part))
        if said and look.movement == "still":
            self._about.suspects.start(variables_of_look(look, self._about.run_name))

    @staticmethod
    def _is_worth_a_line(look: EarlyLook, before: EarlyLook | None, *, part: bool) -> bool:
        """Honest work is told once. Of a node among others, only what it does itself: all the others wait as well."""
        if look.movement == "active":
            return before is None or before.movement != "active"
        return bool(look.places) or not part

    def _note_end(self, lasted_s: float) -> None:
        """The quiet is over: what was found in it is no sign of a hang."""
        lasted_s = max(0.1, round(lasted_s, 1))
        self._watch.early = tuple(
            one if one.lasted_s else structs.replace(one, lasted_s=lasted_s) for one in self._watch.early
        )
        self._keep()

    def _keep(self) -> None:
        """Leaves it in the run directory. A full disk costs only this."""
        if self._watch.early == self._kept:
            return
        self._kept = self._watch.early
        with suppress(OSError):
            replace_file(RunPaths(self._about.run_dir).early, msgspec.json.encode(self._kept))


def without_the_gil(target: Target, look: Look) -> Target:
    """The same, to be asked only what needs no GIL where a thread had it: a question without an answer haunts the exit
    of a rank, and this one may be healthy.
    """
    rank = look.ranks.get(target.rank)
    sample = rank.main.stack.value if rank is not None and rank.main is not None else None
    free = sample is not None and not any(thread.owns_gil for thread in sample.threads)
    return target if free else replace(target, questions=None)
