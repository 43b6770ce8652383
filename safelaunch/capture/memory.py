"""Evidence of the kernel's out-of-memory killer: its counters and its messages in the kernel log.

A counter that has grown since the job's start shows that it killed something; the log shows what. In a container, the
log may be unreadable or give pids of the host. Then only the counters help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safelaunch.model import MemoryKills

from . import cgroups

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_DEATH = re.compile(
    r"\[(\d+)\]:? (?:segfault|general protection|trap )|Killed process (\d+)\b|oom-kill:.*\bpid=(\d+)\b"
)
_MOST_LINE = 200
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class KillCounts:
    """The number of processes that the out-of-memory killer has killed so far; None if unknown.

    ``cgroup``: in the control group that accounts for one process, and below it (``memory.events`` of cgroup v2,
    ``memory.oom_control`` of v1). ``node``: since boot (``/proc/vmstat``).
    """

    cgroup: int | None = None
    node: int | None = None


def kill_counts(pid: int | None = None) -> KillCounts:
    """The current counts, for the control group of ``pid`` (None: this process). Never raises."""
    pid = os.getpid() if pid is None else pid
    cgroup = None
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        group = cgroups.directory(pid, controller)
        if group is not None and cgroup is None:
            cgroup = count_in(cgroups.nearest(group, name))
    return KillCounts(cgroup, count_in(cgroups.text_of(VMSTAT)))


def count_in(text: str) -> int | None:
    """The number after ``oom_kill`` in the text of one of the kernel's files; None without one."""
    found = _COUNT.search(text)
    return int(found[1]) if found else None


def kills_of(pid: int, before: KillCounts, now: KillCounts, kernel_log: str) -> MemoryKills:
    """The signs that the out-of-memory killer killed process ``pid``."""
    named = re.compile(rf"Killed process {pid}\b|oom-kill:.*\bpid={pid}\b")
    line = next((line for line in reversed(kernel_log.splitlines()) if named.search(line)), "")
    return MemoryKills(line.strip(), _more(before.cgroup, now.cgroup), _more(before.node, now.node))


def deaths_between(
    first: int, last: int, living: Collection[int], kernel_log: str, *, most: int = 4
) -> tuple[str, ...]:
    """The lines on processes with numbers between these that a fault or the out-of-memory killer has ended.

    A worker that is gone leaves its number alone, between its parent's and that of the worker which took its place.
    """
    found = {}
    for line in kernel_log.splitlines():
        named = _DEATH.search(line)
        pid = int(named[1] or named[2] or named[3]) if named else 0
        if first < pid < last and pid not in living:
            found[pid] = line.strip()[:_MOST_LINE]
    return tuple(found[pid] for pid in sorted(found)[-most:])


def _more(before: int | None, now: int | None) -> int | None:
    return max(0, now - before) if before is not None and now is not None else None
