"""Names the rank that its peers wait for, and where it spends that time, if two witnesses agree. Has no side effects.

The arrival times of collectives show the rank that comes last, and samples of the stacks the one that waits least. They
are independent: arrivals don't depend on stacks, and samples not on clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import times_of
from safelaunch.addons.record.slowness import LateRanks, late_ranks, percent
from safelaunch.addons.slow.arrivals import Straggler
from safelaunch.stacks.frames import place


@dataclass(frozen=True, slots=True)
class SlowRank:
    rank: int
    lost: float
    """share of the peers' time that they wait for it more than it waits for them"""
    spends: str
    """line in which it spends that time, in words"""

    @property
    def words(self) -> str:
        return f"the other ranks wait for rank {self.rank} {percent(self.lost)} of the time; {self.spends}"


def slow_rank(recording: Recording, arrivals: tuple[Straggler | None, ...]) -> SlowRank | None:
    """Returns the rank that the samples and all looks at the arrivals name; None if any of them differs."""
    late = late_ranks(times_of(recording))
    if late is None or len(late.ranks) != 1:
        return None
    (rank,) = late.ranks
    if any(straggler is None or straggler.rank != rank for straggler in arrivals):
        return None
    return SlowRank(rank, late.difference, _spends(late))


def _spends(late: LateRanks) -> str:
    if late.frame is None:
        return "its extra time is spread over many lines"
    return f"it spends {percent(late.share)} in {place(late.frame)}; the others spend {percent(late.share_of_others)}"
