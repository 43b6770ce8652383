"""Shifts between two call histories: how many calls one is ahead of the other."""

from __future__ import annotations

from operator import ne
from typing import NamedTuple

from safelaunch.verdict.call_history import CallHistory

_TWICE = 2  # a coincidence is a stretch this many times as long as the shift (both sides can repeat one call)
MOST_CALLS = 64  # calls that a shift can have: an evaluation over a sharded model makes a few dozen
SURE_MATCHES = 3
_MOST_REPLACED = 4


class Shift(NamedTuple):
    """A number of calls that a history has more than another one, or fewer."""

    by: int  # negative if fewer
    matched: int  # later calls that agree again
    whole: bool  # all later calls that both have agree
    novel: bool  # the side that lacks these calls makes them nowhere else

    @property
    def size(self) -> tuple[int, bool]:
        """Sort key: a smaller shift explains more."""
        return abs(self.by), not self.whole


def shift_between(history: CallHistory, reference: CallHistory, diverged_at: int, *, odd: bool = False) -> Shift | None:
    """Returns the smallest shift after which the histories agree again.

    Returns None if replacing fewer calls, or another order of a few, explains the rest as well: then neither is ahead.
    """
    shift = _shift(history, reference, diverged_at, odd=odd)
    if shift is None or _is_reordered(history, reference, diverged_at):
        return None
    replaced = _replaced(history, reference, diverged_at)
    calls = abs(shift.by)
    longer, shorter = (history, reference) if shift.by > 0 else (reference, history)
    odd_ones = calls + longer.misfits(diverged_at + calls, shorter, diverged_at, shift.matched)
    return None if replaced is not None and replaced < odd_ones else shift


def _shift(history: CallHistory, reference: CallHistory, diverged_at: int, *, odd: bool) -> Shift | None:
    """Returns the shift after which the histories agree again.

    In a loop, a shift by nearly a round in the other direction fits as well. Calls that the other side never makes
    decide, or else the smaller shift. If two calls alternate, the shift that agrees to the end wins.
    """
    both = (_smallest(history, reference, diverged_at, 1), _smallest(reference, history, diverged_at, -1))
    options = sorted((option for option in both if option is not None), key=lambda option: (option.size, option.by))
    novel = [option for option in options if option.novel]
    if len(novel) == 1:
        return novel[0]
    if not options or _is_by_chance(history, reference, diverged_at, abs(options[0].by)):
        return None
    return options[0] if odd or len(options) == 1 or options[0].size < options[1].size else None


def _is_by_chance(history: CallHistory, reference: CallHistory, diverged_at: int, calls: int) -> bool:
    # A smaller shift explains a long stretch, but not all: then the histories diverged twice.
    fewer = range(1, calls)
    ends = ((longer, shorter, by) for longer, shorter in ((history, reference), (reference, history)) for by in fewer)
    return any(
        agreeing_calls(longer, diverged_at + by, shorter, diverged_at) >= _TWICE * calls for longer, shorter, by in ends
    )


def _is_reordered(history: CallHistory, reference: CallHistory, diverged_at: int) -> bool:
    """Returns whether the next few calls are the same in another order."""
    for count in range(2, 5):
        calls = [[side.at(diverged_at + number) for number in range(count)] for side in (history, reference)]
        if all(all(side) for side in calls) and sorted(calls[0], key=repr) == sorted(calls[1], key=repr):
            behind = range(diverged_at + count, diverged_at + count + SURE_MATCHES)
            following = [(history.at(number), reference.at(number)) for number in behind]
            return all(call == other for call, other in following if call and other)
    return False


def _replaced(history: CallHistory, reference: CallHistory, diverged_at: int) -> int | None:
    """Returns how many later calls with equal numbers differ or can't match; one less if both end in the same call.

    None if too many differ. If few do, neither is ahead: one rank made another call. Equal calls agree under any shift.
    """
    overlap = history.overlap(diverged_at, reference, diverged_at)
    if overlap <= 0:
        return None
    differ = [
        *map(ne, history.column.values_of(diverged_at, overlap), reference.column.values_of(diverged_at, overlap))
    ]
    others = differ.count(True)
    few = not differ[-1] and others <= min(_MOST_REPLACED, overlap - 1)
    if not few and 2 * others >= overlap:
        return None
    level = not differ[-1] and history.last == reference.last
    return others + history.misfits(diverged_at, reference, diverged_at, overlap) - level


def _smallest(longer: CallHistory, shorter: CallHistory, diverged_at: int, sign: int) -> Shift | None:
    for calls in range(1, MOST_CALLS + 1):
        matched = _matched(longer, diverged_at + calls, shorter, diverged_at)
        if matched:
            whole = matched == longer.overlap(diverged_at + calls, shorter, diverged_at)
            made = {longer.at(diverged_at + number) for number in range(calls)}
            return Shift(sign * calls, matched, whole, made.isdisjoint(shorter.all()))
    return None


def _matched(ahead: CallHistory, begin: int, behind: CallHistory, at: int) -> int:
    # Few matches are coincidence. Many can end in a break, because the ranks hang there, unless both completed the
    # calls at the break: then their programs differ, as in two pipeline stages.
    overlap = ahead.overlap(begin, behind, at)
    agree = agreeing_calls(ahead, begin, behind, at)
    if agree < overlap and ahead.is_over(begin + agree) and behind.is_over(at + agree):
        return 0
    return agree if agree == overlap or agree >= SURE_MATCHES else 0


def agreeing_calls(ahead: CallHistory, begin: int, behind: CallHistory, at: int) -> int:
    overlap = max(0, ahead.overlap(begin, behind, at))
    differ = map(ne, ahead.column.values_of(begin, overlap), behind.column.values_of(at, overlap))
    return next((number for number, differs in enumerate(differ) if differs), overlap)
