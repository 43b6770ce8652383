"""What a holder writes about itself into its lock file. It is for people; no decision rests on it."""

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
MOST_BYTES = 16384  # each character of a text may be escaped


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who holds, or waits for, something.

    ``uid`` is the file's owner according to the kernel; the holder wrote the rest. ``by``: ``supervisor``, ``ranks`` if
    the supervisor is gone but the job is not, or ``waiter``. ``pid`` 0 and empty texts: unknown.
    """

    pid: int = 0
    start_ticks: int = 0
    name: str = ""
    command: str = ""
    since_unix_s: float = 0.0
    uid: int = -1
    by: str = "supervisor"

    @property
    def user(self) -> str:
        """The user's name, or number where it has none."""
        return name_of(self.uid)

    def encode(self, **more: object) -> bytes:
        """The contents of the lock file, with ``more`` fields for people who read it."""
        said = {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "name": _printable(self.name)[:64],
            "command": _printable(self.command)[:1000],
            "since_unix_s": round(self.since_unix_s, 3),
        }
        return MAGIC + b"1, " + json.dumps({**said, **more}).encode()[1:] + b"\n"


def decode(data: bytes, uid: int, by: str = "supervisor") -> LeaseHolder:
    """The holder that a file describes, whoever wrote it. Unexpected contents give no pid and no texts."""
    from safelaunch.leases.format import HolderRecord, read

    words = read(data, HolderRecord)
    return LeaseHolder(uid=uid, by=by) if words is None else of_words(words, uid, by)


def of_words(said: HolderRecord, uid: int, by: str) -> LeaseHolder:
    """The holder described by checked words in a file of user ``uid``."""
    return LeaseHolder(
        said.pid, said.start_ticks, _printable(said.name), _printable(said.command), said.since_unix_s, uid, by
    )


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def ourselves(name: str, command: str) -> LeaseHolder:
    """This process as a holder, as of now."""
    pid = os.getpid()
    found = procstat.read(pid)
    return LeaseHolder(pid, found.start_ticks if found else 0, name, command, time.time(), os.getuid())


def since_now(holder: LeaseHolder) -> LeaseHolder:
    """``holder``, as of now."""
    return replace(holder, since_unix_s=time.time())


# --- in words ---------------------------------------------------------------------------------------------------------


def told(holder: LeaseHolder) -> str:
    """``leased by pid 4711 (alice) since 12:03:09: train.py``."""
    if holder.by == "waiter":
        return f"next for {described(holder)}"
    if holder.by == "ranks":
        return f"still held by ranks of a run whose supervisor is gone, {described(holder)}"
    return f"leased by {described(holder)}"


def described(holder: LeaseHolder) -> str:
    pid = f"pid {holder.pid} " if holder.pid else ""
    verb = "waiting since" if holder.by == "waiter" else "since"
    command = f": {holder.command[:80]}" if holder.command else ""
    return f"{pid}({holder.user}) {verb} {moment(holder.since_unix_s)}{command}"


def moment(unix_s: float) -> str:
    """The local time, with the date if it is not today."""
    if not unix_s:
        return "?"
    then, now = time.localtime(unix_s), time.localtime()
    same_day = (then.tm_year, then.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)


# --- What /proc shows about the processes on a GPU: their user, start time, and whether their run has ended -----------


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
    found = re.search(r"^btime (\d+)", text_of("/proc/stat"), re.MULTILINE)
    return float(found[1]) if found else 0.0


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
