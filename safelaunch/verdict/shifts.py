"""How far one call history is ahead of another, or behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ne

from safelaunch.model import Frame
from safelaunch.verdict.call_history import CallHistory, Identity

_TWICE = 2  # as long as the shift itself, a stretch agrees where both sides repeat one call
MOST_CALLS = 64  # more or fewer than the peers, in one place: an evaluation over a sharded model makes a few dozen
SURE_MATCHES = 3
_MOST_REPLACED = 4


@dataclass(frozen=True)
class Offset:
    """One history against another: ``calls`` more (``extra``) or fewer, and ``matched``: how many agree behind them.

    ``whole``: all that both have there. ``novel``: the other side never made these calls anywhere else.
    ``of_first``: it speaks of the first of the two histories.
    """

    extra: bool
    calls: int
    matched: int
    whole: bool
    novel: bool
    of_first: bool = True

    @property
    def size(self) -> tuple[int, bool]:
        """The smaller one explains more."""
        return self.calls, not self.whole

    @property
    def seen_from_there(self) -> Offset:
        """The same of the other history: what one has more the other has less."""
        return replace(self, extra=not self.extra, of_first=not self.of_first)


def offset(mine: CallHistory, theirs: CallHistory, parted: int, *, odd: bool = False) -> Offset | None:
    """What ``mine`` has more or less than ``theirs`` from ``parted`` on; None where neither explains the rest, or where
    fewer calls that were merely other ones explain as much: then nobody is ahead.

    ``odd``: it is ``mine`` that is in the minority, so either explanation names it.
    """
    found = _shift(mine, theirs, parted, odd=odd)
    level = _replaced(mine, theirs, parted)
    if found is None or level is None:
        return found
    differ, ends_alike = level
    differ += mine.misfits(parted, theirs, parted, mine.overlap(parted, theirs, parted))
    longer, shorter = (mine, theirs) if found.extra is found.of_first else (theirs, mine)
    odd_ones = found.calls + longer.misfits(parted + found.calls, shorter, parted, found.matched)
    return None if differ < odd_ones + ends_alike else found


def _shift(mine: CallHistory, theirs: CallHistory, parted: int, *, odd: bool) -> Offset | None:
    """Calls too many or too few, behind which the two agree again.

    In a loop a shift by nearly a whole round the other way agrees as well as the true one: calls that the other side
    never makes decide, else the smaller shift does. Where two calls take turns both are by one call: then the one
    behind which all agrees, to the end of the shorter history, is the true one.
    """
    more = _smallest(mine, theirs, parted)
    fewer = _smallest(theirs, mine, parted)
    found = [
        Offset(extra, calls, matched, whole, _is_novel(longer, shorter, parted, calls))
        for extra, option, longer, shorter in ((True, more, mine, theirs), (False, fewer, theirs, mine))
        if option is not None
        for calls, matched, whole in (option,)
    ]
    novel = [one for one in found if one.novel]
    if len(novel) == 1:
        return novel[0] if novel[0].extra else novel[0].seen_from_there
    found.sort(key=lambda one: (one.size, one.extra))
    if found and _is_by_chance(mine, theirs, parted, found[0].calls):
        return None
    return found[0] if found and (odd or len(found) == 1 or found[0].size < found[1].size) else None


def _is_by_chance(mine: CallHistory, theirs: CallHistory, parted: int, calls: int) -> bool:
    """A shift by fewer calls explains so much of what follows, though not all, that the two have parted once more:
    then a larger one that agrees to the end, with one round in place of another, says nothing.
    """
    fewer = range(1, calls)
    ends = ((longer, shorter, by) for longer, shorter in ((mine, theirs), (theirs, mine)) for by in fewer)
    return any(agreeing_calls(longer, parted + by, shorter, parted) >= _TWICE * calls for longer, shorter, by in ends)


def common_offset(offsets: Sequence[Offset | None]) -> Offset | None:
    """What is true of all of a minority; the majority is right, whatever is novel."""
    known = [offset if offset.of_first else offset.seen_from_there for offset in offsets if offset is not None]
    alike = len(known) == len(offsets) and len({(one.extra, one.calls) for one in known}) == 1
    return min(known, key=lambda one: one.matched) if alike else None


def reordered(mine: CallHistory, theirs: CallHistory, parted: int) -> bool:
    """The next few calls are the same ones in another order, and what follows, if anything, is the same again."""
    for count in range(2, 5):
        calls = [[history.at(parted + number) for number in range(count)] for history in (mine, theirs)]
        if all(all(side) for side in calls) and sorted(calls[0], key=repr) == sorted(calls[1], key=repr):
            behind = range(parted + count, parted + count + SURE_MATCHES)
            following = [(mine.at(number), theirs.at(number)) for number in behind]
            return all(one == other for one, other in following if one and other)
    return False


def branch(stack: Sequence[Frame], other: Identity) -> Frame | None:
    """Of the frames of a call, innermost first, the outermost one that the other side does not have."""
    for frame, theirs in zip(reversed(stack), reversed(other), strict=False):
        if (frame.file, frame.line) != theirs:
            return frame
    return stack[0] if stack else None


def _replaced(mine: CallHistory, theirs: CallHistory, parted: int) -> tuple[int, bool] | None:
    """``(how many calls from there on differ under the same numbers, do both end in the same one)``; None where
    more differ than agree.

    Then nobody is a call ahead: one rank has made another call there (a wrong size, from another line) and gone on.
    Calls that are all alike agree under any shift, so as few are the better explanation.
    """
    overlap = mine.overlap(parted, theirs, parted)
    if overlap <= 0:
        return None
    differ = [*map(ne, mine.column.values_of(parted, overlap), theirs.column.values_of(parted, overlap))]
    agree = overlap - sum(differ)
    few = not differ[-1] and sum(differ) <= _MOST_REPLACED and agree > 0
    level = not differ[-1] and mine.last == theirs.last
    return (sum(differ), level) if few or agree > sum(differ) else None


def _smallest(longer: CallHistory, shorter: CallHistory, parted: int) -> tuple[int, int, bool] | None:
    """The fewest calls that ``longer`` has more, how many agree behind them, and whether none there disagrees."""
    for calls in range(1, MOST_CALLS + 1):
        matched = _matched(longer, parted + calls, shorter, parted)
        if matched:
            return calls, matched, matched == longer.overlap(parted + calls, shorter, parted)
    return None


def _is_novel(longer: CallHistory, shorter: CallHistory, parted: int, calls: int) -> bool:
    known = shorter.all()
    return all(longer.at(parted + number) not in known for number in range(calls))


def _matched(ahead: CallHistory, begin: int, behind: CallHistory, at: int) -> int:
    """How many calls of ``ahead`` from ``begin`` on are those of ``behind`` from ``at`` on, without a break.

    A few that agree and then do not, are chance: 0. Many may end in a break, for that is where the hang is; where both
    have completed what they called there, it is not: they are programs that differ, as those of two pipeline stages do.
    """
    overlap = ahead.overlap(begin, behind, at)
    agree = agreeing_calls(ahead, begin, behind, at)
    if agree < overlap and ahead.is_over(begin + agree) and behind.is_over(at + agree):
        return 0
    return agree if agree == overlap or agree >= SURE_MATCHES else 0


def agreeing_calls(ahead: CallHistory, begin: int, behind: CallHistory, at: int) -> int:
    """How many calls agree, whatever follows."""
    overlap = max(0, ahead.overlap(begin, behind, at))
    differ = map(ne, ahead.column.values_of(begin, overlap), behind.column.values_of(at, overlap))
    return next((number for number, differs in enumerate(differ) if differs), overlap)
