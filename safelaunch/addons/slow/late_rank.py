"""Names the rank that its peers wait for, and where it spends that time, if two witnesses agree. Has no side effects.

The arrival times of collectives show the rank that comes last, and samples of the stacks the one that waits least. They
are independent: arrivals don't depend on stacks, and samples not on clocks. Arrivals can be compared only on one node,
and only if the collectives run on the CPU. Otherwise, two recordings have to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import times_of
from safelaunch.addons.record.slowness import LateRanks, late_ranks, percent
from safelaunch.addons.slow.reasons import SlowReason, reason_of
from safelaunch.addons.slow.service import Examination
from safelaunch.model import Frame
from safelaunch.stacks.frames import place

NOTICEABLE = 0.05  # share of the others' time at a line, for the durations to be compared
MOST_TIMES = 3.0  # a line that takes longer does something else


@dataclass(frozen=True, slots=True)
class SlowRank:
    rank: int
    lost: float
    """share of the peers' time that they wait for it more than it waits for them"""
    frame: Frame | None = None
    """line in which it spends that time; None if it is spread over many lines"""
    spent: float = 0.0
    """share of its time in that line"""
    spent_by_others: float = 0.0
    reason: SlowReason | None = None

    @property
    def words(self) -> str:
        return f"{self.waits}; {self.spends}{self.why}"

    @property
    def waits(self) -> str:
        return f"the other ranks wait for rank {self.rank} {percent(self.lost)} of the time"

    @property
    def spends(self) -> str:
        if self.frame is None:
            return "its extra time is spread over many lines"
        spends = f"it spends {percent(self.spent)} in {place(self.frame)}; the others spend"
        return f"{spends} {percent(self.spent_by_others)}"

    @property
    def why(self) -> str:
        if self.reason is not None:
            return f": {self.reason.words}"
        if self.frame is None:
            return ": more work, or a slower device"
        if self.spent_by_others < NOTICEABLE or self.spent > MOST_TIMES * self.spent_by_others:
            return ""
        return f" ({self.spent / self.spent_by_others:.1f} times as long: more work, or a slower device)"


def slow_rank(examinations: Sequence[Examination], *, since_start: bool) -> SlowRank | None:
    """Returns the rank that all witnesses name; None if any of them differs, or if there is only one."""
    newest, late = examinations[-1], _late(examinations[-1].recording)
    if late is None or any(named(examination) != late.ranks[0] for examination in examinations):
        return None
    if len(examinations) < 2 and not _has_arrivals(newest, late.ranks[0]):
        return None
    (rank,) = late.ranks
    times = times_of(newest.recording)
    reason = reason_of(rank, late.difference, newest.readings, times, since_start=since_start)
    return SlowRank(rank, late.difference, late.frame, late.share, late.share_of_others, reason)


def named(examination: Examination) -> int | None:
    """Returns the only late rank in the samples; None if there are none or several, or if arrivals name another one."""
    late = _late(examination.recording)
    if late is None:
        return None
    (rank,) = late.ranks
    own = _host(examination.recording, rank)
    for host, arrivals in examination.last_to_arrive.items():
        if any(last != (rank if host == own else -1) for last in arrivals):
            return None
    return rank


def _late(recording: Recording) -> LateRanks | None:
    late = late_ranks(times_of(recording))
    return late if late is not None and len(late.ranks) == 1 else None


def _has_arrivals(examination: Examination, rank: int) -> bool:
    return bool(examination.last_to_arrive.get(_host(examination.recording, rank)))


def _host(recording: Recording, rank: int) -> str:
    return next((each.host for each in recording.ranks if each.rank == rank), "")
