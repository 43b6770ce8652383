"""How the ranks' call histories diverge.

A backend pairs calls by number. A rank that makes one call more than its peers, or skips one, is from then on a number
off. If sizes happen to agree, nothing complains until an innocent line much later. The Flight Recorder shows it: after
some number, one rank makes its peers' calls *shifted*.

:class:`Histories` aligns the members of a group by the numbers of their collectives, and the ranks of one role (which
repeat the same calls) by the calls' places in the program.
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
from safelaunch.verdict.conflict import Conflict, first_conflict
from safelaunch.verdict.majority import sides_of, vote
from safelaunch.verdict.shifts import (
    MOST_CALLS,
    SURE_MATCHES,
    CallShift,
    agreeing_calls,
    common_shift,
    diverging_frame,
    reordered,
    shift_between,
)

# --- divergences ------------------------------------------------------------------------------------------------------

_LONG_ALIKE = 2 * SURE_MATCHES

DivergenceKind = Literal["extra", "missing", "reordered", "different"]

_MOST_ENDS = 4


@dataclass(frozen=True)
class Divergence:
    """From call ``number`` on, ``ranks`` don't make the calls that ``peers`` make."""

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    number: int
    kind: DivergenceKind  # made calls that peers didn't, skipped theirs, made the same in another order, or another one
    calls: int  # how many, if extra or missing
    call: Collective  # the first such call: a peer's if it is missing
    stack: tuple[Frame, ...]  # its user frames, innermost first
    branch: Frame | None  # the outermost frame of ``stack`` that the other side doesn't have
    known_to_all: bool  # both sides make such calls elsewhere
    by_frames: bool  # the lines identify calls, not only operation and size
    matched: int  # later calls that agree again after the shift; fewer than ``SURE_MATCHES`` prove little
    visible: bool  # all records hold earlier calls
    entered: Mapping[int, int]  # rank → the last number it entered
    calls_at_number: Mapping[int, Collective]  # rank → its call at ``number``

    @property
    def is_shift(self) -> bool:
        """Calls are extra or missing, and the histories agree again after them."""
        return self.kind in ("extra", "missing") and self.visible

    @property
    def agrees_again(self) -> bool:
        """Enough later calls agree that it isn't coincidence: two, if the other side never makes the extra call."""
        return self.matched >= (SURE_MATCHES if self.known_to_all else SURE_MATCHES - 1)

    def explains_lag(self) -> bool:
        """Returns whether only this divergence makes the ranks lag."""
        numbers = [number for rank, number in self.entered.items() if rank in self.ranks]
        peer_numbers = [number for rank, number in self.entered.items() if rank not in self.ranks]
        if not numbers or not peer_numbers:
            return False
        if self.kind == "extra":
            return max(numbers) - self.calls <= min(peer_numbers)
        return min(numbers) + self.calls >= max(peer_numbers)


@dataclass(frozen=True)
class Habit:
    """A rank's earlier calls of one kind always had the same neighbor, and now it made another call there."""

    usual: Collective  # the usual neighbor
    times: int  # how often it was there
    one_line: bool  # both calls come from one line
    new: bool  # the rank never made the other call before

    @property
    def sure(self) -> bool:
        """It was so several times, and the calls come from different lines."""
        return self.times >= SURE_MATCHES and not self.one_line


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
    def divergence(self) -> Divergence | None:
        """The first divergence; None if there is none, or if neither side can be blamed."""
        if self.diverged_at is None:
            return None
        ranks, majority = vote(self.sides)
        if majority:
            peers = next(side for side in self.sides.values() if side[0] not in ranks)
            return self._minority_divergence(ranks, peers, self.diverged_at)
        return self._divergence_of_two(self.diverged_at) if len(self.sides) == 2 else None

    def split(self) -> Iterator[AlignedHistories]:
        """Splits the sides: ranks that never agree again run different programs."""
        for ranks in self.sides.values():
            if len(ranks) > 1:
                yield AlignedHistories({rank: self._windows[rank] for rank in ranks})

    def _times(self, rank: int, number: int) -> list[int]:
        history = self.histories.get(rank)
        if history is None or history.at(number) == UNKNOWN:
            return []
        return [at for at in range(history.first, number + 1) if history.column.at(at) == history.column.at(number)]

    def times_called(self, rank: int, number: int) -> int:
        return len(self._times(rank, number))

    def round_before(self, rank: int, number: int) -> Literal["whole", "short", ""]:
        """Compares the number of calls in the round before ``number`` with earlier rounds.

        Returns ``""`` if earlier rounds differ or are too few.
        """
        *rounds, made = [end - begin for begin, end in pairwise(self._times(rank, number))] or [0]
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
    def lone_divergence(self) -> Divergence | None:
        """The first divergence of a single rank from all others, after some rounds of the same calls.

        The kind is ``missing`` if the rank continued with one of the peers' next calls. Otherwise it might still make
        the call.
        """
        at = self.diverged_at
        odd, majority = vote(self.sides) if at is not None else ((), False)
        if at is None or not majority or len(odd) != 1 or not self.by_frames or at - self._first < _LONG_ALIKE:
            return None
        history = self.histories[odd[0]]
        peer = max((rank for rank in self.histories if rank not in odd), key=lambda rank: self.histories[rank].last)
        usual = self.histories[peer]
        if len(self.sides) > 2 or usual.at(at) not in history.before(at):
            return None
        following = {usual.at(at + number) for number in range(1, SURE_MATCHES + 1)}
        missing = history.at(at) in following and history.last > at
        return self._divergence(odd, peer, at, "missing" if missing else "different")

    @property
    def _first(self) -> int:
        return max(history.first for history in self.histories.values())

    def _minority_divergence(self, ranks: tuple[int, ...], majority_ranks: list[int], diverged_at: int) -> Divergence:
        peer = max(majority_ranks, key=lambda rank: self.histories[rank].last)  # the longest history shows most
        reference = self.histories[peer]
        minority = [self.histories[rank] for rank in ranks]
        if any(reordered(history, reference, diverged_at) for history in minority):
            return self._divergence(ranks, peer, diverged_at, "reordered")
        # A rank that stops at the same call as a peer, after as many calls, isn't ahead of it.
        level = [self.histories[rank] for rank in majority_ranks if self.histories[rank].last == reference.last]
        against = list({peer_history.at(reference.last): peer_history for peer_history in level}.values())[:_MOST_ENDS]
        shifts = [
            common_shift([shift_between(history, peer_history, diverged_at, odd=True) for history in minority])
            for peer_history in against
        ]
        return self._divergence(ranks, peer, diverged_at, "different", None if None in shifts else shifts[0])

    def _divergence_of_two(self, diverged_at: int) -> Divergence | None:
        """Blames a side by the calls alone, because neither is in the minority."""
        first, second = self.sides.values()
        rank, peer = first[0], second[0]
        if reordered(self.histories[rank], self.histories[peer], diverged_at):
            return None
        shift = shift_between(self.histories[rank], self.histories[peer], diverged_at)
        # By operation and size alone, many calls look the same: then only a call the other side never makes counts.
        if shift is None or not (self.by_frames or (shift.novel and shift.whole)):
            return None
        if not shift.novel and shift.extra:
            shift = shift.inverted  # a repeated or a skipped call: a loop that is cut short is likelier
        if not shift.of_first:
            first, peer = second, rank
        return self._divergence(tuple(first), peer, diverged_at, "different", shift)

    def _divergence(
        self, ranks: tuple[int, ...], peer: int, diverged_at: int, kind: DivergenceKind, shift: CallShift | None = None
    ) -> Divergence:
        if shift is not None:
            kind = "extra" if shift.extra else "missing"
        caller = peer if kind == "missing" else ranks[0]
        made = {rank: history.window.at(diverged_at) for rank, history in self.histories.items()}
        calls_at_number = {rank: call for rank, call in made.items() if call is not None}  # all ranks reached it
        stack = self.histories[caller].window.stack(calls_at_number[caller]).user_frames
        other = ranks[0] if kind == "missing" else peer
        return Divergence(
            ranks=tuple(sorted(ranks)),
            peers=tuple(rank for rank in self.histories if rank not in ranks),
            number=diverged_at,
            kind=kind,
            calls=shift.calls if shift is not None else 0,
            call=calls_at_number[caller],
            stack=stack,
            branch=diverging_frame(stack, self.histories[other].at(diverged_at)),
            known_to_all=shift is not None and self._known_to_all(caller, diverged_at, shift),
            by_frames=self.by_frames,
            matched=shift.matched if shift is not None else 0,
            visible=not diverged_at == self._first > 1,  # otherwise it began before the oldest recorded call
            entered={rank: history.last for rank, history in self.histories.items()},
            calls_at_number=calls_at_number,
        )

    def _known_to_all(self, caller: int, diverged_at: int, shift: CallShift) -> bool:
        made = {self.histories[caller].at(diverged_at + number) for number in range(shift.calls)}
        return all(
            made <= (history.before(diverged_at) if shift.extra else history.all())
            for history in self.histories.values()
        )


class Histories:
    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._groups: dict[str, AlignedHistories] = {}

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

    def shift_in(self, group: str) -> Divergence | None:
        """Returns the calls that some members of ``group`` made too many or skipped."""
        divergence = self.in_group(group).divergence
        return divergence if divergence is not None and divergence.is_shift else None

    def shifts_in(self, groups: Iterable[str]) -> Iterator[Divergence]:
        return (shift for group in sorted(groups) if (shift := self.shift_in(group)) is not None)

    @cached_property
    def first_mismatch(self) -> Conflict | None:
        return first_conflict(self._alignment)

    @cached_property
    def shift_of_program(self) -> Divergence | None:
        """An extra or missing call over the whole programs of ranks.

        It shows a skipped call even if no member of that group has called anything since.
        """
        shifts = [shift for role in self.roles for shift in _shifts(role)]
        # In a loop, the last few calls agree with some round: fewer matches than the shift can be coincidence.
        sure = [
            candidate
            for candidate in shifts
            if candidate.matched >= max(2, candidate.calls)
            and (candidate.known_to_all or self._member_lacks(candidate))
        ]
        return max(sure, key=lambda candidate: candidate.matched, default=None)

    def _member_lacks(self, shift: Divergence) -> bool:
        if shift.kind != "extra" or shift.matched < SURE_MATCHES or shift.call.is_p2p:
            return False
        members, are_known = self._alignment.members(shift.call.group)
        return are_known and bool(members & set(shift.peers))

    def lone_divergence(self, ranks: Collection[int]) -> Divergence | None:
        """Returns how a single one of ``ranks`` left its role; None if none did or several."""
        divergences = [
            divergence
            for role in self.roles
            if (divergence := role.lone_divergence) is not None and divergence.ranks[0] in ranks
        ]
        return divergences[0] if len(divergences) == 1 else None

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

    def broken_habit(self, rank: int, now: Collective, groups: Collection[str] | None = None) -> Habit | None:
        """Returns the call that came right before each earlier call like ``now``, if ``rank`` made another this time.

        A rank that skips a collective waits in the next one, of another group. Two groups entered in opposite orders
        look the same, but then the call comes from a line new to this group, or both come from one line (``for group in
        order: all_reduce(value, group=group)``), which decides nothing.

        Args:
            groups: Only their collectives count; by default, all calls.
        """
        entries = self._entries(rank, groups)
        at = next((n for n in reversed(range(len(entries))) if _is_same(entries[n], now)), 0)
        return self._habit(rank, entries, at, -1, self._call_key(rank, now)[-1])

    def changed_successor(self, rank: int, now: Collective, groups: Collection[str]) -> Habit | None:
        """Returns the usual call after the last one of ``groups``, if ``now`` is another.

        If ``now`` is new and from another line, the rank has reached a new place; otherwise its order changed.
        """
        entries = self._entries(rank, groups)
        what = self._call_key(rank, now)
        if len(entries) < 2 or self._call_key(rank, entries[-1]) != what:
            return None
        habit = self._habit(rank, entries, len(entries) - 2, 1, what[-1])
        return habit if habit is not None and habit.times >= SURE_MATCHES else None

    def _habit(
        self, rank: int, entries: Sequence[Collective], at: int, side: Literal[-1, 1], place: Identity
    ) -> Habit | None:
        """Returns the usual neighbor of earlier calls like number ``at``, if it isn't there now."""
        made = [self._call_key(rank, entry) for entry in entries]
        beside = [n + side for n in range(at) if made[n] == made[at] and n + side >= 0]
        if not place or len({made[n] for n in beside}) != 1 or made[at + side] == made[beside[0]]:
            return None
        usual = beside[-1]
        new = made[at + side] not in made[: at + side]
        return Habit(entries[usual], len(beside), made[usual][-1] == place, new)

    def _call_key(self, rank: int, entry: Collective) -> tuple[str, str, Identity]:
        return entry.group, entry.op, identity_of(entry, self._alignment.stack(rank, entry))

    def _entries(self, rank: int, groups: Collection[str] | None) -> list[Collective]:
        ring = self._alignment.ring(rank)
        return [entry for entry in ring if groups is None or (entry.group in groups and not entry.is_p2p)]


def _is_same(entry: Collective, other: Collective) -> bool:
    return (entry.group, entry.is_p2p, entry.seq, entry.p2p_seq) == (
        other.group,
        other.is_p2p,
        other.seq,
        other.p2p_seq,
    )


def _shifts(aligned: AlignedHistories) -> Iterator[Divergence]:
    divergence = aligned.divergence
    if divergence is not None and divergence.is_shift and divergence.matched >= divergence.calls:
        yield divergence
        return
    for side in aligned.split():
        yield from _shifts(side)
