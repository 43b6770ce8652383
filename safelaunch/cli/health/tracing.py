"""Judges whether stacks can be read, by trials and the kernel's settings, with the fix for this environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from safelaunch.system.errors import Failure

from .check import Check, failed, ok, warning

Place = Literal["host", "docker", "podman", "kubernetes", "apptainer"]
OLDEST_FOR = {(3, 13): (0, 4, 0)}  # py-spy's release notes

_ADD_CAPABILITY: dict[Place, str] = {
    "docker": "docker run --cap-add=SYS_PTRACE ...   (compose: cap_add: [SYS_PTRACE])",
    "podman": "podman run --cap-add=SYS_PTRACE ...",
    "kubernetes": "in the pod's specification, for the container of the job:\n"
    "  securityContext:\n"
    "    capabilities:\n"
    '      add: ["SYS_PTRACE"]',
    "apptainer": "apptainer exec --add-caps CAP_SYS_PTRACE ...   (once, as root: apptainer capability add)",
    "host": "sudo setcap cap_sys_ptrace+ep $(readlink -f $(command -v py-spy)), or run the job as root",
}
_NO_SECCOMP: dict[Place, str] = {
    "docker": "docker run --security-opt seccomp=unconfined ..., or docker >= 19.03 on a kernel >= 4.8",
    "podman": "podman run --security-opt seccomp=unconfined ...",
    "kubernetes": "securityContext: {seccompProfile: {type: Unconfined}}, or a profile that allows ptrace",
    "apptainer": "ask the administrator for a seccomp profile that allows ptrace and process_vm_readv",
    "host": "make the seccomp filter of your session or service allow ptrace and process_vm_readv",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """An attempt to read a waiting child's stack, which took ``took_s`` seconds. ``problem`` empty: it succeeded."""

    problem: str
    took_s: float = 0.0
    kind: Failure = ""


@dataclass(frozen=True, slots=True)
class Rights:
    """The settings that decide whether we may trace. ``yama``: ptrace_scope, None = off; ``seccomp`` 2 = a filter."""

    yama: int | None
    capable: bool
    seccomp: int
    place: Place
    root: bool = False

    def __str__(self) -> str:
        yama = "Yama off" if self.yama is None else f"Yama ptrace_scope={self.yama}"
        capable = "with" if self.capable else "without"
        seccomp = ", under a seccomp filter" if self.seccomp == 2 else ""
        return f"{yama}, {capable} CAP_SYS_PTRACE{seccomp}, {'in ' * (self.place != 'host')}{self.place}"


def add_capability(place: Place) -> str:
    """How to give CAP_SYS_PTRACE to processes in this environment."""
    return _ADD_CAPABILITY[place]


def version_check(path: str, version: str, python: tuple[int, int]) -> Check:
    """Checks py-spy. ``path`` empty: not installed; ``version``: its own answer, such as ``0.4.3``."""
    name = "py-spy"
    if not path:
        return failed(
            name,
            "not installed, so safelaunch reads no Python stacks and reaches few verdicts",
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
    """Judges the trial on a child that allows tracing, as the beacon makes every rank do."""
    name = "reading stacks"
    if not trial.problem:
        note = "; you ran this as root: run it again as the user who runs the jobs" if rights.root else ""
        return ok(name, f"works for a child like a rank, in {1000 * trial.took_s:.0f} ms ({rights}){note}")
    if trial.kind != "denied":
        return failed(name, f"{trial.problem} ({rights})", _other_remedy(trial.kind))
    return failed(name, f"permission denied ({rights})", remedy(rights))


def remedy(rights: Rights) -> str:
    """The fix for denied tracing."""
    on_host = "" if rights.place == "host" else "on the host: "
    if rights.yama == 3:
        return (
            f"{on_host}kernel.yama.ptrace_scope=3 lasts until the next boot: set kernel.yama.ptrace_scope = 1 in\n"
            "/etc/sysctl.d/10-ptrace.conf (or the file that sets 3) and reboot"
        )
    if rights.capable and rights.seccomp == 2:
        return _NO_SECCOMP[rights.place]
    if rights.yama in (1, 2) and not rights.capable:
        # At 2, a rank's permission does not help. At 1 it does, but not for processes without a beacon.
        relax = f"{on_host}sudo sysctl kernel.yama.ptrace_scope={rights.yama - 1}"
        ways = [relax, add_capability(rights.place)]
        return "\nor ".join(ways if rights.place == "host" else ways[::-1])
    if not rights.capable:
        return add_capability(rights.place)
    return (
        "Yama and capabilities allow it, so check SELinux (sudo setsebool deny_ptrace off) and AppArmor\n"
        "(sudo dmesg | grep DENIED)"
    )


def _other_remedy(kind: Failure) -> str:
    if kind == "outdated":
        return "pip install -U py-spy"
    if kind == "timeout":
        return "the machine is overloaded, or ptrace is emulated (gVisor): try again, then run py-spy by hand"
    return "run py-spy by hand on any Python process of yours: py-spy dump --pid PID"


def stranger_check(trial: Trial, rights: Rights) -> Check:
    """Judges the trial on a child without permission, such as a rank's spawned child or a rank without a beacon."""
    name = "reading stacks of spawned children"
    if not trial.problem:
        return ok(name, "works, also for processes without a beacon")
    why = f"permission denied ({rights})" if trial.kind == "denied" else trial.problem
    detail = f"fails for processes that a rank spawns rather than forks, and for a rank without a beacon: {why}"
    return warning(name, detail, remedy(rights))


def native_check(trial: Trial) -> Check:
    """Judges the trial with C frames, which distinguish a Python lock from a wait in C++."""
    name = "reading C frames"
    if not trial.problem:
        return ok(name, f"works with py-spy --native, in {1000 * trial.took_s:.0f} ms")
    return warning(name, f"{trial.problem}; a few verdicts are less certain without C frames")
