"""Names the ranks that their peers wait for, and the line in which they spend that time, if two witnesses agree.

The arrival times of calls show the ranks that come last, and samples of the stacks those that wait least. They are
independent: arrivals don't depend on stacks, and samples not on clocks. Arrivals can be compared only on one node,
and only if the collectives run on the CPU. Otherwise, two recordings have to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import RankTime, mean, times_of
from safelaunch.addons.record.slowness import LATE, late_ranks, percent
from safelaunch.addons.slow.links import BusyConnection, SlowLink, slow_link
from safelaunch.addons.slow.reasons import SlowReason, reason_of
from safelaunch.addons.slow.service import Examination
from safelaunch.model import Frame, rank_words
from safelaunch.stacks.frames import place
from safelaunch.verdict.phrases import capital

NOTICEABLE = 0.05  # share of the others' time at a line, for the durations to be compared
MORE = "more work, or a slower device"
MOST_TIMES = 3.0  # a line that takes longer does something else


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """A rank that its peers wait for, or several that are slow together, such as a stage of a pipeline."""

    ranks: tuple[int, ...]
    lost: float
    """share of the peers' time that they wait for these ranks more than these wait for them"""
    frame: Frame | None = None
    """line in which they spend that time; None if it is spread over many lines"""
    spent: float = 0.0
    """share of their time in that line"""
    spent_by_others: float = 0.0
    reason: SlowReason | None = None
    link: SlowLink | None = None
    """the slow link of their node, for which all ranks wait equally"""

    @property
    def words(self) -> str:
        return self.waits if self.link is not None else f"{self.waits}; {self.spends}{self.why}"

    @property
    def waits(self) -> str:
        if self.link is not None:
            where = f"the network link of {self.link.host} ({rank_words(self.ranks)})"
            busy, elsewhere = percent(self.link.busy), percent(self.link.busy_elsewhere)
            return f"{where} is slow: data on it waits {busy} of the time to be acknowledged, on the others {elsewhere}"
        return f"the other ranks wait for {rank_words(self.ranks)} {percent(self.lost)} of the time"

    @property
    def spends(self) -> str:
        is_one = len(self.ranks) == 1
        if self.frame is None:
            return f"{'its' if is_one else 'their'} extra time is spread over many lines"
        spends = f"{'it spends' if is_one else 'they spend'} {percent(self.spent)} in {place(self.frame)}"
        return f"{spends}; the others spend {percent(self.spent_by_others)}"

    @property
    def why(self) -> str:
        if self.reason is not None:
            return f". {capital(self.reason.words)}"
        if self.frame is None:
            return f": {MORE}"
        if self.spent_by_others < NOTICEABLE or self.spent > MOST_TIMES * self.spent_by_others:
            return ""
        return f" ({self.spent / self.spent_by_others:.1f} times as long: {MORE})"


def slow_ranks(examinations: Sequence[Examination], *, since_start: bool) -> SlowRanks | None:
    """Returns the ranks that all witnesses name; None if any of them differs, or if there is only one."""
    newest, all_times = examinations[-1], [times_of(examination.recording) for examination in examinations]
    names = [named(examination, times) for examination, times in zip(examinations, all_times, strict=True)]
    ranks, times = names[-1], all_times[-1]
    if any(name != ranks for name in names) or (len(names) == 1 and _lacks_witness(newest, ranks)):
        return None
    if ranks is None:
        return _of_slow_link(examinations, mean([time.waits for time in times]))
    late = late_ranks(times)
    assert late is not None  # named() has them from it
    reason = None
    if len(ranks) == 1:
        reason = reason_of(ranks[0], late.difference, newest.readings, times, since_start=since_start)
    if _have_busy_gpus(examinations, ranks, late.difference) and (reason is None or reason.kind != "gpu-clock"):
        return None
    return SlowRanks(ranks, late.difference, late.frame, late.share, late.share_of_others, reason)


def _have_busy_gpus(examinations: Sequence[Examination], ranks: Sequence[int], lost: float) -> bool:
    # A GPU that never idles doesn't wait for its rank's CPU: the other ranks' CPUs run further ahead of their GPUs.
    readings = [each for examination in examinations for each in examination.readings if each.rank in ranks]
    busy = [each.gpu.utilisation_percent for each in readings if each.gpu is not None]
    return bool(busy) and all(percents is not None and percents >= 100 * (1 - lost / 2) for percents in busy)


def needs_another(examinations: Sequence[Examination]) -> bool:
    """Returns whether a single examination names ranks without a second witness."""
    first = examinations[0]
    return len(examinations) == 1 and _lacks_witness(first, named(first, times_of(first.recording)))


def _lacks_witness(examination: Examination, ranks: Sequence[int] | None) -> bool:
    if ranks is None:
        return link_of(examination) is not None
    return not any(examination.late.get(host) for host in _hosts(examination.recording, ranks))


def link_of(examination: Examination) -> SlowLink | None:
    connections: dict[str, list[BusyConnection]] = {}
    for readings in examination.readings:
        connections.setdefault(readings.host, []).extend(readings.connections)
    return slow_link(connections)


def _of_slow_link(examinations: Sequence[Examination], waits: float) -> SlowRanks | None:
    links = [link_of(examination) for examination in examinations]
    newest = links[-1]
    if waits < LATE:
        return None  # the computation hides the transfers
    if newest is None or {link.host if link is not None else "" for link in links} != {newest.host}:
        return None
    ranks = tuple(readings.rank for readings in examinations[-1].readings if readings.host == newest.host)
    reason = SlowReason("network", newest.busy, "its network link is slow")
    lost = min(waits, newest.busy - newest.busy_elsewhere)
    return SlowRanks(tuple(sorted(ranks)), lost, reason=reason, link=newest)


def named(examination: Examination, times: Sequence[RankTime]) -> tuple[int, ...] | None:
    """Returns the late ranks in the samples; None if there are none, or if arrivals on some node name others."""
    late = late_ranks(times)
    if late is None:
        return None
    own = _hosts(examination.recording, late.ranks)
    for host, looks in examination.late.items():
        if any(tuple(sorted(look)) != own.get(host, ()) for look in looks):
            return None
    return tuple(sorted(late.ranks))


def _hosts(recording: Recording, ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    hosts: dict[str, tuple[int, ...]] = {}
    for each in sorted(recording.ranks, key=lambda rank: rank.rank):
        if each.rank in ranks:
            hosts[each.host] = (*hosts.get(each.host, ()), each.rank)
    return hosts
