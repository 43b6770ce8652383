"""safelaunch's own few lines on stderr. Each starts with ``safelaunch: `` and is written whole, at once."""

from __future__ import annotations

import os
import threading

PREFIX = "safelaunch: "
WRITE_DEADLINE_S = 2.0


def say(text: str) -> None:
    """Writes ``text`` to stderr, each line prefixed; gives up on a terminal that does not take it in 2 seconds.

    In a thread: a terminal that has stopped reading (Ctrl-S, a full pipe) must not stop the watch.
    """
    lines = [line if line.startswith(PREFIX) else PREFIX + line for line in text.rstrip("\n").split("\n")]
    data = "".join(line.rstrip() + "\n" for line in lines).encode("utf-8", "replace")
    writer = threading.Thread(target=_write, args=(data,), name="console", daemon=True)
    writer.start()
    writer.join(WRITE_DEADLINE_S)


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return  # nobody listens any more; there is no other place to say it
