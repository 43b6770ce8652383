"""Reads the ranks' output: its recorded end, the files that receive it, and an unfinished line on the terminal."""

from __future__ import annotations

import datetime as dt
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from safelaunch.beacon import layout, output
from safelaunch.capture.result import Result, attempt, within
from safelaunch.system.errors import CaptureError

STREAMS = {1: "out", 2: "err"}
_UP = re.compile(rb"(?:\x1b\[A)*\Z")


class UnfinishedLine:
    """Counts the line feeds that move the cursor below the ranks' output on this process's stderr.

    Several are needed if a progress bar moved the cursor up. Output that bypasses Python's streams isn't seen.
    """

    def __init__(self, pages: Path) -> None:
        self._pages = pages
        self._streams: dict[int, frozenset[int]] = {}  # pid → its streams that share our stderr

    def line_feeds(self, since_ns: int) -> int:
        """Returns how many line feeds are needed; 0 if the last output since ``since_ns`` ends with one.

        ``since_ns`` is CLOCK_REALTIME. Raises OSError.
        """
        newest, last = since_ns, b""
        for path in self._pages.glob(f"*{layout.RING_SUFFIX}"):
            name = layout.parse_page_name(path.name.removesuffix(layout.RING_SUFFIX))
            streams = self._streams_here(name[2]) if name is not None else ()
            with suppress(OSError, ValueError):
                for time_ns, stream, data in output.read(path):
                    if time_ns > newest and stream in streams:
                        newest, last = time_ns, data
        moved = _UP.search(last)
        ups = len(moved[0]) // len(b"\x1b[A") if moved is not None else 0
        return ups + 1 if last and not last.endswith(b"\n") else 0

    def _streams_here(self, pid: int) -> frozenset[int]:
        if pid not in self._streams:
            here = _place(Path("/proc/self/fd/2"))
            if here is None:
                return frozenset()
            places = {stream: _place(Path(f"/proc/{pid}/fd/{stream}")) for stream in STREAMS}
            self._streams[pid] = frozenset(stream for stream, place in places.items() if place in (here, None))
        return self._streams[pid]


def _place(descriptor: Path) -> tuple[int, ...] | None:
    try:
        info = descriptor.stat()
    except OSError:
        return None
    return (info.st_rdev,) if stat.S_ISCHR(info.st_mode) else (info.st_dev, info.st_ino)


def log_tail(records: Iterable[tuple[int, int, bytes]]) -> str:
    """Formats the records of a rank's ring (CLOCK_REALTIME ns, stream, bytes) as ``log_tail.txt``, not yet redacted.

    Each line becomes ``HH:MM:SS.mmm out| text``, with the time in UTC at which its first part was written. A line
    rewritten with carriage returns (a progress bar) shows its last state.
    """
    lines: list[tuple[int, str, bytes]] = []
    open_lines: dict[str, tuple[int, bytes]] = {}
    for time_ns, stream, data in records:
        name = STREAMS.get(stream, str(stream))
        begun, rest = open_lines.pop(name, (time_ns, b""))
        *whole, rest = (rest + data).split(b"\n")
        for number, line in enumerate(whole):
            lines.append((begun if number == 0 else time_ns, name, line))
        if rest:
            open_lines[name] = (time_ns if whole else begun, rest)
    lines += [(begun, name, rest) for name, (begun, rest) in open_lines.items()]
    lines.sort(key=lambda line: line[0])
    return "".join(f"{clock_text(begun)} {name}| {_visible(line)}\n" for begun, name, line in lines)


def clock_text(time_ns: int) -> str:
    moment = dt.datetime.fromtimestamp(time_ns // 1_000_000_000, dt.timezone.utc)
    return f"{moment:%H:%M:%S}.{time_ns // 1_000_000 % 1000:03d}"


def _visible(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1]


TAIL_BYTES = 64 << 10
FILE_DEADLINE_S = 1.0


def ends_of_files(pids: Mapping[int, int]) -> dict[tuple[int, ...], list[Result[str]]]:
    """Reads the ends of the files that receive the ranks' output. The ranks that share a file are its key.

    ``pids`` is rank → pid. Skips pipes and terminals, because reading would take the output away.
    """
    files: dict[tuple[int, int], tuple[Path, list[int]]] = {}
    for rank, pid in sorted(pids.items()):
        for number in (1, 2):
            path = Path(f"/proc/{pid}/fd/{number}")
            with suppress(OSError, CaptureError):
                info = within(FILE_DEADLINE_S, os.fspath(path), path.stat)
                if stat.S_ISREG(info.st_mode):
                    files.setdefault((info.st_dev, info.st_ino), (path, []))[1].append(rank)
    ends: dict[tuple[int, ...], list[Result[str]]] = {}
    for path, ranks in files.values():
        ends.setdefault(tuple(dict.fromkeys(ranks)), []).append(attempt("standard output", lambda: _end_of(path)))  # noqa: B023
    return ends


def _end_of(path: Path) -> str:
    """Reads the last lines of a file in use. Opens it separately, so that the writers' file position doesn't change."""

    def read() -> bytes:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
        return data.partition(b"\n")[2] if size > TAIL_BYTES else data

    lines = within(FILE_DEADLINE_S, os.fspath(path), read).split(b"\n")
    return "\n".join(map(_visible, lines))
