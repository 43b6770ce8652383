"""Where the ranks' call histories parted: a call too many or too few long ago, of which the hang is the late end.

A backend pairs collectives by number. A rank that makes one call more than its peers (``if rank == 0: all_reduce``), or
leaves one out (a batch skipped after an exception), is from there on one number ahead or behind; where sizes happen to
agree nothing complains, and the job stops much later, at an innocent line. The stacks that the Flight Recorder keeps
with each call show it: up to some number all ranks call from the same places, and behind it one rank's places are
those of its peers again, *shifted*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.collectives import Alignment, vote
from safelaunch.model import Frame

MOST_CALLS = 64  # in one place, more or fewer than the peers: an evaluation over a sharded model makes a few dozen
SURE_MATCHES = 3

Place = tuple[tuple[str, int], ...]  # (file, line) of every frame of the user's, innermost first


@dataclass(frozen=True)
class Shift:
    """From number ``seq`` of ``group`` on, ``ranks`` are ``calls`` collectives off their peers.

    ``extra``: they made calls that their peers did not make; otherwise they left out calls that all had made before.
    ``stack``: the user's frames of the first such call, innermost first (of a peer's, where it was left out).
    ``branch``: of these, the outermost one that the other side does not have: where the ways parted.
    ``matched``: how many later calls agree again, shifted by ``calls``; fewer than ``SURE_MATCHES`` prove little.
    ``entered``: rank → the last number it has entered.
    """

    group: str
    seq: int
    ranks: tuple[int, ...]
    extra: bool
    calls: int
    stack: tuple[Frame, ...]
    branch: Frame | None
    matched: int
    entered: Mapping[int, int]

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
    histories = _histories(alignment, group, roots)
    if len(histories) < 2:
        return None
    first = max(min(history) for history in histories.values())
    last = min(max(history) for history in histories.values())
    parted = next((n for n in range(first, last + 1) if len({_at(h, n) for h in histories.values()}) > 1), None)
    if parted is None or parted == first:
        return None  # where it began is out of sight
    sides: dict[tuple[object, ...], list[int]] = {}
    for rank, history in histories.items():
        sides.setdefault(_at(history, parted), []).append(rank)
    odd, majority = vote(sides)
    if majority:
        others = next(ranks for ranks in sides.values() if ranks[0] not in odd)
        pairs = [(odd, others[0])]
    else:
        pairs = [(tuple(ranks), next(r for r in histories if r not in ranks)) for ranks in sides.values()]
    found = [
        shift for ranks, peer in pairs if (shift := _between(alignment, group, histories, roots, parted, ranks, peer))
    ]
    return found[0] if len(found) == 1 else None


def _histories(alignment: Alignment, group: str, roots: Mapping[int, tuple[str, ...]]) -> dict[int, dict[int, Place]]:
    """rank → number → place, of the members of ``group`` whose records hold frames without a gap."""
    known: dict[tuple[Frame, ...], Place] = {}
    found: dict[int, dict[int, Place]] = {}
    for rank in sorted(alignment.members(group)[0] & alignment.records.keys()):
        history: dict[int, Place] = {}
        for entry in alignment.of_group(rank, group):
            if entry.frames not in known:
                stack = fr.user_stack(entry.frames, roots.get(rank, ()))
                known[entry.frames] = tuple((frame.file, frame.line) for frame in stack)
            history[entry.seq] = known[entry.frames]
        whole = bool(history) and len(history) == max(history) - min(history) + 1
        if whole and all(history.values()):
            found[rank] = history
    return found


def _at(history: Mapping[int, Place], number: int) -> Place:
    return history.get(number, ())


def _between(
    alignment: Alignment,
    group: str,
    histories: Mapping[int, Mapping[int, Place]],
    roots: Mapping[int, tuple[str, ...]],
    parted: int,
    ranks: Sequence[int],
    peer: int,
) -> Shift | None:
    """Whether all of ``ranks`` are off ``peer`` in the same way from ``parted`` on."""
    theirs = histories[peer]
    shifts = set()
    for rank in ranks:
        mine = histories[rank]
        before = {place for number, place in mine.items() if number < parted}
        shift = _extra(mine, theirs, parted) or _left_out(mine, theirs, parted, before)
        if shift is None:
            return None
        shifts.add(shift)
    if len({shift[:2] for shift in shifts}) != 1:
        return None
    extra, calls, _ = next(iter(shifts))
    entry = alignment.entry(ranks[0] if extra else peer, group, parted)
    actor = ranks[0] if extra else peer
    stack = fr.user_stack(entry.frames, roots.get(actor, ())) if entry is not None else ()
    return Shift(
        group,
        parted,
        tuple(ranks),
        extra,
        calls,
        stack,
        _branch(stack, _at(histories[peer if extra else ranks[0]], parted)),
        min(shift[2] for shift in shifts),
        {rank: alignment.last(rank, group) for rank in histories},
    )


def _branch(stack: Sequence[Frame], other: Place) -> Frame | None:
    for frame, theirs in zip(reversed(stack), reversed(other), strict=False):
        if (frame.file, frame.line) != theirs:
            return frame
    return stack[0] if stack else None


def _extra(mine: Mapping[int, Place], theirs: Mapping[int, Place], parted: int) -> tuple[bool, int, int] | None:
    """Calls from places where the peer never was, and after them the peer's places again."""
    seen = frozenset(theirs.values())
    calls = 0
    while _at(mine, parted + calls) and _at(mine, parted + calls) not in seen and calls < MOST_CALLS:
        calls += 1
    matched = _matched(mine, parted + calls, theirs, parted)
    return (True, calls, matched) if calls and matched else None


def _left_out(
    mine: Mapping[int, Place], theirs: Mapping[int, Place], parted: int, before: Iterable[Place]
) -> tuple[bool, int, int] | None:
    """Calls of the peer's, from places where both were before, that are not there; after them the places agree.

    In a loop a shift by a whole round agrees as well as the true one; the smallest is the one that was seen.
    """
    known = frozenset(before)
    for calls in range(1, MOST_CALLS + 1):
        if _at(theirs, parted + calls - 1) not in known:
            return None
        matched = _matched(theirs, parted + calls, mine, parted)
        if matched:
            return False, calls, matched
    return None


def _matched(ahead: Mapping[int, Place], begin: int, behind: Mapping[int, Place], at: int) -> int:
    """How many calls of ``ahead`` from ``begin`` on are those of ``behind`` from ``at`` on, without a break.

    A few that agree and then do not, are chance: 0. Many may end in a break, for that is where the hang is.
    """
    overlap = min(max(ahead) - begin, max(behind) - at) + 1
    agree = next((n for n in range(overlap) if _at(ahead, begin + n) != _at(behind, at + n)), max(overlap, 0))
    return agree if agree == overlap or agree >= SURE_MATCHES else 0
