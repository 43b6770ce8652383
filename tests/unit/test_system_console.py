"""Messages: where they go if the reader of stderr has ended, and how they fit on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

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


def test_message_goes_to_terminal_if_stderr_reader_ended() -> None:
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", SAYS, os.ttyname(slave)], check=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert os.read(master, 1024) == b"safelaunch: the verdict\r\n"
    finally:
        os.close(slave)
        os.close(master)


def test_command_in_message_stays_on_single_line() -> None:
    command = "sudo /home/me/a-directory-of-mine/safelaunch/bin/safelaunch dump --all --bundle-dir /elsewhere"
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        code = f"from safelaunch.system.console import say; say('{'many words ' * 9}\\n    {command}')"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stderr=slave)
        lines = os.read(master, 4096).decode().splitlines()
        assert len(lines) > 2 and lines[-1] == f"safelaunch:     {command}"
    finally:
        os.close(slave)
        os.close(master)
