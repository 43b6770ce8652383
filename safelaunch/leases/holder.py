"""Describes a lease's holder in the lock file. The description is for people: no decision depends on it."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safelaunch.system import procstat
from safelaunch.system.files import text_of

if TYPE_CHECKING:
    from safelaunch.leases.format import HolderRecord

MAGIC = b'{"safelaunch": '
MOST_BYTES = 16384  # even if each character is escaped


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Process that has a lease or waits for one. ``pid`` is 0 and texts are empty if unknown."""

    pid: int = 0
    start_ticks: int = 0
    name: str = ""
    command: str = ""
    since_unix_s: float = 0.0
    uid: int = -1  # owner of the file; the holder wrote the rest
    by: str = "supervisor"  # or ``waiter``, or ``ranks`` after their supervisor's end

    @property
    def user(self) -> str:
        return name_of(self.uid)

    def encode(self, **more: object) -> bytes:
        """Returns the content of the lock file. The additional fields ``more`` are only for people."""
        record = {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "name": _printable(self.name)[:64],
            "command": _printable(self.command)[:1000],
            "since_unix_s": round(self.since_unix_s, 3),
        }
        return MAGIC + b"1, " + json.dumps({**record, **more}).encode()[1:] + b"\n"


def decode(data: bytes, uid: int, by: str = "supervisor") -> LeaseHolder:
    """Decodes the holder from a file that user ``uid`` owns; if it is unreadable, only the user is known."""
    from safelaunch.leases.format import HolderRecord, read

    words = read(data, HolderRecord)
    return LeaseHolder(uid=uid, by=by) if words is None else of_record(words, uid, by)


def of_record(record: HolderRecord, uid: int, by: str) -> LeaseHolder:
    name, command = _printable(record.name), _printable(record.command)
    return LeaseHolder(record.pid, record.start_ticks, name, command, record.since_unix_s, uid, by)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def ourselves(name: str, command: str) -> LeaseHolder:
    pid = os.getpid()
    stat = procstat.read(pid)
    return LeaseHolder(pid, stat.start_ticks if stat else 0, name, command, time.time(), os.getuid())


def since_now(holder: LeaseHolder) -> LeaseHolder:
    return replace(holder, since_unix_s=time.time())


# --- messages ---------------------------------------------------------------------------------------------------------


def lease_words(holder: LeaseHolder) -> str:
    """Describes a lease: ``leased by pid 4711 (alice) since 12:03:09: train.py``."""
    if holder.by == "waiter":
        return f"next for {holder_words(holder)}"
    if holder.by == "ranks":
        return f"still held by ranks of a run whose supervisor is gone, {holder_words(holder)}"
    return f"leased by {holder_words(holder)}"


def holder_words(holder: LeaseHolder) -> str:
    pid = f"pid {holder.pid} " if holder.pid else ""
    verb = "waiting since" if holder.by == "waiter" else "since"
    command = f": {holder.command[:80]}" if holder.command else ""
    return f"{pid}({holder.user}) {verb} {moment(holder.since_unix_s)}{command}"


def moment(unix_s: float) -> str:
    """Formats the local time, with the date unless it is today."""
    if not unix_s:
        return "?"
    then, now = time.localtime(unix_s), time.localtime()
    same_day = (then.tm_year, then.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)


# --- processes on a GPU, as /proc shows them --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class User:
    """A process that uses a GPU. Empty fields are unknown."""

    pid: int
    user: str = ""
    command: str = ""
    since_unix_s: float = 0.0
    left_over: bool = False


def look(pid: int) -> User:
    """Describes a process from /proc. If it is gone or in another pid namespace, only its pid is known."""
    stat = procstat.read(pid)
    if stat is None:
        return User(pid)
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return User(pid)
    command = "".join(c if c.isprintable() else " " for c in words) or f"[{stat.name}]"
    since_s = _boot_unix_s() + stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return User(pid, name_of(owner), command, since_s, _is_left_over(stat))


def name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _boot_unix_s() -> float:
    match = re.search(r"^btime (\d+)", text_of("/proc/stat"), re.MULTILINE)
    return float(match[1]) if match else 0.0


def _is_left_over(process: procstat.Stat) -> bool:
    """Returns whether the process belongs to a run whose supervisor is gone.

    Returns False for other users' processes, because their environment is hidden, and for other pid namespaces, because
    their pids mean other processes here.
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
    supervisor = procstat.read(int(number))
    # A younger process with the supervisor's pid isn't the supervisor.
    return supervisor is None or supervisor.state in "ZX" or supervisor.start_ticks > process.start_ticks
