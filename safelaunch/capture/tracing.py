"""Explains why a process could not be traced, with the fix.

py-spy's messages name the failed system call, but rarely the cause: in a container without CAP_SYS_PTRACE, it prints
``Failed to get process executable name. Check that the process is running``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safelaunch.system.errors import CaptureError

_CAP_SYS_PTRACE = 1 << 19
_DENIED = ("permission denied", "os error 13", "operation not permitted", "os error 1)", "eperm")
_ADD_CAPABILITY = "docker run --cap-add=SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE] in Kubernetes"


@dataclass(frozen=True)
class Facts:
    """The facts that decide whether we may trace a process. ``yama``: kernel.yama.ptrace_scope, None = off."""

    alive: bool
    same_user: bool
    capable: bool  # this process has CAP_SYS_PTRACE
    yama: int | None
    container: bool
    executable: str = ""


def look(pid: int) -> Facts:
    """The current facts for ``pid``; never raises."""
    status = _text(Path("/proc/self/status"))
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    target = re.search(r"^Uid:\s*\d+\s+(\d+)", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    yama = _text(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
    try:
        executable = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        executable = ""
    return Facts(
        alive=target is not None,
        same_user=target is not None and int(target[1]) == os.geteuid(),
        capable=effective is not None and bool(int(effective[1], 16) & _CAP_SYS_PTRACE),
        yama=int(yama) if yama.isdigit() else None,
        container=Path("/.dockerenv").exists()
        or bool(re.search("docker|kubepods|containerd", _text(Path("/proc/1/cgroup")))),
        executable=executable,
    )


def explain(stderr: str, facts: Facts) -> CaptureError:
    """py-spy's error message as cause, remedy and kind of failure."""
    said = stderr.lower()
    if not facts.alive:
        return CaptureError("the process is gone")
    if "failed to suspend" in said:
        return CaptureError("the process is stopped, or in a state in which it cannot be suspended")
    if any(phrase in said for phrase in _DENIED):
        return _denied(facts)
    if "python version from target" in said or "not a python" in said:
        executable = facts.executable or "executable unknown"
        why = f"this is not a Python process, or its interpreter was stripped ({executable})"
        return CaptureError(why, kind="absent")
    if "unsupported" in said and "version" in said:
        return CaptureError(
            f"this py-spy does not know the target's Python: {summary(stderr)}", "upgrade py-spy", "outdated"
        )
    if "interpreter" in said:
        return CaptureError(f"no Python interpreter found: the process is starting or ending ({summary(stderr)})")
    return CaptureError(summary(stderr) or "py-spy failed without a message")


def summary(stderr: str) -> str:
    """``Error: A / Caused by: 0: B 1: B`` as ``A: B``, without the backtrace."""
    text = re.split(r"^\s*(?:Stack backtrace|note:)", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    parts: list[str] = []
    for line in text.splitlines():
        part = re.sub(r"^\s*(Error:|Caused by:|\d+:)\s*", "", line).strip()
        if part and part not in parts:
            parts.append(part)
    return ": ".join(parts)[:300]


def _denied(facts: Facts) -> CaptureError:
    if not facts.same_user and not facts.capable:
        other = f"with CAP_SYS_PTRACE: {_ADD_CAPABILITY}" if facts.container else "as root"
        fix = f"run safelaunch as that user, or {other}"
        return CaptureError("permission denied: the process runs as another user", fix, "denied")
    by_yama = f"permission denied by Yama (kernel.yama.ptrace_scope={facts.yama})"
    if facts.yama in (1, 2) and not facts.capable:
        fix = f"as root, sysctl kernel.yama.ptrace_scope=0; or grant CAP_SYS_PTRACE: {_ADD_CAPABILITY}"
        return CaptureError(by_yama, fix, "denied")
    if facts.yama == 3:
        fix = "no process may trace another until the next reboot: set it to 1 in /etc/sysctl.d and reboot"
        return CaptureError(by_yama, fix, "denied")
    why = "permission denied: a seccomp filter forbids ptrace, or CAP_SYS_PTRACE is missing"
    return CaptureError(why, _ADD_CAPABILITY, "denied")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
