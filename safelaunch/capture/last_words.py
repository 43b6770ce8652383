"""Reads a rank's records in the run directory: its exception, faulthandler's stacks, its exit call and its output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from safelaunch.beacon import caught_exceptions, layout, output
from safelaunch.capture.pages import RankContract, bytes_of, read_contract, read_note
from safelaunch.capture.rank_output import log_tail
from safelaunch.capture.result import Result, attempt
from safelaunch.model import CaughtException, DeviceMemory, ExitCall, FatalError, Frame, RankException

_MOST_THREADS = 64

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+[^\n]*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)


_NOTED = RankContract()
_NO_RING: Result[str] = Result(None, "output ring", 0.0, missing="this rank has no beacon")


@dataclass(frozen=True, slots=True)
class LastWords:
    exception: RankException | None = None
    fault_text: str = ""  # all of faulthandler's output, also for a SIGTERM
    fatal: FatalError | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()
    log: Result[str] = _NO_RING  # end of the rank's output, decoded
    device_memory: DeviceMemory | None = None
    snapshot: Path | None = None  # of torch's allocator
    noted: RankContract = _NOTED


def read(base: Path) -> LastWords:
    """Reads all records next to the page ``base``; skips unreadable ones."""

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
        noted=read_contract(base) or RankContract(),
        log=attempt("output ring", lambda: log_tail(output.read(str(companion(layout.RING_SUFFIX))))),
    )


def parse_fatal(text: str) -> FatalError | None:
    """Returns the last fatal error in faulthandler's output; None if the output only has the stacks from a SIGTERM.

    A C library's thread that aborts has no Python frames. Then the main thread, which is last in the list, shows where
    the program was.
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
        stack = _frames(body[head.end() : following.start() if following else len(body)])
        threads += [stack] if stack else []
        frames = frames if is_known else stack
        is_known = is_known or (head["current"] == "Current thread" and bool(stack))
    return FatalError(fatal[1].strip(), frames, tuple(threads[:_MOST_THREADS]))


def _frames(text: str) -> tuple[Frame, ...]:
    matches = _FRAME.finditer(text)
    return tuple(Frame(m["file"], int(m["line"]) if _is_number(m["line"]) else 0, m["function"]) for m in matches)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def parse_caught(slots: bytes) -> tuple[CaughtException, ...]:
    """Parses the notes of ``beacon/caught_exceptions.py``, in order of time; skips half-written slots."""
    exceptions = []
    for begin in range(0, len(slots), caught_exceptions.SLOT_BYTES):
        slot = slots[begin : begin + caught_exceptions.SLOT_BYTES].rstrip(b"\0")
        fields = slot.decode("utf-8", "replace").split("\t")
        if len(fields) == 9 and all(_is_number(fields[at]) for at in (0, 3, 6)):
            raised = Frame(fields[5], int(fields[3]), fields[4])
            handler = Frame(fields[8], int(fields[6]), fields[7])
            exceptions.append(CaughtException(fields[1], fields[2], int(fields[0]) / 1e9, raised, handler))
    return tuple(sorted(exceptions, key=lambda exception: exception.time_unix_s))
