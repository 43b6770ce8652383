"""Attacks by another user on a shared directory. A process of that user makes them if the tests run as root."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STRANGER = 65533 if os.getuid() == 0 else os.getuid()
MINE = os.getuid()
_FLOCK = struct.Struct("hhqqi4x")


def passable(directory: Path) -> None:
    """Opens a directory that was private to this user, so that other users can reach it."""
    for parent in (directory, *directory.parents):
        info = parent.stat()
        if info.st_uid == 0 and os.getuid() == 0 and stat.S_IMODE(info.st_mode) & 0o011 != 0o011:
            parent.chmod(stat.S_IMODE(info.st_mode) | 0o055)


@contextmanager
def open_place() -> Iterator[Path]:
    """Creates a directory that other users can reach. Not pytest's: each new session makes those private."""
    place = Path(tempfile.mkdtemp(prefix="sl-strangers-", dir="/tmp"))
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place)


@contextmanager
def stranger(deed: Callable[[], object], *, again: Callable[[], object] | None = None) -> Iterator[int]:
    """Runs a process of another user that calls ``deed``, keeps its result, and repeats ``again``."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ready[0]), os.close(go[1])
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(STRANGER, STRANGER, STRANGER)
                os.setresuid(STRANGER, STRANGER, STRANGER)
            os.umask(0)
            kept = deed()
            os.write(ready[1], b"!")
            os.set_blocking(go[0], again is None)
            while _waits(go[0]):
                with suppress(OSError):
                    again and again()  # type: ignore[func-returns-value]
            del kept
        except BaseException as error:
            os.write(2, f"the stranger: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(ready[1]), os.close(go[0])
    try:
        assert os.read(ready[0], 1) == b"!", "the stranger failed"
        yield pid
    finally:
        os.close(ready[0]), os.close(go[1])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _waits(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return True


def locked(path: Path, content: bytes = b"", mode: int = 0o644) -> int:
    """Locks a file in every possible way. The returned descriptor holds the locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    os.pwrite(fd, content, 0)
    for lock in (
        lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        lambda: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0)),
    ):
        with suppress(OSError):
            lock()
    return fd


def lock_for_reading(path: Path) -> list[int]:
    """Takes every lock that works on a file with read permission only: exclusive flock, fcntl and open-file locks."""
    found = []
    for kind in ("flock", "fcntl", "open file"):
        fd = os.open(path, os.O_RDONLY)
        found.append(fd)
        with suppress(OSError):
            if kind == "flock":
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                command = fcntl.F_SETLK if kind == "fcntl" else fcntl.F_OFD_SETLK
                fcntl.fcntl(fd, command, _FLOCK.pack(fcntl.F_RDLCK, 0, 0, 0, 0))
    return found


# --- what he writes ---------------------------------------------------------------------------------------------------

NASTY_NUMBERS: tuple[object, ...] = (
    -1, 2**31, 2**63, 2**64, 10**400, 1e300, 0.5, float("inf"), float("-inf"), float("nan"), True, None, "7", [], {},
)  # fmt: skip
NASTY_TEXTS: tuple[object, ...] = (
    "x" * 100_000, "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\u202egnp", "\ud800", "\0", "a\nsafelaunch: b\rc", 7, None,
    [], {},
)  # fmt: skip
RAW: tuple[bytes, ...] = (
    b"", b"\0" * 4096, b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"{}", b"[]", b"null", b"NaN", b"Infinity",
    b"1" * 5000, b'{"pid": 1, "pid": 2}', b'"' + b"\\u0000" * 5000 + b'"',
)  # fmt: skip


def words(pid: int = 1, **more: object) -> dict[str, object]:
    """Returns the text of a valid ticket."""
    said = {"pid": pid, "start_ticks": 1, "name": "n", "command": "theirs.py", "since_unix_s": time.time()}
    return {"safelaunch": 1, **said, "candidates": ["GPU-aaaa", "GPU-bbbb"], "count": 1, **more}


def contents() -> Mapping[str, bytes]:
    """Returns contents of another user's file: each field invalid in each way, and texts that are no records."""
    found = {f"raw {number}": raw for number, raw in enumerate(RAW)}
    for field in ("pid", "start_ticks", "since_unix_s", "count"):
        for number, value in enumerate(NASTY_NUMBERS):
            found[f"{field} {number}"] = encoded({**words(), field: value})
    for field in ("name", "command"):
        for number, value in enumerate(NASTY_TEXTS):
            found[f"{field} {number}"] = encoded({**words(), field: value})
    for number, value in enumerate((*NASTY_TEXTS, [[]], [7], ["x" * 10_000], ["x"] * 100_000, {"GPU-aaaa": 1})):
        found[f"candidates {number}"] = encoded({**words(), "candidates": value})
    for field in words():
        found[f"without {field}"] = encoded({key: value for key, value in words().items() if key != field})
    return found


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


FIRST = "ticket.00000000000000000001."
NAMES = (
    f"{FIRST}1", f"{FIRST}²", f"{FIRST}-1", f"{FIRST}1\n", FIRST + "9" * 30, "ticket.٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠١.1",
    "ticket.", "ticket.1", "ticket." + "x" * 200, "ticket.\n.\x1b[31m", "GPU-aaaa", "GPU-aaaa.", "GPU-aaaa.²",
    "GPU-aaaa.-1", "GPU-aaaa.0\n.ranks", "GPU-aaaa." + "9" * 200, "GPU-aaaa.0.ranks.ranks", f"GPU-aaaa.{MINE}-7",
    f"GPU-aaaa.{MINE}-1.ranks",
)  # fmt: skip
UNDECODABLE = (b"ticket.\xff\xfe", b"GPU-aaaa.\xff", b"GPU-aaaa.\xed\xa0\x80.ranks")


def things() -> Mapping[str, Callable[[Path], object]]:
    """Returns what another user can create at a name, besides a file with text."""

    def sparse(path: Path) -> int:
        fd = locked(path)
        os.truncate(fd, 1 << 42)
        return fd

    def listening(path: Path) -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        here = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        one.listen(1)
        return one

    return {
        "a FIFO": os.mkfifo,
        "a directory": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to a file of ours": lambda path: path.symlink_to(path.parent.parent / "precious"),
        "a dangling link": lambda path: path.symlink_to(path.parent.parent / "new"),
        "a socket": listening,
        "a sparse file": sparse,
        "a file without read permission": lambda path: locked(path, mode=0),
        "a world-writable file": lambda path: locked(path, mode=0o666),
        "an empty file": lambda path: locked(path),
    }


def drawn(chance: random.Random) -> tuple[str, bytes]:
    """Draws a random name and content."""
    text = chance.choice(list(contents().values()))
    if chance.random() < 0.3 and text:
        damaged = bytearray(text[:4000])
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        text = bytes(damaged)
    name = chance.choice(NAMES)
    if chance.random() < 0.5:
        kind = chance.choice(["ticket.", "GPU-aaaa.", "port-20000."])
        name = f"{kind}{chance.randrange(10**20):020d}.{chance.choice('1²٣x')}"
    return name, text
