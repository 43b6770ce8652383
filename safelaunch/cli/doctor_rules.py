"""Judges facts about a node, and suggests fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from safelaunch.model.words import size
from safelaunch.system.console import COMMAND
from safelaunch.system.errors import Failure

# --- the result of one check ------------------------------------------------------------------------------------------


CheckResult = Literal["ok", "warning", "failed"]
RESULTS: tuple[CheckResult, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    # warning: less evidence, or a risk to the job; failed: a main function doesn't work
    result: CheckResult
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warning(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, "warning", detail, fix)


def failed(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, "failed", detail, fix)


# --- whether stacks can be read, judged by trials and the kernel's settings -------------------------------------------


Container = Literal["host", "docker", "podman", "kubernetes", "apptainer"]
OLDEST_FOR = {(3, 13): (0, 4, 0)}  # py-spy's release notes

_ADD_CAPABILITY: dict[Container, str] = {
    "docker": "docker run --cap-add=SYS_PTRACE ...   (compose: cap_add: [SYS_PTRACE])",
    "podman": "podman run --cap-add=SYS_PTRACE ...",
    "kubernetes": "in the pod's specification, for the container of the job:\n"
    "  securityContext:\n"
    "    capabilities:\n"
    '      add: ["SYS_PTRACE"]',
    "apptainer": "apptainer exec --add-caps CAP_SYS_PTRACE ...   (once, as root: apptainer capability add)",
    "host": "sudo setcap cap_sys_ptrace+ep $(readlink -f $(command -v py-spy)), or run the job as root",
}
_NO_SECCOMP: dict[Container, str] = {
    "docker": "docker run --security-opt seccomp=unconfined ..., or docker >= 19.03 on a kernel >= 4.8",
    "podman": "podman run --security-opt seccomp=unconfined ...",
    "kubernetes": "securityContext: {seccompProfile: {type: Unconfined}}, or a profile that allows ptrace",
    "apptainer": "ask the administrator for a seccomp profile that allows ptrace and process_vm_readv",
    "host": "make the seccomp filter of your session or service allow ptrace and process_vm_readv",
}


_OTHER_REMEDIES: dict[Failure, str] = {
    "outdated": "pip install -U py-spy",
    "timeout": "the machine is overloaded, or ptrace is emulated (gVisor): try again, then run py-spy by hand",
}
_BY_HAND = "run py-spy by hand on any Python process of yours: py-spy dump --pid PID"


@dataclass(frozen=True, slots=True)
class Trial:
    problem: str
    took_s: float = 0.0
    kind: Failure = ""


@dataclass(frozen=True, slots=True)
class Rights:
    yama: int | None  # ptrace_scope; None: off
    capable: bool
    seccomp: int  # 2: a filter
    place: Container
    root: bool = False

    def __str__(self) -> str:
        yama = "Yama off" if self.yama is None else f"Yama ptrace_scope={self.yama}"
        capable = "with" if self.capable else "without"
        seccomp = ", under a seccomp filter" if self.seccomp == 2 else ""
        return f"{yama}, {capable} CAP_SYS_PTRACE{seccomp}, {'in ' * (self.place != 'host')}{self.place}"


def py_spy_check(path: str, version: str, python: tuple[int, int]) -> Check:
    """Checks whether py-spy is installed and supports this Python.

    Args:
        path: Path of py-spy; empty if it isn't installed.
        version: Version that it reports, such as ``0.4.3``.
    """
    name = "py-spy"
    if not path:
        return failed(
            name,
            "not installed: the ranks send their own stacks, without C frames and without those of child processes",
            "pip install 'py-spy>=0.4.0'",
        )
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not numbers:
        return failed(name, f"{path} does not print its version: {version or 'no answer'}", "pip install -U py-spy")
    oldest = OLDEST_FOR.get(python)
    if oldest is not None and numbers < oldest:
        wanted = ".".join(map(str, oldest))
        detail = f"{version} does not know Python {python[0]}.{python[1]}"
        return failed(name, detail, f"pip install 'py-spy>={wanted}'   (this one: {path})")
    return ok(name, f"{version}, {path}")


def attach_check(trial: Trial, rights: Rights) -> Check:
    """Judges the attempt to read a child that allows tracing, as ranks with a beacon do."""
    name = "reading stacks"
    if not trial.problem:
        note = "; you ran this as root: run it again as the user who runs the jobs" if rights.root else ""
        return ok(name, f"works for a child like a rank, in {1000 * trial.took_s:.0f} ms ({rights}){note}")
    if trial.kind != "denied":
        return failed(name, f"{trial.problem} ({rights})", _OTHER_REMEDIES.get(trial.kind, _BY_HAND))
    return failed(name, f"permission denied ({rights})", remedy(rights))


def remedy(rights: Rights) -> str:
    on_host = "" if rights.place == "host" else "on the host: "
    if rights.yama == 3:
        return (
            f"{on_host}kernel.yama.ptrace_scope=3 lasts until the next boot: set kernel.yama.ptrace_scope = 1 in\n"
            "/etc/sysctl.d/10-ptrace.conf (or the file that sets 3) and reboot"
        )
    if rights.capable and rights.seccomp == 2:
        return _NO_SECCOMP[rights.place]
    if rights.yama in (1, 2) and not rights.capable:
        # At 2, a rank's permission doesn't help. At 1, it helps if there is a beacon.
        relax = f"{on_host}sudo sysctl kernel.yama.ptrace_scope={rights.yama - 1}"
        ways = [relax, _ADD_CAPABILITY[rights.place]]
        return "\nor ".join(ways if rights.place == "host" else ways[::-1])
    if not rights.capable:
        return _ADD_CAPABILITY[rights.place]
    return (
        "Yama and capabilities allow it, so check SELinux (sudo setsebool deny_ptrace off) and AppArmor\n"
        "(sudo dmesg | grep DENIED)"
    )


def way_in(rights: Rights, own: str, as_root: str, container: str) -> str:
    """Returns a command that can read a running job's stacks after the kernel denied access.

    Processes in a container can't acquire a missing capability, so the command starts a new process that has it.

    Args:
        own: Command that was denied.
        as_root: The same command, run as root.
        container: Name of the container, if any.
    """
    if rights.yama == 3 or rights.capable:
        return remedy(rights)
    if rights.place in ("docker", "podman"):
        more = f"{COMMAND}{rights.place} exec --privileged --user 0 {container} {own}"
        return f"On the host of this container, run it here with all privileges:\n{more}"
    if rights.place == "kubernetes":
        more = f"{COMMAND}kubectl debug -it {container} --profile=sysadmin --target=CONTAINER --image=busybox -- "
        return f"From outside the pod, run it here with all privileges:\n{more}chroot /proc/1/root {own}"
    if rights.root or rights.place != "host":
        return remedy(rights)
    return f"As root, it can read them:\n{COMMAND}{as_root}"


def stranger_check(trial: Trial, rights: Rights) -> Check:
    """Judges the attempt to read a child that doesn't allow tracing, such as a process that a rank spawned."""
    name = "reading stacks of spawned children"
    if not trial.problem:
        return ok(name, "works, also for processes without a beacon")
    why = f"permission denied ({rights})" if trial.kind == "denied" else trial.problem
    detail = f"fails for processes that a rank spawns rather than forks, and for a rank without a beacon: {why}"
    return warning(name, detail, remedy(rights))


def native_check(trial: Trial) -> Check:
    """Judges the attempt to read C frames, which distinguish a Python lock from a wait in C++."""
    name = "reading C frames"
    if not trial.problem:
        return ok(name, f"works with py-spy --native, in {1000 * trial.took_s:.0f} ms")
    return warning(name, f"{trial.problem}; a few verdicts are less certain without C frames")


# --- what the jobs' torch offers a watchdog, and whether the beacon starts in its processes ---------------------------


OLDEST_TORCH = (2, 6)
SLOW_IMPORT_S = 20.0


@dataclass(frozen=True, slots=True)
class TorchProbe:
    problem: str = ""
    python: str = ""
    cuda: str = ""
    import_s: float = 0.0
    distributed: bool = False
    server: bool = False
    register: bool = False
    dump: bool = False
    handlers: Mapping[str, int] = field(default_factory=dict)  # HTTP status by worker server handler; 0: no answer
    beacon: bool = False  # our sitecustomize ran
    chained: str = ""  # the user's sitecustomize, if any
    isolated: bool = False  # Python ignores its environment


def version_check(version: str, package: str, options: int) -> Check:
    """Checks torch's version.

    Args:
        options: Number of options found in torchrun's source; if 0, safelaunch's own table is used.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    where = f"{version or 'of unknown version'}, {package}"
    if numbers and numbers < OLDEST_TORCH:
        return failed("torch", f"{where}: older than 2.6", "pip install 'torch>=2.6'")
    if not options:
        fix = "all options still pass through; if safelaunch takes a value for the script, write it as --name=VALUE"
        return warning("torch", f"{where}; the options of its torchrun could not be read", fix)
    return ok("torch", f"{where}; {options} spellings of torchrun's options")


def import_check(probe: TorchProbe) -> Check:
    name = "import torch"
    if probe.problem:
        return failed(name, probe.problem, "see its own error: python -c 'import torch.distributed'")
    if not probe.distributed:
        return failed(name, "it was built without torch.distributed", "install a build with torch.distributed")
    detail = f"in {probe.import_s:.1f} s, Python {probe.python}, " + (f"CUDA {probe.cuda}" if probe.cuda else "no CUDA")
    if probe.import_s > SLOW_IMPORT_S:
        return warning(name, f"{detail}: slow, and every rank does it", "keep the environment on a local disk")
    return ok(name, detail)


def server_check(probe: TorchProbe) -> Check | None:
    """Checks c10d's worker server, through which a hung rank can still respond. None if torch wasn't imported."""
    name = "worker server"
    if probe.problem or not probe.distributed:
        return None
    if not probe.server:
        detail = "this torch has none, so safelaunch cannot read a live rank's Flight Recorder"
        return warning(name, detail, "pip install 'torch>=2.6', a build for Linux")
    if probe.handlers.get("ping") != 200:
        return failed(name, f"it starts, but does not answer (status {probe.handlers.get('ping', 0)})", "")
    if not probe.register:
        detail = "it answers, but accepts no handlers, so safelaunch cannot test whether native code holds the GIL"
        return warning(name, detail, "use a newer torch (2.13 accepts handlers)")
    return ok(name, "it answers, and accepts handlers")


def recorder_check(probe: TorchProbe) -> Check | None:
    """Checks c10d's Flight Recorder, which records recent collectives. None if torch wasn't imported."""
    name = "Flight Recorder"
    if probe.problem or not probe.distributed or not probe.server:
        return None
    if probe.handlers.get("fr_trace_json") == 200 and probe.dump and probe.register:
        return ok(name, "of a live rank, with stack frames")
    if probe.handlers.get("fr_trace_json") == 200:
        return warning(name, "of a live rank, without stack frames", "use a newer torch (2.13 has them)")
    if probe.handlers.get("dump_nccl_trace_json") == 200:
        detail = "this torch records only NCCL's collectives, not gloo's"
        return warning(name, detail, "use a newer torch (2.13 records both)")
    return warning(
        name, "not available from a live rank of this torch, so verdicts rest on stacks", "use a newer torch"
    )


def beacon_check(probe: TorchProbe) -> Check | None:
    """Checks whether ranks run safelaunch's sitecustomize module. None if unknown."""
    name = "beacon"
    if probe.problem:
        return None
    if not probe.beacon:
        why = (
            "that python ignores its environment (-I or -E, or a wrapper with these)"
            if probe.isolated
            else "it did not run"
        )
        fix = "python must use PYTHONPATH and import site: remove -I, -E, -S, and any PYTHONPATH that a wrapper sets"
        return failed(
            name, f"the beacon's sitecustomize does not run in torch's python: {why}; steps are not counted", fix
        )
    return ok(name, "starts in torch's python" + (f"; your {probe.chained} runs after it" if probe.chained else ""))


def gpu_check(count: int, missing: str, kind: Failure, cuda: str | None, devices: bool) -> Check:
    """Checks whether NVML lists the GPUs.

    Args:
        missing: Reason why it listed none; ``kind`` is the kind of failure.
        cuda: torch's CUDA version; empty if torch was built without CUDA, None if there is no torch.
        devices: True if ``/dev/nvidia*`` exist.
    """
    if not missing:
        return ok("GPUs", f"NVML sees {count}")
    if kind == "not installed":
        return warning("GPUs", f"{missing}: bundles lack GPU data", "pip install nvidia-ml-py")
    if kind == "timeout":
        fix = "if nvidia-smi hangs as well, look for XID errors (sudo dmesg | grep -i xid) and reboot the node"
        return failed("GPUs", missing, fix)
    if devices:
        fix = "docker run --gpus all (NVIDIA_DRIVER_CAPABILITIES=all), or ldconfig -p | grep libnvidia-ml"
        return warning("GPUs", f"{missing}, but /dev/nvidia* exist", fix)
    if cuda:
        fix = "if this is a GPU node, load its driver: nvidia-smi must list the GPUs"
        return warning("GPUs", f"{missing}, but torch is built for CUDA {cuda}", fix)
    return ok("GPUs", missing if cuda is None else f"{missing}; torch is built for the CPU")


MIB = 1 << 20
LEAST_ROOM = (
    64 * MIB
)  # a bundle of 8 ranks has 1-5 MB, or more with Flight Recorder dumps; a rank's page and ring have 72 KB
NO_ROOM = 8 * MIB
SOCKET_PATH_MAX = 107  # sun_path of unix(7) without its terminator
LEAST_PORTS = 2000
NETWORK_DISKS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "fuse")
STATIC_PORT = 29500  # torchrun's default on several nodes


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    total: int = 0
    free: int = 0
    kind: str = ""  # ``ext4``, ``tmpfs``, ``nfs4``, ...
    problem: str = ""

    @property
    def is_remote(self) -> bool:
        return self.kind in NETWORK_DISKS or self.kind.startswith("fuse.")


def room_check(name: str, disk: Disk, what_for: str) -> Check:
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
    """Checks the bundle directory. It can be on a network disk, because only complete bundles are copied there."""
    name = "bundle directory"
    check = room_check(name, replace(disk, kind="") if disk.is_remote else disk, "bundles")
    if check.result == "ok" and disk.is_remote:
        return ok(name, f"{size(disk.free)} free of {size(disk.total)} on {disk.path} ({disk.kind}, a network disk)")
    return check


def shm_check(disk: Disk, place: Container) -> Check:
    more = {
        "docker": "docker run --shm-size=16g ..., or --ipc=host",
        "podman": "podman run --shm-size=16g ..., or --ipc=host",
        "kubernetes": "volumes: [{name: shm, emptyDir: {medium: Memory}}]\n"
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
    }.get(place, "sudo mount -o remount,size=50% /dev/shm")
    if not disk.problem and disk.total <= LEAST_ROOM:
        detail = f"{size(disk.total)} in all (a container's default): DataLoader workers may die of a bus error"
        return warning("/dev/shm", detail, more)
    check = room_check("/dev/shm", disk, "DataLoader workers and NCCL")
    return check if check.result == "ok" else Check(check.name, "warning", check.detail, more)


def run_root_check(disk: Disk, problem: str) -> Check:
    """Checks the place for run directories. ``problem`` is the reason why none can be created, or ""."""
    if problem:
        fix = f"it must be yours, mode 0700 (ls -ld {disk.path}): move it away, or set XDG_RUNTIME_DIR"
        return failed("run directory", f"{disk.path}: {problem}, so safelaunch cannot watch jobs", fix)
    return room_check("run directory", disk, "progress pages, sockets and bundles in progress")


def socket_check(root: str, longest: int) -> Check:
    """Checks that socket paths aren't too long; ``longest`` is the longest of a run below ``root``, in bytes."""
    detail = f"at most {longest} of {SOCKET_PATH_MAX} bytes below {root}"
    if longest > SOCKET_PATH_MAX:
        fix = "set XDG_RUNTIME_DIR to a shorter private directory, or unset it (then /tmp/safelaunch-<uid> is used)"
        return failed("socket paths", f"{detail}: too long for a unix socket", fix)
    return ok("socket paths", detail)


def port_check(bound: str, low: int, high: int) -> Check:
    """Checks whether ports can be bound, and the range of ephemeral ports.

    Args:
        bound: Reason why no port could be bound on the loopback interface, or "".
        low: Start of ip_local_port_range.
        high: End of ip_local_port_range.
    """
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
    """Checks that this host's own name resolves, which gloo and the rendezvous need at every start."""
    fix = f"add a line to /etc/hosts: 127.0.1.1 {host}   (with several nodes: the address that the others use)"
    if problem:
        return warning(
            "host name", f"{host} does not resolve ({problem}): rendezvous and gloo may fail or be slow", fix
        )
    detail = f"{host} is {', '.join(addresses[:3]) or 'nothing'}, found in {1000 * took_s:.0f} ms"
    if took_s > 1:
        return warning("host name", f"{detail}: slow, and every rank does it", fix)
    return ok("host name", detail)


def leftover_check(dead: tuple[str, ...], kept: tuple[str, ...], live: int) -> Check:
    detail = f"{live} live run{'s' * (live != 1)}"
    if kept:
        where = kept[0].rpartition("/")[0]
        fix = f"move them: mv {where}/* DIR   (and find out why --bundle-dir was not writable)"
        return warning(
            "left behind",
            f"{detail}; in {where}, because --bundle-dir was not writable: {len(kept)} bundle{'s' * (len(kept) != 1)}",
            fix,
        )
    if dead:
        detail += f"; {len(dead)} of dead runs, which the next run removes: {', '.join(dead[:3])}"
    return ok("left behind", detail)
