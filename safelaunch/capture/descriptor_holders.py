"""Searches for the processes that have the other ends of pipes, sockets and semaphores.

A pipe's reader sees end-of-file only when every write end is closed, and a full pipe is emptied only through a read
end. Forked children inherit both ends, so they are often open in a process that doesn't need them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.sock_diag import unix_sockets
from safelaunch.capture.sockets import descriptors, other_ends
from safelaunch.model import OtherEnd, ProcessState, ThreadState
from safelaunch.system import procstat
from safelaunch.system.files import link_of, text_of

CPU_S, DEADLINE_S = 0.5, 5.0  # a descriptor takes some microseconds, and a wait for the CPU on a busy machine

_WRITES = frozenset({"write", "writev", "sendto", "sendmsg", "sendmmsg", "sendfile"})
_IO_URING = "anon_inode:[io_uring]"  # the kernel does its requests without a thread of the process
_KTHREADD = 2

_READS = frozenset({"read", "readv", "recvfrom", "recvmsg", "recvmmsg", "poll", "ppoll", "splice"})

WantedEnds = tuple[str, bool]  # a descriptor's target or a mapping; True if it must be open for writing


@dataclass(frozen=True)
class _EndOfSearch:
    cpu_s: float
    wall_s: float

    @property
    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_s or time.monotonic() > self.wall_s


@dataclass(frozen=True)
class _Holders:
    by: Mapping[WantedEnds, tuple[OtherEnd, ...]]
    closed: bool = False  # no unsearched process can have a wanted end
    rings: frozenset[int] = frozenset()  # processes that use io_uring

    def is_closed(self, end: WantedEnds) -> bool:
        return self.closed and self.rings.isdisjoint(holder.pid for holder in self.by[end])


def with_ends(
    states: Sequence[ProcessState], pids: Iterable[int], *, deadline_s: float = DEADLINE_S
) -> tuple[ProcessState, ...]:
    """Adds the holders of the other ends that the threads of ``states`` wait for.

    Searches processes in the order of ``pids``. The search of processes outside ``states`` ends after ``CPU_S`` seconds
    of CPU time or ``deadline_s`` seconds. If it is incomplete, only connections are reported, because a connection has
    only one other end, while unsearched processes might also hold a pipe or semaphore.
    """
    until = _EndOfSearch(time.thread_time() + CPU_S, time.monotonic() + deadline_s)
    wanted = {(state.pid, tid): end for state in states for tid, end in _wanted(state)}
    if not wanted and not any(thread.locked_by is not None for state in states for thread in state.threads):
        return tuple(states)
    shared = {
        (_own_socket(thread), False)
        for state in states
        for thread in state.threads
        if (state.pid, thread.tid) in wanted
    }
    own = [state.pid for state in states]
    holders = _holders(frozenset(wanted.values()) | shared, own, pids, until)
    return tuple(_with_holders(state, wanted, holders) for state in states)


def _wanted(state: ProcessState) -> Iterator[tuple[int, WantedEnds]]:
    """Yields each waiting thread's id, and how the other end appears among its holder's descriptors."""
    waiting = [
        thread for thread in state.threads if thread.inode is not None and thread.syscall_name in _WRITES | _READS
    ]
    pipes = [thread for thread in waiting if thread.fd_target.startswith("pipe:")]
    for thread in pipes:
        yield thread.tid, (f"pipe:[{thread.inode}]", thread.syscall_name in _READS)
    in_sockets = {thread.tid: thread.inode for thread in waiting if thread not in pipes and thread.inode is not None}
    peers = other_ends(state.pid, in_sockets.values()) if in_sockets else {}
    for tid, inode in in_sockets.items():
        if inode in peers:
            yield tid, (f"socket:[{peers[inode]}]", False)
    for thread in state.threads:
        if thread.futex_file:
            yield thread.tid, (thread.futex_file, True)  # a semaphore that processes share


def _own_socket(thread: ThreadState) -> str:
    return f"socket:[{thread.inode}]"


def _holders(wanted: frozenset[WantedEnds], own: Collection[int], pids: Iterable[int], until: _EndOfSearch) -> _Holders:
    targets = {target for target, _ in wanted}
    mapped = [end for end in wanted if " " in end[0]]  # device and inode
    by_end: dict[WantedEnds, dict[int, OtherEnd]] = {end: {} for end in wanted}
    jobs: set[str] = set()  # targets in the job's processes, which might have passed a descriptor through them
    every: set[str] = set()
    inherited = {link_of(f"/proc/self/fd/{number}") for number in range(3)}  # safelaunch's own, passed to the job
    unreadable, rings = set[int](), set[int]()
    began = min((stat.start_ticks for stat in map(procstat.read, own) if stat is not None), default=0)
    groups = {_group(pid) for pid in own}
    for pid in dict.fromkeys((*own, *pids)):
        if pid not in own and until.is_over:
            return _Holders({end: tuple(each.values()) for end, each in by_end.items() if each and _is_socket(end)})
        its: set[str] = set()
        for path, target in descriptors(pid):
            its.add(target)
            for writes in _directions(path, target) if target in targets else ():
                if (target, writes) in by_end:
                    by_end[target, writes].setdefault(pid, OtherEnd(pid, _name(pid)))
        its.discard("")
        every |= its
        rings |= {pid} if _IO_URING in its else set()
        jobs |= its - inherited if pid in own else set()
        unreadable |= {pid} if not its and _hides_its(pid) else set()
        mappings = _mapped_files(pid) if mapped else frozenset()
        for end in mapped:
            if end[0] in mappings:
                by_end[end].setdefault(pid, OtherEnd(pid, _name(pid)))
    closed = not unreadable and _are_closed(own, jobs, every)
    if any(_might_have_inherited(pid, began, groups) for pid in unreadable):
        by_end = {end: each for end, each in by_end.items() if end not in mapped}
    return _Holders({end: tuple(each.values()) for end, each in by_end.items()}, closed, frozenset(rings))


def _mapped_files(pid: int) -> frozenset[str]:
    # A file's path can differ between processes, but not its device and inode.
    with suppress(OSError):  # it has ended, or belongs to another user
        return frozenset(mapping.identity for mapping in ProcessMemory(pid).mappings)
    return frozenset()


def _is_socket(end: WantedEnds) -> bool:
    return end[0].startswith("socket:")


def _group(pid: int) -> str:
    return text_of(f"/proc/{pid}/cgroup")


def _might_have_inherited(pid: int, began: int, groups: Collection[str]) -> bool:
    state = procstat.read(pid)
    return state is not None and state.start_ticks >= began and _group(pid) in groups


def _hides_its(pid: int) -> bool:
    """True if the process belongs to another user, so that its descriptors can't be read.

    Whatever its age and group, the job might have sent it a descriptor over a Unix socket that is closed by now.
    """
    state = procstat.read(pid)
    if state is None or state.ppid in (0, _KTHREADD):  # init keeps what it receives, and kernel threads receive nothing
        return False
    try:
        if state.state in "ZX":  # if other threads live, their descriptors exist but aren't shown
            return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()) > 1
        return any(True for _ in Path(f"/proc/{pid}/fd").iterdir())  # unreadable descriptors
    except OSError as error:
        return isinstance(error, PermissionError)


def _are_closed(own: Collection[int], jobs: Collection[str], every: Collection[str]) -> bool:
    """True if no unsearched process can have received a descriptor from the job.

    This requires that no descriptor is in transit in a Unix socket, and that none of the job's sockets (``jobs``) is
    connected to a Unix socket that no searched process has (``every`` holds those they have).
    """
    unix, network = unix_sockets(), link_of("/proc/self/ns/net")
    if unix is None or {link_of(f"/proc/{pid}/ns/net") for pid in own} - {network, ""}:
        return False
    unread = (end.peer for end in unix.values() if end.unread)
    if not all(f"socket:[{peer}]" in every and f"socket:[{peer}]" not in jobs for peer in unread):
        return False
    of_job = (unix.get(int(target[8:-1])) for target in jobs if target.startswith("socket:["))
    return all(f"socket:[{end.peer}]" in every for end in of_job if end is not None and end.peer is not None)


def _directions(path: Path, target: str) -> tuple[bool, ...]:
    """Returns the open directions: True for writing, False for reading, or both. Sockets have no direction: False."""
    if target.startswith("socket:"):
        return (False,)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ()  # it was closed
    return tuple(writes for writes, bit in ((True, stat.S_IWUSR), (False, stat.S_IRUSR)) if mode & bit)


def _name(pid: int) -> str:
    stat = procstat.read(pid)
    return stat.name if stat is not None else ""


def _with_holders(state: ProcessState, wanted: Mapping[tuple[int, int], WantedEnds], holders: _Holders) -> ProcessState:
    def with_ends(thread: ThreadState) -> ThreadState:
        end = wanted.get((state.pid, thread.tid))
        if thread.locked_by is not None:
            return structs.replace(thread, ends_closed=holders.closed)
        if end is None or end not in holders.by:
            return thread
        sharers = {holder.pid for holder in holders.by.get((_own_socket(thread), False), ())} - {state.pid}
        changed = structs.replace(thread, ends=holders.by[end], ends_closed=holders.is_closed(end))
        return structs.replace(changed, lock_sharers=tuple(sorted(sharers))) if _is_socket(end) else changed

    return structs.replace(state, threads=tuple(map(with_ends, state.threads)))
