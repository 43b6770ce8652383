"""What a rank left in the run directory before it ended: exception, faulthandler's stacks, its call of exit, output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from safelaunch.beacon import caught, layout, ring
from safelaunch.model import CaughtException, ExitCall, FatalError, Frame, RankException

from . import logs
from .result import Result, attempt

MAX_BYTES = 1 << 20

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+[^\n]*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)


_NO_RING: Result[str] = Result(None, "output ring", 0.0, missing="this rank has no beacon")


@dataclass(frozen=True, slots=True)
class LastWords:
    """``fault_text``: everything faulthandler wrote, also for a SIGTERM. ``log``: the end of the output, decoded."""

    exception: RankException | None = None
    fault_text: str = ""
    fatal: FatalError | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()
    log: Result[str] = _NO_RING


def read(base: Path) -> LastWords:
    """Everything that lies beside the page ``base``; what cannot be read is not there."""

    def companion(suffix: str) -> Path:
        return base.with_name(base.name + suffix)

    fault = _text(companion(layout.FAULT_SUFFIX))
    return LastWords(
        exception=read_exception(companion(layout.EXCEPTION_SUFFIX)),
        fault_text=fault,
        fatal=parse_fatal(fault),
        exit_call=parse_exit_call(_text(companion(layout.EXIT_SUFFIX))),
        caught=parse_caught(_bytes(companion(layout.CAUGHT_SUFFIX))),
        log=attempt("output ring", lambda: logs.log_tail(ring.read(str(companion(layout.RING_SUFFIX))))),
    )


def read_exception(path: Path) -> RankException | None:
    """The uncaught exception that a rank recorded, if any."""
    try:
        return msgspec.json.decode(path.read_bytes()[:MAX_BYTES], type=RankException)
    except (OSError, msgspec.DecodeError):
        return None


def parse_fatal(text: str) -> FatalError | None:
    """The last fatal error in faulthandler's output; None where there are only the stacks that it leaves at a SIGTERM.

    A thread of a C library that aborts has no Python frames; then the main thread, the last in the list, has to say
    where the program was.
    """
    found = list(_FATAL.finditer(text))
    if not found:
        return None
    fatal = found[-1]
    body = text[fatal.end() :]
    frames: tuple[Frame, ...] = ()
    for head, following in pairwise([*_THREAD.finditer(body), None]):
        assert head is not None
        frames = _frames(body[head.end() : following.start() if following else len(body)])
        if head["current"] == "Current thread" and frames:
            break
    return FatalError(fatal[1].strip(), frames)


def _frames(text: str) -> tuple[Frame, ...]:
    found = _FRAME.finditer(text)
    return tuple(Frame(m["file"], int(m["line"]) if m["line"].isdigit() else 0, m["function"]) for m in found)


def parse_exit_call(text: str) -> ExitCall | None:
    """The note of ``beacon/exits.py``; None where there is none, or only a part of one."""
    head, *lines = text.split("\n")
    call, _, code = head.partition("\t")
    if not call or not code.isdigit():
        return None
    parts = [line.split("\t", 2) for line in lines]
    frames = (Frame(part[2], int(part[0]), part[1]) for part in parts if len(part) == 3 and part[0].isdigit())
    return ExitCall(call, int(code), tuple(frames))


def parse_caught(slots: bytes) -> tuple[CaughtException, ...]:
    """The notes of ``beacon/caught.py``, by time; a slot that was being written is left out."""
    found = []
    for begin in range(0, len(slots), caught.SLOT_BYTES):
        fields = slots[begin : begin + caught.SLOT_BYTES].rstrip(b"\0").decode("utf-8", "replace").split("\t")
        if len(fields) == 9 and all(fields[at].isdecimal() for at in (0, 3, 6)):
            raised = Frame(fields[5], int(fields[3]), fields[4])
            handler = Frame(fields[8], int(fields[6]), fields[7])
            found.append(CaughtException(fields[1], fields[2], int(fields[0]) / 1e9, raised, handler))
    return tuple(sorted(found, key=lambda one: one.time_unix_s))


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""
