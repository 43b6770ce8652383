"""Finds processes that the out-of-memory killer has killed, using its counters and the kernel log.

A counter that has grown since the job's start shows that the killer was at work; the log shows which process it killed.
In a container, only the counters help, because the log might be unreadable or contain the host's pids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safelaunch.capture.cgroups import directory, nearest
from safelaunch.model import MemoryKills
from safelaunch.system.files import text_of

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_DEATH = re.compile(
    r"\[(\d+)\]:? (?:segfault|general protection|trap )|Killed process (\d+)\b|oom-kill:.*\bpid=(\d+)\b"
)
_MOST_LINE = 200
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class KillCounts:
    """Processes that the out-of-memory killer has killed so far; None if unknown."""

    cgroup: int | None = None  # in the accounting cgroup and below it (v2 memory.events, v1 memory.oom_control)
    node: int | None = None  # since boot (/proc/vmstat)


def kill_counts() -> KillCounts:
    """Returns the current counts, for this process's cgroup. Never raises."""
    cgroup = None
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        group = directory(os.getpid(), controller)
        if group is not None and cgroup is None:
            cgroup = count_in(nearest(group, name))
    return KillCounts(cgroup, count_in(text_of(VMSTAT)))


def count_in(text: str) -> int | None:
    match = _COUNT.search(text)
    return int(match[1]) if match else None


def kills_of(pid: int, before: KillCounts, now: KillCounts, kernel_log: str) -> MemoryKills:
    named = re.compile(rf"Killed process {pid}\b|oom-kill:.*\bpid={pid}\b")
    line = next((line for line in reversed(kernel_log.splitlines()) if named.search(line)), "")
    return MemoryKills(line.strip(), _more(before.cgroup, now.cgroup), _more(before.node, now.node))


def deaths_between(
    first: int, last: int, living: Collection[int], kernel_log: str, *, most: int = 4
) -> tuple[str, ...]:
    """Returns log lines about processes with pids between ``first`` and ``last`` that a fault or the OOM killer killed.

    A worker that was already reaped has a pid between its parent's and its replacement's.
    """
    by_pid = {}
    for line in kernel_log.splitlines():
        named = _DEATH.search(line)
        pid = int(named[1] or named[2] or named[3]) if named else 0
        if first < pid < last and pid not in living:
            by_pid[pid] = line.strip()[:_MOST_LINE]
    return tuple(by_pid[pid] for pid in sorted(by_pid)[-most:])


def _more(before: int | None, now: int | None) -> int | None:
    return max(0, now - before) if before is not None and now is not None else None
