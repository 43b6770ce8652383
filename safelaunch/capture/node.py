"""Collects a job's environment on this node: variables, versions, resources.

Everything is read from files: none of the job's code is imported or run.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from safelaunch.capture import cgroups, gpu
from safelaunch.capture.kernel_log import kernel_log
from safelaunch.capture.result import Result, attempt, within
from safelaunch.model import Gpu, Gpus, Resources
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of, text_of
from safelaunch.system.redaction.redact import shown_env

DEADLINE_S = 6.0  # for each source
APART_S = 1.2  # between two readings of the GPUs: NVML averages the utilisation over up to a second
Links = dict[str, dict[str, str | int]]  # of :func:`network`
Kills = Mapping[str, Mapping[str, int | None] | None]


@dataclass(frozen=True, slots=True)
class NodeSubject:
    pid: int | None = None  # one of the ranks
    code_roots: tuple[str, ...] = ()  # directories of that rank's packages
    env: Result[dict[str, str]] | None = None  # initial environment of the rank
    kills: Kills = field(default_factory=dict)  # out-of-memory kills at the job's start, and now
    usual_gpus: tuple[Gpu, ...] = ()  # reading while the job was stepping
    links: Links | None = None  # reading when the job became quiet


def sources() -> Mapping[str, Callable[[NodeSubject], Result[Any] | None]]:
    """Returns the sources of this node's evidence, by field of ``NodeFiles``.

    A source returns None if it doesn't apply.
    """
    return {
        "gpus": _gpus,
        "nvidia_smi": lambda _: gpu.nvidia_smi_text(deadline_s=DEADLINE_S),
        "kernel_log": lambda _: kernel_log(deadline_s=DEADLINE_S),
        "pressure": lambda _: pressure(),
        "versions": lambda subject: versions(subject.code_roots, pid=subject.pid),
        "resources": lambda subject: resources(pid=subject.pid, kills=subject.kills, links=subject.links),
        "env": lambda subject: subject.env,
    }


def _gpus(subject: NodeSubject) -> Result[Gpus]:
    found = gpu.gpus(deadline_s=DEADLINE_S, apart_s=APART_S)
    value = found.value
    return replace(found, value=structs.replace(value, usual=subject.usual_gpus)) if value is not None else found


# Packages with versions that matter for a hang.
PACKAGES = (
    "torch", "triton", "numpy", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "accelerate", "apex", "datasets", "deepspeed", "lightning", "megatron-core", "mpi4py",
    "pytorch-lightning", "ray", "torchdata", "torchvision", "transformer-engine", "transformers", "webdataset",
    "flash-attn", "py-spy", "safelaunch",
)  # fmt: skip

MOST_LINKS = 64
_ERRORS = ("rx_errors", "tx_errors")
_PORT_ERRORS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors")
_RDMA_ERRORS = ("local_ack_timeout_err", "packet_seq_err", "req_cqe_error", "resp_cqe_error", "rnr_nak_retry_err")


def environment_of(pid: int, *, deadline_s: float = 2.0) -> Result[dict[str, str]]:
    """Returns ``pid``'s initial environment (``/proc`` doesn't show later changes), redacted; never raises."""

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
    """Parses NUL-separated ``NAME=value`` entries.

    Skips other text, which is there if the process rewrote its title.
    """
    entries = (entry.partition("=") for entry in raw.decode("utf-8", "replace").split("\0"))
    return {name: value for name, equals, value in entries if equals and name}


def versions(
    code_roots: Sequence[str] = (), *, pid: int | None = None, deadline_s: float = 3.0
) -> Result[dict[str, str]]:
    """Returns versions of Python, torch and related packages, NCCL, driver, kernel, safelaunch; never raises.

    Args:
        code_roots: The rank's package directories, as its beacon reported them; by default this process's.
        pid: The rank. Its ``exe`` link names its interpreter.
    """
    bounded = partial(within, deadline_s, "versions", lambda: _versions(list(code_roots), pid))
    return attempt("package metadata", bounded)


def resources(
    *,
    pid: int | None = None,
    cwd: str | None = None,
    kills: Kills | None = None,
    links: Links | None = None,
    deadline_s: float = 3.0,
) -> Result[Resources]:
    """Returns memory, load, disks, network and limits of this node and of ``pid``'s cgroup; never raises.

    ``disks`` has the sizes of ``/dev/shm``, ``/tmp`` and ``cwd``, or the reason why one is missing: a dead network
    mount never responds.
    """

    def read() -> Resources:
        begin = time.monotonic()
        home = cwd or (link_of(f"/proc/{pid}/cwd") if pid is not None else "")
        places = [place for place in ("/dev/shm", "/tmp", home) if place]
        each_s = deadline_s / len(places)
        links_now = network_within(min(1.0, deadline_s / 3))
        return Resources(
            cpus=os.cpu_count(),
            load=os.getloadavg(),
            memory_bytes=parse_meminfo(text_of("/proc/meminfo")),
            cgroup=cgroups.limits(pid or os.getpid()),
            limits=parse_limits(text_of(f"/proc/{pid}/limits")) if pid is not None else {},
            network=links_now,
            link_errors=grown(links, links_now) if links is not None else None,
            disks={place: _disk(place, min(each_s, deadline_s - (time.monotonic() - begin))) for place in places},
            out_of_memory_kills=dict(kills or {}),
        )

    return attempt("/proc, cgroup, statvfs", read)


def pressure(place: str = "/proc/pressure") -> Result[str]:
    """Returns the share of time that tasks on this node spent waiting for CPU, memory and I/O; never raises."""

    def read() -> str:
        lines = [f"{n}: {line}" for n in ("cpu", "memory", "io") for line in text_of(f"{place}/{n}").splitlines()]
        if not lines:
            raise CaptureError(f"{place}: this kernel doesn't provide it")
        return "\n".join(lines) + "\n"

    return attempt(place, read)


def parse_meminfo(text: str) -> dict[str, int]:
    wanted = ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "SwapFree", "Shmem", "Dirty", "Writeback")
    fields = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in fields if name in wanted}


def parse_limits(text: str) -> dict[str, str]:
    """Parses ``/proc/<pid>/limits`` into name → soft limit."""
    wanted = ("Max open files", "Max processes", "Max locked memory", "Max address space", "Max core file size")
    fields = re.findall(r"^(\S.*?)  +(\S+)  +\S+", text, re.MULTILINE)
    return {name: soft for name, soft in fields if name in wanted}


def torch_build(version_py: str) -> dict[str, str]:
    names = {"cuda": "torch_cuda", "hip": "torch_hip", "git_version": "torch_git"}
    assignments = re.findall(r"^(\w+)[^=\n]*= *['\"]([^'\"]+)['\"]", version_py, re.MULTILINE)
    return {names[name]: value for name, value in assignments if name in names}


def _versions(code_roots: list[str], pid: int | None) -> dict[str, str]:
    paths = code_roots or sys.path
    texts: dict[str, str] = {"system": _os_name(), "kernel": platform.release(), "machine": platform.machine()}
    executable = link_of(f"/proc/{pid}/exe") if pid is not None else sys.executable
    python = re.search(r"python(\d+\.\d+)", " ".join([executable or "", *code_roots]))
    if pid is None and not code_roots:
        texts["python"] = platform.python_version()
    elif python:
        texts["python"] = python[1]
    if executable:
        texts["python_executable"] = executable
    from importlib import metadata  # slow to import, and needed only during an incident

    for package in PACKAGES:
        distribution = next(iter(metadata.distributions(name=package, path=paths)), None)
        if distribution is not None:
            texts[package] = distribution.version
    for root in paths:
        text = text_of(Path(root, "torch", "version.py"))
        if text:
            texts.update(torch_build(text))
            break
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text_of("/proc/driver/nvidia/version"))
    if driver:
        texts["nvidia_driver"] = driver[1]
    from safelaunch import __version__

    texts["safelaunch"] = __version__
    return texts


def _disk(place: str, deadline_s: float) -> dict[str, int | str]:
    try:
        usage = within(deadline_s, place, lambda: shutil.disk_usage(place))
    except CaptureError as error:
        return {"missing": error.message}
    except OSError as error:
        return {"missing": error.strerror or str(error)}
    return {"total_bytes": usage.total, "used_bytes": usage.used, "free_bytes": usage.free}


def network_within(deadline_s: float) -> Links:
    # A stuck driver holds the lock that reading the speed takes.
    try:
        return within(deadline_s, "/sys/class/net", network)
    except CaptureError as error:
        return {"interfaces": {"state": error.message}}


def network(root: Path = Path("/sys/class")) -> Links:
    """Returns network interfaces (hardware, or any that is up) and the ports of InfiniBand devices (``mlx5_0/1``).

    Each has its known state, speed, MTU and nonzero error counters.
    """
    links: Links = {}
    for path in sorted((root / "net").glob("*")):
        state = text_of(path / "operstate").strip()
        if path.name != "lo" and (state == "up" or (path / "device").exists()):
            numbers = {"speed_mbit": text_of(path / "speed").strip(), "mtu": text_of(path / "mtu").strip()}
            links[path.name] = {"state": state} | {name: int(text) for name, text in numbers.items() if text.isdigit()}
            links[path.name] |= _counted(path / "statistics", (*_ERRORS, "rx_dropped", "tx_dropped"))
    for path in sorted((root / "infiniband").glob("*/ports/*")):
        state, rate = text_of(path / "state").strip(), text_of(path / "rate").strip()
        port = f"{path.parent.parent.name}/{path.name}"
        links[port] = {"state": state.partition(": ")[2] or state, "rate": rate}
        links[port] |= _counted(path / "counters", _PORT_ERRORS) | _counted(path / "hw_counters", _RDMA_ERRORS)
    return dict(list(links.items())[:MOST_LINKS])


def grown(before: Links, now: Links) -> dict[str, dict[str, int]]:
    """Returns how much each error counter of a link has grown. Dropped packets don't count: healthy links drop some."""
    counters = (*_ERRORS, *_PORT_ERRORS, *_RDMA_ERRORS)
    more = {
        link: {name: int(now[link].get(name, 0)) - int(before[link].get(name, 0)) for name in counters}
        for link in now.keys() & before.keys()
    }
    found = {link: {name: count for name, count in counts.items() if count > 0} for link, counts in more.items()}
    return {link: counts for link, counts in sorted(found.items()) if counts}


def _counted(folder: Path, names: Sequence[str]) -> dict[str, int]:
    texts = {name: text_of(folder / name).strip() for name in names}
    return {name: int(text) for name, text in texts.items() if text.isdigit() and int(text)}


def _os_name() -> str:
    name = re.search(r"^PRETTY_NAME=\"?([^\"\n]+)", text_of("/etc/os-release"), re.MULTILINE)
    return name[1] if name else platform.system()
