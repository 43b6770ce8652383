"""Decides when a quiet job deserves an early look, long before the threshold. Has no side effects.

A look costs a rank only milliseconds, so the first one comes once the job has been quiet for a few times its longest
recent step. If earlier quiet spells ended by themselves (an evaluation, a checkpoint), this one must outlast them. More
looks follow at growing intervals. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

LEAST_S, MOST_S = 5.0, 60.0
TIMES_STEP = 8.0  # multiple of the longest recent step
UNKNOWN_S = 10.0  # without a usual step
OUTLASTS = 1.5  # multiple of the longest spell that ended by itself
GROWTH = 3.0  # between two looks at a spell
# A job without a step for this long counts as frozen when the user stops it.
FROZEN_TIMES, FROZEN_S = 10.0, 2.0
# A time without a step worth mentioning, in usual steps and in seconds.
FEW_STEPS, FEW_S = 5, 5.0
FORGETS_S = 86_400.0
REMEMBERED = 8

Stage = Literal["start", "first steps", "steps"]
"""no step yet; usual step unknown; usual step known"""


@dataclass(frozen=True, slots=True)
class Spell:
    since_s: float
    stage: Stage
    usual_s: float = 0.0
    """median of the recent steps; 0 before stage ``steps``"""
    longest_s: float = 0.0
    """longest of the recent steps; 0 before stage ``steps``"""
    made: bool = True
    """False: the clock was reset at ``since_s``"""


@dataclass(frozen=True, slots=True)
class EndedSpell:
    at_s: float
    lasted_s: float


@dataclass(frozen=True, slots=True)
class QuietHistory:
    stage: Stage = "start"
    begin_s: float = 0.0
    """start of the current spell; 0: none"""
    looks: tuple[float, ...] = ()
    """age of the current spell at each look"""
    excused_s: float = 0.0
    """end of the last time when no rank could be judged"""
    ended: tuple[EndedSpell, ...] = ()


def follow(quiet: QuietHistory, spell: Spell | None, now: float) -> QuietHistory:
    """Adds the current quiet spell, which is None if no rank can be judged or if a rank announced it."""
    if spell is None:
        return replace(quiet, begin_s=0.0, looks=(), excused_s=now)
    if spell.stage != quiet.stage:  # a start's length says nothing about training
        quiet = replace(quiet, stage=spell.stage, begin_s=0.0, looks=(), ended=())
    begin_s = max(spell.since_s, quiet.excused_s)
    if begin_s <= quiet.begin_s:
        return quiet
    if quiet.begin_s and spell.made and begin_s == spell.since_s:
        quiet = _remembering(quiet, EndedSpell(begin_s, begin_s - quiet.begin_s))
    return replace(quiet, begin_s=begin_s, looks=())


def _remembering(quiet: QuietHistory, ended: EndedSpell) -> QuietHistory:
    if ended.lasted_s < LEAST_S:
        return quiet
    fresh = (spell for spell in (*quiet.ended, ended) if ended.at_s - spell.at_s < FORGETS_S)
    return replace(quiet, ended=tuple(sorted(fresh, key=lambda spell: -spell.lasted_s)[:REMEMBERED]))


def is_quiet(age_s: float, usual_s: float) -> bool:
    """Returns whether a time without a step is worth mentioning; False if the usual step is unknown (0)."""
    return bool(usual_s) and age_s > max(FEW_S, FEW_STEPS * usual_s)


def is_due(quiet: QuietHistory, spell: Spell, now: float) -> bool:
    after_s = GROWTH * quiet.looks[-1] if quiet.looks else first_look_s(quiet, spell, now)
    return bool(quiet.begin_s) and now - quiet.begin_s >= after_s


def first_look_s(quiet: QuietHistory, spell: Spell, now: float) -> float:
    least_s = UNKNOWN_S
    if spell.stage == "steps":
        least_s = max(min(MOST_S, max(LEAST_S, TIMES_STEP * spell.longest_s)), OUTLASTS * spell.longest_s)
    return max(least_s, _outlasting_s(quiet, now))


def _outlasting_s(quiet: QuietHistory, now: float) -> float:
    # A shorter spell might repeat an earlier one.
    return OUTLASTS * max((spell.lasted_s for spell in quiet.ended if now - spell.at_s < FORGETS_S), default=0.0)


def frozen_s(quiet: QuietHistory | None, spell: Spell | None, now: float) -> float:
    """Returns how long the job has been frozen; 0 if it isn't frozen, or if that is unknown."""
    if spell is None or not spell.usual_s:
        return 0.0
    begin_s = max(spell.since_s, quiet.excused_s if quiet is not None else 0.0)
    least_s = max(FROZEN_S, FROZEN_TIMES * spell.usual_s, OUTLASTS * spell.longest_s)
    if quiet is not None:
        least_s = max(least_s, _outlasting_s(quiet, now))
    return now - begin_s if now - begin_s >= least_s else 0.0


def with_look(quiet: QuietHistory, now: float) -> QuietHistory:
    return replace(quiet, looks=(*quiet.looks, now - quiet.begin_s))
