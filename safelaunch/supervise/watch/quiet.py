"""When does a quiet job deserve an early look, long before the threshold that may end it? Pure.

A threshold that ends jobs has to be patient. A look ends nothing and costs a rank some milliseconds, so it comes after
a few of the longest recent steps. Spells of quiet that ended by themselves (an evaluation, a checkpoint) are
remembered: the next look waits for a spell that outlasts them. Looks at one spell follow at growing distances.

Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

LEAST_S, MOST_S = 5.0, 60.0
TIMES_STEP = 8.0  # of the longest recent step
UNKNOWN_S = 10.0  # before a usual step is known: imports, the first compilation
OUTLASTS = 1.5  # of the longest spell that ended by itself
GROWTH = 3.0  # from one look at a spell to the next
# So long without a step, a job counts as frozen for whoever stops it, and wants to know why.
FROZEN_TIMES, FROZEN_S = 10.0, 2.0
# No step for longer than this many usual ones, and this long, is worth a word.
FEW_STEPS, FEW_S = 5, 5.0
FORGETS_S = 86_400.0
REMEMBERED = 8

Stage = Literal["start", "first steps", "steps"]
"""No rank has stepped; too few steps for a usual one; the usual step is known."""


@dataclass(frozen=True, slots=True)
class Spell:
    """The ranks' last sign of progress was at ``since_s``. ``made`` False: there the clock was started again instead.

    ``usual_s``, ``longest_s``: the median and the longest of the recent ordinary steps; 0 before the stage ``steps``.
    """

    since_s: float
    stage: Stage
    usual_s: float = 0.0
    longest_s: float = 0.0
    made: bool = True


@dataclass(frozen=True, slots=True)
class EndedSpell:
    """A spell that ended by itself at ``at_s``, after ``lasted_s``."""

    at_s: float
    lasted_s: float


@dataclass(frozen=True, slots=True)
class Quiet:
    """What is known of a job's quiet.

    ``begin_s``: the beginning of the present spell, 0 without one. ``looks``: how long it had lasted at each look at
    it. ``excused_s``: until then nobody was to be judged.
    """

    stage: Stage = "start"
    begin_s: float = 0.0
    looks: tuple[float, ...] = ()
    excused_s: float = 0.0
    ended: tuple[EndedSpell, ...] = ()


def follow(known: Quiet, spell: Spell | None, now: float) -> Quiet:
    """Takes in the present spell. None: nobody is to be judged, or a rank has said that it will be quiet."""
    if spell is None:
        return replace(known, begin_s=0.0, looks=(), excused_s=now)
    if spell.stage != known.stage:  # how long a start takes, and looks at it, says nothing about training
        known = replace(known, stage=spell.stage, begin_s=0.0, looks=(), ended=())
    begin_s = max(spell.since_s, known.excused_s)
    if begin_s <= known.begin_s:
        return known
    if known.begin_s and spell.made and begin_s == spell.since_s:
        known = _remembering(known, EndedSpell(begin_s, begin_s - known.begin_s))
    return replace(known, begin_s=begin_s, looks=())


def _remembering(known: Quiet, ended: EndedSpell) -> Quiet:
    """Of many spells the longest are kept: these are what the next one has to outlast."""
    if ended.lasted_s < LEAST_S:
        return known
    fresh = (one for one in (*known.ended, ended) if ended.at_s - one.at_s < FORGETS_S)
    return replace(known, ended=tuple(sorted(fresh, key=lambda one: -one.lasted_s)[:REMEMBERED]))


def is_quiet(age_s: float, usual_s: float) -> bool:
    """Whether ``age_s`` without a step is worth a word, where a step usually takes ``usual_s``; never if that is 0."""
    return bool(usual_s) and age_s > max(FEW_S, FEW_STEPS * usual_s)


def is_due(known: Quiet, spell: Spell, now: float) -> bool:
    """Whether to look now, at the spell that ``follow`` has taken in."""
    after_s = GROWTH * known.looks[-1] if known.looks else first_look_s(known, spell, now)
    return bool(known.begin_s) and now - known.begin_s >= after_s


def first_look_s(known: Quiet, spell: Spell, now: float) -> float:
    """How long a spell lasts before the first look at it."""
    least_s = UNKNOWN_S
    if spell.stage == "steps":
        least_s = max(min(MOST_S, max(LEAST_S, TIMES_STEP * spell.longest_s)), OUTLASTS * spell.longest_s)
    return max(least_s, _outlasting_s(known, now))


def _outlasting_s(known: Quiet, now: float) -> float:
    """How long a spell has to last to be no mere repetition of one that ended by itself."""
    return OUTLASTS * max((one.lasted_s for one in known.ended if now - one.at_s < FORGETS_S), default=0.0)


def frozen_s(known: Quiet | None, spell: Spell | None, now: float) -> float:
    """For how long the job has been frozen: no step for ten times the usual; 0 if it isn't, or no step is usual.

    ``known``: what earlier spells tell, where they were followed.
    """
    if spell is None or not spell.usual_s:
        return 0.0
    begin_s = max(spell.since_s, known.excused_s if known is not None else 0.0)
    least_s = max(FROZEN_S, FROZEN_TIMES * spell.usual_s, OUTLASTS * spell.longest_s)
    if known is not None:
        least_s = max(least_s, _outlasting_s(known, now))
    return now - begin_s if now - begin_s >= least_s else 0.0


def looking(known: Quiet, now: float) -> Quiet:
    """A look at the present spell begins."""
    return replace(known, looks=(*known.looks, now - known.begin_s))
