"""safelaunch's output: messages on stderr (``say`` prefixes each line), results on stdout (``show``).

Every text goes through ``redact`` first.
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
COMMAND = "    "  # begins a line of a message that is a command to paste, and so is never broken
WRITE_DEADLINE_S = 2.0


class Redaction:
    """Removes secrets from text. Calling it returns the text unchanged until ``use`` sets a function.

    The command line starts with the general rules. Once the job's own secrets are known, it sets a function that
    removes those as well.
    """

    def __init__(self) -> None:
        self._function: Callable[[str], str] | None = None

    def use(self, function: Callable[[str], str] | None) -> None:
        """Sends every later text through ``function``; None turns redaction off."""
        self._function = function

    def __call__(self, text: str) -> str:
        return self._function(text) if self._function is not None else text


redact = Redaction()


class FreshLine:
    """Returns the line feeds that move the cursor below what the job has printed: none until ``use`` sets a function.

    The job writes to the same terminal or pipe. A progress bar leaves the cursor at its end, in the middle of a line.
    """

    def __init__(self) -> None:
        self._function: Callable[[int], int] | None = None
        self._written_ns = 0

    def use(self, function: Callable[[int], int]) -> None:
        """``function`` gets the time of safelaunch's own last line (CLOCK_REALTIME, ns)."""
        self._function = function

    def __call__(self) -> str:
        try:
            return "\n" * self._function(self._written_ns) if self._function is not None else ""
        except (OSError, ValueError):
            return ""

    def begin(self) -> None:
        """A whole line was written: the cursor is at the beginning of the next one."""
        self._written_ns = time.time_ns()


fresh_line = FreshLine()


@dataclass(frozen=True, slots=True)
class Display:
    """Where a text is shown: how many columns there are, whether it may be coloured, whether it is a terminal."""

    width: int = 100
    color: bool = False
    terminal: bool = False


NARROWEST, WIDTH = 40, 100
ECHO = len("^C")  # which the terminal may have written where a line begins


def display(descriptor: int, environ: Mapping[str, str]) -> Display:
    """The terminal behind a descriptor; 100 columns without colour for a file or a pipe.

    Colour follows what CPython does: NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal.
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

    ``color``: the colours in it are ours, and stay; in a line with a secret they do not.
    """
    if color:
        return "\n".join(map(_safe_in_color, text.split("\n")))
    text = redact(text)
    if all(map(str.isprintable, text.split("\n"))):
        return text
    from safelaunch.system.printable import clean_text  # rarely needed, and this is imported before the job starts

    return clean_text(text)


def _safe_in_color(line: str) -> str:
    plain = _COLOR.sub("", line)
    if redact(plain) != plain:
        return terminal_safe(plain)
    return "".join(part if _COLOR.fullmatch(part) else terminal_safe(part) for part in _COLOR.split(line))


def show(text: str, *, color: bool = False, fold: bool = False) -> None:
    """Prints ``text`` on stdout; ``color``: with the colours in it. Raises BrokenPipeError if nobody reads the pipe.

    ``fold``: as text to be read, whose lines a terminal would break within words.
    """
    text = terminal_safe(text, color=color)
    put(folded(text, room()) if fold else text)


def room() -> int:
    """How long a line on stdout may be: the width of the terminal, or what nobody reaches."""
    on = display(1, os.environ)
    return on.width if on.terminal else sys.maxsize


def command_lines(words: Sequence[str], first: str, width: int) -> list[str]:
    """A command after ``first``, in lines that a shell reads as one. ``words``: as they are quoted."""
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
    """``text`` in lines of at most ``width``, as far as its words allow.

    A row of several cells, which two spaces part, breaks between cells; other lines between words, and what follows
    stands below the text that it belongs to.
    """
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip(" "))
    cells = [found.end() for found in _CELL.finditer(line)]
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
    """Broken between words; all but the first part begin at column ``hang``."""
    text = line.lstrip(" ")
    return wrapped(text, width, " " * (len(line) - len(text)), " " * hang)


def wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """A paragraph in lines that begin with ``first``, then with ``others``. No path and no option is broken."""
    import textwrap  # rarely needed, and this is imported before the job starts

    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def cut(text: str, width: int) -> str:
    """At most so many characters of it, the last one ``…`` where that is not all."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def show_json(document: object) -> None:
    """Prints a JSON document of strings, numbers, lists and dicts on stdout."""
    put(json_text(document))


def put(text: str) -> None:
    """Prints text that is safe as it is. Raises BrokenPipeError, and SafelaunchError for a full disk, say."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SafelaunchError(f"standard output can't be written: {error.strerror or error}") from error


def json_text(document: object) -> str:
    """Returns the document as JSON, with each of its strings redacted separately."""
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

    The text may quote untrusted input, so control sequences are removed; ``color``: but not colours. On a terminal, a
    line that is too long breaks between words, not within a path or a ``COMMAND``; ``laid_out``: the text has its lines
    already. A thread does the writing: a terminal that has stopped reading (Ctrl-S, a full pipe) must not block the
    watchdog.
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
    """The width of the terminal behind stderr; 0 if there is none."""
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 0


def _broken(line: str, width: int) -> list[str]:
    """The line in as many as it needs, each prefixed. A word is never broken, however long it is."""
    room = max(width - ECHO, NARROWEST) - len(PREFIX)
    text = line.removeprefix(PREFIX)
    if len(text) <= room or text.startswith(COMMAND):
        return [line]
    indent = len(text) - len(text.lstrip(" "))
    parts = _wrapped(text, room, indent + 2)
    return [PREFIX + part for part in parts] or [line]


def _write(data: bytes) -> None:
    """Writes to stderr; to the terminal if the reader of stderr has ended, as ``tee`` does at Ctrl-C."""
    data = fresh_line().encode() + data
    try:
        while data:
            data = data[os.write(2, data) :]
        fresh_line.begin()
    except BrokenPipeError:
        _write_to_terminal(data)
    except OSError:
        return  # stderr is closed, and there is nowhere else to report that


def _write_to_terminal(data: bytes) -> None:
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return  # there is none
    try:
        os.write(terminal, data)
    except OSError:
        return
    finally:
        os.close(terminal)
