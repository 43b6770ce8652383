"""Who has the other end of the pipe or connection at which a thread waits, by the descriptors of all processes.

A pipe ends only when nobody has its write end open any more, and a full one is emptied only by who has its read end.
Both ends are inherited by every child that is forked meanwhile, so it is often not who it was meant to be.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from safelaunch.capture import sockets
from safelaunch.model import OtherEnd, ProcessState, ThreadState
from safelaunch.system import procstat

CPU_S, DEADLINE_S = 0.5, 5.0  # a descriptor takes some microseconds, and on a busy machine the turn to read it

_WRITES = frozenset({"write", "writev", "sendto", "sendmsg", "sendmmsg", "sendfile", "splice"})
_READS = frozenset({"read", "readv", "recvfrom", "recvmsg", "recvmmsg", "poll", "ppoll"})

Wanted = tuple[str, bool]  # what the descriptor points at; whether it has to be one for writing


@dataclass(frozen=True)
class _Until:
    cpu_s: float
    wall_s: float

    @property
    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_s or time.monotonic() > self.wall_s


def with_ends(
    states: Sequence[ProcessState], pids: Iterable[int], *, deadline_s: float = DEADLINE_S
) -> tuple[ProcessState, ...]:
    """The same states, with the other ends of what their threads wait at. ``pids``: where to look, and in which order.

    The processes of ``states`` are always read. After ``CPU_S`` seconds of CPU, or ``deadline_s`` seconds, it gives up
    on all others. It then tells of connections whose other end it has found: these have one. Of a pipe it tells
    nothing, because what matters is that nobody else has it, and that may be among the rest.
    """
    until = _Until(time.thread_time() + CPU_S, time.monotonic() + deadline_s)
    wanted = {(state.pid, tid): one for state in states for tid, one in _wanted(state)}
    found = _holders(frozenset(wanted.values()), pids, {state.pid for state in states}, until) if wanted else {}
    return tuple(_told(state, wanted, found) for state in states)


def _wanted(state: ProcessState) -> Iterator[tuple[int, Wanted]]:
    """What the other ends look like among the descriptors of whoever has them: tid → that."""
    waiting = [one for one in state.threads if one.inode is not None and one.syscall_name in _WRITES | _READS]
    pipes = [one for one in waiting if one.fd_target.startswith("pipe:")]
    for thread in pipes:
        yield thread.tid, (f"pipe:[{thread.inode}]", thread.syscall_name in _READS)
    others = {one.tid: one.inode for one in waiting if one not in pipes and one.inode is not None}
    peers = sockets.other_ends(state.pid, others.values()) if others else {}
    for tid, inode in others.items():
        if inode in peers:
            yield tid, (f"socket:[{peers[inode]}]", False)


def _holders(
    wanted: frozenset[Wanted], pids: Iterable[int], own: Collection[int], until: _Until
) -> dict[Wanted, tuple[OtherEnd, ...]]:
    targets = {target for target, _ in wanted}
    found: dict[Wanted, dict[int, OtherEnd]] = {one: {} for one in wanted}
    for pid in dict.fromkeys(pids):
        if pid not in own and until.is_over:
            found = {one: holders for one, holders in found.items() if holders and one[0].startswith("socket:")}
            break
        for path, target in sockets.descriptors(pid):
            for writes in _directions(path, target) if target in targets else ():
                if (target, writes) in found:
                    found[target, writes].setdefault(pid, OtherEnd(pid, _name(pid)))
    return {one: tuple(holders.values()) for one, holders in found.items()}


def _directions(path: Path, target: str) -> tuple[bool, ...]:
    """Whether it is open for writing; both where it is for reading as well. Those of sockets say nothing."""
    if target.startswith("socket:"):
        return (False,)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ()  # closed meanwhile
    return tuple(writes for writes, bit in ((True, stat.S_IWUSR), (False, stat.S_IRUSR)) if mode & bit)


def _name(pid: int) -> str:
    found = procstat.read(pid)
    return found.name if found is not None else ""


def _told(
    state: ProcessState, wanted: dict[tuple[int, int], Wanted], found: dict[Wanted, tuple[OtherEnd, ...]]
) -> ProcessState:
    def one(thread: ThreadState) -> ThreadState:
        asked = wanted.get((state.pid, thread.tid))
        return structs.replace(thread, ends=found[asked]) if asked is not None and asked in found else thread

    if not any(pid == state.pid for pid, _ in wanted):
        return state
    return structs.replace(state, threads=tuple(map(one, state.threads)))
