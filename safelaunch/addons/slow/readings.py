"""Measures what keeps ranks from running: other threads, CPU limits, disks, signals, the garbage collector."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from safelaunch.addons.slow.links import BusyConnection, busy_connections, connections_of
from safelaunch.beacon import garbage
from safelaunch.capture import cgroups
from safelaunch.capture.gpu import gpus
from safelaunch.capture.look import Target
from safelaunch.capture.sock_diag import TcpConnection
from safelaunch.capture.worker_server import Unanswered, post_to_python
from safelaunch.job.process import descendants, process_table
from safelaunch.leases.inventory import has_driver
from safelaunch.model import Gpu
from safelaunch.supervise.looks import ask_each
from safelaunch.system import procstat
from safelaunch.system.decoding import from_json
from safelaunch.system.files import text_of

STATES_EVERY_S = 0.05
GARBAGE_DEADLINE_S = 2.0
TICKS_S = os.sysconf("SC_CLK_TCK")
RIVAL_SHARE = 0.1  # of a CPU


class RankReadings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times in which a rank's main thread couldn't run, as shares of the measured time (0 to 1)."""

    rank: Annotated[int, Meta(ge=0)]
    host: str = ""
    shares: dict[str, Annotated[float, Meta(ge=0.0, le=1.0)]] = {}
    """reason → share; lacks what couldn't be measured"""
    before: dict[str, float] = {}
    """reason → share of the time since the process started"""
    rival: str = ""
    """the other process that used most of the rank's CPUs, in words"""
    major_faults: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    connections: list[BusyConnection] = []
    """its TCP connections to other nodes"""
    gpu: Gpu | None = None
    """its GPU at the end"""
    gpu_errors: dict[str, int] = {}
    """the GPU's error counters that grew, and by how much"""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals since the start of a process, in seconds unless named otherwise."""

    at_s: float
    start_s: float
    queued_s: float | None
    slices: int  # times that it got a CPU
    throttled_s: float
    stolen_s: float  # mean over the node's CPUs
    major_faults: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Node:
    at_s: float
    ranks: Mapping[int, int]  # pid → rank
    totals: Mapping[int, _Totals]  # by rank
    cpu_ms: Mapping[tuple[int, int], int]  # (pid, start) of all processes → CPU time
    gpus: Sequence[Gpu]
    connections: Mapping[int, Mapping[int, TcpConnection]]  # by pid and inode

    @classmethod
    def read(cls, ranks: Mapping[int, int]) -> _Node:
        totals = {rank: total for pid, rank in ranks.items() if (total := _totals(pid)) is not None}
        return cls(time.monotonic(), ranks, totals, _cpu_times(), _gpus(), connections_of(ranks))


class _Collected(msgspec.Struct, frozen=True):
    collecting_s: float | None = None


def measure(targets: Sequence[Target], host: str, stop: threading.Event) -> list[RankReadings]:
    """Measures these ranks until ``stop`` is set."""
    ranks = {target.pid: target.rank for target in targets}
    before = _Node.read(ranks)
    ended = _garbage_collection(targets)
    _garbage_collection([target for target in targets if target.rank in ended])  # it was an earlier measurement's end
    states = _states(targets, stop)
    collecting = _garbage_collection(targets)
    after = _Node.read(ranks)
    measured = [target for target in targets if _runs_on(before.totals.get(target.rank), after.totals.get(target.rank))]
    return [
        _readings(target, host, before, after, states[target.rank], collecting.get(target.rank)) for target in measured
    ]


def _runs_on(before: _Totals | None, after: _Totals | None) -> bool:
    return before is not None and after is not None and before.start_s == after.start_s


def _readings(
    target: Target, host: str, before: _Node, after: _Node, states: Counter[str], collecting_s: float | None
) -> RankReadings:
    first, last = before.totals[target.rank], after.totals[target.rank]
    shares = _shares(first, last, states)
    if collecting_s is not None:
        shares["garbage-collection"] = min(1.0, collecting_s / max(last.at_s - first.at_s, 1e-6))
    own = {target.pid, *(process.pid for process in descendants([target.pid]))}
    gpu = _gpu_of(own, after.gpus)
    return RankReadings(
        rank=target.rank,
        host=host,
        shares=_rounded(shares),
        before=_rounded(_lifetime(first)),
        rival=_rival(target.pid, own, before, after),
        major_faults=last.major_faults - first.major_faults,
        read_bytes=last.read_bytes - first.read_bytes,
        written_bytes=last.written_bytes - first.written_bytes,
        connections=busy_connections(
            before.connections[target.pid], after.connections[target.pid], max(after.at_s - before.at_s, 1e-6)
        ),
        gpu=gpu,
        gpu_errors=_grown(_gpu_of(own, before.gpus), gpu),
    )


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def _totals(pid: int) -> _Totals | None:
    stat = procstat.read(pid, pid)  # of the main thread
    if stat is None or stat.state in "ZX":
        return None
    queued = text_of(f"/proc/{pid}/task/{pid}/schedstat").split()
    io = dict(line.split(": ") for line in text_of(f"/proc/{pid}/io").splitlines() if ": " in line)
    cpu = text_of("/proc/stat").partition("\n")[0].split()
    return _Totals(
        at_s=time.clock_gettime(time.CLOCK_BOOTTIME),
        start_s=stat.start_ticks / TICKS_S,
        queued_s=int(queued[1]) / 1e9 if len(queued) == 3 else None,
        slices=int(queued[2]) if len(queued) == 3 else 0,
        throttled_s=cgroups.throttled_ms(pid) / 1000,
        stolen_s=int(cpu[8]) / TICKS_S / (os.cpu_count() or 1) if len(cpu) > 8 else 0.0,
        major_faults=stat.major_faults,
        read_bytes=int(io.get("read_bytes", 0)),
        written_bytes=int(io.get("write_bytes", 0)),
    )


def _states(targets: Sequence[Target], stop: threading.Event) -> dict[int, Counter[str]]:
    """Returns how often each main thread was seen in each state."""
    states: dict[int, Counter[str]] = {target.rank: Counter() for target in targets}
    while not stop.wait(STATES_EVERY_S):
        for target in targets:
            stat = procstat.read(target.pid, target.pid)
            if stat is not None:
                states[target.rank][stat.state] += 1
    return states


def _shares(first: _Totals, last: _Totals, states: Counter[str]) -> dict[str, float]:
    seconds, seen = max(last.at_s - first.at_s, 1e-6), states.total()

    def share(before_s: float, after_s: float) -> float:
        return max(0.0, min(1.0, (after_s - before_s) / seconds))  # a process can move to another cgroup

    throttled = share(first.throttled_s, last.throttled_s)
    shares = {"cpu-steal": share(first.stolen_s, last.stolen_s)}
    if first.queued_s is not None and last.queued_s:  # includes throttled time; a group's is the sum over its CPUs
        queued = share(first.queued_s, last.queued_s)
        throttled = min(throttled, queued)
        shares["cpu-queue"] = queued - throttled
    shares["cpu-quota"] = throttled
    if seen:
        shares["stopped"] = (states["T"] + states["t"]) / seen
        shares["disk"], shares["memory"] = states["D"] / seen, 0.0
        faults = last.major_faults - first.major_faults
        if faults >= max(states["D"], 1):
            shares["disk"], shares["memory"] = 0.0, shares["disk"]
        if "cpu-queue" in shares:  # after each fault, it queues for a CPU
            of_faults = min(1.0, faults / max(1, last.slices - first.slices)) * shares["cpu-queue"]
            shares["memory"] += of_faults
            shares["cpu-queue"] -= of_faults
    return shares


def _lifetime(totals: _Totals) -> dict[str, float]:
    seconds = max(totals.at_s - totals.start_s, 1e-6)
    throttled_s = min(totals.throttled_s, totals.queued_s or totals.throttled_s)  # its group can be older
    shares = {"cpu-quota": throttled_s / seconds}
    if totals.queued_s is not None:
        shares["cpu-queue"] = max(0.0, totals.queued_s - throttled_s) / seconds
    return shares


def _garbage_collection(targets: Sequence[Target]) -> dict[int, float]:
    """Begins to measure the garbage collectors, or ends it and returns their seconds by rank."""

    def ask(target: Target) -> float | None:
        try:
            answer = post_to_python(
                str(target.socket), garbage.HANDLER, target.questions, deadline_s=GARBAGE_DEADLINE_S
            )
            return from_json(answer, _Collected).collecting_s
        except (Unanswered, msgspec.DecodeError):
            return None

    return ask_each(targets, ask, deadline_s=2 * GARBAGE_DEADLINE_S)


# --- other processes --------------------------------------------------------------------------------------------------


def _cpu_times() -> dict[tuple[int, int], int]:
    # (pid, start) → ms
    table = process_table()
    return {(pid, ticks): stat.cpu_ms for pid, (_, ticks) in table.items() if (stat := procstat.read(pid)) is not None}


def _rival(pid: int, own: Collection[int], before: _Node, after: _Node) -> str:
    seconds = max(after.at_s - before.at_s, 1e-6)
    used = {
        key[0]: (ms - before.cpu_ms.get(key, 0)) / 1000 / seconds
        for key, ms in after.cpu_ms.items()
        if key[0] not in own
    }
    cpus = _cpus(pid)

    def on_its_cpus(rival: int) -> float:
        allowed = _cpus(rival)
        return used[rival] * len(cpus & allowed) / max(1, len(allowed))

    busiest = sorted(used, key=lambda rival: -used[rival])[:8]
    rival = max(busiest, key=on_its_cpus, default=0)
    if not rival or on_its_cpus(rival) < RIVAL_SHARE:
        return ""
    stat = procstat.read(rival)
    process = f"{stat.name} (pid {rival})" if stat is not None else f"pid {rival}"
    return f"{f'rank {after.ranks[rival]}' if rival in after.ranks else process} used {used[rival]:.1f} CPUs"


def _cpus(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus() -> Sequence[Gpu]:
    driver = gpus().value if has_driver(os.environ) else None
    return driver.gpus if driver is not None else ()


def _gpu_of(pids: Collection[int], gpus: Sequence[Gpu]) -> Gpu | None:
    used = [gpu for gpu in gpus if any(process.pid in pids for process in gpu.processes or ())]
    return used[0] if len(used) == 1 else None


def _grown(before: Gpu | None, after: Gpu | None) -> dict[str, int]:
    if before is None or after is None or before.uuid != after.uuid:
        return {}
    counters = [name for name in Gpu.__struct_fields__ if name.endswith(("_errors", "_replays"))]
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in counters}
    return {
        name: int(now - was) for name, (was, now) in pairs.items() if was is not None and now is not None and now > was
    }
