"""The calls of all ranks in the order in which they made them: where, and how, did one part from its peers?

A backend pairs calls by number. A rank that makes one call more than its peers (``if rank == 0: all_reduce``), or
leaves one out (a batch skipped after an exception), is from there on one number ahead or behind; where sizes happen to
agree nothing complains, and the job stops much later, at an innocent line. The Flight Recorder shows it: up to some
number all ranks make the same calls, and behind it one rank's calls are those of its peers again, *shifted*.

What makes two calls the same is :func:`identity_of`. :class:`Histories` aligns the records: the members of a group by
the numbers of their collectives, and the ranks of one role (which make the same calls again and again) by their places
in the program, whatever the group. Each rank that leaves the consensus of the others is a :class:`Divergence`; every
rule that reasons about the past reads these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from safelaunch.model import Collective, Frame
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.call_history import UNKNOWN, CallHistory, Identity, histories_of, identity_of
from safelaunch.verdict.columns import Window, first_difference
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.mismatch import Mismatch, first_mismatch
from safelaunch.verdict.shifts import (
    MOST_CALLS,
    SURE_MATCHES,
    Offset,
    agreeing_calls,
    branch,
    common_offset,
    offset,
    reordered,
)

# --- how all ranks' calls part ----------------------------------------------------------------------------------------

_LONG_ALIKE = 2 * SURE_MATCHES

DivergenceKind = Literal["extra", "missing", "reordered", "different"]

_MOST_ENDS = 4


@dataclass(frozen=True)
class Divergence:
    """From call ``number`` on, ``ranks`` do not call as ``peers`` do.

    ``kind``: they made ``calls`` calls that their peers did not (``extra``), left out ``calls`` that these made
    (``missing``), made the same few in another order (``reordered``), or another one there (``different``).
    ``call``: the first such call: theirs; a peer's, where it was left out. ``stack``: its user frames, innermost
    first; ``branch``: of these, the outermost one that the other side does not have: where the ways parted.
    ``known_to_all``: both sides make such calls, at those places. ``by_frames``: calls were told by the lines that
    made them; else only by operation and size.
    ``matched``: how many later calls agree again, shifted by ``calls``; fewer than ``SURE_MATCHES`` prove little.
    ``visible``: the records of all hold calls from before it. ``entered``: rank → the last number that it has entered.
    ``there``: rank → what it called as ``number``.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    number: int
    kind: DivergenceKind
    calls: int
    call: Collective
    stack: tuple[Frame, ...]
    branch: Frame | None
    known_to_all: bool
    by_frames: bool
    matched: int
    visible: bool
    entered: Mapping[int, int]
    there: Mapping[int, Collective]

    @property
    def is_shift(self) -> bool:
        """Calls too many or too few, in sight, behind which the histories agree again."""
        return self.kind in ("extra", "missing") and self.visible

    @property
    def agrees_again(self) -> bool:
        """For long enough that it is no chance: two calls do behind one that the other side never makes."""
        return self.matched >= (SURE_MATCHES if self.known_to_all else SURE_MATCHES - 1)

    def explains_lag(self) -> bool:
        """Without it the ranks would be level, or the others ahead: no one else is behind for a reason of its own."""
        mine = [number for rank, number in self.entered.items() if rank in self.ranks]
        others = [number for rank, number in self.entered.items() if rank not in self.ranks]
        if not mine or not others:
            return False
        if self.kind == "extra":
            return max(mine) - self.calls <= min(others)
        return min(mine) + self.calls >= max(others)


@dataclass(frozen=True)
class Habit:
    """``usual``: the call that each time stood where a rank has now made another one; ``times``: how often.

    ``one_line``: both come from one line. ``new``: the other one was never made before.
    """

    usual: Collective
    times: int
    one_line: bool
    new: bool

    @property
    def sure(self) -> bool:
        """That was so several times, and the two come from different lines."""
        return self.times >= SURE_MATCHES and not self.one_line


class Aligned:
    """Histories that are meant to be alike, call by call."""

    def __init__(self, windows: Mapping[int, Window]) -> None:
        self._windows = windows

    @cached_property
    def _read(self) -> tuple[dict[int, CallHistory], bool]:
        return histories_of(self._windows)

    @property
    def histories(self) -> dict[int, CallHistory]:
        return self._read[0]

    @cached_property
    def diverged_at(self) -> int | None:
        """The first number under which two ranks made different calls, as far as all of them came; None for none."""
        if len(self.histories) < 2:
            return None
        last = min(history.last for history in self.histories.values())
        first = self._first
        return first_difference(history.column.between(first, last) for history in self.histories.values())

    @property
    def by_frames(self) -> bool:
        return self._read[1]

    @cached_property
    def sides(self) -> dict[Identity, list[int]]:
        """The ranks by what they called when they parted."""
        at = self.diverged_at
        return sides_of({rank: history.at(at) for rank, history in self.histories.items()}) if at is not None else {}

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first one: who parted from whom. None where they did not, or where neither side is the odd one."""
        if self.diverged_at is None:
            return None
        ranks, majority = vote(self.sides)
        if majority:
            others = next(others for others in self.sides.values() if others[0] not in ranks)
            return self._of_minority(ranks, others, self.diverged_at)
        return self._of_two(self.diverged_at) if len(self.sides) == 2 else None

    def split(self) -> Iterator[Aligned]:
        """Each side for itself: ranks that part and do not come together again run programs of their own."""
        for ranks in self.sides.values():
            if len(ranks) > 1:
                yield Aligned({rank: self._windows[rank] for rank in ranks})

    def _times(self, rank: int, number: int) -> list[int]:
        """Under which numbers ``rank`` has made its call ``number``, up to that, as far as its record goes back."""
        mine = self.histories.get(rank)
        if mine is None or mine.at(number) == UNKNOWN:
            return []
        return [at for at in range(mine.first, number + 1) if mine.column.at(at) == mine.column.at(number)]

    def times_called(self, rank: int, number: int) -> int:
        return len(self._times(rank, number))

    def round_before(self, rank: int, number: int) -> Literal["whole", "short", ""]:
        """How many calls ``rank`` made since the last one from the place of its call ``number``: as many as each time
        before, or fewer. ``""`` where earlier rounds differ, or there are too few to tell.
        """
        *rounds, made = [end - begin for begin, end in pairwise(self._times(rank, number))] or [0]
        if not self.by_frames or len(set(rounds)) != 1:
            return ""
        return "whole" if made == rounds[0] else "short" if made < rounds[0] else ""

    def may_have_left_out(self, rank: int, number: int) -> bool:
        """Whether ``rank`` would agree with its peers to the end, had it made some calls more before its ``number``.

        Where every step makes the same calls, histories alone do not show where a step was left out: this tests a place
        that something else points at.
        """
        others = [history for other, history in self.histories.items() if other != rank]
        mine = self.histories.get(rank)
        if mine is None or not others or number < mine.first:
            return False
        for begin in range(number, number + MOST_CALLS + 1):
            ends = {other: max(0, other.overlap(begin, mine, number)) for other in others}
            if all(one.first <= begin and agreeing_calls(one, begin, mine, number) == end for one, end in ends.items()):
                return begin > number and max(ends.values()) >= max(SURE_MATCHES, begin - number)
        return False

    @property
    def of_one(self) -> Divergence | None:
        """The first divergence of a single rank from all others, which had called alike for some rounds.

        ``missing`` if its call is one of the next that they made, and it has made others since: so it left out what
        they made before. Else it may yet make that, and its call is only a different one.
        """
        at = self.diverged_at
        odd, majority = vote(self.sides) if at is not None else ((), False)
        if at is None or not majority or len(odd) != 1 or not self.by_frames or at - self._first < _LONG_ALIKE:
            return None
        mine = self.histories[odd[0]]
        peer = max((rank for rank in self.histories if rank not in odd), key=lambda rank: self.histories[rank].last)
        usual = self.histories[peer]
        if len(self.sides) > 2 or usual.at(at) not in mine.before(at):
            return None
        following = {usual.at(at + number) for number in range(1, SURE_MATCHES + 1)}
        missing = mine.at(at) in following and mine.last > at
        return self._divergence(odd, peer, at, "missing" if missing else "different")

    @property
    def _first(self) -> int:
        return max(history.first for history in self.histories.values())

    def _of_minority(self, ranks: tuple[int, ...], others: list[int], parted: int) -> Divergence:
        peer = max(others, key=lambda rank: self.histories[rank].last)  # who came furthest tells most
        theirs = self.histories[peer]
        mine = [self.histories[rank] for rank in ranks]
        if any(reordered(history, theirs, parted) for history in mine):
            return self._divergence(ranks, peer, parted, "reordered")
        # Whoever ends where one of the others does, having made as many calls, is ahead of none of them.
        level = [self.histories[rank] for rank in others if self.histories[rank].last == theirs.last]
        against = list({one.at(theirs.last): one for one in level}.values())[:_MOST_ENDS]
        found = [common_offset([offset(history, one, parted, odd=True) for history in mine]) for one in against]
        return self._divergence(ranks, peer, parted, "different", None if None in found else found[0])

    def _of_two(self, parted: int) -> Divergence | None:
        """Neither side is in the minority: the calls themselves have to tell which one is odd."""
        first, second = self.sides.values()
        one, peer = first[0], second[0]
        if reordered(self.histories[one], self.histories[peer], parted):
            return None
        found = offset(self.histories[one], self.histories[peer], parted)
        # Told by operation and size alone, many calls are alike: then only one that the other side never makes tells.
        if found is None or not (self.by_frames or (found.novel and found.whole)):
            return None
        if not found.novel and found.extra:
            found = found.seen_from_there  # one repeated a call or the other left it out: loops are rather cut short
        if not found.of_first:
            first, peer = second, one
        return self._divergence(tuple(first), peer, parted, "different", found)

    def _divergence(
        self, ranks: tuple[int, ...], peer: int, parted: int, kind: DivergenceKind, found: Offset | None = None
    ) -> Divergence:
        if found is not None:
            kind = "extra" if found.extra else "missing"
        caller = peer if kind == "missing" else ranks[0]
        made = {rank: history.window.at(parted) for rank, history in self.histories.items()}
        there = {rank: call for rank, call in made.items() if call is not None}  # all have come as far as that
        stack = self.histories[caller].window.stack(there[caller]).user_frames
        other = ranks[0] if kind == "missing" else peer
        return Divergence(
            ranks=tuple(sorted(ranks)),
            peers=tuple(rank for rank in self.histories if rank not in ranks),
            number=parted,
            kind=kind,
            calls=found.calls if found is not None else 0,
            call=there[caller],
            stack=stack,
            branch=branch(stack, self.histories[other].at(parted)),
            known_to_all=found is not None and self._known_to_all(caller, parted, found),
            by_frames=self.by_frames,
            matched=found.matched if found is not None else 0,
            visible=not parted == self._first > 1,  # else it began before what the records still hold
            entered={rank: history.last for rank, history in self.histories.items()},
            there=there,
        )

    def _known_to_all(self, caller: int, parted: int, found: Offset) -> bool:
        """Whether every rank had made these calls before ``parted``; where they were left out, ever.

        A rank that comes to them later is one that makes such calls.
        """
        made = {self.histories[caller].at(parted + number) for number in range(found.calls)}
        return all(
            made <= (history.before(parted) if found.extra else history.all()) for history in self.histories.values()
        )


class Histories:
    """The call histories of a job."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._groups: dict[str, Aligned] = {}

    def in_group(self, group: str) -> Aligned:
        """The members of ``group``, by the numbers of its collectives.

        Different calls under one number are no fault by themselves (``if rank == 0: all_reduce(a) else:
        all_reduce(b)``); only calls that agree again at an offset are.
        """
        if group not in self._groups:
            windows = (
                (rank, self._alignment.window(rank, group)) for rank in sorted(self._alignment.members(group)[0])
            )
            self._groups[group] = Aligned({rank: window for rank, window in windows if window is not None})
        return self._groups[group]

    def shift_in(self, group: str) -> Divergence | None:
        """The calls that some members of ``group`` made too many, or left out; None where histories agree, do not
        overlap, or differ in other ways.
        """
        found = self.in_group(group).divergence
        return found if found is not None and found.is_shift else None

    def shifts_in(self, groups: Iterable[str]) -> Iterator[Divergence]:
        """Those in these groups, by their names."""
        return (shift for group in sorted(groups) if (shift := self.shift_in(group)) is not None)

    @cached_property
    def first_mismatch(self) -> Mismatch | None:
        """The oldest number of a group under which ranks recorded what does not fit."""
        return first_mismatch(self._alignment)

    @cached_property
    def shift_of_program(self) -> Divergence | None:
        """A call too many or too few over all calls of each rank in the order of its program, whatever their groups.

        Ranks that run one program make the same calls in groups of their own; so a rank that left one out shows even
        where nobody called anything in that group since.
        """
        found = [shift for role in self.roles for shift in _shifts(role)]
        # In a loop the last few calls agree with some round or other: fewer that agree than are off may be chance.
        sure = [one for one in found if one.matched >= max(2, one.calls) and (one.known_to_all or self._lacks(one))]
        return max(sure, key=lambda one: one.matched, default=None)

    def _lacks(self, shift: Divergence) -> bool:
        """A call too many that a member of its own group did not make. Who has no group there makes no such calls, and
        need not: only what both sides make counts otherwise.
        """
        if shift.kind != "extra" or shift.matched < SURE_MATCHES or shift.call.is_p2p:
            return False
        members, known = self._alignment.members(shift.call.group)
        return known and bool(members & set(shift.peers))

    def of_one(self, ranks: Collection[int]) -> Divergence | None:
        """How one of ``ranks`` alone left its role, over whole programs; None where none did, or several."""
        found = [one for role in self.roles if (one := role.of_one) is not None and one.ranks[0] in ranks]
        return found[0] if len(found) == 1 else None

    @cached_property
    def roles(self) -> list[Aligned]:
        """Whole programs, by the place of a call in them: of ranks that make the same calls again and again.

        The stages of a pipeline differ by design. What a rank called only once, or nobody else did, says nothing: some
        are further than others.
        """
        programs = self._alignment.programs()
        histories, _ = histories_of(programs)
        calls = {rank: Counter(history.column.values) for rank, history in histories.items()}
        callers = Counter(call for mine in calls.values() for call in mine)
        roles: dict[frozenset[int], dict[int, Window]] = {}
        for rank, mine in calls.items():
            role = frozenset(call for call, count in mine.items() if count > 1 and callers[call] > 1)
            roles.setdefault(role, {})[rank] = programs[rank]
        return [Aligned(mine) for mine in roles.values()]

    def broken_habit(self, rank: int, now: Collective, groups: Collection[str] | None = None) -> Habit | None:
        """The call that came right before each earlier one like ``now``, where another one did this time: so ``rank``
        has left it out. None where there is no such habit.

        Collectives of ``groups`` count; without these all calls, sends and receives as well.

        A rank that leaves out a collective of one group waits in the next one, of another group, and its peers wait in
        the one it left out: the same picture as two groups entered in opposite orders. The rank's own record tells them
        apart: a line that has followed the same other line each time, and not now, is a call left out. Where the groups
        are swapped, the call comes from a line that has not been there with this group before; or both come from one
        line (``for group in order: all_reduce(value, group=group)``), and then nothing here tells.
        """
        mine = self._entries(rank, groups)
        at = next((n for n in reversed(range(len(mine))) if _is_same(mine[n], now)), 0)
        return self._habit(rank, mine, at, -1, self._what(rank, now)[-1])

    def usual_instead(self, rank: int, now: Collective, groups: Collection[str]) -> Habit | None:
        """The call that has followed the one of ``groups`` that ``rank`` made before ``now``, each time, and several
        times, where ``now`` is another. If that is new, and from another line, the rank has come to a new place; else
        it has changed the order.
        """
        mine = self._entries(rank, groups)
        what = self._what(rank, now)
        if len(mine) < 2 or self._what(rank, mine[-1]) != what:
            return None
        found = self._habit(rank, mine, len(mine) - 2, 1, what[-1])
        return found if found is not None and found.times >= SURE_MATCHES else None

    def _habit(
        self, rank: int, mine: Sequence[Collective], at: int, side: Literal[-1, 1], place: Identity
    ) -> Habit | None:
        """What stood on that ``side`` of each earlier call like number ``at``: where it was always one, and is not now.

        ``place``: whence the call comes that the rank waits in.
        """
        made = [self._what(rank, entry) for entry in mine]
        beside = [n + side for n in range(at) if made[n] == made[at] and n + side >= 0]
        if not place or len({made[n] for n in beside}) != 1 or made[at + side] == made[beside[0]]:
            return None
        usual = beside[-1]
        new = made[at + side] not in made[: at + side]
        return Habit(mine[usual], len(beside), made[usual][-1] == place, new)

    def _what(self, rank: int, entry: Collective) -> tuple[str, str, Identity]:
        return entry.group, entry.op, identity_of(entry, self._alignment.stack(rank, entry))

    def _entries(self, rank: int, groups: Collection[str] | None) -> list[Collective]:
        ring = self._alignment.ring(rank)
        return [one for one in ring if groups is None or (one.group in groups and not one.is_p2p)]


def _is_same(one: Collective, other: Collective) -> bool:
    return (one.group, one.is_p2p, one.seq, one.p2p_seq) == (other.group, other.is_p2p, other.seq, other.p2p_seq)


def _shifts(aligned: Aligned) -> Iterator[Divergence]:
    found = aligned.divergence
    if found is not None and found.is_shift and found.matched >= found.calls:
        yield found
        return
    for side in aligned.split():
        yield from _shifts(side)
