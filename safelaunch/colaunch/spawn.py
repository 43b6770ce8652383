"""One job's safelaunch: started so that it is known before it runs, and so that it does not outlive us unseen.

- The child waits for our word, which comes when the journal knows it; when we are killed first, it ends.
- It asks the kernel for a SIGTERM at our death (PR_SET_PDEATHSIG), which it passes on to its job: ``kill -9`` of
  colaunch ends the jobs as a scheduler would.
- It leaves its exit code in a file as well: when we are killed while it ends, that it has succeeded is not forgotten.
- Its log is locked (flock). The lock belongs to the open file, which every process of the job has as its stdout: while
  any of them lives, it is held, and whoever wants to run the same attempt again can tell.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safelaunch.launch.process import ProcessId, fork

PR_SET_PDEATHSIG = 1
EXIT_FILE = "SAFELAUNCH_EXIT_FILE"

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, where. ``log`` takes all of its output; ``cores``: its CPU affinity, empty to leave it.

    ``exit_file``: where safelaunch is to leave its exit code. ``keep``: descriptors that it is to have as well.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: Path
    cores: Collection[int] = ()
    exit_file: Path | None = None
    keep: Collection[int] = ()


def start(command: Command, tell: Callable[[ProcessId], None]) -> ProcessId:
    """Starts it in a session of its own. ``tell`` is told of the process before it runs; what it raises ends it.

    Raises OSError when it cannot be started. To be called from the main thread: the kernel takes the end of the thread
    that forked for ours.
    """
    # Appended to, never cut: were the attempt there already, nothing of it would be lost.
    log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        parent = os.getpid()
        return fork(lambda: _become(command, log, parent), tell)
    finally:
        os.close(log)


def _become(command: Command, log: int, parent: int) -> NoReturn:
    """In the forked child."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)  # it was killed before
    os.setsid()
    os.chdir(command.cwd)
    if command.cores:
        os.sched_setaffinity(0, command.cores)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in command.keep:
        os.set_inheritable(descriptor, True)
    env = dict(command.env)
    if command.exit_file is not None:
        env[EXIT_FILE] = f"{os.getpid()}:{command.exit_file}"
    os.execve(command.argv[0], list(command.argv), env)


def exit_code_in(exit_file: Path) -> int | None:
    """What safelaunch left there; None where it was ended before it could."""
    try:
        text = exit_file.read_text("ascii")
        return int(text) if text.endswith("\n") else None
    except (OSError, ValueError):
        return None


def is_held(log: Path) -> bool:
    """Whether a process of the attempt that wrote ``log`` still lives."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
