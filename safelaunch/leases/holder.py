"""What a holder tells of itself in its lock file: for people to read, never a reason to decide anything."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace

from safelaunch import procstat
from safelaunch.leases.users import name_of

MAGIC = b'{"safelaunch": '
MOST_BYTES = 4096
_COMMAND_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or waits for, something.

    ``uid`` is the file's owner, as the kernel has it; the rest is what the holder wrote. ``by``: ``supervisor``, or
    ``ranks`` where that is gone and the job is not, or ``waiter``. ``pid`` 0 and empty texts: it did not say.
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

    def encode(self) -> bytes:
        """As it is written down, with a few fields more that a person who reads the file will want."""
        command = self.command[:_COMMAND_CHARACTERS]
        fields = [self.pid, self.start_ticks, self.name[:64], command, round(self.since_unix_s, 3)]
        text = json.dumps(dict(zip(_FIELDS, fields, strict=True)))
        return MAGIC + b"1, " + text.encode("utf-8", "backslashreplace")[1:] + b"\n"

    def is_alive(self) -> bool:
        """Whether the process that wrote this still runs, as far as can be seen from here."""
        found = procstat.read(self.pid) if self.pid > 0 else None
        return found is not None and found.start_ticks == self.start_ticks


_FIELDS = ("pid", "start_ticks", "name", "command", "since_unix_s")


def decode(data: bytes, uid: int, by: str = "supervisor") -> Holder:
    """What a file says, whoever wrote it; anything but the expected is passed over."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return Holder(uid=uid, by=by)

    def number(key: str) -> float:
        value = said.get(key)
        return value if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0  # 1e12 s: nobody's time

    def text(key: str) -> str:
        value = said.get(key)
        return "".join(c if c.isprintable() else " " for c in value) if isinstance(value, str) else ""

    return Holder(
        int(number("pid")),
        int(number("start_ticks")),
        text("name"),
        text("command"),
        float(number("since_unix_s")),
        uid,
        by,
    )


def ourselves(name: str, command: str) -> Holder:
    """This process as a holder, from now on."""
    pid = os.getpid()
    found = procstat.read(pid)
    return Holder(pid, found.start_ticks if found else 0, name, command, time.time(), os.getuid())


def since_now(holder: Holder) -> Holder:
    """The same, as of now."""
    return replace(holder, since_unix_s=time.time())
