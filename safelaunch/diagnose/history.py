"""Where the ranks' call histories parted: a call too many or too few long ago, of which the hang is the late end.

A backend pairs collectives by number. A rank that makes one call more than its peers (``if rank == 0: all_reduce``), or
leaves one out (a batch skipped after an exception), is from there on one number ahead or behind; where sizes happen to
agree nothing complains, and the job stops much later, at an innocent line. The stacks that the Flight Recorder keeps
with each call show it: up to some number all ranks call from the same places, and behind it one rank's places are
those of its peers again, *shifted*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import Alignment, vote
from safelaunch.diagnose.columns import Column, Numbering, Window, first_difference, program_of
from safelaunch.entries import Entries
from safelaunch.model import Collective, Frame

MOST_CALLS = 64  # in one place, more or fewer than the peers: an evaluation over a sharded model makes a few dozen
SURE_MATCHES = 3

Place = tuple[tuple[str, int], ...]  # (file, line) of every frame of the user's, innermost first


@dataclass(frozen=True)
class Shift:
    """From number ``seq`` of ``group`` on, ``ranks`` are ``calls`` collectives off their peers.

    ``extra``: they made calls that their peers did not make; otherwise they left out calls that all had made before.
    ``stack``: the user's frames of the first such call, innermost first (of a peer's, where it was left out).
    ``branch``: of these, the outermost one that the other side does not have: where the ways parted.
    ``known_to_all``: both sides make such calls, at those places.
    ``matched``: how many later calls agree again, shifted by ``calls``; fewer than ``SURE_MATCHES`` prove little.
    ``entered``: rank → the last number it has entered. ``calls_there``: rank → what it called as number ``seq``.
    """

    group: str
    seq: int
    ranks: tuple[int, ...]
    extra: bool
    calls: int
    stack: tuple[Frame, ...]
    branch: Frame | None
    known_to_all: bool
    matched: int
    entered: Mapping[int, int]
    calls_there: Mapping[int, Collective]

    @property
    def sure(self) -> bool:
        return self.matched >= SURE_MATCHES

    def explains_lag(self) -> bool:
        """Without it the ranks would be level, or the others ahead: no one else is behind for a reason of its own."""
        mine = [number for rank, number in self.entered.items() if rank in self.ranks]
        others = [number for rank, number in self.entered.items() if rank not in self.ranks]
        if not mine or not others:
            return False
        if self.extra:
            return max(mine) - self.calls <= min(others)
        return min(mine) + self.calls >= max(others)


def shift_in(alignment: Alignment, group: str, roots: Mapping[int, tuple[str, ...]]) -> Shift | None:
    """The shift in ``group``, or None: histories agree, do not overlap, lack frames, or differ in other ways.

    Different places under one number are no fault by themselves (``if rank == 0: all_reduce(a) else:
    all_reduce(b)``); only places that agree again at an offset are.
    """
    members = sorted(alignment.members(group)[0] & alignment.records.keys())
    windows = {rank: alignment.window(rank, group) for rank in members}
    return _find(group, {rank: window for rank, window in windows.items() if window is not None}, roots)


def shift_of_program(alignment: Alignment, roots: Mapping[int, tuple[str, ...]]) -> Shift | None:
    """The same over all calls of each rank in the order of its program, whatever their groups.

    Ranks that run one program make the same calls in groups of their own; so a rank that left one out shows even where
    nobody called anything in that group since. Compared are ranks of one role: the stages of a pipeline differ by
    design. Two calls that changed places are no shift.
    """
    found = [shift for programs in programs_by_role(alignment, roots) for shift in _shifts_of_role(programs, roots)]
    # A rank that has no group there never makes such calls, and need not: only what both sides make counts. And in a
    # loop the last few calls agree with some round or other: fewer that agree than are off may be chance.
    sure = [shift for shift in found if shift.matched >= max(2, shift.calls) and shift.known_to_all]
    return max(sure, key=lambda shift: shift.matched, default=None)


def _shifts_of_role(programs: Mapping[int, Window], roots: Mapping[int, tuple[str, ...]]) -> list[Shift]:
    """Ranks that part and do not come together again run programs of their own, though from the same places (two
    stages of a pipeline differ in how often they do what): each side is compared for itself.
    """
    shift = _find("", programs, roots)
    if shift is not None and shift.matched >= shift.calls:
        return [shift]
    histories = _histories(programs, roots)
    parted = _parted(histories)
    if parted is None:
        return []
    return [
        shift
        for ranks in _sides(histories, parted).values()
        if len(ranks) > 1
        for shift in _shifts_of_role({rank: programs[rank] for rank in ranks}, roots)
    ]


def programs_by_role(alignment: Alignment, roots: Mapping[int, tuple[str, ...]]) -> list[dict[int, Window]]:
    """rank → its calls by their place in the program, for each role: ranks that call from the same places again and
    again. Where they came only once, or nobody else does, says nothing: some are further than others.
    """
    whole = all(map(alignment.is_whole, alignment.records))  # blocks leave gaps in the numbers of a recorder
    programs = {
        rank: program_of(Entries.of(record.entries), counted=whole) for rank, record in alignment.records.items()
    }
    calls = {rank: Counter(history.column.values) for rank, history in _histories(programs, roots).items()}
    callers = Counter(place for mine in calls.values() for place in mine)
    roles: dict[frozenset[int], dict[int, Window]] = {}
    for rank, mine in calls.items():
        role = frozenset(place for place, count in mine.items() if count > 1 and callers[place] > 1)
        roles.setdefault(role, {})[rank] = programs[rank]
    return list(roles.values())


@dataclass(frozen=True)
class Departure:
    """``rank`` is in ``call``, its last, where the others of its role, ``mates``, made ``theirs``; until then they all
    called alike.
    """

    rank: int
    call: Collective
    mates: tuple[int, ...]
    theirs: Collective


def departures(alignment: Alignment, roots: Mapping[int, tuple[str, ...]]) -> list[Departure]:
    """The ranks that wait now in a call that is not the one which most ranks of their role made there."""
    found = []
    for programs in programs_by_role(alignment, roots):
        histories = _histories(programs, roots)
        for rank, history in histories.items():
            last = history.last
            there = {mate: other.at(last) for mate, other in histories.items() if mate != rank and other.at(last)}
            sides = Counter(there.values()).most_common(1)
            if not sides or history.at(last) == sides[0][0] or 2 * sides[0][1] <= len(there) + 1:
                continue
            mates = [mate for mate, place in there.items() if place == sides[0][0]]
            usual = histories[mates[0]]
            before = range(max(history.first, usual.first), last)
            call, theirs = programs[rank].at(last), programs[mates[0]].at(last)
            if call and theirs and before and all(history.at(n) == usual.at(n) for n in before):
                found.append(Departure(rank, call, tuple(mates), theirs))
    return found


def may_have_parted_before(alignment: Alignment, groups: Iterable[str], roots: Mapping[int, tuple[str, ...]]) -> bool:
    """Whether windows that begin late show no stretch on which the ranks of one of these groups agree.

    Ranks that call from the same places for a while have not parted before; where they never do, they may have.
    """
    for group in groups:
        members = sorted(alignment.members(group)[0] & alignment.records.keys())
        first = max((alignment.first(rank, group) for rank in members), default=0)
        if first <= 1:
            continue
        entries = [[alignment.entry(rank, group, first + n) for rank in members] for n in range(SURE_MATCHES)]
        places = [
            {place_of(entry, roots.get(rank, ())) for rank, entry in zip(members, row, strict=True) if entry}
            for row in entries
        ]
        if any(len(row) != 1 or () in row for row in places):
            return True
    return False


def called_alike(alignment: Alignment, groups: Iterable[str], roots: Mapping[int, tuple[str, ...]]) -> bool:
    """Whether the members of each of these groups are known to have called from the same places as far as they came.

    Without frames nobody knows; a call too many or left out would look the same from outside.
    """
    for group in groups:
        members = alignment.members(group)[0] & alignment.records.keys()
        windows = {rank: alignment.window(rank, group) for rank in members}
        held = {rank: window for rank, window in windows.items() if window is not None}
        histories = _histories(held, roots)
        if not held or len(histories) < len(held) or _parted(histories) is not None:
            return False
    return True


def left_out_at(
    alignment: Alignment, group: str, rank: int, number: int, roots: Mapping[int, tuple[str, ...]]
) -> int | None:
    """How many calls ``rank`` would have had to make more, before its ``number``, to agree with its peers to the end.

    None where no such number of calls makes them agree, or none is missing. Where every step calls from the same
    places, histories alone do not show where a step was left out: this tests a place that something else points at.
    """
    members = sorted(alignment.members(group)[0] & alignment.records.keys())
    windows = {member: alignment.window(member, group) for member in members}
    histories = _histories({member: window for member, window in windows.items() if window is not None}, roots)
    mine = histories.pop(rank, None)
    if mine is None or not histories:
        return None
    for calls in range(MOST_CALLS + 1):
        agreed = [_agreed_to_the_end(other, number + calls, mine, number) for other in histories.values()]
        if min(agreed) >= 0:
            return calls if calls and max(agreed) >= max(SURE_MATCHES, calls) else None
    return None


def _agreed_to_the_end(ahead: _History, begin: int, behind: _History, at: int) -> int:
    """How many calls of ``ahead`` from ``begin`` on are those of ``behind`` from ``at`` on; -1 where one is not."""
    if begin < ahead.first or at < behind.first:
        return -1
    overlap = max(0, min(ahead.last - begin, behind.last - at) + 1)
    alike = ahead.column.values_of(begin, overlap) == behind.column.values_of(at, overlap)
    return overlap if alike else -1


def _find(group: str, windows: Mapping[int, Window], roots: Mapping[int, tuple[str, ...]]) -> Shift | None:
    histories = _histories(windows, roots)
    parted = _parted(histories)
    if parted is None or (parted == (first := _first(histories)) and first > 1):
        return None  # where it began is out of sight
    sides = _sides(histories, parted)
    ranks, majority = vote(sides)
    if majority:
        others = next(others for others in sides.values() if others[0] not in ranks)
        peer = max(others, key=lambda rank: histories[rank].last)  # who came furthest tells most
        found = _common([_offset(histories[rank], histories[peer], parted, odd=True) for rank in ranks])
    elif len(sides) == 2:
        (one, *_), (peer, *_) = sides.values()
        found = _offset(histories[one], histories[peer], parted)
        if found is not None and not found.novel and found.extra:
            found = found.seen_from_there  # one repeated a call or the other left it out: loops are rather cut short
        if found is not None and not found.of_first:
            one, peer = peer, one
        ranks = tuple(sides[histories[one].at(parted)])
    else:
        return None
    if found is None:
        return None
    caller = ranks[0] if found.extra else peer
    calls_there = {rank: windows[rank].at(parted) for rank in histories}
    call = calls_there[caller]
    stack = fr.user_stack(call.frames, roots.get(caller, ())) if call else ()
    return Shift(
        group,
        parted,
        tuple(sorted(ranks)),
        found.extra,
        found.calls,
        stack,
        _branch(stack, histories[peer if found.extra else ranks[0]].at(parted)),
        _known_to_all(histories, caller, parted, found),
        found.matched,
        {rank: history.last for rank, history in histories.items()},
        {rank: entry for rank, entry in calls_there.items() if entry is not None},
    )


def _first(histories: Mapping[int, _History]) -> int:
    return max(history.first for history in histories.values())


def _parted(histories: Mapping[int, _History]) -> int | None:
    """The first number under which two of the histories have different places; None for none."""
    if len(histories) < 2:
        return None
    last = min(history.last for history in histories.values())
    return first_difference([history.column.between(_first(histories), last) for history in histories.values()])


def _sides(histories: Mapping[int, _History], parted: int) -> dict[Place, list[int]]:
    """The ranks by where they were when they parted."""
    sides: dict[Place, list[int]] = {}
    for rank, history in histories.items():
        sides.setdefault(history.at(parted), []).append(rank)
    return sides


def _known_to_all(histories: Mapping[int, _History], caller: int, parted: int, found: _Offset) -> bool:
    """Whether every rank had been at the places of these calls before ``parted``; where calls were left out, ever.

    A rank that comes there later is one that makes such calls.
    """
    places = {histories[caller].at(parted + number) for number in range(found.calls)}
    return all(places <= (one.before(parted) if found.extra else one.all()) for one in histories.values())


class _History:
    """The places from which one rank made its calls, by number, without a gap."""

    def __init__(self, column: Column, places: Numbering, window: Window) -> None:
        self.column = column
        self._places = places
        self._window = window

    @property
    def first(self) -> int:
        return self.column.numbers[0]

    @property
    def last(self) -> int:
        return self.column.numbers[-1]

    def at(self, number: int) -> Place:
        """``()`` where the record does not hold that number."""
        return cast("Place", self._places.value(self.column.at(number))) or ()

    def is_over(self, number: int) -> bool:
        entry = self._window.at(number)
        return entry is not None and entry.completed

    def before(self, number: int) -> set[Place]:
        return self._of(self.column.values[: max(0, number - self.first)])

    def all(self) -> set[Place]:
        return self._of(self.column.values)

    def _of(self, values: Iterable[int]) -> set[Place]:
        return {cast("Place", self._places.value(value)) for value in set(values)}


def _histories(windows: Mapping[int, Window], roots: Mapping[int, tuple[str, ...]]) -> dict[int, _History]:
    """Of the ranks whose records hold frames without a gap."""
    places = Numbering(place_of)
    columns = {rank: places.column(window, roots.get(rank, ())) for rank, window in windows.items()}
    nowhere = places.number_of(())
    return {
        rank: _History(column, places, windows[rank])
        for rank, column in columns.items()
        if column.whole and nowhere not in column.values
    }


def place_of(entry: Collective, roots: tuple[str, ...]) -> Place:
    return tuple((frame.file, frame.line) for frame in fr.user_stack(entry.frames, roots))


@dataclass(frozen=True)
class _Offset:
    """One history against another: ``calls`` more (``extra``) or fewer, and how many agree behind them.

    ``whole``: all that both have there. ``novel``: the calls come from places where the other side never was.
    ``of_first``: it is told of the first of the two histories.
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
    def seen_from_there(self) -> _Offset:
        """The same of the other history: what one has more the other has less."""
        return replace(self, extra=not self.extra, of_first=not self.of_first)


def _common(offsets: Sequence[_Offset | None]) -> _Offset | None:
    """What is true of all of a minority; the majority is right, whatever is novel."""
    known = [one if one.of_first else one.seen_from_there for one in offsets if one is not None]
    alike = len(known) == len(offsets) and len({(one.extra, one.calls) for one in known}) == 1
    return min(known, key=lambda one: one.matched) if alike else None


def _offset(mine: _History, theirs: _History, parted: int, *, odd: bool = False) -> _Offset | None:
    """What ``mine`` has more or less than ``theirs`` from ``parted`` on; None where neither explains the rest.

    ``odd``: it is ``mine`` that is in the minority, so either explanation names it.

    In a loop a shift by nearly a whole round the other way agrees as well as the true one: calls from places that the
    other side does not know decide, else the smaller shift does. Where two calls take turns both are by one call: then
    the one behind which all agrees, to the end of the shorter history, is the true one.
    """
    if _reordered(mine, theirs, parted):
        return None
    more = _smallest(mine, theirs, parted)
    fewer = _smallest(theirs, mine, parted)
    found = [
        _Offset(extra, calls, matched, whole, _is_novel(longer, shorter, parted, calls))
        for extra, option, longer, shorter in ((True, more, mine, theirs), (False, fewer, theirs, mine))
        if option is not None
        for calls, matched, whole in (option,)
    ]
    novel = [offset for offset in found if offset.novel]
    if len(novel) == 1:
        return novel[0] if novel[0].extra else novel[0].seen_from_there
    found.sort(key=lambda offset: (offset.size, offset.extra))
    return found[0] if found and (odd or len(found) == 1 or found[0].size < found[1].size) else None


def _reordered(mine: _History, theirs: _History, parted: int) -> bool:
    """The next few calls are the same ones in another order, and what follows, if anything, is the same again."""
    for count in range(2, 5):
        calls = [[history.at(parted + number) for number in range(count)] for history in (mine, theirs)]
        if all(all(side) for side in calls) and sorted(calls[0]) == sorted(calls[1]):
            behind = range(parted + count, parted + count + SURE_MATCHES)
            following = [(mine.at(number), theirs.at(number)) for number in behind]
            return all(one == other for one, other in following if one and other)
    return False


def _smallest(longer: _History, shorter: _History, parted: int) -> tuple[int, int, bool] | None:
    """The fewest calls that ``longer`` has more, how many agree behind them, and whether none there disagrees."""
    for calls in range(1, MOST_CALLS + 1):
        matched = _matched(longer, parted + calls, shorter, parted)
        if matched:
            return calls, matched, matched == _overlap(longer, parted + calls, shorter, parted)
    return None


def _is_novel(longer: _History, shorter: _History, parted: int, calls: int) -> bool:
    known = shorter.all()
    return all(longer.at(parted + number) not in known for number in range(calls))


def _branch(stack: Sequence[Frame], other: Place) -> Frame | None:
    for frame, theirs in zip(reversed(stack), reversed(other), strict=False):
        if (frame.file, frame.line) != theirs:
            return frame
    return stack[0] if stack else None


def _overlap(ahead: _History, begin: int, behind: _History, at: int) -> int:
    return min(ahead.last - begin, behind.last - at) + 1


def _matched(ahead: _History, begin: int, behind: _History, at: int) -> int:
    """How many calls of ``ahead`` from ``begin`` on are those of ``behind`` from ``at`` on, without a break.

    A few that agree and then do not, are chance: 0. Many may end in a break, for that is where the hang is; where both
    have completed what they called there, it is not: they are programs that differ, as those of two pipeline stages do.
    """
    overlap = _overlap(ahead, begin, behind, at)
    if overlap <= 0:
        return 0
    pairs = zip(ahead.column.values_of(begin, overlap), behind.column.values_of(at, overlap), strict=True)
    agree = next((number for number, (its, the_others) in enumerate(pairs) if its != the_others), overlap)
    if agree < overlap and ahead.is_over(begin + agree) and behind.is_over(at + agree):
        return 0
    return agree if agree == overlap or agree >= SURE_MATCHES else 0
