"""Finds a job's work between two readings of its counters, beyond background activity. Has no side effects.

While the job steps, the highest use of each thread, process and connection is learned. When it doesn't step, any larger
use is work that a rank might be waiting for. A rank's main thread is background only while it waits for its peers or
its GPU, because it might be spinning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from safelaunch.capture.counters import CounterKey, Counters, CpuTime, ProcessCounters

WorkKind = Literal["cpu", "io", "network", "faults", "children", "rdma", "messages"]
# kind, pid, start_ticks, and tid or connection's inode (None: a process, or all connections it opens)
UseKey = tuple[WorkKind, int, int, int | None]

TIMES = 1.5  # multiple of the learned use


class Floor(NamedTuple):
    """Activity that doesn't count as work: up to the larger of ``once`` per window and ``per_s``."""

    once: float
    per_s: float

    def within(self, seconds: float, *, awaited: bool = False) -> float:
        """Returns how much activity in a window of this length doesn't count as work.

        ``once`` allows for bursts of background work. If a main thread does the work or waits for it (``awaited``),
        ``once`` shrinks with the window, so that a steady pace counts in short windows, too.
        """
        once = self.once * min(1.0, seconds / BURST_S) if awaited else self.once
        return max(once, self.per_s * seconds)


BURST_S = 10.0  # window of ``once``

FLOORS: Mapping[WorkKind, Floor] = {
    # Milliseconds. A thread that polls every millisecond takes up to 3 % of a core.
    "cpu": Floor(20.0, 30.0),
    # Bytes. Heartbeats, progress bars and loggers stay below 1 KiB/s, a read of a log or of /proc below 16 KiB.
    "io": Floor(16 << 10, 1 << 10),
    # Bytes. A group's monitor reads a store key each second (0.2 KiB/s). Keepalive probes don't count.
    "network": Floor(4 << 10, 1 << 10),
    # Pages: 1 MiB, as a garbage collector or a timer's Python code touches.
    "faults": Floor(256, 16),
    "children": Floor(0, 0),
    # Bytes. An idle InfiniBand port carries only its subnet manager's packets of 256 bytes.
    "rdma": Floor(64 << 10, 4 << 10),
}
QUEUED_SHARE = 0.25  # share of the time; a thread that waits less for a core isn't held up


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest use in one window. It is stored as two rates, because a long window dilutes a burst."""

    per_s: float = 0.0
    once: float = 0.0
    total: float = 0.0

    def plus(self, amount: float, seconds: float) -> Peak:
        return Peak(max(self.per_s, amount / seconds), max(self.once, amount), self.total + amount)


@dataclass(frozen=True, slots=True)
class Background:
    peaks: Mapping[UseKey, Peak] = field(default_factory=dict)
    changes: int = 0
    """processes that began or ended"""
    seconds: float = 0.0
    """length of all windows"""


@dataclass(frozen=True, slots=True)
class ObservedWork:
    rank: int
    """pid of its main process; 0 for ``rdma``, which counts for the node"""
    pid: int
    tid: int | None
    """None: the whole process"""
    kind: WorkKind
    amount: float
    """milliseconds of CPU, bytes, pages, processes, or messages per second"""

    @property
    def words(self) -> str:
        actor = f"process {self.pid}"
        if self.tid is not None:
            actor = f"{'the main thread' if self.tid == self.pid else f'thread {self.tid}'} of {actor}"
        if self.kind == "cpu":
            return f"{actor} uses {self.amount / 1000:.0%} of a core, or waits for one"
        if self.kind == "children":
            return f"processes below {self.pid} start or end, {self.amount:.2g} per second"
        if self.kind == "messages":
            return f"{actor} is woken {self.amount:.2g} times per second by data that it receives"
        if self.kind == "faults":
            return f"{actor} touches {self.amount:.0f} new pages per second"
        if self.kind == "rdma":
            return f"the node's RDMA ports carry {_bytes(self.amount)}/s"
        does = "sends and receives" if self.kind == "network" else "reads and writes"
        return f"{actor} {does} {_bytes(self.amount)}/s"


class _Use(NamedTuple):
    key: UseKey
    rank: int
    amount: float
    parts: Mapping[UseKey, float] = {}
    """use of each connection, summed in ``amount``"""


_CHANGES: UseKey = ("children", 0, 0, None)
_RDMA: UseKey = ("rdma", 0, 0, None)


def learn(background: Background, before: Counters, after: Counters) -> Background:
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return background
    changes = len(_changes(before, after))
    uses = (use for use in _uses(before, after) if use.key[1:3] in before.processes)
    used = {what: amount for use in uses for what, amount in (use.parts or {use.key: use.amount}).items()}
    used |= {_CHANGES: changes, _RDMA: _increase(before.rdma_bytes, after.rdma_bytes)}
    present = {
        (*key, number)
        for key, process in after.processes.items()
        for number in (None, *process.threads, *process.sockets)
    }
    peaks = {what: peak for what, peak in background.peaks.items() if what[1:] in present | {(0, 0, None)}}
    peaks |= {what: peaks.get(what, Peak()).plus(amount, seconds) for what, amount in used.items()}
    return Background(peaks, background.changes + changes, background.seconds + seconds)


def find_work(
    before: Counters,
    after: Counters,
    background: Background,
    *,
    foreground: Collection[int] = (),
    waiting: Collection[int] = (),
) -> tuple[ObservedWork, ...]:
    """Returns the work between two readings that exceeds the background, the strongest first.

    Args:
        foreground: Processes that a rank's main thread is waiting for; all their work counts.
        waiting: Main processes of ranks that are waiting for peers or the GPU.
    """
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return ()
    work: list[tuple[float, ObservedWork]] = []

    def judge(use: _Use, hidden: float = 0.0, *, awaited: bool = False) -> None:
        kind, pid, _, tid = use.key
        allowed = FLOORS[kind].within(seconds, awaited=awaited and kind in ("io", "network")) + hidden
        if use.amount > allowed:
            work.append((use.amount / max(allowed, 1), ObservedWork(use.rank, pid, tid, kind, use.amount / seconds)))

    changed = _changes(before, after)
    if changed:
        rank, mean = changed[-1], background.changes / background.seconds if background.seconds else 0.0
        once = background.peaks.get(_CHANGES, Peak()).once
        judge(_Use(("children", rank, 0, None), rank, len(changed)), TIMES * (once + mean * seconds))
    helpers = changed and not work  # as many short-lived ones as usual
    rdma = _Use(_RDMA, 0, _increase(before.rdma_bytes, after.rdma_bytes))
    judge(rdma, _hidden(rdma, background, seconds))
    for use in _uses(before, after):
        kind, pid, start_ticks, tid = use.key
        is_main = tid == pid == use.rank
        if pid in foreground or (is_main and pid not in waiting):
            judge(use, awaited=True)
        elif not (is_main and kind == "cpu") and not (helpers and (pid, start_ticks) not in before.processes):
            judge(use, _hidden(use, background, seconds))
    return tuple(piece for _, piece in sorted(work, key=lambda item: -item[0]))


def _hidden(use: _Use, background: Background, seconds: float) -> float:
    """Returns how much of a use is background, computed for each connection separately.

    A new connection is compared with the mean, because a job opens most of its connections in one burst.
    """
    hidden = 0.0
    for what, amount in (use.parts or {use.key: use.amount}).items():
        peak = background.peaks.get(what, Peak())
        if what in use.parts and what == use.key and background.seconds:
            peak = replace(peak, per_s=peak.total / background.seconds)
        hidden += min(amount, TIMES * max(peak.once, peak.per_s * seconds))
    return hidden


def _changes(before: Counters, after: Counters) -> list[int]:
    # Ranks of the processes that began, or of the ended processes if they are more.
    began = [
        process.rank for key, process in after.processes.items() if key not in before.processes and _is_new(key, before)
    ]
    ended = [process.rank for key, process in before.processes.items() if key not in after.processes]
    return max(began, ended, key=len)


def _is_new(key: CounterKey, before: Counters) -> bool:
    # The first reading might have missed it.
    return key[1] >= before.at_ticks


def _uses(before: Counters, after: Counters) -> Iterator[_Use]:
    seconds = after.at_s - before.at_s
    for key, now in after.processes.items():
        was = before.processes.get(key) or (ProcessCounters(now.rank) if _is_new(key, before) else None)
        if was is None:
            continue
        for tid, used in now.threads.items():
            earlier = was.threads.get(tid, _NOTHING)
            cpu_ms, queued_ms = _increase(earlier.cpu_ms, used.cpu_ms), _increase(earlier.queued_ms, used.queued_ms)
            is_kept_waiting = queued_ms >= QUEUED_SHARE * 1000 * seconds
            yield _Use(("cpu", *key, tid), now.rank, cpu_ms + queued_ms * is_kept_waiting)
        main_io, main_faults = (
            _increase(was.main_io_bytes, now.main_io_bytes),
            _increase(was.main_faults, now.main_faults),
        )
        if key[0] == now.rank:
            yield _Use(("io", *key, key[0]), now.rank, main_io)
            yield _Use(("faults", *key, key[0]), now.rank, main_faults)
        yield _Use(("io", *key, None), now.rank, _increase(was.io_bytes + main_io, now.io_bytes))
        yield _Use(("faults", *key, None), now.rank, _increase(was.faults + main_faults, now.faults))
        opened = sum(count for inode, count in now.sockets.items() if inode not in was.sockets)
        moved: dict[UseKey, float] = {("network", *key, None): opened}
        for inode in now.sockets.keys() & was.sockets.keys():
            moved["network", key[0], key[1], inode] = _increase(was.sockets[inode], now.sockets[inode])
        yield _Use(("network", *key, None), now.rank, sum(moved.values()), moved)


_NOTHING = CpuTime(0.0)


def _increase(before: float, after: float) -> float:
    return max(0.0, after - before)


def _bytes(amount: float) -> str:
    return f"{amount / 1e6:.1f} MB" if amount >= 1e6 else f"{amount / 1e3:.1f} kB"
