"""Starts a job's safelaunch so that it is recorded before it runs, and can't outlive colaunch unnoticed.

- The child waits until the journal contains it and it is released. If colaunch is killed before that, it exits.
- The kernel sends the child SIGTERM when colaunch dies (PR_SET_PDEATHSIG), and the child forwards it to its job. So
  ``kill -9`` of colaunch ends its jobs.
- The child also writes its exit code to a file, so that a success isn't lost if colaunch is killed at that moment.
- The child's log is locked (flock). The lock belongs to the open file, which is the stdout of every process of the
  job, so ``--resume`` can tell whether any of them is alive.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safelaunch.job.process import ProcessId, fork
from safelaunch.system.files import text_of, try_lock

PR_SET_PDEATHSIG = 1
EXIT_FILE = "SAFELAUNCH_EXIT_FILE"
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class JobCommand:
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: Path
    exit_file: Path | None = None
    keep: Collection[int] = ()  # descriptors that it inherits


def spawn(command: JobCommand, tell: Callable[[ProcessId], None]) -> ProcessId:
    """Starts the command in a new session. Raises OSError on failure.

    Call it from the main thread, because the kernel sends SIGTERM to the child when the thread that forked it ends.

    Args:
        tell: Called with the process before it runs; if it raises, the process exits.
    """
    # Append, never truncate: the attempt might exist.
    log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # the file system has no locks
            try_lock(log)
        parent = os.getpid()
        return fork(lambda: _become(command, log, parent), tell)
    finally:
        os.close(log)


def _become(command: JobCommand, log: int, parent: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)  # the parent was killed before
    os.setsid()
    os.chdir(command.cwd)
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
    """Returns the exit code that safelaunch wrote to the file; None if it was killed before that."""
    match = re.fullmatch(r"(\d+)\n", text_of(exit_file), re.ASCII)
    return int(match[1]) if match else None


def is_held(log: Path) -> bool:
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
