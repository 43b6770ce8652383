"""Creates a progress page inside a rank or the agent, and waits for the words that the supervisor writes to it."""

from __future__ import annotations

import mmap
import os
from time import monotonic_ns, sleep

from . import layout


def start_ticks(pid: int | str = "self") -> int:
    """Returns a process's start time in clock ticks since boot: field 22 of /proc/<pid>/stat."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def create(path: str) -> tuple[mmap.mmap, memoryview]:
    """Creates and maps a page of ``layout.WORDS`` words at ``path``. Returns ``(mmap, view of 64-bit words)``.

    It allocates the blocks before mapping them: a store to a hole of a full tmpfs would kill the rank by SIGBUS. If the
    page exists, this process claimed it before ``exec``: the new program begins the page, which the supervisor may have
    mapped, anew, and finds none of the old one's files.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    again = False
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = os.open(path, flags)
        again = True
        _remove_companions(path)
    try:
        os.posix_fallocate(fd, 0, layout.SIZE)
        mapped = mmap.mmap(fd, layout.SIZE)
    finally:
        os.close(fd)
    words = memoryview(mapped).cast("Q")
    if again:  # READY and PID stay: without them the supervisor takes the page for a damaged one
        mapped[2 * 8 :] = bytes(layout.SIZE - 2 * 8)
    words[layout.PID] = os.getpid()
    words[layout.START_TICKS] = start_ticks()
    words[layout.CLAIMED_NS] = monotonic_ns()
    return mapped, words


def _remove_companions(path: str) -> None:
    directory, name = os.path.split(path)
    for other in os.listdir(directory):
        if other.startswith(name + "."):
            os.unlink(os.path.join(directory, other))


def keep(mapping: object) -> None:
    """Keeps ``mapping`` alive until the interpreter itself ends, after the script's modules and files.

    Before Python 3.13, a mapping owns a descriptor and closes it by number when it is freed. A script that closes
    descriptors it did not open, as daemons do, may have reused that number for a file.
    """
    os.register_at_fork(after_in_child=lambda kept=mapping: None)


def wait_for_answers(words: memoryview) -> bool:
    """Waits at exit for the handlers that the supervisor called, at most ``LAST_ANSWER_S``. Returns whether all ended.

    A thread that requests the GIL after the interpreter is gone aborts the process. No new question can arrive during
    the wait: the supervisor announces each question first, then checks that the rank is not exiting.

    Its own sleeps are the clock: on a starved machine the handler waits for a core as long as this thread does.
    """
    sleep(0.001)  # both sides write, then read the other's word: let the stores arrive
    for _ in range(int(layout.LAST_ANSWER_S / 0.005)):
        if words[layout.ANSWERED] >= words[layout.ASKED]:
            return True
        sleep(0.005)
    return words[layout.ANSWERED] >= words[layout.ASKED]


def wait_for_ack(words: memoryview, supervisor_pid: int, hold_s: float = layout.HOLD_S) -> None:
    """Waits until the supervisor has looked at the peers: at most ``hold_s``, and only while it is alive."""
    deadline = monotonic_ns() + int(hold_s * 1e9)
    while not words[layout.ACK] and monotonic_ns() < deadline:
        try:
            os.kill(supervisor_pid, 0)
        except OSError:
            return
        sleep(0.01)
