"""The control groups of a process: whether it is frozen or throttled, and its limits (cgroups(7))."""

from __future__ import annotations

from pathlib import Path

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
    return next((text for place in places if (text := text_of(place / name))), "")


def is_frozen(pid: int) -> bool:
    """Whether a cgroup freezer holds the process, v2 (``frozen 1``) or v1 (``FROZEN``)."""
    unified = directory(pid)
    if unified and "frozen 1" in text_of(unified / "cgroup.events").splitlines():
        return True
    freezer = directory(pid, "freezer")
    return freezer is not None and text_of(freezer / "freezer.state") == "FROZEN"


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


def text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
