"""Reads NCCL's warnings from the log files that ``NCCL_DEBUG_FILE`` names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safelaunch.model import NcclLog

MAX_BYTES = 4 << 20  # per file: half at its beginning, half at its end
MAX_WARNINGS = 32
MAX_CHARACTERS = 500

# ``[2025-06-01 12:00:00] host:pid:tid [gpu] file.cc:41 NCCL WARN text``; older versions have neither time nor file.
_WARNING = re.compile(
    r"^(?:\[[^\]\n]{8,40}\] )?(?P<host>[^\s:]+):(?P<pid>\d+)(?::\d+)? \[-?\d+\] (?:\S+:\d+ )?NCCL WARN (?P<text>.+)$",
    re.MULTILINE,
)


def path_of(pattern: str, host: str, pid: int) -> Path:
    """Returns a process's log file.

    NCCL replaces ``%h`` with the host name up to its first dot, and ``%p`` with the pid.
    """
    values = {"%h": host.partition(".")[0], "%p": str(pid), "%%": "%"}
    return Path(re.sub("%[hp%]", lambda match: values[match[0]], pattern))


def warnings_in(text: str) -> dict[int, tuple[str, ...]]:
    """Maps each pid to its distinct warnings in order. If there are many, only the first and last ones are included."""
    by_pid: dict[int, dict[str, None]] = {}
    for match in _WARNING.finditer(text):
        by_pid.setdefault(int(match["pid"]), {})[match["text"].strip()[:MAX_CHARACTERS]] = None
    return {pid: _ends(tuple(texts)) for pid, texts in by_pid.items()}


def _ends(texts: tuple[str, ...]) -> tuple[str, ...]:
    half = MAX_WARNINGS // 2
    return texts if len(texts) <= MAX_WARNINGS else (*texts[:half], *texts[-half:])


def logs_of(paths: Iterable[Path], folder: str, pids: Sequence[int]) -> Mapping[int, NcclLog]:
    """Maps each of ``pids`` to its log. ``folder`` is the logs' folder in the bundle. Skips unreadable files."""
    logs: dict[int, NcclLog] = {}
    for path in paths:
        for pid, warnings in warnings_in(_read(path)).items():
            if pid in pids:
                logs[pid] = NcclLog(f"{folder}/{path.name}", warnings)
    return logs


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                return ""
            data = file.read(MAX_BYTES // 2)
            if info.st_size > MAX_BYTES:
                file.seek(info.st_size - MAX_BYTES // 2)
            return (data + file.read(MAX_BYTES // 2)).decode("utf-8", "replace")
    except OSError:
        return ""
