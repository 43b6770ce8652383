"""Explains why a process can't be traced.

py-spy's messages name the failed system call, but rarely the cause: in a container without CAP_SYS_PTRACE, it prints
``Failed to get process executable name. Check that the process is running``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of, text_of

_CAP_SYS_PTRACE = 1 << 19
_DENIED = ("permission denied", "os error 13", "operation not permitted", "os error 1)", "eperm")
_ADD_CAPABILITY = "docker run --cap-add=SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE] in Kubernetes"


@dataclass(frozen=True)
class PtraceFacts:
    """Facts that determine whether this process is allowed to trace another."""

    alive: bool
    same_user: bool
    capable: bool  # this process has CAP_SYS_PTRACE
    yama: int | None  # kernel.yama.ptrace_scope; None if off
    container: bool
    executable: str = ""


def tracing_facts(pid: int) -> PtraceFacts:
    status = text_of(Path("/proc/self/status"))
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    target = re.search(r"^Uid:\s*\d+\s+(\d+)", text_of(Path(f"/proc/{pid}/status")), re.MULTILINE)
    yama = text_of(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
    return PtraceFacts(
        alive=target is not None,
        same_user=target is not None and int(target[1]) == os.geteuid(),
        capable=effective is not None and bool(int(effective[1], 16) & _CAP_SYS_PTRACE),
        yama=int(yama) if yama.isdigit() else None,
        container=Path("/.dockerenv").exists()
        or bool(re.search("docker|kubepods|containerd", text_of(Path("/proc/1/cgroup")))),
        executable=Path(link_of(f"/proc/{pid}/exe")).name,
    )


def explain(stderr: str, facts: PtraceFacts) -> CaptureError:
    message = stderr.lower()
    if not facts.alive:
        return CaptureError("the process is gone")
    if "failed to suspend" in message:
        return CaptureError("the process is stopped, or in a state in which it can't be suspended")
    if any(phrase in message for phrase in _DENIED):
        return _denied(facts)
    if "python version from target" in message or "not a python" in message:
        executable = facts.executable or "executable unknown"
        why = f"not a Python process, or its interpreter was stripped ({executable})"
        return CaptureError(why, kind="absent")
    if "unsupported" in message and "version" in message:
        return CaptureError(
            f"this py-spy doesn't support the target's Python: {summary(stderr)}", "upgrade py-spy", "outdated"
        )
    if "interpreter" in message:
        return CaptureError(f"no Python interpreter found: the process is starting or ending ({summary(stderr)})")
    return CaptureError(summary(stderr) or "py-spy failed without a message")


def may_read(pid: int) -> bool:
    """True if this process has the right to open the memory of ``pid``, which is the right to trace it."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # it has ended
    return True


def summary(stderr: str) -> str:
    """Shortens ``Error: A / Caused by: 0: B 1: B`` to ``A: B``, without the backtrace."""
    text = re.split(r"^\s*(?:Stack backtrace|note:)", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    parts: list[str] = []
    for line in text.splitlines():
        part = re.sub(r"^\s*(Error:|Caused by:|\d+:)\s*", "", line).strip()
        if part and part not in parts:
            parts.append(part)
    return ": ".join(parts)[:300]


def _denied(facts: PtraceFacts) -> CaptureError:
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
