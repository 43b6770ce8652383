"""Shifts between two call histories: how many calls one is ahead of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ne

from safelaunch.model import Frame
from safelaunch.verdict.call_history import CallHistory, Identity

_TWICE = 2  # a coincidence is a stretch this many times as long as the shift (both sides can repeat one call)
MOST_CALLS = 64  # calls that a shift can have: an evaluation over a sharded model makes a few dozen
SURE_MATCHES = 3
_MOST_REPLACED = 4


@dataclass(frozen=True)
class CallShift:
    """A number of calls that a history has more (``extra``) or fewer than another one."""

    extra: bool
    calls: int
    matched: int  # later calls that agree again
    whole: bool  # all later calls that both have agree
    novel: bool  # the other side makes these calls nowhere else
    of_first: bool = True  # it describes the first of the two histories

    @property
    def size(self) -> tuple[int, bool]:
        """Sort key: a smaller shift explains more."""
        return self.calls, not self.whole

    @property
    def inverted(self) -> CallShift:
        """The same shift from the other history's point of view."""
        return replace(self, extra=not self.extra, of_first=not self.of_first)


def shift_between(
    history: CallHistory, reference: CallHistory, diverged_at: int, *, odd: bool = False
) -> CallShift | None:
    """Returns the smallest shift after which the histories agree again.

    Returns None if replacing fewer calls explains the rest as well: then neither is ahead.
    """
    shift = _shift(history, reference, diverged_at, odd=odd)
    level = _replaced(history, reference, diverged_at)
    if shift is None or level is None:
        return shift
    differ, ends_alike = level
    differ += history.misfits(diverged_at, reference, diverged_at, history.overlap(diverged_at, reference, diverged_at))
    longer, shorter = (history, reference) if shift.extra is shift.of_first else (reference, history)
    odd_ones = shift.calls + longer.misfits(diverged_at + shift.calls, shorter, diverged_at, shift.matched)
    return None if differ < odd_ones + ends_alike else shift


def _shift(history: CallHistory, reference: CallHistory, diverged_at: int, *, odd: bool) -> CallShift | None:
    """Returns the shift after which the histories agree again.

    In a loop, a shift by nearly a round in the other direction fits as well. Calls that the other side never makes
    decide, or else the smaller shift. If two calls alternate, the shift that agrees to the end wins.
    """
    more = _smallest(history, reference, diverged_at)
    fewer = _smallest(reference, history, diverged_at)
    options = [
        CallShift(extra, calls, matched, whole, _is_novel(longer, shorter, diverged_at, calls))
        for extra, option, longer, shorter in ((True, more, history, reference), (False, fewer, reference, history))
        if option is not None
        for calls, matched, whole in (option,)
    ]
    novel = [option for option in options if option.novel]
    if len(novel) == 1:
        return novel[0] if novel[0].extra else novel[0].inverted
    options.sort(key=lambda option: (option.size, option.extra))
    if options and _is_by_chance(history, reference, diverged_at, options[0].calls):
        return None
    return options[0] if options and (odd or len(options) == 1 or options[0].size < options[1].size) else None


def _is_by_chance(history: CallHistory, reference: CallHistory, diverged_at: int, calls: int) -> bool:
    # A smaller shift explains a long stretch, but not all: then the histories diverged twice.
    fewer = range(1, calls)
    ends = ((longer, shorter, by) for longer, shorter in ((history, reference), (reference, history)) for by in fewer)
    return any(
        agreeing_calls(longer, diverged_at + by, shorter, diverged_at) >= _TWICE * calls for longer, shorter, by in ends
    )


def common_shift(shifts: Sequence[CallShift | None]) -> CallShift | None:
    """Returns the shift that all ranks of a minority share."""
    oriented = [shift if shift.of_first else shift.inverted for shift in shifts if shift is not None]
    alike = len(oriented) == len(shifts) and len({(shift.extra, shift.calls) for shift in oriented}) == 1
    return min(oriented, key=lambda shift: shift.matched) if alike else None


def reordered(history: CallHistory, reference: CallHistory, diverged_at: int) -> bool:
    """Returns whether the next few calls are the same in another order."""
    for count in range(2, 5):
        calls = [[side.at(diverged_at + number) for number in range(count)] for side in (history, reference)]
        if all(all(side) for side in calls) and sorted(calls[0], key=repr) == sorted(calls[1], key=repr):
            behind = range(diverged_at + count, diverged_at + count + SURE_MATCHES)
            following = [(history.at(number), reference.at(number)) for number in behind]
            return all(call == other for call, other in following if call and other)
    return False


def diverging_frame(stack: Sequence[Frame], other: Identity) -> Frame | None:
    """Returns the outermost frame of a call (innermost first) that the other side doesn't have."""
    for frame, place in zip(reversed(stack), reversed(other), strict=False):
        if (frame.file, frame.line) != place:
            return frame
    return stack[0] if stack else None


def _replaced(history: CallHistory, reference: CallHistory, diverged_at: int) -> tuple[int, bool] | None:
    """Returns how many later calls with equal numbers differ, and whether both histories end in the same call.

    None if too many differ. If few do, neither is ahead: one rank made another call. Equal calls agree under any shift.
    """
    overlap = history.overlap(diverged_at, reference, diverged_at)
    if overlap <= 0:
        return None
    differ = [
        *map(ne, history.column.values_of(diverged_at, overlap), reference.column.values_of(diverged_at, overlap))
    ]
    agree = overlap - sum(differ)
    few = not differ[-1] and sum(differ) <= _MOST_REPLACED and agree > 0
    level = not differ[-1] and history.last == reference.last
    return (sum(differ), level) if few or agree > sum(differ) else None


def _smallest(longer: CallHistory, shorter: CallHistory, diverged_at: int) -> tuple[int, int, bool] | None:
    for calls in range(1, MOST_CALLS + 1):
        matched = _matched(longer, diverged_at + calls, shorter, diverged_at)
        if matched:
            return calls, matched, matched == longer.overlap(diverged_at + calls, shorter, diverged_at)
    return None


def _is_novel(longer: CallHistory, shorter: CallHistory, diverged_at: int, calls: int) -> bool:
    calls_of_shorter = shorter.all()
    return all(longer.at(diverged_at + number) not in calls_of_shorter for number in range(calls))


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
