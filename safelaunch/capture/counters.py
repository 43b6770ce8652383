"""Counts a job's work: what its processes have computed, read, written, sent and received so far.

Reading doesn't disturb the processes. The kernel counts ``read`` and ``write``, but not ``splice``, nor ``recv`` and
``send`` on Unix and UDP sockets; ``supervise.judge`` looks at threads that wait in these. Work on pages that are
already mapped shows only as CPU time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from safelaunch.capture import proc, sock_diag
from safelaunch.job.process import ProcessTable, process_table
from safelaunch.system import procstat
from safelaunch.system.files import link_of

MAX_THREADS = 8192  # over all ranks
MAX_DESCRIPTORS = 1 << 16
SERVER_THREAD = "pt_workerserver"  # its pool's threads inherit the name
RDMA = Path("/sys/class/infiniband")
_RDMA_COUNTERS = {  # bytes per unit; the last two are EFA's
    "counters/port_xmit_data": 4, "counters/port_rcv_data": 4, "hw_counters/tx_bytes": 1, "hw_counters/rx_bytes": 1,
}  # fmt: skip
_TICKS_S = os.sysconf("SC_CLK_TCK")

CounterKey = tuple[int, int]  # pid, start_ticks


@dataclass(frozen=True, slots=True)
class CpuTime:
    """A thread's time on a CPU, and the time when it could run but had to wait for one."""

    cpu_ms: float
    queued_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    rank: int  # pid of the rank's main process
    faults: int = 0
    io_bytes: int = 0  # read and written, without recv and send
    threads: Mapping[int, CpuTime] = field(default_factory=dict)
    sockets: Mapping[int, int] = field(default_factory=dict)  # inode → bytes of TCP; shared ones count for the parent
    main_io_bytes: int = 0  # of a rank's main thread
    main_faults: int = 0
    servers: Collection[int] = ()  # torch's worker server, not counted: it works for safelaunch


@dataclass(frozen=True, slots=True)
class Counters:
    at_s: float  # CLOCK_MONOTONIC
    at_ticks: int  # the same moment on the clock of start_ticks
    processes: Mapping[CounterKey, ProcessCounters] = field(default_factory=dict)
    rdma_bytes: int = 0  # over all ports of the node
    connections: Collection[int] = ()  # inodes in this network namespace
    partial: bool = False  # something couldn't be read, or exceeded a limit


def read(pids: Collection[int], before: Counters | None = None) -> Counters:
    """Reads the counters of these ranks' main processes and of their descendants; never raises.

    If ``before`` is given, searches descriptors only for connections that are new since then.
    """
    at_s, at_ticks = time.monotonic(), int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_S)
    reader = _CounterReader(before or Counters(0.0, 0))
    processes: dict[CounterKey, ProcessCounters] = {}
    for rank in pids:
        with suppress(OSError):
            processes.update(reader.tree(rank))
    connections = sock_diag.tcp_bytes()
    here = ("", link_of("/proc/self/ns/net"))
    if connections is None or any(link_of(f"/proc/{pid}/ns/net") not in here for pid in pids):
        reader.partial, connections = True, connections or {}
    owned = reader.owned(connections, processes)
    processes = {key: replace(counters, sockets=owned.get(key, {})) for key, counters in processes.items()}
    return Counters(at_s, at_ticks, processes, _rdma_bytes(), frozenset(connections), reader.partial)


class _CounterReader:
    def __init__(self, before: Counters) -> None:
        self.partial = False
        self._before = before
        self._left = MAX_THREADS
        self._table: ProcessTable | None = None  # read only if the kernel lists no children

    def tree(self, rank: int) -> Iterator[tuple[CounterKey, ProcessCounters]]:
        waiting = [rank]
        for pid in waiting:  # grows: parents before children
            stat = procstat.read(pid)
            if stat is None:
                continue
            if stat.state in "ZX":  # its parent's counters include it once it is reaped
                yield (pid, stat.start_ticks), ProcessCounters(rank)
                continue
            threads: dict[int, CpuTime] = {}
            servers: list[int] = []
            for tid in self._threads(pid):
                if pid == rank and self._serves((pid, stat.start_ticks), tid):
                    servers.append(tid)
                    continue
                words = _text(f"/proc/{pid}/task/{tid}/schedstat").split()
                if len(words) == 3:
                    threads[tid] = CpuTime(int(words[0]) / 1e6, int(words[1]) / 1e6)
                elif (thread := procstat.read(pid, tid)) is not None:
                    threads[tid] = CpuTime(thread.cpu_ms)
                waiting += self._children(pid, tid)
            main = procstat.read(pid, pid) if pid == rank else None
            yield (
                (pid, stat.start_ticks),
                ProcessCounters(
                    rank,
                    _faults(pid, servers) if servers else stat.faults,
                    self._io_bytes(f"/proc/{pid}/io"),
                    threads,
                    main_io_bytes=self._io_bytes(f"/proc/{pid}/task/{pid}/io") if main is not None else 0,
                    main_faults=main.faults if main is not None else 0,
                    servers=frozenset(servers),
                ),
            )

    def _serves(self, key: CounterKey, tid: int) -> bool:
        was = self._before.processes.get(key)
        if was is not None and (tid in was.threads or tid in was.servers):
            return tid in was.servers
        return _text(f"/proc/{key[0]}/task/{tid}/comm").strip() == SERVER_THREAD

    def owned(
        self, connections: Mapping[int, int], processes: Collection[CounterKey]
    ) -> dict[CounterKey, dict[int, int]]:
        """Assigns each connection, with its bytes, to a process.

        Parents must precede children that inherit connections.
        """
        owned: dict[CounterKey, dict[int, int]] = {key: {} for key in processes}
        past = self._before.processes
        for key, counters in past.items():
            if key in owned:
                owned[key] = {inode: connections[inode] for inode in counters.sockets if inode in connections}
        ended = {inode for key, counters in past.items() if key not in owned for inode in counters.sockets}
        new = connections.keys() - (set(self._before.connections) - ended)
        left = MAX_DESCRIPTORS
        for key in processes if new else ():
            try:
                names = os.listdir(f"/proc/{key[0]}/fd")  # noqa: PTH208
            except OSError as error:
                self.partial |= isinstance(error, PermissionError)
                continue
            left -= len(names)
            if left < 0:
                self.partial = True
                break
            for inode in new.intersection(socket_inodes(key[0], names)):
                owned[key][inode] = connections[inode]
                new.discard(inode)
        return owned

    def _threads(self, pid: int) -> list[int]:
        try:
            tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - ten times as fast
        except OSError:
            return []
        self.partial |= len(tids) > self._left
        tids = tids[: self._left]
        self._left -= len(tids)
        return tids

    def _children(self, pid: int, tid: int) -> list[int]:
        try:
            return [int(word) for word in _read(f"/proc/{pid}/task/{tid}/children").split()]
        except FileNotFoundError:
            if tid != pid:
                return []
        except OSError:
            return []
        if self._table is None:
            self._table = process_table()
        return [child for child, (parent, _) in self._table.items() if parent == pid]

    def _io_bytes(self, path: str) -> int:
        try:
            counts = proc.parse_io(_read(path))
        except PermissionError:
            self.partial, counts = True, None
        except OSError:
            counts = None
        return sum(counts or ())


def _faults(pid: int, without: Collection[int]) -> int:
    """Returns a process's page faults, not counting threads ``without``.

    Retries until these threads had no fault during the reading.
    """
    served, faults = -1, 0
    for _ in range(5):  # an answer takes some ten milliseconds
        before, served = served, sum(stat.faults for tid in without if (stat := procstat.read(pid, tid)) is not None)
        if served == before:
            break
        whole = procstat.read(pid)
        faults = whole.faults if whole is not None else 0
    return max(0, faults - served)


def socket_inodes(pid: int, descriptors: list[str]) -> Iterator[int]:
    for name in descriptors:
        target = link_of(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _rdma_bytes() -> int:
    total = 0
    for name, size in _RDMA_COUNTERS.items():
        for path in RDMA.glob(f"*/ports/*/{name}"):
            with suppress(ValueError):
                total += size * int(_text(str(path)) or 0)
    return total


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _text(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""
