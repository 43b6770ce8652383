"""Writes the files that a process of the job shares with the supervisor: its progress page, mapped files and notes.

A mapped file is allocated first, because a store to a hole in a file on a full tmpfs would kill the rank with SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from time import monotonic_ns, sleep

from . import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def note(path: str, value: Any) -> None:
    """Writes a file atomically. Any value except bytes is converted to JSON."""
    with open(path + layout.PARTIAL, "wb", opener=private) as out:
        out.write(value if isinstance(value, bytes) else as_json(value).encode())
    os.rename(path + layout.PARTIAL, path)


def append(path: str, data: bytes) -> None:
    """Appends ``data`` in one operation, so that other processes' data doesn't get mixed into it."""
    fd = private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def as_json(value: Any) -> str:
    """Converts to JSON without the json module, because that is slow to import and the script can shadow it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(str(key))}:{as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_json, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, (int, float)) else _quoted(str(value))


_ESCAPED = {number: f"\\u{number:04x}" for number in (*range(32), *b'"\\')}


def _quoted(text: str) -> str:
    return f'"{text.encode("utf-8", "replace").decode().translate(_ESCAPED)}"'


def out_of_the_way(descriptor: int) -> int:
    """Moves the descriptor to a high number, because scripts close and reopen low numbers. Returns the new number."""
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 240)
    except OSError:
        return descriptor  # the limit on descriptors is low
    os.close(descriptor)
    return high


def mapped(path: str, size: int, how: int = os.O_CREAT | os.O_EXCL) -> mmap.mmap:
    """Returns a new mapped file of ``size`` bytes. Raises OSError, for example if the file exists."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def start_ticks(pid: int | str = "self") -> int:
    """Returns a process's start time in clock ticks since boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def create(path: str) -> tuple[mmap.mmap, memoryview]:
    """Creates and maps a page of ``layout.WORDS`` words at ``path``. Returns ``(mmap, view of 64-bit words)``.

    If the page exists, this process claimed it before it called ``exec``. Then the page is cleared in place, because
    the supervisor might have mapped it, and the old program's files are removed.
    """
    try:
        memory = mapped(path, layout.SIZE)
    except FileExistsError:
        _remove_companions(path)
        memory = mapped(path, layout.SIZE, how=0)
        memory[2 * 8 :] = bytes(layout.SIZE - 2 * 8)  # READY and PID stay: without them the page counts as damaged
    words = memoryview(memory).cast("Q")
    words[layout.PID] = os.getpid()
    words[layout.START_TICKS] = start_ticks()
    words[layout.CLAIMED_NS] = monotonic_ns()
    return memory, words


def _remove_companions(path: str) -> None:
    directory, name = os.path.split(path)
    for other in os.listdir(directory):
        if other.startswith(name + "."):
            os.unlink(os.path.join(directory, other))


def keep(mapping: object) -> None:
    """Keeps ``mapping`` alive until the interpreter ends, so that it outlives the script's modules and files.

    Before Python 3.13, a mapping closes its descriptor by number when it is freed. A script that closes descriptors it
    didn't open, as daemons do, might have reused that number for a file.
    """
    os.register_at_fork(after_in_child=lambda kept=mapping: None)


def wait_for_answers(words: memoryview) -> bool:
    """Waits at exit for the handlers that the supervisor called, at most ``LAST_ANSWER_S``. Returns whether all ended.

    If a thread requests the GIL after the interpreter is gone, the process aborts. No new request can arrive: the
    supervisor announces a request before it checks that the rank isn't exiting. The time is measured by counting
    sleeps, because on an overloaded machine the handler waits for a core as long as this thread does.
    """
    sleep(0.001)  # let both sides' stores arrive
    for _ in range(int(layout.LAST_ANSWER_S / 0.005)):
        if words[layout.ANSWERED] >= words[layout.ASKED]:
            return True
        sleep(0.005)
    return words[layout.ANSWERED] >= words[layout.ASKED]


def wait_for_ack(words: memoryview, supervisor_pid: int, hold_s: float = layout.HOLD_S) -> None:
    """Waits, while the supervisor is alive, until it has sampled this rank's peers, but at most ``hold_s`` seconds."""
    deadline = monotonic_ns() + int(hold_s * 1e9)
    while not words[layout.ACK] and monotonic_ns() < deadline:
        try:
            os.kill(supervisor_pid, 0)
        except OSError:
            return
        sleep(0.01)
