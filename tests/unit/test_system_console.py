"""Messages: where they go if the reader of stderr has ended."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

# Leads a session on the terminal named by its only argument; its stderr is a pipe without a reader.
SAYS = """if True:
    import fcntl, os, sys, termios
    os.setsid()
    terminal = os.open(sys.argv[1], os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 2)
    from safelaunch.system.console import say
    say("the verdict")
"""


def test_a_message_goes_to_the_terminal_if_the_reader_of_stderr_has_ended() -> None:
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", SAYS, os.ttyname(slave)], check=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert os.read(master, 1024) == b"safelaunch: the verdict\r\n"
    finally:
        os.close(slave)
        os.close(master)
