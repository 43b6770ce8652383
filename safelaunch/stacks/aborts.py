"""Recognizes the last message of a process that the C++ runtime, glibc, Python or the out-of-memory killer ended."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_LINES = 60
_HEAP = "the heap had been corrupted by native code that wrote past its memory or freed it twice"
_OUT_OF_MEMORY = "the out-of-memory killer killed a process of the job"
_NO_ROOM = "there was no memory left to allocate"


@dataclass(frozen=True)
class Abort:
    words: str
    means: str = ""  # explanation, unless the message needs none
    has_sizes: bool = False  # the message has the sizes that don't match


# The first match wins; ``{...}`` is a named group of the pattern.
_ABORTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), means)
    for pattern, means in (
        (
            r"enforce fail at .*gloo/.*\.length <= .*?(?P<sent>\d+) vs (?P<room>\d+)",
            "a peer sent {sent} bytes into a call that has room for {room}",
        ),
        (r"enforce fail at .*gloo/", "gloo received data or a connection that doesn't match what it expected"),
        (
            r"double free or corruption|(?:free|munmap_chunk|realloc|calloc|malloc)\(\): |corrupted (?:size|double)",
            _HEAP,
        ),
        (r"\*\*\* (?:stack smashing|buffer overflow) detected", "native code wrote past the end of a buffer"),
        (r"std::bad_alloc|DefaultCPUAllocator: can't allocate|Cannot allocate memory", _NO_ROOM),
        (r"oom[-_]kill|OOM Killed|Out of memory: Killed process", _OUT_OF_MEMORY),
        (r"insufficient shared memory \(shm\)", "/dev/shm is full"),
        (  # faulthandler's name for a signal adds nothing to the signal
            r"Fatal Python error: (?!Segmentation fault|Aborted|Bus error|Illegal instr|Floating.point)",
            "the interpreter itself aborted",
        ),
        (r"terminate called (?:after throwing|without an active)", "an uncaught C++ exception ended it"),
        (r"^\s*what\(\): ", "an uncaught C++ exception ended it"),
        (r"EnforceNotMet", "a check in C++ failed"),
        (r"Assertion `.*' failed", "an assertion in C or C++ failed"),
        (r"libgomp: |OMP: Error", "the OpenMP runtime aborted"),
    )
)


def last_abort(log: str) -> Abort | None:
    """Returns the last known abort message at the end of a process's output; None if there is none."""
    lines = [line.strip() for line in log.splitlines()[-_MOST_LINES:]]
    for before, line in reversed([*zip(["", *lines], lines, strict=False)]):
        # The preceding line has the type of the C++ exception.
        words = f"{before} {line}" if line.startswith("what(): ") and before.startswith("terminate called") else line
        for pattern, means in _ABORTS:
            if hit := pattern.search(words):
                return Abort(words, means.format(**hit.groupdict()), bool(hit.groupdict()))
    return None


# Error lines of argparse and click.
_OPTIONS = re.compile(r"(?:\S+: error|Error): \S")


def options_refused(log: str) -> str:
    """Returns the last line that says that the command's options were rejected; "" if there is none."""
    lines = [line.strip() for line in log.splitlines()[-_MOST_LINES:]]
    return next((line for line in reversed(lines) if _OPTIONS.match(line)), "")
