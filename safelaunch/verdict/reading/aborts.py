"""What a process that was aborted wrote last: the C++ runtime's words, glibc's, Python's, the out-of-memory killer's.

Told apart by the fixed words of these libraries. What stands in between is the program's own message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_LINES = 60
_HEAP = "the heap was corrupted before, by native code that wrote past its memory or freed it twice"
_OUT_OF_MEMORY = "the out-of-memory killer took a process of the job"
_NO_ROOM = "there was no memory left to allocate"


@dataclass(frozen=True)
class Abort:
    """``words``: as written, in one line. ``means``: what that says to who has never met them; may be empty."""

    words: str
    means: str = ""


# The first that fits a line tells what it means. ``{...}``: a group of the pattern.
_KINDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), means)
    for pattern, means in (
        (
            r"enforce fail at .*gloo/.*\.length <= .*?(?P<sent>\d+) vs (?P<room>\d+)",
            "a peer sent {sent} bytes into a call of this rank that has room for {room}",
        ),
        (r"enforce fail at .*gloo/", "gloo found what it got from a peer, or a connection to one, not to be as agreed"),
        (
            r"double free or corruption|(?:free|munmap_chunk|realloc|calloc|malloc)\(\): |corrupted (?:size|double)",
            _HEAP,
        ),
        (r"\*\*\* (?:stack smashing|buffer overflow) detected", "native code wrote past the end of a buffer"),
        (r"std::bad_alloc|DefaultCPUAllocator: can't allocate|Cannot allocate memory", _NO_ROOM),
        (r"oom[-_]kill|OOM Killed|Out of memory: Killed process", _OUT_OF_MEMORY),
        (r"insufficient shared memory \(shm\)", "/dev/shm is full"),
        (r"Fatal Python error: ", "the interpreter itself gave up"),
        (r"terminate called (?:after throwing|without an active)", "a C++ exception that nothing caught ended it"),
        (r"^\s*what\(\): ", "a C++ exception that nothing caught ended it"),
        (r"EnforceNotMet", "a check in C++ failed"),
        (r"Assertion `.*' failed", "an assertion in C or C++ failed"),
        (r"libgomp: |OMP: Error", "the OpenMP runtime gave up"),
    )
)


def last_abort(log: str) -> Abort | None:
    """The last such message at the end of a process's output; None where there is none."""
    lines = [line.strip() for line in log.splitlines()[-_MOST_LINES:]]
    for at in reversed(range(len(lines))):
        if any(pattern.search(lines[at]) for pattern, _ in _KINDS):
            return _of(" ".join(_whole(lines, at)))
    return None


def _whole(lines: list[str], at: int) -> Iterator[str]:
    """The line, behind the one that names the type of the C++ exception that it is about."""
    if at and lines[at].startswith("what(): ") and lines[at - 1].startswith("terminate called"):
        yield lines[at - 1]
    yield lines[at]


def _of(words: str) -> Abort:
    found = next((match, means) for pattern, means in _KINDS if (match := pattern.search(words)))
    return Abort(words, found[1].format(**found[0].groupdict()))
