"""Builds the fake libnvidia-ml.so.1 and writes the state that it reports. Processes load it by LD_LIBRARY_PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("libnvidia_ml.c")
GIB = 1 << 30


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-4000-8000-000000000000"


def mig_uuid(index: int, instance: int) -> str:
    return f"MIG-{index:08d}-{instance:04d}-4000-8000-000000000000"


@cache
def library() -> Path | None:
    """Returns the directory with the built library, or None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    directory = Path(tempfile.gettempdir()) / f"nvml-stub-{os.getuid()}-{int(SOURCE.stat().st_mtime)}"
    target = directory / "libnvidia-ml.so.1"
    if not target.exists():
        directory.mkdir(mode=0o755, exist_ok=True)
        unfinished = directory / f"unfinished-{os.getpid()}"
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", unfinished, SOURCE], check=True, timeout=60
        )
        unfinished.rename(target)
    return directory


def values(index: int, **readings: int) -> tuple[str, ...]:
    """Returns the lines of state for a GPU's readings: ``NAMES`` of the library; power in mW."""
    return tuple(f"value {index} {name} {number}" for name, number in readings.items())


SPINS, IDLE, COMPUTES = (
    {"utilisation": 100, "memory": 0, "power": 190_000},
    {"utilisation": 0, "memory": 0, "power": 90_000},
    {"utilisation": 98, "memory": 40, "power": 600_000},
)


@dataclass(frozen=True)
class Node:
    """A simulated node. The file ``state`` describes its GPUs; initialising NVML reads it."""

    state: Path
    lease_dir: Path

    @property
    def environ(self) -> dict[str, str]:
        """The variables that let a process see this node and share its leases."""
        found = library()
        assert found is not None
        return {
            "LD_LIBRARY_PATH": os.fspath(found),
            "NVML_STUB_STATE": os.fspath(self.state),
            "SAFELAUNCH_LEASE_DIR": os.fspath(self.lease_dir),
        }

    def write(self, *lines: str, gpus: int = 8, used: Sequence[int] = ()) -> None:
        """Writes ``gpus`` GPUs of 80 GiB, idle or (if in ``used``) with 10 GiB in use, and further lines of state."""
        text = [f"gpu {n} {uuid(n)} {10 * GIB if n in used else 4 << 20} {80 * GIB}" for n in range(gpus)]
        unfinished = self.state.with_suffix(".new")
        unfinished.write_text("\n".join([*text, *lines]) + "\n")
        unfinished.rename(self.state)
