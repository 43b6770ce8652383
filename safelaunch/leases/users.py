"""What /proc shows about the processes on a GPU: their user, start time, and whether their run has ended."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from safelaunch.system import procstat


@dataclass(frozen=True, slots=True)
class User:
    """A process on a GPU. Empty fields: not visible from here. ``left_over``: its run has ended."""

    pid: int
    user: str = ""
    command: str = ""
    since_unix_s: float = 0.0
    left_over: bool = False


def look(pid: int) -> User:
    """What /proc shows about a process; nothing if it is gone or in another pid namespace."""
    found = procstat.read(pid)
    if found is None:
        return User(pid)
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return User(pid)
    command = "".join(c if c.isprintable() else " " for c in words) or f"[{found.name}]"
    since_s = _boot_unix_s() + found.start_ticks / os.sysconf("SC_CLK_TCK")
    return User(pid, name_of(owner), command, since_s, _is_left_over(found))


def name_of(uid: int) -> str:
    """The user's name, or number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _boot_unix_s() -> float:
    try:
        with open("/proc/stat", encoding="ascii", errors="replace") as file:
            line = next(line for line in file if line.startswith("btime "))
        return float(line.split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        return 0.0


def _is_left_over(process: procstat.Stat) -> bool:
    """Whether the process belongs to a run whose supervisor is gone. False for other users' processes, which hide it,
    and for another pid namespace, where the supervisor's pid means another process.
    """
    try:
        if os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return False
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    prefix = b"SAFELAUNCH_SUPERVISOR_PID="
    number = next((item[len(prefix) :] for item in variables if item.startswith(prefix)), b"")
    if not re.fullmatch(rb"[0-9]{1,10}", number):
        return False
    there = procstat.read(int(number))
    # A supervisor is older than the processes it starts; a younger process only has its old pid.
    return there is None or there.state in "ZX" or there.start_ticks > process.start_ticks
