"""A cgroup for one process of a job: a CPU quota, or a limit on the disk. Takes root; cgroup v1 or v2."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
V1 = {"cpu": "cpu", "io": "blkio"}
_numbers = itertools.count()


def cannot(controller: str) -> str:
    """Returns why a process can't be limited here; empty if it can."""
    if os.getuid():
        return "cgroups take root"
    return (
        "" if _is_v1(controller) or controller in _v2_controllers() else f"there is no cgroup controller {controller}"
    )


def _is_v1(controller: str) -> bool:
    return (ROOT / V1[controller] / "cgroup.procs").exists()


def _v2_controllers() -> list[str]:
    enabled = ROOT / "cgroup.subtree_control"
    return enabled.read_text().split() if enabled.exists() else []


class Limits:
    """``with Limits("cpu") as limits: limits.cpu(0.5); limits.add(pid)``. Processes leave it at the end."""

    def __init__(self, controller: str) -> None:
        self._is_v1 = _is_v1(controller)
        self._above = ROOT / V1[controller] if self._is_v1 else ROOT
        self.path = self._above / f"slow-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Limits:
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):
            for pid in (self.path / "cgroup.procs").read_text().split():
                _write(self._above / "cgroup.procs", pid)
            try:
                self.path.rmdir()
                return
            except OSError:  # a process that is ending
                time.sleep(0.1)

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def cpu(self, share: float) -> None:
        """Limits the processes to this share of one CPU."""
        quota = int(share * PERIOD_US)
        if self._is_v1:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.path / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def disk(self, path: Path, *, per_s: int) -> None:
        """Limits reads and writes of the disk that has ``path`` to this number per second."""
        disk = _disk_of(path)
        if self._is_v1:
            for what in ("read", "write"):
                (self.path / f"blkio.throttle.{what}_iops_device").write_text(f"{disk} {per_s}")
        else:
            (self.path / "io.max").write_text(f"{disk} riops={per_s} wiops={per_s}")


def _disk_of(path: Path) -> str:
    device = path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    where = Path("/sys/dev/block", numbers).resolve()
    whole = where.parent if (where / "partition").exists() else where
    return (whole / "dev").read_text().strip()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:  # the process has ended
        pass
