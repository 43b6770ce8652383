"""Can stacks be read? What a trial and the kernel's settings mean, and the remedy for this very place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    "host": "the seccomp filter of the session or service that you are in has to allow ptrace and process_vm_readv",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """An attempt on a child that holds still. ``problem`` empty: its stack was read, in ``took_s`` seconds."""

    problem: str
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rights:
    """What decides whether we may trace. ``yama``: kernel.yama.ptrace_scope, None = off; ``seccomp`` 2 = a filter."""

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
    """How CAP_SYS_PTRACE is given to the processes of this place."""
    return _ADD_CAPABILITY[place]


def version_check(path: str, version: str, python: tuple[int, int]) -> Check:
    """py-spy itself. ``path`` empty: there is none; ``version`` as it says, ``0.4.3``."""
    name = "py-spy"
    if not path:
        return failed(name, "not installed: no Python stacks, so hardly a verdict", "pip install 'py-spy>=0.4.0'")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not numbers:
        return failed(name, f"{path} does not tell its version: {version or 'no answer'}", "pip install -U py-spy")
    oldest = OLDEST_FOR.get(python)
    if oldest is not None and numbers < oldest:
        wanted = ".".join(map(str, oldest))
        detail = f"{version} does not know Python {python[0]}.{python[1]}"
        return failed(name, detail, f"pip install 'py-spy>={wanted}'   (this one: {path})")
    return ok(name, f"{version}, {path}")


def attach_check(trial: Trial, rights: Rights) -> Check:
    """The trial on a child that lets us trace it, as the beacon makes every rank do."""
    name = "reading stacks"
    if not trial.problem:
        note = "; as root: examine it as the user that runs the jobs, too" if rights.root else ""
        return ok(name, f"of a child like a rank, in {1000 * trial.took_s:.0f} ms ({rights}){note}")
    if "permission denied" not in trial.problem:
        return failed(name, f"{trial.problem} ({rights})", _other_remedy(trial.problem))
    return failed(name, f"permission denied ({rights})", remedy(rights))


def remedy(rights: Rights) -> str:
    """What makes tracing possible where it was denied."""
    on_host = "" if rights.place == "host" else "on the host: "
    if rights.yama == 3:
        return (
            f"{on_host}kernel.yama.ptrace_scope=3 holds until the next boot: set kernel.yama.ptrace_scope = 1 in\n"
            "/etc/sysctl.d/10-ptrace.conf (whatever sets 3 there) and reboot"
        )
    if rights.capable and rights.seccomp == 2:
        return _NO_SECCOMP[rights.place]
    if rights.yama in (1, 2) and not rights.capable:
        # At 2 nothing that a rank allows helps; at 1 it does, but not for what has no beacon.
        relax = f"{on_host}sudo sysctl kernel.yama.ptrace_scope={rights.yama - 1}"
        ways = [relax, add_capability(rights.place)]
        return "\nor ".join(ways if rights.place == "host" else ways[::-1])
    if not rights.capable:
        return add_capability(rights.place)
    return (
        "neither Yama nor a capability: SELinux (sudo setsebool deny_ptrace off) or AppArmor (sudo dmesg | grep DENIED)"
    )


def _other_remedy(problem: str) -> str:
    if "upgrade py-spy" in problem or "does not know" in problem:
        return "pip install -U py-spy"
    if "no answer within" in problem:
        return "the machine is overloaded, or ptrace is emulated (gVisor): try again, then run py-spy by hand"
    return "run it by hand: py-spy dump --pid PID of any Python process of yours"


def stranger_check(trial: Trial, rights: Rights) -> Check:
    """The trial on a child that does not let us: what a rank spawns, and a rank without a beacon."""
    name = "reading stacks of spawned children"
    if not trial.problem:
        return ok(name, "of processes that have no beacon, too")
    why = trial.problem.partition(":")[0]  # the rest is a remedy in general; ours is for this place
    detail = f"not of what a rank spawns rather than forks, nor of a rank without a beacon: {why}"
    return warning(name, detail, remedy(rights))


def native_check(trial: Trial) -> Check:
    """C frames: they tell a Python lock from a wait in C++."""
    name = "reading C frames"
    if not trial.problem:
        return ok(name, f"py-spy --native, in {1000 * trial.took_s:.0f} ms")
    return warning(name, f"py-spy --native: {trial.problem}; a few verdicts stay less certain")
