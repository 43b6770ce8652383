"""Creating and writing a progress page from inside a rank or the agent."""

from __future__ import annotations

import mmap
import os
from time import monotonic_ns, sleep

from . import layout

PR_SET_PDEATHSIG = 1


def start_ticks(pid: int | str = "self") -> int:
    """A process's start time in clock ticks since boot: field 22 of /proc/<pid>/stat."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def create(path: str) -> tuple[mmap.mmap, memoryview]:
    """Maps a new page of ``layout.WORDS`` words at ``path``; returns ``(mmap, view of 64-bit words)``.

    The blocks are allocated before they are mapped: storing into a hole of a full tmpfs would end the rank by SIGBUS.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, layout.SIZE)
        mapped = mmap.mmap(fd, layout.SIZE)
    finally:
        os.close(fd)
    words = memoryview(mapped).cast("Q")
    words[layout.PID] = os.getpid()
    words[layout.START_TICKS] = start_ticks()
    words[layout.CLAIMED_NS] = monotonic_ns()
    return mapped, words


def keep(mapping: object) -> None:
    """Holds ``mapping`` until the interpreter itself goes, after the script's modules and files.

    Before Python 3.13 a mapping has a descriptor of its own and closes it by number when it goes. A script that closes
    what it did not open, as daemons do, may have that number in use for a file by then.
    """
    os.register_at_fork(after_in_child=lambda kept=mapping: None)


def die_with_parent(parent: int, signum: int) -> None:
    """Has the kernel send ``signum`` when ``parent`` dies, where that is our parent still. Main thread only.

    The guardian ends a job whose supervisor was killed; this helps when the guardian was killed, too.
    """
    if os.getppid() != parent:
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signum)


def wait_for_answers(words: memoryview) -> bool:
    """At exit: lets a handler that the supervisor has asked finish, ``LAST_ANSWER_S`` seconds at most; says if it did.

    A thread that wants the GIL when the interpreter is gone aborts the process. From here on the supervisor asks
    nothing more: it looks at the state after it has announced its question.
    """
    deadline = monotonic_ns() + int(layout.LAST_ANSWER_S * 1e9)
    while words[layout.ASKING] and monotonic_ns() < deadline:
        sleep(0.005)
    return not words[layout.ASKING]


def wait_for_ack(words: memoryview, supervisor_pid: int) -> None:
    """Waits until the supervisor has looked at the peers, at most ``layout.HOLD_S`` and only while it lives."""
    deadline = monotonic_ns() + int(layout.HOLD_S * 1e9)
    while not words[layout.ACK] and monotonic_ns() < deadline:
        try:
            os.kill(supervisor_pid, 0)
        except OSError:
            return
        sleep(0.01)
