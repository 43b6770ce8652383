"""Creates a control group (cgroup v2) for the job, if possible, so that all of the job's processes can be found.

A process can't leave it by forking, by starting a new session, by changing its environment, or by losing its parent.
``cgroup.kill`` (Linux 5.14) kills all members at once. Root, systemd user sessions, and containers with delegated
groups can create one.

The group has no controllers, so it neither limits nor shares anything. It is created only if our own group has no
limits, because programs that adapt to limits read only their own group's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safelaunch.system.files import text_of

LIMITS = ("memory.max", "memory.high", "cpu.max", "pids.max", "cpuset.cpus")
PREFIX = "safelaunch-"
OLD_S = 60.0  # younger groups might be waiting for their job
LEAVES_S = 0.2  # for ended processes to leave the group


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Control group at ``path``. Its methods ignore failures, because safelaunch has other ways to find processes."""

    path: Path

    def add(self, pid: int) -> bool:
        """Moves a process, and so its later children, into the group. Takes up to 20 ms.

        Returns False if that fails.
        """
        return _write(self.path / "cgroup.procs", str(pid))

    def leave(self) -> bool:
        return _write(self.path.parent / "cgroup.procs", "0")

    def members(self) -> list[int]:
        """Returns the pids in the group and in its subgroups."""
        lists = [text_of(directory / "cgroup.procs") for directory in self._directories()]
        return [int(pid) for text in lists for pid in text.split() if pid != "0"]

    def kill(self) -> None:
        """Sends SIGKILL to all members at once, so that none can escape by forking."""
        _write(self.path / "cgroup.kill", "1")

    def dissolve(self) -> None:
        """Removes the group. Processes still in it move to its parent."""
        deadline = time.monotonic() + LEAVES_S
        while True:
            for pid in self.members():
                _write(self.path.parent / "cgroup.procs", str(pid))
            for directory in reversed(self._directories()):
                _remove(directory)
            if not self.path.exists() or time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def _directories(self) -> list[Path]:
        return [Path(directory) for directory, _, _ in os.walk(self.path)]


def kill_of(group: ControlGroup | None) -> Callable[[], object]:
    return group.kill if group is not None else lambda: None


def create(name: str) -> ControlGroup | None:
    """Creates a group below our own for the run ``name``.

    Returns None if that is impossible, or if the job would notice a difference: limits, or controllers.
    """
    own = _own()
    if own is None or any(_limits(text_of(own / limit)) for limit in LIMITS):
        return None
    group = ControlGroup(own / f"{PREFIX}{name}")
    try:
        group.path.mkdir()
    except OSError:
        return None
    if text_of(group.path / "cgroup.controllers").strip() or not (group.path / "cgroup.kill").exists():
        _remove(group.path)
        return None
    return group


def sweep() -> None:
    """Removes empty groups left by killed guardians."""
    own = _own()
    for group in own.glob(f"{PREFIX}*") if own is not None else ():
        try:
            if time.time() - group.stat().st_mtime > OLD_S:
                _remove(group)
        except OSError:
            continue


def _own() -> Path | None:
    path = locate(text_of("/proc/self/cgroup"), text_of("/proc/self/mountinfo"))
    return path if path is not None and os.access(path, os.W_OK) else None


def locate(membership: str, mounts: str) -> Path | None:
    """Returns our group's directory in the unified hierarchy; None if that isn't mounted.

    Args:
        membership: Content of ``/proc/self/cgroup``.
        mounts: Content of ``/proc/self/mountinfo``.
    """
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if path is None:
        return None
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, place = fields.split()[3:5]
            if path == root or path.startswith(root.rstrip("/") + "/"):
                return Path(place) / path[len(root) :].strip("/")
    return None


def _limits(value: str) -> bool:
    return value.split()[:1] not in ([], ["max"])


def _write(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return  # it has members, or others' groups
