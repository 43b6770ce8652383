"""Looks up the facts of this node: disks, clock, ports, limits, leftovers of earlier runs. ``rules`` judges them."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

from safelaunch.beacon import layout
from safelaunch.capture import cgroups
from safelaunch.capture.result import within
from safelaunch.job.paths import RunPaths
from safelaunch.supervise.control.discover import find
from safelaunch.system.errors import CaptureError

from .check import Check
from .rules import Clock, Disk, cgroup_check, hostname_check, leftover_check, limits_check, port_check, run_root_check

DISK_DEADLINE_S = 4.0
NAME_DEADLINE_S = 8.0
READINGS = 2000


def disk(path: Path) -> Disk:
    """The file system of ``path``, or of the nearest existing directory above it."""

    def look() -> Disk:
        existing = path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        found = os.statvfs(existing)
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return Disk(os.fspath(path), size, free, kind(existing.resolve(), Path("/proc/self/mounts").read_text()))

    try:
        return within(DISK_DEADLINE_S, os.fspath(path), look)
    except (OSError, CaptureError) as error:
        return Disk(os.fspath(path), problem=getattr(error, "strerror", None) or str(error))


def kind(path: Path, mounts: str) -> str:
    """The type of the file system under ``path``, from the text of ``/proc/mounts``."""
    best, found = -1, ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), words[2]
    return found


def run_root(root: Path) -> Check:
    """Checks that a run directory can be created below ``root``, by creating an empty one there."""
    problem = ""
    trial = root / f"doctor-{os.getpid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        info = root.lstat()
        if info.st_uid != os.getuid() or info.st_mode & 0o077:
            problem = f"not a private directory of yours (owner {info.st_uid}, mode {info.st_mode & 0o777:o})"
        trial.mkdir(mode=0o700)
        trial.rmdir()
    except OSError as error:
        problem = problem or error.strerror or str(error)
    return run_root_check(disk(root), problem)


def longest_socket(root: Path) -> int:
    """The length in bytes of the longest socket path below ``root``: the kernel's greatest pid, 100 attempts, ranks in
    the tens of thousands.
    """
    most = _text("/proc/sys/kernel/pid_max").strip() or "4194304"
    run = RunPaths(root / f"r{most}-99")
    page = layout.page_name(99, 99999, int(most))
    return len(os.fsencode(run.of_page(page, layout.SERVER_SUFFIX)))


def clock(begin: tuple[float, float]) -> Clock:
    """The facts about clocks. ``begin``: ``time.time()`` and ``time.monotonic()`` of a moment ago."""
    jump = (time.time() - begin[0]) - (time.monotonic() - begin[1])
    start = time.perf_counter_ns()
    for _ in range(READINGS):
        time.monotonic_ns()
    cost = (time.perf_counter_ns() - start) / READINGS
    return Clock(
        source=_text("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip(),
        suspended_s=time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC),
        jump_s=jump,
        cost_ns=cost,
    )


def ports() -> Check:
    """Binds a loopback port, as torchrun's rendezvous does."""
    problem = ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError as error:
        problem = error.strerror or str(error)
    words = _text("/proc/sys/net/ipv4/ip_local_port_range").split()
    low, high = (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)
    return port_check(problem, low, high)


def host_name(resolve: Callable[[str], list[str]] | None = None) -> Check:
    """Looks up our own host name, as every rank does."""
    host = socket.gethostname()
    begin = time.monotonic()
    addresses: list[str] = []
    problem = ""
    try:
        addresses = within(NAME_DEADLINE_S, "the name service", lambda: (resolve or _addresses)(host))
    except CaptureError:
        problem = f"no answer within {NAME_DEADLINE_S:g} s"
    except OSError as error:
        problem = error.strerror or str(error)
    return hostname_check(host, tuple(dict.fromkeys(addresses)), time.monotonic() - begin, problem)


def _addresses(host: str) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def limits() -> Check:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0:
        processes = -1  # the kernel exempts root from it
    return limits_check(files, processes, _threads_of(os.getuid()))


def _threads_of(uid: int) -> int:
    """The number of this user's threads, which RLIMIT_NPROC counts."""
    count = 0
    for entry in list(os.scandir("/proc")):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += sum(1 for _ in os.scandir(f"{entry.path}/task"))
        except OSError:
            continue  # it has ended
    return count


def control_group() -> Check:
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return cgroup_check(cgroups.limits(os.getpid()), int(total[1]) * 1024 if total else 0)


def left_behind(places: tuple[Path, ...]) -> Check:
    found = find(places)
    live = [item for item in found if item.alive]
    dead = [os.fspath(item.directory) for item in found if item not in live]
    kept = [os.fspath(bundle) for place in places for bundle in sorted((place / "bundles").glob("*-*Z-*"))]
    return leftover_check(tuple(dead), tuple(kept), len(live))


def has_gpu_devices() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
