"""Examines the ranks of a job: samples their stacks, and measures what keeps them from running in that time.

Every node examines its own ranks; see ``addons.protocols.Service``.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from safelaunch.addons.record import sampling
from safelaunch.addons.record.recording import Recording, Sampling
from safelaunch.addons.record.service import Recorder
from safelaunch.addons.slow.arrivals import LEAST_CALLS, find_straggler
from safelaunch.addons.slow.readings import RankReadings, measure
from safelaunch.capture.flight_recorder import arrivals_of
from safelaunch.leases.inventory import has_driver
from safelaunch.model import format_ranks
from safelaunch.supervise.looks import ask_each
from safelaunch.supervise.respond import JobView
from safelaunch.system.task import BackgroundTask

SHORTEST_S, LONGEST_S = 8.0, 20.0  # of the samples
SAMPLES = 160  # of each rank, for a difference of 15 % to exceed its scatter
SHARE, LEAST_CPUS = 0.03, 0.12  # the larger, for at most LONGEST_S: share of the node's CPUs, and CPUs
MOST_PEERS = 3
MOST_RANKS = 8  # of a node, if nothing shows which rank is late
ARRIVALS_DEADLINE_S = 5.0


class Examine(msgspec.Struct, frozen=True):
    since_unix_s: Annotated[float, Meta(ge=0.0, le=1e11)]
    """start of the arrivals to compare"""


class Examination(msgspec.Struct, frozen=True, omit_defaults=True):
    """Recording of the ranks, and their readings over the same time. Without samples if no rank arrives late."""

    recording: Recording = msgspec.field(default_factory=Recording)
    readings: list[RankReadings] = []
    late: dict[str, list[list[Annotated[int, Meta(ge=0)]]]] = {}
    """host with several ranks → its ranks that arrive late, before and after the samples; an empty list: none"""


class Examiner:
    """Implements ``addons.protocols.Service``."""

    name = "slow"
    noun = "examination"
    ask = Examine
    part = Examination

    def here(self, ask: Examine, job: JobView, stop: threading.Event) -> Examination:
        """Examines the ranks that arrive late and some others; on several nodes, ranks of each node."""
        late = late_by_arrivals(job, ask.since_unix_s)
        if job.is_whole and late == ():
            return Examination(late={job.context.host: [[]]})
        targets = job.watch.targets()
        if late is not None:
            others = [target for target in targets if target.rank not in late]
            most = max(MOST_PEERS, 1 + 2 * len(late)) if job.is_whole else None
            targets = (*(target for target in targets if target.rank in late), *others[:most])
        targets = targets[:MOST_RANKS]
        done = threading.Event()
        readings = BackgroundTask("readings", lambda: measure(targets, job.context.host, done))
        try:
            recording = Recorder().here(_sampling([target.rank for target in targets]), job, stop)
        finally:
            done.set()
        looks = [list(ranks) for ranks in (late, late_by_arrivals(job, ask.since_unix_s)) if ranks is not None]
        arrivals = {job.context.host: looks} if looks else {}
        return Examination(recording, job.context.cleaned(readings.joined()), arrivals)

    def check(self, part: Examination) -> None:
        Recorder().check(part.recording)

    def merged(self, ask: Examine, parts: Sequence[Examination], notes: Sequence[str]) -> Examination:
        sampled = [part for part in parts if part.recording.ranks] or list(parts)[:1]
        ranks = format_ranks(rank.rank for part in sampled for rank in part.recording.ranks)  # others weren't wanted
        recording = Recorder().merged(Sampling(1.0, ranks), [part.recording for part in sampled], notes)
        return Examination(
            recording,
            [readings for part in parts for readings in part.readings],
            {host: looks for part in parts for host, looks in part.late.items()},
        )

    def bounded(self, part: Examination, fits: Callable[[Examination], bool]) -> Examination:
        def fits_with(recording: Recording) -> bool:
            return fits(msgspec.structs.replace(part, recording=recording))

        return msgspec.structs.replace(part, recording=Recorder().bounded(part.recording, fits_with))


def late_by_arrivals(job: JobView, since_unix_s: float) -> tuple[int, ...] | None:
    """Returns the ranks of this node that the others wait for; empty if there are none, None if that can't be seen."""
    targets = job.watch.targets()
    answers = ask_each(targets, lambda target: arrivals_of(str(target.socket)), deadline_s=ARRIVALS_DEADLINE_S)
    since_ns = int(since_unix_s * 1e9)
    recent = {rank: {call: at for call, at in calls.items() if at >= since_ns} for rank, calls in answers.items()}
    if len(targets) < 2 or any(len(recent.get(target.rank, ())) < LEAST_CALLS for target in targets):
        return None  # others can seem late because they wait for the rank that doesn't answer
    members = Counter(group for calls in recent.values() for group in {group for group, _ in calls})
    if not job.is_whole and 1 in members.values():
        return None  # that rank waits for other nodes
    straggler = find_straggler(recent)
    if straggler is not None:
        return straggler.ranks
    return None if has_driver(os.environ) else ()  # a CPU enters its GPU's calls early, so it might not be late


def _sampling(ranks: Sequence[int]) -> Sampling:
    cpus = len(os.sched_getaffinity(0))
    share = max(SHARE, LEAST_CPUS / cpus)
    rate_hz = sampling.rate_for(len(ranks) * len(sampling.PASSES), cpus, share)
    return Sampling(min(LONGEST_S, max(SHORTEST_S, SAMPLES / rate_hz)), format_ranks(ranks), share, children=False)
