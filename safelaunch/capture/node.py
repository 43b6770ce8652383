"""A job's environment on this node: variables, versions, resources.

All of it comes from files. This process imports nothing of the job, and runs none of its interpreters.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safelaunch.capture import cgroups
from safelaunch.capture.result import Result, attempt, within
from safelaunch.system.errors import CaptureError
from safelaunch.system.redaction.redact import shown_env

# Packages whose versions matter for a hang, if installed.
PACKAGES = (
    "torch", "triton", "numpy", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "accelerate", "apex", "datasets", "deepspeed", "lightning", "megatron-core", "mpi4py",
    "pytorch-lightning", "ray", "torchdata", "torchvision", "transformer-engine", "transformers", "webdataset",
    "flash-attn", "py-spy", "safelaunch",
)  # fmt: skip

MOST_LINKS = 64


def environment_of(pid: int, *, deadline_s: float = 2.0) -> Result[dict[str, str]]:
    """The environment that ``pid`` started with (``/proc`` does not show later changes), redacted; never raises."""

    def read() -> dict[str, str]:
        try:
            raw = within(deadline_s, f"/proc/{pid}/environ", Path(f"/proc/{pid}/environ").read_bytes)
        except FileNotFoundError as error:
            raise CaptureError(f"process {pid} is gone") from error
        except PermissionError as error:
            raise CaptureError(f"/proc/{pid}/environ: permission denied (needs the same user)") from error
        return shown_env(parse_environ(raw))

    return attempt(f"/proc/{pid}/environ", read)


def parse_environ(raw: bytes) -> dict[str, str]:
    """``NAME=value`` entries separated by NUL; skips those without ``=`` (of a process that rewrote its title)."""
    entries = (entry.partition("=") for entry in raw.decode("utf-8", "replace").split("\0"))
    return {name: value for name, equals, value in entries if equals and name}


def versions(
    code_roots: Sequence[str] = (), *, pid: int | None = None, deadline_s: float = 3.0
) -> Result[dict[str, str]]:
    """Versions of Python, torch and its companions, NCCL, driver, kernel, safelaunch; never raises.

    ``code_roots``: the rank's package directories according to its beacon; empty: those of this process. ``pid``: the
    rank, whose ``exe`` link names its interpreter.
    """

    def read() -> dict[str, str]:
        return within(deadline_s, "versions", lambda: _versions(list(code_roots), pid))

    return attempt("package metadata", read)


def resources(*, pid: int | None = None, cwd: str | None = None, deadline_s: float = 3.0) -> Result[dict[str, Any]]:
    """Memory, load, pressure, disks, network and limits of this node and of ``pid``'s cgroup; never raises.

    ``disks`` holds ``/dev/shm``, ``/tmp`` and ``cwd`` with total, used and free bytes, or the reason for having none: a
    dead network mount never answers.
    """

    def read() -> dict[str, Any]:
        begin = time.monotonic()
        found: dict[str, Any] = {"cpus": os.cpu_count(), "load": list(os.getloadavg())}
        found["memory_bytes"] = parse_meminfo(_text("/proc/meminfo"))
        found["pressure"] = {name: _text(f"/proc/pressure/{name}").splitlines() for name in ("cpu", "memory", "io")}
        found["cgroup"] = cgroups.limits(pid or os.getpid())
        if pid is not None:
            found["limits"] = parse_limits(_text(f"/proc/{pid}/limits"))
        home = cwd or (_link(f"/proc/{pid}/cwd") if pid is not None else "")
        places = [place for place in ("/dev/shm", "/tmp", home) if place]
        each_s = deadline_s / len(places)
        found["network"] = _network_within(min(1.0, deadline_s / 3))
        found["disks"] = {place: _disk(place, min(each_s, deadline_s - (time.monotonic() - begin))) for place in places}
        return found

    return attempt("/proc, cgroup, statvfs", read)


def parse_meminfo(text: str) -> dict[str, int]:
    """The relevant lines of ``/proc/meminfo``, in bytes."""
    wanted = ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "SwapFree", "Shmem", "Dirty", "Writeback")
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in found if name in wanted}


def parse_limits(text: str) -> dict[str, str]:
    """``/proc/<pid>/limits`` as name → soft limit."""
    wanted = ("Max open files", "Max processes", "Max locked memory", "Max address space", "Max core file size")
    found = re.findall(r"^(\S.*?)  +(\S+)  +\S+", text, re.MULTILINE)
    return {name: soft for name, soft in found if name in wanted}


def torch_build(version_py: str) -> dict[str, str]:
    """CUDA, ROCm and git version from the text of ``torch/version.py``."""
    names = {"cuda": "torch_cuda", "hip": "torch_hip", "git_version": "torch_git"}
    found = re.findall(r"^(\w+)[^=\n]*= *['\"]([^'\"]+)['\"]", version_py, re.MULTILINE)
    return {names[name]: value for name, value in found if name in names}


def _versions(code_roots: list[str], pid: int | None) -> dict[str, str]:
    paths = code_roots or sys.path
    found: dict[str, str] = {"system": _os_name(), "kernel": platform.release(), "machine": platform.machine()}
    executable = _link(f"/proc/{pid}/exe") if pid is not None else sys.executable
    python = re.search(r"python(\d+\.\d+)", " ".join([executable or "", *code_roots]))
    if pid is None and not code_roots:
        found["python"] = platform.python_version()
    elif python:
        found["python"] = python[1]
    if executable:
        found["python_executable"] = executable
    from importlib import metadata  # with a mail parser and more behind it, for the one moment of an incident

    for package in PACKAGES:
        distribution = next(iter(metadata.distributions(name=package, path=paths)), None)
        if distribution is not None:
            found[package] = distribution.version
    for root in paths:
        text = _text(Path(root, "torch", "version.py"))
        if text:
            found.update(torch_build(text))
            break
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text("/proc/driver/nvidia/version"))
    if driver:
        found["nvidia_driver"] = driver[1]
    from safelaunch import __version__

    found["safelaunch"] = __version__
    return found


def _disk(place: str, deadline_s: float) -> Mapping[str, int | str]:
    try:
        usage = within(deadline_s, place, lambda: shutil.disk_usage(place))
    except CaptureError as error:
        return {"missing": error.message}
    except OSError as error:
        return {"missing": error.strerror or str(error)}
    return {"total_bytes": usage.total, "used_bytes": usage.used, "free_bytes": usage.free}


def _network_within(deadline_s: float) -> dict[str, dict[str, str | int]]:
    """A driver that is stuck keeps the lock that a question for the speed takes."""
    try:
        return within(deadline_s, "/sys/class/net", network)
    except CaptureError as error:
        return {"interfaces": {"state": error.message}}


def network(root: Path = Path("/sys/class")) -> dict[str, dict[str, str | int]]:
    """The network interfaces that are up or hardware, and the ports of InfiniBand devices (``mlx5_0/1``).

    Each with its state, its speed, and those of its error counters that are not 0.
    """
    found: dict[str, dict[str, str | int]] = {}
    for path in sorted((root / "net").glob("*")):
        state = _text(path / "operstate").strip()
        if path.name != "lo" and (state == "up" or (path / "device").exists()):
            speed = _text(path / "speed").strip()
            found[path.name] = {"state": state} | ({"speed_mbit": int(speed)} if speed.isdigit() else {})
            found[path.name] |= _counted(path / "statistics", ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"))
    for path in sorted((root / "infiniband").glob("*/ports/*")):
        state, rate = _text(path / "state").strip(), _text(path / "rate").strip()
        port = f"{path.parent.parent.name}/{path.name}"
        found[port] = {"state": state.partition(": ")[2] or state, "rate": rate}
        found[port] |= _counted(path / "counters", ("link_downed", "symbol_error", "port_rcv_errors"))
    return dict(list(found.items())[:MOST_LINKS])


def _counted(folder: Path, names: Sequence[str]) -> dict[str, int]:
    found = {name: _text(folder / name).strip() for name in names}
    return {name: int(text) for name, text in found.items() if text.isdigit() and int(text)}


def _os_name() -> str:
    name = re.search(r"^PRETTY_NAME=\"?([^\"\n]+)", _text("/etc/os-release"), re.MULTILINE)
    return name[1] if name else platform.system()


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
