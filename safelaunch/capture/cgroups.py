"""The control groups of a process (cgroups(7)): frozen, throttled, its limits, what was killed for want of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safelaunch.model import MemoryKills
from safelaunch.system.files import text_of

ROOT = Path("/sys/fs/cgroup")


def parse_membership(text: str) -> dict[str, str]:
    """``/proc/<pid>/cgroup`` as controller → path; the unified (v2) hierarchy has the key ``""``."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def membership(pid: int) -> dict[str, str]:
    """The control groups of a process; empty if it is gone."""
    return parse_membership(text_of(Path(f"/proc/{pid}/cgroup")))


def directory(pid: int, controller: str = "", root: Path = ROOT) -> Path | None:
    """Directory of the process's cgroup in v2 (``""``) or under a v1 controller; None if not mounted."""
    path = membership(pid).get(controller)
    if path is None:
        return None
    mounts = [root / controller] if controller else [root, root / "unified"]
    for mount in mounts:
        if controller or (mount / "cgroup.controllers").exists():
            # Inside a container, the path may be the host's, while the mount is already the container's own group.
            found = next((d for d in (mount / path.lstrip("/"), mount) if d.is_dir()), None)
            if found:
                return found
    return None


def nearest(group: Path, name: str, root: Path = ROOT) -> str:
    """The text of ``name`` in ``group``, or in the closest group above it that has it; empty where none has.

    A group without a controller is under that of a group above it: the job's own, which safelaunch makes, has none.
    """
    places = (place for place in (group, *group.parents) if place.is_relative_to(root))
    return next((text for place in places if (text := text_of(place / name).strip())), "")


def is_frozen(pid: int) -> bool:
    """Whether a cgroup freezer holds the process, v2 (``frozen 1``) or v1 (``FROZEN``)."""
    unified = directory(pid)
    if unified and "frozen 1" in text_of(unified / "cgroup.events").splitlines():
        return True
    freezer = directory(pid, "freezer")
    return freezer is not None and text_of(freezer / "freezer.state").strip() == "FROZEN"


def throttled_ms(pid: int) -> int:
    """Milliseconds for which CPU limits (v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``) have stopped the process's groups.

    Each group counts only its own limit, so the groups above it are read as well. 0 without a limit.
    """
    total_us = 0
    for group in {directory(pid), directory(pid, "cpu")} - {None}:
        assert group is not None
        places = [place for place in (group, *group.parents) if place.is_relative_to(ROOT)]
        total_us += sum(parse_throttled_us(text_of(place / "cpu.stat")) for place in places)
    return total_us // 1000


def parse_throttled_us(text: str) -> int:
    """``throttled_usec`` (v2) or ``throttled_time`` (v1, nanoseconds) of ``cpu.stat``, in microseconds."""
    counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    return int(counts.get("throttled_usec", 0)) or int(counts.get("throttled_time", 0)) // 1000


def limits(pid: int) -> dict[str, str]:
    """Memory, process and CPU limits and the count of out-of-memory kills, as the kernel writes them."""
    found: dict[str, str] = {}
    wanted = {
        "": [
            "memory.max",
            "memory.high",
            "memory.current",
            "memory.events",
            "pids.max",
            "pids.current",
            "cpu.max",
        ],
        "memory": ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"],
        "pids": ["pids.max", "pids.current"],
        "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"],
    }
    for controller, names in wanted.items():
        group = directory(pid, controller)
        for name in names if group else ():
            text = nearest(group, name) if group else ""
            if text:
                found[name] = "; ".join(text.splitlines())
    return found


# --- the out-of-memory killer -----------------------------------------------------------------------------------------
# A counter that has grown since the job's start shows that it killed something; the log shows what. In a container,
# the log may be unreadable or give pids of the host. Then only the counters help.

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


def kill_counts() -> KillCounts:
    """The current counts, for the control group of this process. Never raises."""
    cgroup = None
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        group = directory(os.getpid(), controller)
        if group is not None and cgroup is None:
            cgroup = count_in(nearest(group, name))
    return KillCounts(cgroup, count_in(text_of(VMSTAT)))


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
