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

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import Alignment, vote
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
    return _find(group, {r: {e.seq: e for e in alignment.of_group(r, group)} for r in members}, roots)


def shift_of_program(alignment: Alignment, roots: Mapping[int, tuple[str, ...]]) -> Shift | None:
    """The same over all calls of each rank in the order of its program, whatever their groups.

    Ranks that run one program make the same calls in groups of their own; so a rank that left one out shows even where
    nobody called anything in that group since. Compared are ranks of one role: the stages of a pipeline differ by
    design. Two calls that changed places are no shift.
    """
    found = [_find("", entries, roots) for entries in programs_by_role(alignment, roots)]
    # A rank that has no group there never makes such calls, and need not: only what both sides make counts.
    sure = [shift for shift in found if shift is not None and shift.matched >= 2 and shift.known_to_all]
    return max(sure, key=lambda shift: shift.matched, default=None)


def programs_by_role(
    alignment: Alignment, roots: Mapping[int, tuple[str, ...]]
) -> list[dict[int, dict[int, Collective]]]:
    """rank → place in its program → call, for each role: ranks that call from the same places again and again. Where
    they came only once, or nobody else does, says nothing: some are further than others.
    """
    whole = all(map(alignment.is_whole, alignment.records))  # blocks leave gaps in the numbers of a recorder
    entries = {
        rank: {place if whole else entry.record_id: entry for place, entry in enumerate(record.entries)}
        for rank, record in alignment.records.items()
    }
    calls = {rank: Counter(history.values()) for rank, history in _histories(entries, roots).items()}
    callers = Counter(place for mine in calls.values() for place in mine)
    roles: dict[frozenset[Place], dict[int, dict[int, Collective]]] = {}
    for rank, mine in calls.items():
        role = frozenset(place for place, count in mine.items() if count > 1 and callers[place] > 1)
        roles.setdefault(role, {})[rank] = entries[rank]
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
    for entries in programs_by_role(alignment, roots):
        histories = _histories(entries, roots)
        for rank, history in histories.items():
            last = max(history)
            there = {mate: other[last] for mate, other in histories.items() if mate != rank and last in other}
            sides = Counter(there.values()).most_common(1)
            if not sides or history[last] == sides[0][0] or 2 * sides[0][1] <= len(there) + 1:
                continue
            mates = [mate for mate, place in there.items() if place == sides[0][0]]
            before = range(max(min(history), min(histories[mates[0]])), last)
            if before and all(_at(history, n) == _at(histories[mates[0]], n) for n in before):
                found.append(Departure(rank, entries[rank][last], tuple(mates), entries[mates[0]][last]))
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
        begin = range(first, first + SURE_MATCHES)
        entries = {r: {n: e for n in begin if (e := alignment.entry(r, group, n)) is not None} for r in members}
        histories = _histories(entries, roots)
        alike = (len({_at(history, number) for history in histories.values()}) == 1 for number in begin)
        if len(histories) < len(entries) or not all(alike):
            return True
    return False


def _find(
    group: str, entries: Mapping[int, Mapping[int, Collective]], roots: Mapping[int, tuple[str, ...]]
) -> Shift | None:
    histories = _histories(entries, roots)
    if len(histories) < 2:
        return None
    first = max(min(history) for history in histories.values())
    last = min(max(history) for history in histories.values())
    parted = next((n for n in range(first, last + 1) if len({_at(h, n) for h in histories.values()}) > 1), None)
    if parted is None or (parted == first and first > 1):
        return None  # where it began is out of sight
    sides: dict[tuple[object, ...], list[int]] = {}
    for rank, history in histories.items():
        sides.setdefault(_at(history, parted), []).append(rank)
    ranks, majority = vote(sides)
    if majority:
        others = next(others for others in sides.values() if others[0] not in ranks)
        peer = max(others, key=lambda rank: max(histories[rank]))  # who came furthest tells most
        found = _common([_offset(histories[rank], histories[peer], parted, odd=True) for rank in ranks])
    elif len(sides) == 2:
        (one, *_), (peer, *_) = sides.values()
        found = _offset(histories[one], histories[peer], parted)
        if found is not None and not found.novel and found.extra:
            found = found.seen_from_there  # one repeated a call or the other left it out: loops are rather cut short
        if found is not None and not found.of_first:
            one, peer = peer, one
        ranks = tuple(sides[_at(histories[one], parted)])
    else:
        return None
    if found is None:
        return None
    caller = ranks[0] if found.extra else peer
    stack = fr.user_stack(entries[caller][parted].frames, roots.get(caller, ()))
    return Shift(
        group,
        parted,
        tuple(sorted(ranks)),
        found.extra,
        found.calls,
        stack,
        _branch(stack, _at(histories[peer if found.extra else ranks[0]], parted)),
        _known_to_all(histories, caller, parted, found),
        found.matched,
        {rank: max(entries[rank]) for rank in histories},
        {rank: entries[rank][parted] for rank in histories},
    )


def _known_to_all(histories: Mapping[int, Mapping[int, Place]], caller: int, parted: int, found: _Offset) -> bool:
    """Whether every rank had been at the places of these calls before ``parted``; where calls were left out, ever.

    A rank that comes there later is one that makes such calls.
    """
    places = {_at(histories[caller], parted + number) for number in range(found.calls)}
    return all(
        places <= {place for n, place in history.items() if n < parted or not found.extra}
        for history in histories.values()
    )


def _histories(
    entries: Mapping[int, Mapping[int, Collective]], roots: Mapping[int, tuple[str, ...]]
) -> dict[int, dict[int, Place]]:
    """rank → number → place, of the ranks whose records hold frames without a gap."""
    known: dict[tuple[int, tuple[str, ...]], Place] = {}  # by identity: entries of one place share their frames
    found: dict[int, dict[int, Place]] = {}
    for rank, numbered in entries.items():
        history: dict[int, Place] = {}
        mine = roots.get(rank, ())
        for number, entry in numbered.items():
            key = (id(entry.frames), mine)
            if key not in known:
                known[key] = tuple((frame.file, frame.line) for frame in fr.user_stack(entry.frames, mine))
            history[number] = known[key]
        whole = bool(history) and len(history) == max(history) - min(history) + 1
        if whole and all(history.values()):
            found[rank] = history
    return found


def _at(history: Mapping[int, Place], number: int) -> Place:
    return history.get(number, ())


@dataclass(frozen=True)
class _Offset:
    """One history against another: ``calls`` more (``extra``) or fewer, and how many agree behind them.

    ``novel``: the calls come from places where the other side never was. ``of_first``: it is told of the first of the
    two histories.
    """

    extra: bool
    calls: int
    matched: int
    novel: bool
    of_first: bool = True

    @property
    def seen_from_there(self) -> _Offset:
        """The same of the other history: what one has more the other has less."""
        return replace(self, extra=not self.extra, of_first=not self.of_first)


def _common(offsets: Sequence[_Offset | None]) -> _Offset | None:
    """What is true of all of a minority; the majority is right, whatever is novel."""
    known = [one if one.of_first else one.seen_from_there for one in offsets if one is not None]
    alike = len(known) == len(offsets) and len({(one.extra, one.calls) for one in known}) == 1
    return min(known, key=lambda one: one.matched) if alike else None


def _offset(
    mine: Mapping[int, Place], theirs: Mapping[int, Place], parted: int, *, odd: bool = False
) -> _Offset | None:
    """What ``mine`` has more or less than ``theirs`` from ``parted`` on; None where neither explains the rest.

    ``odd``: it is ``mine`` that is in the minority, so either explanation names it.

    In a loop a shift by nearly a whole round the other way agrees as well as the true one: calls from places that the
    other side does not know decide, else the smaller shift does.
    """
    if _reordered(mine, theirs, parted):
        return None
    more = _smallest(mine, theirs, parted)
    fewer = _smallest(theirs, mine, parted)
    found = [
        _Offset(extra, calls, matched, _is_novel(longer, shorter, parted, calls))
        for extra, option, longer, shorter in ((True, more, mine, theirs), (False, fewer, theirs, mine))
        if option is not None
        for calls, matched in (option,)
    ]
    novel = [offset for offset in found if offset.novel]
    if len(novel) == 1:
        return novel[0] if novel[0].extra else novel[0].seen_from_there
    found.sort(key=lambda offset: (offset.calls, offset.extra))
    return found[0] if found and (odd or len(found) == 1 or found[0].calls < found[1].calls) else None


def _reordered(mine: Mapping[int, Place], theirs: Mapping[int, Place], parted: int) -> bool:
    """The next few calls are the same ones in another order, and what follows, if anything, is the same again."""
    for count in range(2, 5):
        calls = [[_at(history, parted + number) for number in range(count)] for history in (mine, theirs)]
        following = [_at(history, parted + count) for history in (mine, theirs)]
        if all(all(side) for side in calls) and sorted(calls[0]) == sorted(calls[1]):
            return following[0] == following[1] or not all(following)
    return False


def _smallest(longer: Mapping[int, Place], shorter: Mapping[int, Place], parted: int) -> tuple[int, int] | None:
    """The fewest calls that ``longer`` has more, and how many agree behind them."""
    for calls in range(1, MOST_CALLS + 1):
        matched = _matched(longer, parted + calls, shorter, parted)
        if matched:
            return calls, matched
    return None


def _is_novel(longer: Mapping[int, Place], shorter: Mapping[int, Place], parted: int, calls: int) -> bool:
    known = frozenset(shorter.values())
    return all(_at(longer, parted + number) not in known for number in range(calls))


def _branch(stack: Sequence[Frame], other: Place) -> Frame | None:
    for frame, theirs in zip(reversed(stack), reversed(other), strict=False):
        if (frame.file, frame.line) != theirs:
            return frame
    return stack[0] if stack else None


def _matched(ahead: Mapping[int, Place], begin: int, behind: Mapping[int, Place], at: int) -> int:
    """How many calls of ``ahead`` from ``begin`` on are those of ``behind`` from ``at`` on, without a break.

    A few that agree and then do not, are chance: 0. Many may end in a break, for that is where the hang is.
    """
    overlap = min(max(ahead) - begin, max(behind) - at) + 1
    agree = next((n for n in range(overlap) if _at(ahead, begin + n) != _at(behind, at + n)), max(overlap, 0))
    return agree if agree == overlap or agree >= SURE_MATCHES else 0
