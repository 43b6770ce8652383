"""Makes docs/pictures/verdict.svg: the screen of README's job, as a terminal shows it. Look at it before a commit."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]

COLUMNS = 100
COMMAND = "safelaunch --nproc-per-node=3 train.py"
# Fonts of the reader's machine: a picture in a page loads nothing from elsewhere.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        script = next(block.text for block in blocks("README.md") if block.title == "train.py")
        Path(place, "train.py").write_text(script + "\n")
        lines = (
            _screen(place).replace(place, "/home/me").replace(f" on {socket.gethostname()})", " on node1)").splitlines()
        )
    own = [line for line in lines if "safelaunch: " in line]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi("\n".join([f"$ {COMMAND}", *own])))
    picture = ROOT / "docs" / "pictures" / "verdict.svg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(FONTS.sub("", console.export_svg(title="safelaunch", unique_id="verdict")).strip() + "\n")
    print("\n".join(own), f"{picture}: {picture.stat().st_size:,} bytes", sep="\n")


def _screen(place: str) -> str:
    """Returns what the job prints to a terminal with safelaunch's defaults, which takes a minute."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    command = [sys.executable, "-P", "-m", *COMMAND.split()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SAFELAUNCH_")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    job = subprocess.Popen(command, cwd=place, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    parts = []
    with open(ours, "rb", buffering=0) as screen:
        try:
            while part := screen.read(1 << 16):
                parts.append(part)
        except OSError:
            pass  # so a terminal ends
    job.wait()
    return b"".join(parts).decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
