"""Judges the facts of a node for a watched job, by thresholds, with a fix for each that is missed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .check import Check, failed, ok, warning
from .tracing import Place

MIB = 1 << 20
GIB = 1 << 30
LEAST_ROOM = 64 * MIB  # a bundle of 8 ranks is 1-5 MB, a page and a ring 72 KB a rank; Flight Recorder dumps are more
NO_ROOM = 8 * MIB
SOCKET_PATH_MAX = 107  # bytes: sun_path of unix(7), without its end
LEAST_FILES = 4096
LEAST_PROCESSES = 4096
LEAST_PORTS = 2000
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "riscv_clocksource")
NETWORK_DISKS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "fuse")
STATIC_PORT = 29500  # torchrun's default rendezvous port on several nodes
UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system. ``problem``: why its size is unknown; ``kind``: ``ext4``, ``tmpfs``, ``nfs4``, ..."""

    path: str
    total: int = 0
    free: int = 0
    kind: str = ""
    problem: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether another machine serves it."""
        return self.kind in NETWORK_DISKS or self.kind.startswith("fuse.")


def size(number: float) -> str:
    """``79 GiB``, ``512 MiB``."""
    return f"{number / GIB:.0f} GiB" if number >= 10 * GIB else f"{number / MIB:.0f} MiB"


def room_check(name: str, disk: Disk, what_for: str) -> Check:
    """Checks the room in a local directory that safelaunch or the job writes to."""
    if disk.problem:
        return failed(name, f"{disk.path}: {disk.problem}", f"make it usable: it holds {what_for}")
    detail = f"{size(disk.free)} free of {size(disk.total)} on {disk.path} ({disk.kind})"
    if disk.free < NO_ROOM:
        return failed(name, f"{detail}: no room for {what_for}", f"free some space: du -xsh {disk.path}/* | sort -h")
    if disk.free < LEAST_ROOM:
        return warning(name, f"{detail}: little for {what_for}", f"free some space: du -xsh {disk.path}/* | sort -h")
    if disk.is_remote:
        fix = f"put {what_for} on a local disk: set TMPDIR, XDG_RUNTIME_DIR"
        return warning(name, f"{detail}: a network disk", fix)
    return ok(name, detail)


def bundle_check(disk: Disk) -> Check:
    """The bundle directory, which may well be on a network disk: a bundle is copied there once it is complete."""
    name = "bundle directory"
    found = room_check(name, replace(disk, kind="") if disk.is_remote else disk, "bundles")
    if found.result == "ok" and disk.is_remote:
        return ok(name, f"{size(disk.free)} free of {size(disk.total)} on {disk.path} ({disk.kind}, a network disk)")
    return found


def shm_check(disk: Disk, place: Place) -> Check:
    """Checks ``/dev/shm``, which holds the batches of DataLoader workers and NCCL's buffers."""
    more = {
        "docker": "docker run --shm-size=16g ..., or --ipc=host",
        "podman": "podman run --shm-size=16g ..., or --ipc=host",
        "kubernetes": "volumes: [{name: shm, emptyDir: {medium: Memory}}]\n"
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
    }.get(place, "sudo mount -o remount,size=50% /dev/shm")
    if not disk.problem and disk.total <= LEAST_ROOM:
        detail = f"{size(disk.total)} in all (a container's default): DataLoader workers may die of a bus error"
        return warning("/dev/shm", detail, more)
    found = room_check("/dev/shm", disk, "DataLoader workers and NCCL")
    return found if found.result == "ok" else Check(found.name, "warning", found.detail, more)


def run_root_check(disk: Disk, problem: str) -> Check:
    """Checks the place for run directories. ``problem``: why none can be created there."""
    if problem:
        fix = f"it must be yours, mode 0700 (ls -ld {disk.path}): move it away, or set XDG_RUNTIME_DIR"
        return failed("run directory", f"{disk.path}: {problem}, so safelaunch cannot watch jobs", fix)
    return room_check("run directory", disk, "progress pages, sockets and bundles in progress")


def socket_check(root: str, longest: int) -> Check:
    """Checks the lengths of socket paths. ``longest``: the longest, in bytes, that a run below ``root`` can have."""
    detail = f"at most {longest} of {SOCKET_PATH_MAX} bytes below {root}"
    if longest > SOCKET_PATH_MAX:
        fix = "set XDG_RUNTIME_DIR to a shorter private directory, or unset it (then /tmp/safelaunch-<uid> is used)"
        return failed("socket paths", f"{detail}: too long for a unix socket", fix)
    return ok("socket paths", detail)


@dataclass(frozen=True, slots=True)
class Clock:
    """The node's clocks. ``suspended_s``: since boot; ``jump_s``: wall clock against CLOCK_MONOTONIC in the last
    seconds; ``cost_ns``: of one reading.
    """

    source: str
    suspended_s: float
    jump_s: float
    cost_ns: float


def clock_check(clock: Clock) -> Check:
    """Checks the clocks: CLOCK_MONOTONIC times steps and must be cheap; the wall clock times files and failures."""
    detail = f"clock source {clock.source or 'unknown'}, {clock.cost_ns:.0f} ns a reading"
    if clock.suspended_s > 1:
        detail += f", suspended for {clock.suspended_s:.0f} s since boot (the watch restarts its timers after that)"
    if abs(clock.jump_s) > 0.2:
        fix = "let a single time service correct it slowly: see chronyc tracking, timedatectl status"
        return warning("clock", f"{detail}; the wall clock jumped by {clock.jump_s:+.1f} s during this check", fix)
    if clock.cost_ns > 2000 or (clock.source and clock.source not in FAST_CLOCKS and clock.cost_ns > 500):
        fix = (
            "see available_clocksource in /sys/devices/system/clocksource/clocksource0; tsc=reliable on the kernel line"
        )
        return warning("clock", f"{detail}: slow, also for torch and NCCL", fix)
    return ok("clock", detail)


def port_check(bound: str, low: int, high: int) -> Check:
    """Checks ports. ``bound``: why none could be bound on loopback; ``low``, ``high``: ip_local_port_range."""
    if bound:
        return failed(
            "ports", f"no port of 127.0.0.1 can be bound: {bound}", "bring loopback up: sudo ip link set lo up"
        )
    if not low:
        return ok("ports", "a loopback port can be bound")
    detail = f"ephemeral ports {low}-{high}"
    if high - low < LEAST_PORTS:
        fix = 'sudo sysctl net.ipv4.ip_local_port_range="32768 60999"'
        return warning("ports", f"{detail}: too few, because every rank takes several", fix)
    if low <= STATIC_PORT <= high:
        fix = f"sudo sysctl net.ipv4.ip_local_reserved_ports={STATIC_PORT}"
        return warning("ports", f"{detail}: the kernel may give torchrun's own port {STATIC_PORT} to any program", fix)
    return ok("ports", detail)


def hostname_check(host: str, addresses: tuple[str, ...], took_s: float, problem: str) -> Check:
    """Checks the lookup of the host's own name, which gloo and the rendezvous do at every start."""
    fix = f"add a line to /etc/hosts: 127.0.1.1 {host}   (with several nodes: the address that the others use)"
    if problem:
        return warning(
            "host name", f"{host} does not resolve ({problem}): rendezvous and gloo may fail or be slow", fix
        )
    detail = f"{host} is {', '.join(addresses[:3]) or 'nothing'}, found in {1000 * took_s:.0f} ms"
    if took_s > 1:
        return warning("host name", f"{detail}: slow, and every rank does it", fix)
    return ok("host name", detail)


def limits_check(files: int, processes: int, used: int) -> Check:
    """Checks ``ulimit -n`` and ``-u`` (-1: none). ``used``: this user's processes and threads."""
    shown = f"open files {_limit(files)}, processes {_limit(processes)} ({used} in use)"
    problems, fixes = [], []
    if 0 <= files < LEAST_FILES:
        problems.append("too few files for the sockets of many ranks and DataLoader workers")
        fixes.append(f"ulimit -n {16 * LEAST_FILES}   (/etc/security/limits.conf, docker run --ulimit nofile=65536)")
    if 0 <= processes < max(LEAST_PROCESSES, used + LEAST_PROCESSES // 2):
        problems.append("too few processes, because every rank starts dozens of threads")
        fixes.append("ulimit -u 65536   (/etc/security/limits.conf: nproc)")
    if problems:
        return warning("limits", f"{shown}: {'; '.join(problems)}", "\n".join(fixes))
    return ok("limits", shown)


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def cgroup_check(limits: Mapping[str, str], node_bytes: int) -> Check:
    """Checks the control group's limits, in the kernel's format (see ``capture.cgroups.limits``)."""
    most = _number(limits.get("memory.max") or limits.get("memory.limit_in_bytes", ""))
    current = _number(limits.get("memory.current") or limits.get("memory.usage_in_bytes", "")) or 0
    events = limits.get("memory.events") or limits.get("memory.oom_control", "")
    killed = int(match[1]) if (match := re.search(r"\boom_kill (\d+)", events)) else 0
    pids, pids_used = _number(limits.get("pids.max", "")), _number(limits.get("pids.current", "")) or 0
    limited = most is not None and most < UNLIMITED and (not node_bytes or most < node_bytes)
    detail = f"memory limit {size(most)}, {size(current)} used" if limited and most else "no memory limit"
    detail += f", processes {pids_used} of {pids}" if pids is not None else ""
    if killed:
        fix = "give the container more memory, or use fewer DataLoader workers; see dmesg | grep -i oom"
        return warning("control group", f"{detail}; the out-of-memory killer has killed {killed} of its processes", fix)
    if limited and most is not None and most < 2 * GIB:
        return warning(
            "control group", f"{detail}: too little, because every rank takes 0.5-1 GiB before its model", "raise it"
        )
    if pids is not None and pids - pids_used < 512:
        fix = "docker run --pids-limit=-1 ..., Kubernetes podPidsLimit, systemd TasksMax="
        return warning("control group", f"{detail}: few are left, and threads count too", fix)
    return ok("control group", detail)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def leftover_check(dead: tuple[str, ...], kept: tuple[str, ...], live: int) -> Check:
    """Checks for run directories of dead runs, and bundles that could not be written to the requested directory."""
    detail = f"{live} live run{'s' * (live != 1)}"
    if kept:
        where = kept[0].rpartition("/")[0]
        fix = f"move them: mv {where}/* DIR   (and find out why --bundle-dir was not writable)"
        return warning(
            "left behind", f"{detail}; {len(kept)} bundles are in {where}, because --bundle-dir was not writable", fix
        )
    if dead:
        detail += f"; {len(dead)} of dead runs, which the next run removes: {', '.join(dead[:3])}"
    return ok("left behind", detail)
