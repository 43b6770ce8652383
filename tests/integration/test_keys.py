"""What a key does in the terminal of a job: Ctrl-C where it is frozen and where it is not, Ctrl-\\."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import PROGRAMS, Job

pytestmark = pytest.mark.torch

CTRL_C, CTRL_BACKSLASH = b"\x03", b"\x1c"
FROZEN = [PROGRAMS / "blocked.py", "--how=asleep", "--culprit=1"]
# Leads a session on the terminal named by its first argument, and becomes Python with the other ones.
ON_TERMINAL = """if True:
    import fcntl, os, sys, termios
    os.setsid()
    terminal = os.open(sys.argv[1], os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    os.dup2(terminal, 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Typed(Job):
    """A job whose safelaunch has a terminal of its own, in the foreground."""

    master: int

    def type(self, key: bytes) -> None:
        os.write(self.master, key)


@contextmanager
def on_terminal(words: list[str | Path], scratch: Path) -> Iterator[Typed]:
    master, slave = pty.openpty()
    try:
        interpreter = [sys.executable, "-c", ON_TERMINAL, os.ttyname(slave), "-m", "safelaunch"]
        with Typed(words, scratch, interpreter=interpreter) as job:
            job.master = master
            yield job
    finally:
        os.close(slave)
        os.close(master)
