"""Reads a process's control groups (cgroups(7)): freezer, throttling, limits."""

from __future__ import annotations

from pathlib import Path

from safelaunch.system.files import text_of

ROOT = Path("/sys/fs/cgroup")


def parse_membership(text: str) -> dict[str, str]:
    """Parses ``/proc/<pid>/cgroup`` into controller → path. Key ``""`` is the unified (v2) hierarchy."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def membership(pid: int) -> dict[str, str]:
    return parse_membership(text_of(Path(f"/proc/{pid}/cgroup")))


def directory(pid: int, controller: str = "", root: Path = ROOT) -> Path | None:
    """Returns the process's cgroup directory: v2 (``""``) or a v1 controller's.

    None if that hierarchy isn't mounted.
    """
    path = membership(pid).get(controller)
    if path is None:
        return None
    mounts = [root / controller] if controller else [root, root / "unified"]
    for mount in mounts:
        if controller or (mount / "cgroup.controllers").exists():
            # In a container, the path can be the host's while the mount is already the container's own group.
            group = next((d for d in (mount / path.lstrip("/"), mount) if d.is_dir()), None)
            if group:
                return group
    return None


def nearest(group: Path, name: str, root: Path = ROOT) -> str:
    """Returns the contents of file ``name`` in ``group`` or its closest ancestor that has it; empty if there isn't one.

    Ancestors count because a group without the controller, such as the job's, is still subject to their limits.
    """
    places = (place for place in (group, *group.parents) if place.is_relative_to(root))
    return next((text for place in places if (text := text_of(place / name).strip())), "")


def is_frozen(pid: int) -> bool:
    """True if a freezer holds the process: v2 (``frozen 1``) or v1 (``FROZEN``)."""
    unified = directory(pid)
    if unified and "frozen 1" in text_of(unified / "cgroup.events").splitlines():
        return True
    freezer = directory(pid, "freezer")
    return freezer is not None and text_of(freezer / "freezer.state").strip() == "FROZEN"


def throttled_ms(pid: int) -> int:
    """Returns how long CPU limits (v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``) have stopped the process's groups.

    The result includes ancestor groups, because each group counts only the time stopped by its own limit.
    """
    total_us = 0
    for group in {directory(pid), directory(pid, "cpu")} - {None}:
        assert group is not None
        places = [place for place in (group, *group.parents) if place.is_relative_to(ROOT)]
        total_us += sum(parse_throttled_us(text_of(place / "cpu.stat")) for place in places)
    return total_us // 1000


def parse_throttled_us(text: str) -> int:
    """Returns the throttled time in ``cpu.stat``, in microseconds.

    Reads ``throttled_usec`` (v2) or ``throttled_time`` (v1, in nanoseconds).
    """
    counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    return int(counts.get("throttled_usec", 0)) or int(counts.get("throttled_time", 0)) // 1000


def limits(pid: int) -> dict[str, str]:
    """Returns memory, process and CPU limits and out-of-memory kills, as the kernel writes them."""
    texts: dict[str, str] = {}
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
                texts[name] = "; ".join(text.splitlines())
    return texts
