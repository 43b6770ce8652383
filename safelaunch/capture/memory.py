"""Was it the kernel's out-of-memory killer? What it counts, and what it writes to the kernel's log.

The counts are compared with those at the job's start: they tell that it struck, the log tells whom. In a container the
log, where it can be read at all, may give pids of the host; then the counts are all there is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safelaunch.model import MemoryKills

from . import cgroups

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class KillCounts:
    """Processes that the out-of-memory killer has taken so far; None where the kernel does not say.

    ``cgroup``: in the control group of one process and below it (``memory.events`` of cgroup v2,
    ``memory.oom_control`` of v1). ``node``: since boot (``/proc/vmstat``).
    """

    cgroup: int | None = None
    node: int | None = None


def kill_counts(pid: int | None = None) -> KillCounts:
    """The counts as they are now, for the control group of ``pid`` (None: of this process). Never raises."""
    pid = os.getpid() if pid is None else pid
    cgroup = None
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        group = cgroups.directory(pid, controller)
        cgroup = count_in(group / name) if group is not None and cgroup is None else cgroup
    return KillCounts(cgroup, count_in(VMSTAT))


def count_in(path: Path) -> int | None:
    """The number after ``oom_kill`` in one of the kernel's files; None without one."""
    try:
        found = _COUNT.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def kills_of(pid: int, before: KillCounts, now: KillCounts, kernel_log: str) -> MemoryKills:
    """The signs that process ``pid`` was taken by the out-of-memory killer."""
    named = re.compile(rf"Killed process {pid}\b|oom-kill:.*\bpid={pid}\b")
    line = next((line for line in reversed(kernel_log.splitlines()) if named.search(line)), "")
    return MemoryKills(line.strip(), _more(before.cgroup, now.cgroup), _more(before.node, now.node))


def _more(before: int | None, now: int | None) -> int | None:
    return max(0, now - before) if before is not None and now is not None else None
