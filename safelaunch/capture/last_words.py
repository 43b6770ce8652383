"""Reads what a rank left in the run directory: exception, faulthandler's stacks, its call of exit, and output."""

from __future__ import annotations

import datetime as dt
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from safelaunch.beacon import caught_exceptions, layout, output
from safelaunch.capture.pages import Noted, bytes_of, read_contract, read_note
from safelaunch.model import CaughtException, DeviceMemory, ExitCall, FatalError, Frame, RankException
from safelaunch.system.errors import CaptureError

from .result import Result, attempt, within

_MOST_THREADS = 64

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+[^\n]*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)


_NOTED = Noted()
_NO_RING: Result[str] = Result(None, "output ring", 0.0, missing="this rank has no beacon")


@dataclass(frozen=True, slots=True)
class LastWords:
    """A rank's records. ``fault_text``: all of faulthandler's output, also for a SIGTERM; ``log``: the end of the
    rank's output, decoded.
    """

    exception: RankException | None = None
    fault_text: str = ""
    fatal: FatalError | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()
    log: Result[str] = _NO_RING
    device_memory: DeviceMemory | None = None
    snapshot: Path | None = None  # of torch's allocator
    noted: Noted = _NOTED


def read(base: Path) -> LastWords:
    """All records beside the page ``base``; unreadable ones are left out."""

    def companion(suffix: str) -> Path:
        return base.with_name(base.name + suffix)

    fault = bytes_of(companion(layout.FAULT_SUFFIX)).decode("utf-8", "replace")
    return LastWords(
        exception=read_note(companion(layout.EXCEPTION_SUFFIX), RankException),
        fault_text=fault,
        fatal=parse_fatal(fault),
        exit_call=read_note(companion(layout.EXIT_SUFFIX), ExitCall),
        caught=parse_caught(bytes_of(companion(layout.CAUGHT_SUFFIX))),
        device_memory=read_note(companion(layout.MEMORY_SUFFIX), DeviceMemory),
        snapshot=snapshot if (snapshot := companion(layout.SNAPSHOT_SUFFIX)).exists() else None,
        noted=read_contract(base) or Noted(),
        log=attempt("output ring", lambda: log_tail(output.read(str(companion(layout.RING_SUFFIX))))),
    )


def parse_fatal(text: str) -> FatalError | None:
    """The last fatal error in faulthandler's output; None if it has only the stacks that a SIGTERM leaves.

    If a thread of a C library aborts, it has no Python frames. Then the main thread, the last one in the list, shows
    where the program was.
    """
    errors = list(_FATAL.finditer(text))
    if not errors:
        return None
    fatal = errors[-1]
    body = text[fatal.end() :]
    frames: tuple[Frame, ...] = ()
    threads, is_known = [], False
    for head, following in pairwise([*_THREAD.finditer(body), None]):
        assert head is not None
        found = _frames(body[head.end() : following.start() if following else len(body)])
        threads += [found] if found else []
        frames = frames if is_known else found
        is_known = is_known or (head["current"] == "Current thread" and bool(found))
    return FatalError(fatal[1].strip(), frames, tuple(threads[:_MOST_THREADS]))


def _frames(text: str) -> tuple[Frame, ...]:
    found = _FRAME.finditer(text)
    return tuple(Frame(m["file"], int(m["line"]) if _is_number(m["line"]) else 0, m["function"]) for m in found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def parse_caught(slots: bytes) -> tuple[CaughtException, ...]:
    """The notes of ``beacon/caught_exceptions.py``, by time; half-written slots are left out."""
    found = []
    for begin in range(0, len(slots), caught_exceptions.SLOT_BYTES):
        slot = slots[begin : begin + caught_exceptions.SLOT_BYTES].rstrip(b"\0")
        fields = slot.decode("utf-8", "replace").split("\t")
        if len(fields) == 9 and all(_is_number(fields[at]) for at in (0, 3, 6)):
            raised = Frame(fields[5], int(fields[3]), fields[4])
            handler = Frame(fields[8], int(fields[6]), fields[7])
            found.append(CaughtException(fields[1], fields[2], int(fields[0]) / 1e9, raised, handler))
    return tuple(sorted(found, key=lambda one: one.time_unix_s))


# --- where it left the cursor -----------------------------------------------------------------------------------------

_UP = re.compile(rb"(?:\x1b\[A)*\Z")


class UnfinishedLine:
    """Tells how many line feeds move the cursor below what the ranks have printed on this process's stderr.

    A bar above others moves the cursor back up, so several may be needed. ``pages``: of the run. Output that doesn't
    go through Python's streams isn't seen.
    """

    def __init__(self, pages: Path) -> None:
        self._pages = pages
        self._streams: dict[int, frozenset[int]] = {}  # pid: its streams that lead where our stderr does

    def line_feeds(self, since_ns: int) -> int:
        """0 if the last output since then (CLOCK_REALTIME) ends with a line feed, or there is none. Raises OSError."""
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
            found = {stream: _place(Path(f"/proc/{pid}/fd/{stream}")) for stream in STREAMS}
            self._streams[pid] = frozenset(stream for stream, place in found.items() if place in (here, None))
        return self._streams[pid]


def _place(descriptor: Path) -> tuple[int, ...] | None:
    """Identifies what a descriptor refers to; None if that isn't known, as after the end of the process."""
    try:
        found = descriptor.stat()
    except OSError:
        return None
    return (found.st_rdev,) if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


# --- its output -------------------------------------------------------------------------------------------------------

STREAMS = {1: "out", 2: "err"}


def log_tail(records: Iterable[tuple[int, int, bytes]]) -> str:
    """The records of a rank's ring (CLOCK_REALTIME ns, stream, bytes) as ``log_tail.txt``, not yet redacted.

    Each line of output becomes ``HH:MM:SS.mmm out| text``, in UTC, with the time of its first part. A line that a
    progress bar rewrote with carriage returns shows its last state.
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
    """CLOCK_REALTIME nanoseconds as ``HH:MM:SS.mmm`` UTC."""
    moment = dt.datetime.fromtimestamp(time_ns // 1_000_000_000, dt.timezone.utc)
    return f"{moment:%H:%M:%S}.{time_ns // 1_000_000 % 1000:03d}"


def _visible(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1]


# --- of ranks without a beacon ----------------------------------------------------------------------------------------

TAIL_BYTES = 64 << 10
FILE_DEADLINE_S = 1.0


def ends_of_files(pids: Mapping[int, int]) -> dict[tuple[int, ...], list[Result[str]]]:
    """The ends of the files behind the standard output and error of ranks (rank → pid), by the ranks that write them.

    Nothing of pipes and terminals, which only one can read.
    """
    found: dict[tuple[int, int], tuple[Path, list[int]]] = {}
    for rank, pid in sorted(pids.items()):
        for number in (1, 2):
            path = Path(f"/proc/{pid}/fd/{number}")
            with suppress(OSError, CaptureError):
                info = within(FILE_DEADLINE_S, os.fspath(path), path.stat)
                if stat.S_ISREG(info.st_mode):
                    found.setdefault((info.st_dev, info.st_ino), (path, []))[1].append(rank)
    ends: dict[tuple[int, ...], list[Result[str]]] = {}
    for path, ranks in found.values():
        ends.setdefault(tuple(dict.fromkeys(ranks)), []).append(attempt("standard output", lambda: _end_of(path)))  # noqa: B023
    return ends


def _end_of(path: Path) -> str:
    """The last lines of a file that others write. It is opened anew, so that their place in it stays as it is."""

    def read() -> bytes:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
        return data.partition(b"\n")[2] if size > TAIL_BYTES else data

    lines = within(FILE_DEADLINE_S, os.fspath(path), read).split(b"\n")
    return "\n".join(map(_visible, lines))
