"""Tracebacks in the output of a rank: of worker processes, and of threads that an exception has ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from safelaunch.model import EarlierException, Frame

_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')
_OF_A_THREAD = re.compile(r"^Exception in thread (?P<name>.+?)(?: \(.*\))?:$")
_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (?:err|out)\| ")  # of ``log_tail.txt``


@dataclass(frozen=True)
class ParsedTraceback:
    """``frames``: innermost first. ``message``: its last line, with the type. ``thread``: which it has ended."""

    frames: tuple[Frame, ...]
    message: str
    thread: str = ""


def parse(lines: Iterable[str]) -> ParsedTraceback | None:
    """The first traceback in these lines; None where they hold none."""
    frames: list[Frame] = []
    for line in lines:
        found = _FRAME.match(line)
        if found:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
        elif frames and line and not line.startswith(" "):
            return ParsedTraceback(tuple(reversed(frames)), line)
    return ParsedTraceback(tuple(reversed(frames)), "") if frames else None


# Between an exception and the one that came from it.
CHAIN = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
_CHAINED = re.compile(rf"^({'|'.join(CHAIN)}):$", re.MULTILINE)


def earlier(text: str) -> list[EarlierException]:
    """The exceptions from which this one came, as a traceback prints them, the first one first."""
    parts = _CHAINED.split(text)
    read = ((parse(part.splitlines()), words == CHAIN[0]) for part, words in zip(parts[::2], parts[1::2], strict=False))
    found = [(part, *part.message.partition(": ")[::2], explicit) for part, explicit in read if part is not None]
    return [EarlierException(kind, message, part.frames, explicit) for part, kind, message, explicit in found]


GATHERED = "Traceback (most recent call last): (RANK "  # as torch.distributed.checkpoint begins each
_OF_A_RANK = re.compile(rf"^{re.escape(GATHERED)}(\d{{1,9}})\)$", re.MULTILINE)


def gathered(message: str) -> dict[int, ParsedTraceback]:
    """Rank of the group → what it raised, of an error that every rank raises for those that failed."""
    _, *parts = _OF_A_RANK.split(message)
    read = ((int(rank), parse(text.splitlines())) for rank, text in zip(parts[::2], parts[1::2], strict=True))
    return {rank: one for rank, one in read if one is not None and one.message}


# torch's ExceptionWrapper, and the two pools of the standard library.
_OF_A_WORKER = (
    re.compile(r"Caught \w+ in DataLoader (?P<who>worker)(?: process)?(?P<number> \d+)?\.\nOriginal (?=Traceback)"),
    re.compile(
        r"(?P<who>)(?P<number>)(?:multiprocessing\.pool\.RemoteTraceback|concurrent\.futures\.process\._RemoteTraceback)"
        r": \n\"\"\"\n"
    ),
)


def of_worker(text: str) -> tuple[str, ParsedTraceback]:
    """A worker process, and what it raised, inside the text of the rank's own; without frames where it has none."""
    begin = next(filter(None, (pattern.search(text) for pattern in _OF_A_WORKER)), None)
    inner = parse(text[begin.end() :].splitlines()) if begin is not None else None
    who = f"dataloader worker{begin['number'] or ''}" if begin is not None and begin["who"] else "worker process"
    return who, inner or ParsedTraceback((), "")


def lines_of(log_tail: str) -> list[str]:
    """What a rank has printed, without the times."""
    return [_PREFIX.sub("", line) for line in log_tail.splitlines()]


def of_threads(log_tail: str) -> Iterator[ParsedTraceback]:
    """Of the threads that an exception has ended, as ``threading`` prints them, the newest first."""
    lines = lines_of(log_tail)
    for at in range(len(lines) - 1, -1, -1):
        head = _OF_A_THREAD.match(lines[at])
        found = parse(lines[at + 1 : at + 400]) if head else None
        if head and found is not None and found.message:
            yield ParsedTraceback(found.frames, found.message, head["name"])
