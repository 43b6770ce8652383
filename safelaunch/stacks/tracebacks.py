"""Parses tracebacks in a rank's output that come from worker processes, or from threads that an exception ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from safelaunch.model import EarlierException, Frame

_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')
_OF_A_THREAD = re.compile(r"^Exception in thread (?P<name>.+?)(?: \(.*\))?:$")
_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} (?:err|out)\| ")  # in ``log_tail.txt``


@dataclass(frozen=True)
class ParsedTraceback:
    frames: tuple[Frame, ...]  # innermost first
    message: str  # last line, with the exception's type
    thread: str = ""  # name of the thread that ended


def parse(lines: Iterable[str]) -> ParsedTraceback | None:
    frames: list[Frame] = []
    for line in lines:
        match = _FRAME.match(line)
        if match:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        elif frames and line and not line.startswith(" "):
            return ParsedTraceback(tuple(reversed(frames)), line)
    return ParsedTraceback(tuple(reversed(frames)), "") if frames else None


# Lines between an exception and the next one in its chain.
CHAIN = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
_CHAINED = re.compile(rf"^({'|'.join(CHAIN)}):$", re.MULTILINE)


def earlier(text: str) -> list[EarlierException]:
    parts = _CHAINED.split(text)
    read = ((parse(part.splitlines()), words == CHAIN[0]) for part, words in zip(parts[::2], parts[1::2], strict=False))
    exceptions = [(part, *part.message.partition(": ")[::2], explicit) for part, explicit in read if part is not None]
    return [EarlierException(kind, message, part.frames, explicit) for part, kind, message, explicit in exceptions]


GATHERED = "Traceback (most recent call last): (RANK "  # torch.distributed.checkpoint begins each traceback with it
_OF_A_RANK = re.compile(rf"^{re.escape(GATHERED)}(\d{{1,9}})\)$", re.MULTILINE)


def gathered(message: str) -> dict[int, ParsedTraceback]:
    """Returns each failed rank's exception, parsed from an error that all ranks of a group raise together."""
    _, *parts = _OF_A_RANK.split(message)
    read = ((int(rank), parse(text.splitlines())) for rank, text in zip(parts[::2], parts[1::2], strict=True))
    return {rank: traceback for rank, traceback in read if traceback is not None and traceback.message}


# torch's ExceptionWrapper, and the two pools of the standard library.
_OF_A_WORKER = (
    re.compile(r"Caught \w+ in DataLoader (?P<who>worker)(?: process)?(?P<number> \d+)?\.\nOriginal (?=Traceback)"),
    re.compile(
        r"(?P<who>)(?P<number>)(?:multiprocessing\.pool\.RemoteTraceback|concurrent\.futures\.process\._RemoteTraceback)"
        r": \n\"\"\"\n"
    ),
)


def of_worker(text: str) -> tuple[str, ParsedTraceback]:
    """Returns the name of the worker process in a rank's error, and its traceback (without frames if it has none)."""
    begin = next(filter(None, (pattern.search(text) for pattern in _OF_A_WORKER)), None)
    inner = parse(text[begin.end() :].splitlines()) if begin is not None else None
    who = f"dataloader worker{begin['number'] or ''}" if begin is not None and begin["who"] else "worker process"
    return who, inner or ParsedTraceback((), "")


def lines_of(log_tail: str) -> list[str]:
    return [_PREFIX.sub("", line) for line in log_tail.splitlines()]


def of_threads(log_tail: str) -> Iterator[ParsedTraceback]:
    """Yields the tracebacks that ``threading`` prints when an exception ends a thread, newest first."""
    lines = lines_of(log_tail)
    for at in range(len(lines) - 1, -1, -1):
        head = _OF_A_THREAD.match(lines[at])
        traceback = parse(lines[at + 1 : at + 400]) if head else None
        if head and traceback is not None and traceback.message:
            yield ParsedTraceback(traceback.frames, traceback.message, head["name"])
