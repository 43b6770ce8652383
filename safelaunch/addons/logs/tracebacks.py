"""Parses tracebacks and fatal signals, and decides whether their process continued afterwards."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile

from msgspec import structs

from safelaunch.addons.logs.error_lines import PROGRESS
from safelaunch.addons.logs.lines import LogLine
from safelaunch.addons.logs.speakers import LogEntry
from safelaunch.model import RankException
from safelaunch.stacks import tracebacks
from safelaunch.verdict.exceptions import USUALLY_CAUGHT, is_consequence

MOST_MESSAGE, _MOST_SINCE, _FEW, _MOST_LINES = 12, 40, 1, 2000

HEAD = "Traceback (most recent call last):"
CUT_OFF = "an exception (the log ends before its name)"
BOXED = re.compile(r"[╭┌+][─-]+ *Traceback \(most recent call last\)")  # drawn by rich
_FRAME_IN_BOX = re.compile(r"[│|] (?P<file>\S.*?):(?P<line>\d{1,9}) in (?P<function>\S+) *[│|]?$")
_MESSAGE_LINE = re.compile(  # continues a message of NCCL or CUDA
    r"nccl(?:\w+Error|Invalid\w+)|Last error:|[\w.]+: Connect to |[\w:]+Error: |CUDA kernel errors "
    r"|For debugging consider |Device-side assert|Compile with `|GPU device may be out of range|Search for `cuda"
)
_ERROR = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:\(\w+\))?)(?:: (?P<message>.*))?$", re.DOTALL)
_NAME = re.compile(r"(?P<type>(?:\w+\.)*[A-Z]\w*(?:Error|Exception))(?P<message>)$")
BARE = re.compile(r"(?!nccl)(?P<type>[A-Za-z_][\w.]*(?:Error|Exception)): +(?P<message>\S.*)", re.DOTALL)


@dataclass
class OpenTraceback:
    line: LogLine
    lines: list[str]
    thread: bool
    entry: LogEntry
    rank: int | None = None  # rank that an earlier line names
    pid: str = ""  # process from which Ray passes on the exception
    indent: str = ""
    state: str = "frames"  # message | original | after | chain
    at: int = 0  # start of the last traceback of a chain
    rest: int = 0
    cut: bool = False  # the log lacks its head, or all but its last line
    socket: str = ""  # c10d's preceding report about a socket
    ignored: bool = False
    is_local: bool = False  # ``rank`` is local to a node

    def take(self, text: str, *, timed: bool) -> bool:
        """Adds the next line if it belongs to the traceback; returns whether it does.

        If the traceback's first line had no time, a line that has one belongs to another message.
        """
        if timed and not self.entry.timed and self.state != "frames":
            return False
        if len(self.lines) >= _MOST_LINES:
            return False
        text = text.removeprefix(self.indent)
        indented = text.startswith((" ", "\t", "│", "|", "╭", "╰"))
        if self.state == "frames" and len(self.lines) == 1 and (not text.strip() or text.startswith(HEAD)):
            return True  # head of another process's traceback, interleaved with this one
        if self.state in ("frames", "original"):
            self.state = self.state if indented else "message"
        elif self.state == "message":
            if text.startswith(("Original Traceback", tracebacks.GATHERED)):
                self.state = "original"
            elif not text.strip():
                self.state = "after"
            elif (
                self.rest >= MOST_MESSAGE
                or (self.cut and BARE.match(text))
                or not (_MESSAGE_LINE.match(text) or self.lines[-1].startswith("Last error:"))
            ):
                return False
            self.rest += 1
        elif text.startswith(tracebacks.CHAIN):
            self.state = "chain"
        elif text.startswith(HEAD) and self.state == "chain":
            self.state, self.at, self.rest = "frames", len(self.lines), 0
        elif text.strip():
            return False
        self.lines.append(text)
        return True

    def exception(self, at_s: float, *, cut_off: bool = False) -> RankException | None:
        """Returns the last exception of a chain, or the first if the last arose only in cleanup; None if incomplete.

        Args:
            cut_off: True if the log ends here, perhaps before the exception's name.
        """
        error = self._last(at_s) or (self._cut_off(at_s) if cut_off and self.state == "frames" else None)
        if error is None or not self.socket or (error.message and "ddress already in use" not in error.message):
            return error
        return structs.replace(error, message=f"{error.message} ({self.socket})" if error.message else self.socket)

    def _cut_off(self, at_s: float) -> RankException | None:
        parsed = tracebacks.parse(self.lines[self.at + 1 :])
        return RankException(CUT_OFF, "", at_s, parsed.frames, "\n".join(self.lines)) if parsed is not None else None

    def _last(self, at_s: float) -> RankException | None:
        heads = [at for at, line in enumerate(self.lines) if at <= self.at and line.startswith(HEAD)]
        last = self._exception(self.at, len(self.lines), at_s)
        first = self._exception(heads[0], heads[1], at_s) if len(heads) > 1 else None
        if last is None or first is None or first.type.rpartition(".")[2] in USUALLY_CAUGHT:
            return last
        return first if is_consequence(last) and not is_consequence(first) else last

    def _exception(self, begin: int, end: int, at_s: float) -> RankException | None:
        lines = self.lines[begin + 1 : end]
        if BOXED.match(self.lines[begin]):
            boxed = (_FRAME_IN_BOX.match(line) for line in lines)
            frames = [
                f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}' for frame in boxed if frame
            ]
            lines = [*frames, *(line for line in lines if line and not line.startswith(("│", "|", "╭", "╰", " ")))]
        parsed = tracebacks.parse(lines)
        if parsed is None and self.cut and lines:
            parsed = tracebacks.ParsedTraceback(
                (), next((line for line in lines if not line.startswith(" ")), lines[0])
            )
        if parsed is None:
            return None
        error = (BARE if self.cut else _ERROR).match(parsed.message) or _NAME.match(parsed.message)
        if error is None:
            return None
        rest_lines = self.lines[self.lines.index(parsed.message, begin) + 1 : end]
        message = "\n".join(
            [error["message"] or "", *takewhile(lambda line: not line.startswith(tracebacks.CHAIN), rest_lines)]
        ).strip()
        return RankException(error["type"], message, at_s, parsed.frames, "\n".join(self.lines[:end]))


@dataclass
class LinesAfter:
    """Counts the lines that a speaker prints after an exception, to find out whether the exception was caught."""

    lines: int = 0
    usual: int = 0  # lines like earlier ones; others might continue the message
    steps: int = 0
    numbers: int = 0  # lines with a number, as in reports of progress
    raising: str = ""  # shape of the error line; retries repeat it
    shapes: frozenset[str] = frozenset()  # shapes of the lines before the error, if some repeat

    @staticmethod
    def of(last: str, before: Collection[str]) -> LinesAfter:
        """Starts counting after an error whose last line is ``last``; ``before`` are lines before the traceback."""
        shapes = frozenset(map(_shape, before))
        return LinesAfter(raising=_shape(last), shapes=shapes if len(shapes) < len(before) else frozenset())

    def add(self, text: str) -> None:
        self.lines += 1
        if self.lines <= MOST_MESSAGE:
            self.usual += _shape(text) in (self.raising, *self.shapes)
            self.numbers += any(map(str.isdecimal, text))
            self.steps += PROGRESS.search(text) is not None

    def add_usual(self) -> None:
        self.lines += 1
        self.usual += 1

    def is_end(self, error: RankException, *, has_failed: bool) -> bool:
        """Returns whether ``error`` ended its process.

        Args:
            has_failed: True if another source reports that the process failed.
        """
        caught = error.type.rpartition(".")[2] in USUALLY_CAUGHT
        message = not self.usual and (bool(self.shapes) or self.numbers <= _FEW) and not caught
        if has_failed and max(self.usual, self.steps) > _FEW:  # it continued and ended later
            return False
        return self.lines <= (_MOST_SINCE if has_failed else MOST_MESSAGE if message else _FEW)


def _shape(text: str) -> str:
    return " ".join(re.findall(r"[^\W\d_]+", text))


FATAL = "Fatal Python error: "
_CURRENT = "Current thread"
_FATAL_LINE = re.compile(r"\s|$|Current thread|Thread 0x|Extension modules:|Python runtime state:|<")
SIGNALS = {
    "Killed": signal.SIGKILL, "Terminated": signal.SIGTERM, "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS, "Out Of Memory": signal.SIGKILL,
    "Illegal instruction": signal.SIGILL, "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
}  # fmt: skip


@dataclass
class Crash:
    """Output of faulthandler or of the interpreter at a fatal signal."""

    line: LogLine
    lines: list[str]
    since: int = 0  # lines printed afterwards

    @property
    def signal(self) -> int:
        """Signal that ended the process. The interpreter's own fatal errors end it with SIGABRT."""
        return SIGNALS.get(self.lines[0].removeprefix(FATAL).strip(), signal.SIGABRT)

    def take(self, text: str, *, from_script: bool) -> None:
        is_next = text.startswith(_CURRENT) and any(line.startswith(_CURRENT) for line in self.lines)
        if not (self.since or is_next) and _FATAL_LINE.match(text) and len(self.lines) < _MOST_LINES:
            self.lines.append(text)
        else:
            self.since += from_script

    def is_end(self, *, has_failed: bool) -> bool:
        """Returns whether the process ended here. If only its child crashed, the process itself prints more lines."""
        return self.since <= (_MOST_SINCE if has_failed else _FEW)
