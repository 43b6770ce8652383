"""A job's environment on this node: variables, versions, resources.

All of it comes from files. This process imports nothing of the job, and runs none of its interpreters.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safelaunch.capture import cgroups, command, gpu
from safelaunch.capture.result import Result, attempt, within
from safelaunch.model import Resources
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of, text_of
from safelaunch.system.redaction.redact import shown_env

DEADLINE_S = 6.0  # of each source
Kills = Mapping[str, Mapping[str, int | None] | None]


@dataclass(frozen=True, slots=True)
class NodeSubject:
    """Whom a node's sources ask. ``pid``: one of the ranks, whose packages are in ``code_roots``; ``env``: the
    environment it was started with; ``kills``: what the out-of-memory killer had counted at the job's start, and now.
    """

    pid: int | None = None
    code_roots: tuple[str, ...] = ()
    env: Result[dict[str, str]] | None = None
    kills: Kills = field(default_factory=dict)


def sources() -> Mapping[str, Callable[[NodeSubject], Result[Any] | None]]:
    """The sources of a node's evidence, by the fields of ``NodeFiles``. None: there is nothing to ask."""
    return {
        "gpus": lambda _: gpu.gpus(deadline_s=DEADLINE_S),
        "nvidia_smi": lambda _: gpu.nvidia_smi_text(deadline_s=DEADLINE_S),
        "kernel_log": lambda _: kernel_log(deadline_s=DEADLINE_S),
        "pressure": lambda _: pressure(),
        "versions": lambda asked: versions(asked.code_roots, pid=asked.pid),
        "resources": lambda asked: resources(pid=asked.pid, kills=asked.kills),
        "env": lambda asked: asked.env,
    }


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
    bounded = partial(within, deadline_s, "versions", lambda: _versions(list(code_roots), pid))
    return attempt("package metadata", bounded)


def resources(
    *, pid: int | None = None, cwd: str | None = None, kills: Kills | None = None, deadline_s: float = 3.0
) -> Result[Resources]:
    """Memory, load, disks, network and limits of this node and of ``pid``'s cgroup; never raises.

    ``disks`` holds ``/dev/shm``, ``/tmp`` and ``cwd`` with total, used and free bytes, or the reason for having none: a
    dead network mount never answers.
    """

    def read() -> Resources:
        begin = time.monotonic()
        home = cwd or (link_of(f"/proc/{pid}/cwd") if pid is not None else "")
        places = [place for place in ("/dev/shm", "/tmp", home) if place]
        each_s = deadline_s / len(places)
        return Resources(
            cpus=os.cpu_count(),
            load=os.getloadavg(),
            memory_bytes=parse_meminfo(text_of("/proc/meminfo")),
            cgroup=cgroups.limits(pid or os.getpid()),
            limits=parse_limits(text_of(f"/proc/{pid}/limits")) if pid is not None else {},
            network=_network_within(min(1.0, deadline_s / 3)),
            disks={place: _disk(place, min(each_s, deadline_s - (time.monotonic() - begin))) for place in places},
            out_of_memory_kills=dict(kills or {}),
        )

    return attempt("/proc, cgroup, statvfs", read)


def pressure(place: str = "/proc/pressure") -> Result[str]:
    """The share of time in which tasks of this node waited for CPU, memory and I/O lately; never raises."""

    def read() -> str:
        lines = [f"{n}: {line}" for n in ("cpu", "memory", "io") for line in text_of(f"{place}/{n}").splitlines()]
        if not lines:
            raise CaptureError(f"{place}: this kernel keeps no account of it")
        return "\n".join(lines) + "\n"

    return attempt(place, read)


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
    executable = link_of(f"/proc/{pid}/exe") if pid is not None else sys.executable
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
        text = text_of(Path(root, "torch", "version.py"))
        if text:
            found.update(torch_build(text))
            break
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text_of("/proc/driver/nvidia/version"))
    if driver:
        found["nvidia_driver"] = driver[1]
    from safelaunch import __version__

    found["safelaunch"] = __version__
    return found


def _disk(place: str, deadline_s: float) -> dict[str, int | str]:
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

    Each with its state, its speed, its MTU, and those of its error counters that are not 0; what it doesn't say is left
    out.
    """
    found: dict[str, dict[str, str | int]] = {}
    for path in sorted((root / "net").glob("*")):
        state = text_of(path / "operstate").strip()
        if path.name != "lo" and (state == "up" or (path / "device").exists()):
            numbers = {"speed_mbit": text_of(path / "speed").strip(), "mtu": text_of(path / "mtu").strip()}
            found[path.name] = {"state": state} | {name: int(text) for name, text in numbers.items() if text.isdigit()}
            found[path.name] |= _counted(path / "statistics", ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"))
    for path in sorted((root / "infiniband").glob("*/ports/*")):
        state, rate = text_of(path / "state").strip(), text_of(path / "rate").strip()
        port = f"{path.parent.parent.name}/{path.name}"
        found[port] = {"state": state.partition(": ")[2] or state, "rate": rate}
        found[port] |= _counted(path / "counters", ("link_downed", "symbol_error", "port_rcv_errors"))
    return dict(list(found.items())[:MOST_LINKS])


def _counted(folder: Path, names: Sequence[str]) -> dict[str, int]:
    found = {name: text_of(folder / name).strip() for name in names}
    return {name: int(text) for name, text in found.items() if text.isdigit() and int(text)}


def _os_name() -> str:
    name = re.search(r"^PRETTY_NAME=\"?([^\"\n]+)", text_of("/etc/os-release"), re.MULTILINE)
    return name[1] if name else platform.system()


# --- the kernel log ---------------------------------------------------------------------------------------------------

MAX_KERNEL_LINES = 200
NOTHING = "(nothing relevant)"
_MAX_KMSG_BYTES = 8 << 20

# Kernel messages that explain a hang or a killed rank: memory, GPUs, stuck tasks, storage, network, hardware.
_RELEVANT = re.compile(
    r"out of memory|oom[-_ ]?kill|killed process|memory cgroup|\bnvrm\b|\bxid\b|nvidia|nvlink|nvswitch"
    r"|gpu has fallen|hung task|blocked for more than|soft lockup|hard lockup|rcu.*stall|segfault"
    r"|general protection|traps:|i/o error|blk_update_request|nvme.*(timeout|reset|abort)|ext4-fs error"
    r"|xfs.*(error|corrupt)|\bnfs\b|\blustre|\bceph|\bgpfs|\bmmfs|\bbeegfs|fuse.*(error|abort)"
    r"|server .* not responding|remounting filesystem|machine check|\bmce: .*error|edac .*error|hardware error"
    r"|aer: |pcie bus error|dmar: .*fault|iommu.*fault|mlx5.*(error|timeout|fail|down)|link (is )?down"
    r"|thermal.*critical|temperature above|throttl",
    re.IGNORECASE,
)


def kernel_log(*, deadline_s: float = 3.0) -> Result[str]:
    """The last lines of the kernel log that may explain a hang, newest last; never raises.

    From ``/dev/kmsg``, else ``journalctl -k``: many systems reserve the former for root (``kernel.dmesg_restrict``).
    """

    def read() -> str:
        begin = time.monotonic()
        try:
            lines = within(deadline_s / 2, "/dev/kmsg", _kmsg)
        except (OSError, CaptureError) as error:
            lines = _journal(deadline_s - (time.monotonic() - begin), error)
        found = relevant(lines)
        return "\n".join(found or [NOTHING]) + "\n"

    return attempt("kernel log", read)


def relevant(lines: Iterable[str]) -> list[str]:
    """The last ``MAX_KERNEL_LINES`` lines that may explain a hang or a killed process."""
    return [line for line in lines if _RELEVANT.search(line)][-MAX_KERNEL_LINES:]


def since(begun: str, lines: Sequence[str]) -> list[str]:
    """The messages of the run alone: the log goes back to the boot of the node. A line without a time stays.

    ``begun``: the time of its start, as the log writes it.
    """
    begun_s, times = _moment(begun), [_moment(line) for line in lines]
    return [line for line, at_s in zip(lines, times, strict=True) if line != NOTHING and not 0 < at_s < begun_s]


_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def _moment(text: str) -> float:
    """The time at the beginning of a text, in Unix seconds, of UTC where it names no zone; 0 without one."""
    found = _MOMENT.match(text)
    if found is None:
        return 0.0
    zone = (found[3] or "Z").replace("Z", "+0000").replace(":", "")
    try:
        return dt.datetime.strptime(f"{found[1]} {found[2]} {zone}", "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return 0.0


def parse_kmsg(record: str, boot_unix_s: float) -> str:
    """One record of ``/dev/kmsg`` (ABI/testing/dev-kmsg) as ``YYYY-MM-DD HH:MM:SS text``; ``""`` if none."""
    head, separator, text = record.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdigit():
        return ""
    moment = dt.datetime.fromtimestamp(boot_unix_s + int(fields[2]) / 1e6, dt.timezone.utc)
    first = text.split("\n", 1)[0]  # KEY=value lines of the device follow
    return f"{moment:%Y-%m-%d %H:%M:%S} {first}"


def _kmsg() -> list[str]:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    lines: list[str] = []
    size = 0
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while size < _MAX_KMSG_BYTES:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break  # the end
            except BrokenPipeError:
                continue  # overwritten while reading: the next read continues after the gap
            size += len(record)
            lines.append(parse_kmsg(record.decode("utf-8", "replace"), boot))
    finally:
        os.close(descriptor)
    return lines


def _journal(deadline_s: float, denied: Exception) -> list[str]:
    reason = getattr(denied, "strerror", None) or str(denied)
    remedy = "run as root, or sysctl kernel.dmesg_restrict=0"
    program = shutil.which("journalctl")
    if not program:
        raise CaptureError(f"/dev/kmsg: {reason}", remedy)
    argv = [program, "-k", "-n", "5000", "--no-pager", "-q", "-o", "short-iso"]
    output = command.run(argv, deadline_s=max(0.1, deadline_s))
    if output.timed_out or output.returncode != 0 or not output.stdout.strip():
        raise CaptureError(f"/dev/kmsg: {reason}; journalctl -k shows nothing", remedy)
    return output.stdout.decode("utf-8", "replace").splitlines()
