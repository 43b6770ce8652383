"""Takes early looks, which print a line about a quiet job within seconds, long before the threshold.

An early look ends no job and writes no bundle. But if it proves that the job is dead, the job is suspected sooner.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from safelaunch.capture.look import Look, Target
from safelaunch.job.paths import RunPaths
from safelaunch.model import EarlyLook
from safelaunch.report.about import early_line
from safelaunch.supervise import collecting, judge, judge_process
from safelaunch.supervise.hooks import variables_of_look
from safelaunch.supervise.kinds import EARLY_LOOK
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.respond import Incident, JobView, look
from safelaunch.supervise.watch import quiet
from safelaunch.supervise.watch.quiet import QuietHistory, Spell
from safelaunch.supervise.watch.stall import Status
from safelaunch.system.console import say
from safelaunch.system.errors import internal_error
from safelaunch.system.files import replace_file

NEARLY_DUE_S = 4.0  # no early look this close to the suspicion
KEPT = 8
QUESTION_FILE = "early"


@dataclass(frozen=True)
class _EarlyReport:
    look: EarlyLook | None = None
    proved: bool = False
    worked_s: float = 0.0
    """when the job worked (CLOCK_MONOTONIC); 0: it didn't"""


class EarlyLooks:
    def __init__(self, job: JobView) -> None:
        self._job = job
        self._watch, self._context = job.watch, job.context
        self._quiet = QuietHistory()
        self._attempt = self._watch.attempt
        self._under_way: Incident[_EarlyReport] | None = None
        self._spell: tuple[Spell, float] | None = None
        self._failed = False
        self._kept: tuple[EarlyLook, ...] = ()

    @property
    def quiet(self) -> QuietHistory:
        return self._quiet

    def advance(self, now: float, *, free: bool) -> None:
        """Performs the next step. ``free`` is False if the job is suspected, has failed or is being stopped."""
        if self._failed:
            return
        try:
            self._advance(now, free=free and self._watch.state.status is Status.WATCHING)
        except Exception as error:  # noqa: BLE001 - the watch continues without early looks
            self._failed = True
            say(internal_error(error, "the early looks", "Still watching."))

    def _advance(self, now: float, *, free: bool) -> None:
        if self._watch.attempt != self._attempt:
            self._attempt, self._quiet = self._watch.attempt, QuietHistory()
            self._keep()
        spell, before = self._watch.spell(now), self._quiet
        self._quiet = quiet.follow(before, spell, now)
        if before.begin_s and self._quiet.begin_s != before.begin_s:
            end_s = self._quiet.begin_s or now
            self._note_end(end_s - before.begin_s)
        if self._under_way is not None and self._spell is not None:
            at, (spell, begin_s) = self._under_way, self._spell
            if not free or begin_s != self._quiet.begin_s:
                at.cancel()
            if at.done:
                self._under_way = None
                if not at.cancelled.is_set():
                    self._watch.drop_quiet_counters()
                    self._report(at.result or _EarlyReport(), spell, begin_s, now)
        elif free and spell is not None and self._may_look(now) and quiet.is_due(self._quiet, spell, now):
            self._quiet = quiet.with_look(self._quiet, now)
            self._spell = spell, self._quiet.begin_s
            self._under_way = Incident("early look", lambda at: self._look(spell, at))

    def _may_look(self, now: float) -> bool:
        due_s = self._watch.state.due_s
        return not due_s or due_s - now > NEARLY_DUE_S

    def _look(self, spell: Spell, at: Incident[_EarlyReport]) -> _EarlyReport:
        looks = look(EARLY_LOOK, self._job, at, quiet=self._watch.quiet)
        at.pause(0.0)
        report = self._judge(spell, looks)
        at.pause(0.0)
        return report

    def _judge(self, spell: Spell, looks: Looks) -> _EarlyReport:
        done = judge.work_in(looks, self._watch.background)
        ranks = {target.pid: target.rank for target in looks.targets}
        active = tuple(sorted({ranks[piece.rank] for piece in done if piece.rank in ranks}))
        still = not (done or looks.collectives_moved)
        tells = still or (active and self._job.is_whole and spell.stage == "steps")
        worked_s = 0.0 if still else looks.taken[-1].end_s
        if judge.all_are_stopped(looks.taken[-1]) or not tells:
            return _EarlyReport(worked_s=worked_s)
        prove = still and self._job.is_whole and not judge.describe_unseen(looks.taken[-1], looks)
        looks = replace(looks, targets=tuple(without_the_gil(target, looks.taken[-1]) for target in looks.targets))
        kind = replace(EARLY_LOOK, asks=still)
        evidence = collecting.evidence_of(kind, looks, self._job.snapshot(), self._context)
        place = self._context.run_dir / QUESTION_FILE
        words = judge_process.ask(evidence, None if still else active, place, prove=prove)
        words = self._context.cleaned(words)
        if not words.words or (words.common and spell.stage != "steps"):
            return _EarlyReport(None, words.proved, worked_s)
        early = EarlyLook(
            unix_s=round(time.time(), 3),
            quiet_s=0.0,
            usual_s=round(spell.usual_s, 4),
            movement="still" if still else "active",
            words=words.words,
            cause=words.cause,
            places=words.places,
        )
        return _EarlyReport(early, words.proved, worked_s)

    def _report(self, report: _EarlyReport, spell: Spell, begin_s: float, now: float) -> None:
        if report.proved:
            self._watch.note_proof(spell.since_s)
        if report.worked_s:
            self._watch.note_work(report.worked_s)
        if report.look is None:
            return
        newest = structs.replace(report.look, quiet_s=round(now - begin_s, 1))
        before = next((early for early in reversed(self._watch.early) if not early.lasted_s), None)
        part = not self._job.is_whole
        shown = self._is_worth_a_line(newest, before, part=part)
        self._watch.early = (*self._watch.early, structs.replace(newest, said=shown))[-KEPT:]
        self._keep()
        if shown:
            say(early_line(newest, before, part=part))
            self._say_limit(spell, is_first=before is None)
        if shown and newest.movement == "still":
            self._context.suspects.start(variables_of_look(newest, self._context.run_name))

    def _say_limit(self, spell: Spell, *, is_first: bool) -> None:
        # The user might expect --stall-timeout to apply if it is the only limit they set.
        policy = self._watch.policy
        if is_first and spell.stage != "steps" and policy.stall_given and not policy.startup_given:
            limit = f"--startup-timeout ({policy.startup_s:.0f} s)"
            say(f"no rank has made a step yet: until then {limit} applies, not --stall-timeout")

    @staticmethod
    def _is_worth_a_line(look: EarlyLook, before: EarlyLook | None, *, part: bool) -> bool:
        # Report work once. On one of several nodes, report only this node's ranks, because all others wait, too.
        if look.movement == "active":
            return before is None or before.movement != "active"
        return bool(look.places) or not part

    def _note_end(self, lasted_s: float) -> None:
        lasted_s = max(0.1, round(lasted_s, 1))
        self._watch.early = tuple(
            early if early.lasted_s else structs.replace(early, lasted_s=lasted_s) for early in self._watch.early
        )
        self._keep()

    def _keep(self) -> None:
        if self._watch.early == self._kept:
            return
        self._kept = self._watch.early
        with suppress(OSError):
            replace_file(RunPaths(self._context.run_dir).early, msgspec.json.encode(self._kept))


def without_the_gil(target: Target, look: Look) -> Target:
    """Drops requests that need the GIL, unless the GIL is free: an unanswered request delays a healthy rank's exit."""
    rank = look.ranks.get(target.rank)
    sample = rank.main.stack.value if rank is not None and rank.main is not None else None
    free = sample is not None and not any(thread.owns_gil for thread in sample.threads)
    return target if free else replace(target, questions=None)
