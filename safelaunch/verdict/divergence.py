"""How calls differ from what was expected, by call histories.

A backend pairs calls by number. A rank that makes one call more than its peers, or skips one, is from then on a number
off. If sizes happen to agree, nothing complains until an innocent line much later. The Flight Recorder shows it: after
some number, one rank makes its peers' calls *shifted*.

:class:`Histories` compares the calls of a rank with three references: the calls of its peers in a group, by the numbers
of its collectives; the calls of ranks in the same role (which repeat the same calls), by their places in the program;
and its own earlier calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from safelaunch.model import Collective, Frame
from safelaunch.model.entries import positions
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.call_history import UNKNOWN, CallHistory, Identity, histories_of, identity_of
from safelaunch.verdict.columns import Numbering, Window, first_difference
from safelaunch.verdict.conflict import Conflict, first_conflict
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.shifts import MOST_CALLS, SURE_MATCHES, Shift, agreeing_calls, shift_between

_LONG_ALIKE = 2 * SURE_MATCHES
_MOST_ENDS = 4
_HABIT_CALLS = 2  # earlier calls in one group that count as a habit

Reference = Literal["peers", "role", "past"]
Kind = Literal["extra", "missing", "changed", "swapped"]


@dataclass(frozen=True)
class Difference:
    """Calls of ``ranks`` that differ from the calls of their peers or their role, or from their own earlier calls."""

    reference: Reference
    kind: Kind
    ranks: tuple[int, ...]
    there: Mapping[int, Collective]  # rank → the first call that differs; also of peers
    expected: Collective  # a peer's call there, or the usual one
    peers: tuple[int, ...] = ()
    number: int = 0  # place of the call in its group or in the program
    calls: int = 0  # how many are extra or missing, if others agree again after them
    matched: int = 0  # later calls that agree again, or earlier ones of the habit; few prove little
    known: bool = True  # the side that lacks the call makes such calls elsewhere
    explains_lag: bool = False  # only this makes the ranks lag

    @property
    def sure(self) -> bool:
        """Enough calls match that it isn't coincidence: two, if the other side never makes the extra call."""
        return self.matched >= (SURE_MATCHES if self.known else SURE_MATCHES - 1)

    @property
    def call(self) -> Collective:
        """The extra or missing call, or the one made instead of another."""
        return self.expected if self.kind == "missing" else self.there[self.ranks[0]]


class AlignedHistories:
    """Histories that should be the same, call by call."""

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
        """The first number at which two ranks made different calls."""
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
        """The ranks by their call where they diverged."""
        at = self.diverged_at
        return sides_of({rank: history.at(at) for rank, history in self.histories.items()}) if at is not None else {}

    @cached_property
    def shift(self) -> Difference | None:
        """The first calls that some ranks made too many or skipped, if their histories agree again after them.

        None if neither side can be blamed, or if it began before the oldest recorded call.
        """
        at = self.diverged_at
        ranks, majority = vote(self.sides) if at is not None else ((), False)
        if at is None or at == self._first > 1 or not (majority or len(self.sides) == 2):
            return None
        peers = [rank for rank in self.histories if rank not in ranks]
        odd, usual = (ranks, peers) if majority else (side[:1] for side in self.sides.values())
        shift = self._shift_of(odd, usual, at, odd=majority)
        # By operation and size alone, many calls look the same: then only a call the other side never makes counts.
        if shift is None or not (majority or self.by_frames or (shift.novel and shift.whole)):
            return None
        extra = shift.by > 0
        if not majority:  # the calls alone decide: a loop that is cut short is likelier
            first, second = self.sides.values()
            ranks, extra = tuple(first if shift.novel is extra else second), shift.novel
        return self._difference("peers", "extra" if extra else "missing", ranks, at, shift)

    def split(self) -> Iterator[AlignedHistories]:
        """Splits the sides: ranks that never agree again run different programs."""
        for ranks in self.sides.values():
            if len(ranks) > 1:
                yield AlignedHistories({rank: self._windows[rank] for rank in ranks})

    def times_called(self, rank: int, number: int) -> list[int]:
        """Returns the numbers up to ``number`` at which the rank made the same call as there."""
        history = self.histories.get(rank)
        if history is None or history.at(number) == UNKNOWN:
            return []
        return [at for at in range(history.first, number + 1) if history.column.at(at) == history.column.at(number)]

    def round_before(self, rank: int, number: int) -> Literal["whole", "short", ""]:
        """Compares the number of calls in the round before ``number`` with earlier rounds.

        Returns ``""`` if earlier rounds differ or are too few.
        """
        *rounds, made = [end - begin for begin, end in pairwise(self.times_called(rank, number))] or [0]
        if not self.by_frames or len(set(rounds)) != 1:
            return ""
        return "whole" if made == rounds[0] else "short" if made < rounds[0] else ""

    def may_have_left_out(self, rank: int, number: int) -> bool:
        """Returns whether ``rank`` would agree with its peers to the end with some more calls before ``number``.

        If all steps make the same calls, histories alone don't show which step was skipped, so another sign must name
        the place.
        """
        peer_histories = [history for other, history in self.histories.items() if other != rank]
        own_history = self.histories.get(rank)
        if own_history is None or not peer_histories or number < own_history.first:
            return False
        for begin in range(number, number + MOST_CALLS + 1):
            ends = {other: max(0, other.overlap(begin, own_history, number)) for other in peer_histories}
            if all(
                peer_history.first <= begin and agreeing_calls(peer_history, begin, own_history, number) == end
                for peer_history, end in ends.items()
            ):
                return begin > number and max(ends.values()) >= max(SURE_MATCHES, begin - number)
        return False

    @property
    def left_by_one(self) -> Difference | None:
        """The first call of a single rank that differs from all others', after some rounds of the same calls.

        The kind is ``missing`` if the rank continued with one of the peers' next calls. Otherwise it might still make
        the call.
        """
        at = self.diverged_at
        odd, majority = vote(self.sides) if at is not None else ((), False)
        if at is None or not majority or len(odd) != 1 or not self.by_frames or at - self._first < _LONG_ALIKE:
            return None
        history = self.histories[odd[0]]
        usual = max((self.histories[rank] for rank in self.histories if rank not in odd), key=lambda peer: peer.last)
        if len(self.sides) > 2 or usual.at(at) not in history.before(at):
            return None
        following = {usual.at(at + number) for number in range(1, SURE_MATCHES + 1)}
        skipped = history.at(at) in following and history.last > at
        return self._difference("role", "missing" if skipped else "changed", odd, at)

    @property
    def _first(self) -> int:
        return max(history.first for history in self.histories.values())

    def _shift_of(self, ranks: Sequence[int], peers: Sequence[int], at: int, *, odd: bool = False) -> Shift | None:
        """Returns the shift that all ``ranks`` share, whichever call the longest histories of ``peers`` end with.

        A rank that stops at the same call as a peer, after as many calls, isn't ahead of it.
        """
        last = max(self.histories[peer].last for peer in peers)
        ends = {end.at(last): end for peer in peers if (end := self.histories[peer]).last == last}
        against = [*ends.values()][:_MOST_ENDS]
        shifts = [shift_between(self.histories[rank], end, at, odd=odd) for end in against for rank in ranks]
        shared = [shift for shift in shifts if shift is not None and shifts[0] and shift.by == shifts[0].by]
        return min(shared[: len(ranks)], key=lambda shift: shift.matched) if len(shared) == len(shifts) else None

    def _difference(
        self, reference: Reference, kind: Kind, ranks: tuple[int, ...], at: int, shift: Shift | None = None
    ) -> Difference:
        there = {rank: call for rank, history in self.histories.items() if (call := history.window.at(at)) is not None}
        peers = tuple(rank for rank in self.histories if rank not in ranks)
        calls, extra = abs(shift.by) if shift is not None else 0, kind == "extra"
        caller = max((self.histories[rank] for rank in (ranks[:1] if extra else peers)), key=lambda side: side.last)
        made = {caller.at(at + number) for number in range(calls)}
        ends, peer_ends = ([self.histories[rank].last for rank in side] for side in (ranks, peers))
        return Difference(
            reference,
            kind,
            tuple(sorted(ranks)),
            there,
            there[peers[0]],
            peers,
            at,
            calls,
            shift.matched if shift is not None else 0,
            all(made <= (side.before(at) if extra else side.all()) for side in self.histories.values()),
            max(ends) - calls <= min(peer_ends) if extra else min(ends) + calls >= max(peer_ends),
        )


class Histories:
    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._groups: dict[str, AlignedHistories] = {}
        self._calls = Numbering(lambda entry, stack: (entry.group, entry.op, identity_of(entry, stack)))

    def in_group(self, group: str) -> AlignedHistories:
        """Aligns the members of ``group`` by the numbers of its collectives.

        Different calls under one number aren't a fault by themselves (``if rank == 0: all_reduce(a) else:
        all_reduce(b)``).
        """
        if group not in self._groups:
            windows = (
                (rank, self._alignment.window(rank, group)) for rank in sorted(self._alignment.members(group)[0])
            )
            self._groups[group] = AlignedHistories({rank: window for rank, window in windows if window is not None})
        return self._groups[group]

    def shifts(self, groups: Iterable[str]) -> list[Difference]:
        """Returns the calls that members of ``groups`` made too many or skipped; the best shown first."""
        shifts = [shift for group in sorted(groups) if (shift := self.in_group(group).shift) is not None]
        return sorted(shifts, key=lambda shift: -shift.matched)

    @cached_property
    def first_mismatch(self) -> Conflict | None:
        return first_conflict(self._alignment)

    @cached_property
    def shift_of_program(self) -> Difference | None:
        """An extra or missing call over the whole programs of ranks.

        It shows a skipped call even if no member of that group has called anything since.
        """
        # In a loop, the last few calls agree with some round: fewer matches than the shift can be coincidence.
        shifts = (shift for role in self.roles for shift in _shifts(role) if shift.matched > 1)
        shown = (shift for shift in shifts if shift.known or self._member_lacks(shift))
        return max(shown, key=lambda shift: shift.matched, default=None)

    def _member_lacks(self, shift: Difference) -> bool:
        if shift.kind != "extra" or shift.matched < SURE_MATCHES or shift.call.is_p2p:
            return False
        members, are_known = self._alignment.members(shift.call.group)
        return are_known and bool(members & set(shift.peers))

    def left_role(self, ranks: Collection[int]) -> Difference | None:
        """Returns how a single one of ``ranks`` left its role; None if none did or several."""
        left = [left for role in self.roles if (left := role.left_by_one) is not None and left.ranks[0] in ranks]
        return left[0] if len(left) == 1 else None

    @cached_property
    def roles(self) -> list[AlignedHistories]:
        """Whole programs of ranks that repeat the same calls.

        The stages of a pipeline differ by design. Calls made only once, or by one rank, don't count, because some ranks
        are further than others.
        """
        programs = self._alignment.programs()
        histories, _ = histories_of(programs)
        calls = {rank: Counter(history.column.values) for rank, history in histories.items()}
        callers = Counter(call for counts in calls.values() for call in counts)
        roles: dict[frozenset[int], dict[int, Window]] = {}
        for rank, counts in calls.items():
            role = frozenset(call for call, count in counts.items() if count > 1 and callers[call] > 1)
            roles.setdefault(role, {})[rank] = programs[rank]
        return [AlignedHistories(windows) for windows in roles.values()]

    def left_habit(
        self, rank: int, now: Collective, side: Literal[-1, 1], groups: Collection[str] | None = None
    ) -> Difference | None:
        """Returns the usual neighbor of calls like ``now``, or like the one before it, if it isn't there this time.

        A rank that skips a collective waits in the next one, of another group. Two groups entered in opposite orders
        look the same, but then the call comes from a line new to this group, or both come from one line (``for group in
        order: all_reduce(value, group=group)``), which decides nothing.

        Args:
            side: -1 looks for the call right before each earlier call like ``now``; 1, if ``now`` is the newest call,
                for the one right after each earlier call like the one before it.
            groups: Only their collectives count; by default, all calls.
        """
        ring, window = self._alignment.ring(rank), self._alignment.window(rank, now.group)
        counted = ring.positions_of(lambda kind: groups is None or (kind.group in groups and not kind.is_p2p))
        values, position = self._calls_of(rank), window.position(now.seq) if window is not None else None
        made = [values[at] for at in counted]
        at = counted.index(position) if position is not None and position in counted else 0
        place = self._calls.value(made[at])[-1] if at else UNKNOWN
        if place == UNKNOWN or (side > 0 and made[-1] != made[at]):
            return None
        anchor = at if side < 0 else at - 1
        beside = [n + side for n in positions(made, {made[anchor]}) if n + side >= 0 and n < anchor]
        if len({made[n] for n in beside}) != 1 or made[beside[0]] == made[anchor + side]:
            return None
        reorders = self._calls.value(made[beside[0]])[-1] == place or (side > 0 and made[at] in made[:at])
        kind: Kind = "swapped" if reorders else "missing" if side < 0 else "changed"
        return Difference("past", kind, (rank,), {rank: now}, ring[counted[beside[-1]]], matched=len(beside))

    def left_group(self, rank: int, site: Frame) -> Difference | None:
        """Returns the group of all earlier calls like the newest one from ``site``, if that one is in another."""
        ring, values = self._alignment.ring(rank), self._calls_of(rank)
        calls = {value: self._calls.value(value) for value in set(values)}
        line = ((site.file, site.line),)
        newest = max(positions(values, [value for value, call in calls.items() if call[-1][:1] == line]), default=-1)
        group, _, place = calls[values[newest]] if newest >= 0 else ("", "", UNKNOWN)
        same = [value for value, call in calls.items() if call[-1] == place]
        earlier = [at for at in positions(values, same) if at < newest]
        usual = {calls[values[at]][0] for at in earlier}
        if len(earlier) < _HABIT_CALLS or len(usual) != 1 or group in usual:
            return None
        return Difference("past", "changed", (rank,), {rank: ring[newest]}, ring[earlier[-1]], matched=len(earlier))

    def _calls_of(self, rank: int) -> Sequence[int]:
        return self._calls.column(self._alignment.program(rank)).values


def _shifts(aligned: AlignedHistories) -> Iterator[Difference]:
    shift = aligned.shift
    if shift is not None and shift.matched >= shift.calls:
        yield shift
        return
    for side in aligned.split():
        yield from _shifts(side)
