"""The order in which a rank calls, round after round: which call has it always made right before the one it is in?

A rank that leaves out a collective of one group waits in the next one, of another group, and its peers wait in the one
it left out: the same picture as two groups entered in opposite orders. The rank's own record tells them apart: a line
that has followed the same other line each time, and not now, is a call left out. Where the groups are swapped, the call
comes from a line that has not been there with this group before; or both come from one line (``for group in order:
all_reduce(value, group=group)``), and then nothing here tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from safelaunch.diagnose.collectives import Alignment
from safelaunch.diagnose.history import Place, place_of
from safelaunch.entries import Entries
from safelaunch.model import Collective

SURE_TIMES = 3


@dataclass(frozen=True)
class Broken:
    """``usual``: the call that came right before each earlier one from the same place, and not this time.

    ``sure``: that was so several times, and the two come from different lines.
    """

    usual: Collective
    sure: bool


def broken_by(
    alignment: Alignment, rank: int, now: Collective, groups: Collection[str], roots: tuple[str, ...]
) -> Broken | None:
    """The habit that ``rank`` broke by its call ``now``, counting calls of ``groups``; None where there is none."""
    record = alignment.records.get(rank)
    if record is None:
        return None
    mine = [e for e in Entries.of(record.entries) if e.group in groups and not e.is_p2p]
    at = next((n for n in reversed(range(len(mine))) if (mine[n].group, mine[n].seq) == (now.group, now.seq)), 0)
    what = _what(now, roots)
    times = [n for n in range(1, at) if _what(mine[n], roots) == what]
    usual = {_what(mine[n - 1], roots) for n in times}
    if len(usual) != 1 or not what[-1] or _what(mine[at - 1], roots) in usual:
        return None
    before = mine[times[-1] - 1]
    return Broken(before, len(times) >= SURE_TIMES and _what(before, roots)[-1] != what[-1])


def taken_in_turns(alignment: Alignment, calls: Mapping[int, Collective], roots: Mapping[int, tuple[str, ...]]) -> bool:
    """Whether the ranks' ``calls`` may be of one round, each made as often as the others as far as records show.

    Ranks that swap two calls make both, in every round. Where a rank has made one of them more often than another, as
    an all_reduce in each step and one for the log in each tenth, a round has not got both: who is alone in such a call
    has come to it by another way than by a swap.
    """
    wanted = {_what(call, roots.get(rank, ())) for rank, call in calls.items()}
    for rank in calls:
        record = alignment.records.get(rank)
        mine = Entries.of(record.entries) if record is not None else ()
        counts = Counter(what for entry in mine if (what := _what(entry, roots.get(rank, ()))) in wanted and what[-1])
        before = [count - (what == _what(calls[rank], roots.get(rank, ()))) for what, count in counts.items()]
        made = [count for count in before if count]
        if len(made) > 1 and max(made) - min(made) > 1:
            return False
    return True


def _what(entry: Collective, roots: tuple[str, ...]) -> tuple[str, str, Place]:
    """Group, operation and place of a call."""
    return entry.group, entry.op, place_of(entry, roots)
