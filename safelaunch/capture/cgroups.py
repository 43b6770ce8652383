"""What the control groups of a process say: whether it is frozen, and its limits (cgroups(7))."""

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
    """The control groups of a process; empty when it is gone."""
    return parse_membership(_text(Path(f"/proc/{pid}/cgroup")))


def directory(pid: int, controller: str = "", root: Path = ROOT) -> Path | None:
    """Directory of the process's cgroup in v2 (``""``) or under a v1 controller; None if not mounted."""
    path = membership(pid).get(controller)
    if path is None:
        return None
    mounts = [root / controller] if controller else [root, root / "unified"]
    for mount in mounts:
        if controller or (mount / "cgroup.controllers").exists():
            # Inside a container the path may be the host's, and the mount already the container's own group.
            found = next((d for d in (mount / path.lstrip("/"), mount) if d.is_dir()), None)
            if found:
                return found
    return None


def is_frozen(pid: int) -> bool:
    """Whether the process is held by a cgroup freezer, v2 (``frozen 1``) or v1 (``FROZEN``)."""
    unified = directory(pid)
    if unified and "frozen 1" in _text(unified / "cgroup.events").splitlines():
        return True
    freezer = directory(pid, "freezer")
    return freezer is not None and _text(freezer / "freezer.state") == "FROZEN"


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
            text = _text(group / name) if group else ""
            if text:
                found[name] = "; ".join(text.splitlines())
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
