"""Writes safelaunch's output: messages to stderr (``say``), results to stdout (``show``).

All text goes through ``redact`` first.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.system.errors import SafelaunchError

PREFIX = "safelaunch: "
COMMAND = "    "  # starts a line with a command to paste, which is never broken
WRITE_DEADLINE_S = 2.0


class Redaction:
    """Removes secrets from text. Does nothing until ``use`` sets a function.

    The command line first sets general rules. Once the job's secrets are known, it sets another function that also
    removes these.
    """

    def __init__(self) -> None:
        self._function: Callable[[str], str] | None = None

    def use(self, function: Callable[[str], str] | None) -> None:
        self._function = function

    def __call__(self, text: str) -> str:
        return self._function(text) if self._function is not None else text


redact = Redaction()


class FreshLine:
    """Returns the line feeds that move the cursor below the job's output. Returns none until ``use`` sets a function.

    The job writes to the same terminal or pipe, and a progress bar leaves the cursor in the middle of a line.
    """

    def __init__(self) -> None:
        self._function: Callable[[int], int] | None = None
        self._written_ns = 0

    def use(self, function: Callable[[int], int]) -> None:
        """Sets the function. Its argument is the time of safelaunch's own last line (CLOCK_REALTIME, ns)."""
        self._function = function

    def __call__(self) -> str:
        try:
            return "\n" * self._function(self._written_ns) if self._function is not None else ""
        except (OSError, ValueError):
            return ""

    def begin(self) -> None:
        self._written_ns = time.time_ns()


fresh_line = FreshLine()


@dataclass(frozen=True, slots=True)
class Display:
    width: int = 100  # columns
    color: bool = False
    terminal: bool = False


NARROWEST, WIDTH = 40, 100
ECHO = len("^C")  # the terminal might have written it at the beginning of a line


def display(descriptor: int, environ: Mapping[str, str]) -> Display:
    """Returns the width of a descriptor's lines, and whether they can have colour.

    Files and pipes get 100 columns, no colour.

    The decision on colour follows CPython: NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal.
    """
    try:
        tty = os.isatty(descriptor)
        width = os.get_terminal_size(descriptor).columns if tty else WIDTH
    except OSError:
        tty, width = False, WIDTH
    color = tty and environ.get("TERM") != "dumb"
    color = not environ.get("NO_COLOR") and (color or bool(environ.get("FORCE_COLOR")))
    return Display(max(width, NARROWEST) if width else 80, color, tty)


_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")


def terminal_safe(text: str, *, color: bool = False) -> str:
    """Returns ``text`` without secrets and without control sequences that a terminal would execute.

    If ``color``, colours are kept, except in lines with a secret.
    """
    if color:
        return "\n".join(map(_safe_in_color, text.split("\n")))
    text = redact(text)
    if all(map(str.isprintable, text.split("\n"))):
        return text
    from safelaunch.system.printable import (
        clean_text,
    )  # rarely needed, and this module is imported before the job starts

    return clean_text(text)


def _safe_in_color(line: str) -> str:
    plain = _COLOR.sub("", line)
    if redact(plain) != plain:
        return terminal_safe(plain)
    return "".join(part if _COLOR.fullmatch(part) else terminal_safe(part) for part in _COLOR.split(line))


def show(text: str, *, color: bool = False, fold: bool = False) -> None:
    """Prints ``text`` to stdout. Raises BrokenPipeError if the pipe has no reader.

    Args:
        color: Whether the text's colours are kept.
        fold: Whether to break lines longer than the terminal between words.
    """
    text = terminal_safe(text, color=color)
    put(folded(text, room()) if fold else text)


def room() -> int:
    """Returns the maximum length of a line on stdout, in characters."""
    on = display(1, os.environ)
    return on.width if on.terminal else sys.maxsize


def command_lines(words: Sequence[str], first: str, width: int) -> list[str]:
    """Formats a command after the text ``first``, in lines that a shell reads as one.

    ``words`` must already be quoted.
    """
    lines = [f"{first}{words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len("  \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{' ' * (len(first) + 2)}{word}")
    return lines


_CELL = re.compile(r"(?<=\S) {2,}(?=\S)")


def folded(text: str, width: int) -> str:
    """Breaks lines longer than ``width``, unless a single word is longer than that.

    A row of cells, separated by two spaces, is broken between cells. Other lines are broken between words, and their
    continuation is indented to the text it belongs to.
    """
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip(" "))
    cells = [match.end() for match in _CELL.finditer(line)]
    if len(cells) < 2:
        return _wrapped(line, width, cells[0] if cells and 2 * cells[0] <= width else indent + 2 * bool(indent))
    rows: list[str] = []
    for begin, end in zip((0, *cells), (*cells, len(line)), strict=True):
        cell = line[begin:end]
        if rows and len(f"{rows[-1]}{cell}".rstrip()) <= width:
            rows[-1] += cell
        else:
            rows.append(" " * (indent + 4) * bool(rows) + cell)
    return [part for row in rows for part in _wrapped(row.rstrip(), width, indent + 6)]


def _wrapped(line: str, width: int, hang: int) -> list[str]:
    text = line.lstrip(" ")
    return wrapped(text, width, " " * (len(line) - len(text)), " " * hang)


def wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Breaks a paragraph into lines. The first begins with ``first``, the rest with ``others``.

    Doesn't break paths or options.
    """
    import textwrap  # rarely needed, and this module is imported before the job starts

    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def show_json(document: object) -> None:
    put(json_text(document))


def put(text: str) -> None:
    """Prints text that is already safe.

    Raises BrokenPipeError, or SafelaunchError for other errors, such as a full disk.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SafelaunchError(f"standard output can't be written: {error.strerror or error}") from error


def json_text(document: object) -> str:
    """Returns the document as JSON, with each string redacted separately."""
    from safelaunch.system.printable import json_document

    return json_document(_redacted_tree(document))


def _redacted_tree(value: object) -> object:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(str(key)): _redacted_tree(entry) for key, entry in value.items()}
    return [_redacted_tree(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def say(text: str, *, color: bool = False, laid_out: bool = False) -> None:
    """Writes ``text`` to stderr with each line prefixed, and gives up after 2 seconds.

    The text can quote untrusted input, so control sequences are removed. A thread writes, because a terminal that has
    stopped reading (Ctrl-S, a full pipe) must not block the watchdog.

    Args:
        text: The text. On a terminal, long lines are broken between words, but not within a path or a ``COMMAND``.
        color: Whether its colours are kept.
        laid_out: Whether to leave lines unbroken.
    """
    lines = [
        line if line.startswith(PREFIX) else PREFIX + line
        for line in terminal_safe(text, color=color).rstrip("\n").split("\n")
    ]
    width = 0 if laid_out else _columns()
    if width:
        lines = [part for line in lines for part in _broken(line, width)]
    data = "".join(line.rstrip() + "\n" for line in lines).encode("utf-8", "replace")
    writer = threading.Thread(target=_write, args=(data,), name="console", daemon=True)
    writer.start()
    writer.join(WRITE_DEADLINE_S)


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 0


def _broken(line: str, width: int) -> list[str]:
    room = max(width - ECHO, NARROWEST) - len(PREFIX)
    text = line.removeprefix(PREFIX)
    if len(text) <= room or text.startswith(COMMAND):
        return [line]
    indent = len(text) - len(text.lstrip(" "))
    parts = _wrapped(text, room, indent + 2)
    return [PREFIX + part for part in parts] or [line]


def _write(data: bytes) -> None:
    """Writes to stderr, or to the terminal if the reader of stderr is gone (``tee`` ends at Ctrl-C)."""
    data = fresh_line().encode() + data
    try:
        while data:
            data = data[os.write(2, data) :]
        fresh_line.begin()
    except BrokenPipeError:
        _write_to_terminal(data)
    except OSError:
        return


def _write_to_terminal(data: bytes) -> None:
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return  # no terminal
    try:
        os.write(terminal, data)
    except OSError:
        return
    finally:
        os.close(terminal)
