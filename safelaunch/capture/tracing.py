"""Why a process could not be traced, in words that lead to a remedy.

py-spy's own messages name the system call that failed, seldom the cause: a container without CAP_SYS_PTRACE
reads ``Failed to get process executable name. Check that the process is running``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CAP_SYS_PTRACE = 1 << 19
_DENIED = ("permission denied", "os error 13", "operation not permitted", "os error 1)", "eperm")
_ADD_CAPABILITY = "docker run --cap-add=SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE] in Kubernetes"


@dataclass(frozen=True)
class Facts:
    """What decides whether we may trace a process. ``yama``: kernel.yama.ptrace_scope, None = off."""

    alive: bool
    same_user: bool
    capable: bool  # this process has CAP_SYS_PTRACE
    yama: int | None
    container: bool
    executable: str = ""


def look(pid: int) -> Facts:
    """The facts for ``pid`` as of now; never raises."""
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


def explain(stderr: str, facts: Facts) -> str:
    """py-spy's complaint as cause and remedy."""
    said = stderr.lower()
    if not facts.alive:
        return "the process is gone"
    if "failed to suspend" in said:
        return "the process is stopped or in a state in which it cannot be suspended"
    if any(phrase in said for phrase in _DENIED):
        return _denied(facts)
    if "python version from target" in said or "not a python" in said:
        return f"not a Python process, or one that was stripped ({facts.executable or 'executable unknown'})"
    if "unsupported" in said and "version" in said:
        return f"this py-spy does not know the target's Python ({summary(stderr)}); upgrade py-spy"
    if "interpreter" in said:
        return f"no Python interpreter found in it: still starting or already ending ({summary(stderr)})"
    return summary(stderr) or "it failed without a message"


def summary(stderr: str) -> str:
    """``Error: A / Caused by: 0: B 1: B`` as ``A: B``, without the backtrace."""
    text = re.split(r"^\s*(?:Stack backtrace|note:)", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    parts: list[str] = []
    for line in text.splitlines():
        part = re.sub(r"^\s*(Error:|Caused by:|\d+:)\s*", "", line).strip()
        if part and part not in parts:
            parts.append(part)
    return ": ".join(parts)[:300]


def _denied(facts: Facts) -> str:
    if not facts.same_user and not facts.capable:
        return "permission denied: it runs as another user; run safelaunch as that user" + (
            f", or with CAP_SYS_PTRACE ({_ADD_CAPABILITY})" if facts.container else ", or as root"
        )
    if facts.yama in (1, 2) and not facts.capable:
        return (
            f"permission denied by Yama (kernel.yama.ptrace_scope={facts.yama}): "
            f"sysctl kernel.yama.ptrace_scope=0 as root, or CAP_SYS_PTRACE ({_ADD_CAPABILITY})"
        )
    if facts.yama == 3:
        return "permission denied by Yama (kernel.yama.ptrace_scope=3): nobody may trace until the next reboot"
    return f"permission denied: no ptrace here (seccomp, or CAP_SYS_PTRACE missing): {_ADD_CAPABILITY}"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
