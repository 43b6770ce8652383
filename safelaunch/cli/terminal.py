"""The terminal as a screen that one leaves open: lines drawn in place, keys read. Restored however the program ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Protocol

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN, PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"
COLORS: Mapping[str, str] = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "warn": "\x1b[33m",
    "alarm": "\x1b[1;31m",
    "title": "\x1b[1;36m",
    "good": "\x1b[32m",
}
WITHOUT_COLOR: Mapping[str, str] = {"bold": "\x1b[1m", "alarm": "\x1b[1m", "title": "\x1b[1m", "warn": "\x1b[1m"}
LONGEST_KEY = 8
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Styled(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def style(self) -> str: ...


def is_usable() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Terminal:
    """``with Terminal() as terminal: terminal.draw(lines); terminal.key(1.0)``

    Ctrl-C, SIGTERM and SIGHUP leave the block as exceptions; Ctrl-Z gives the screen back for as long as it lasts.
    """

    def __init__(self) -> None:
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self._colors = COLORS if not os.environ.get("NO_COLOR") else WITHOUT_COLOR
        self.has_keys = sys.stdin.isatty()

    def __enter__(self) -> Terminal:
        for number in ENDING:
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        try:
            self._take()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[Styled]) -> None:
        """Draws the whole screen. Writes over what was there, so that nothing flickers."""
        encoding = sys.stdout.encoding or "ascii"
        rows = [
            self._colors.get(line.style, "") + line.text.encode(encoding, "replace").decode(encoding) + PLAIN
            for line in lines
        ]
        self._write(HOME + f"{REST_OF_LINE}\r\n".join(rows) + REST_OF_LINE + REST_OF_SCREEN)

    def key(self, patience_s: float) -> str:
        """The next key, or an empty text after ``patience_s`` seconds. A key with an escape sequence gives that."""
        if not self.has_keys:
            time.sleep(patience_s)
            return ""
        if not self._is_typed(patience_s):
            return ""
        data = os.read(sys.stdin.fileno(), 1)
        if not data:
            self.has_keys = False  # the other end is closed
        while data.startswith(b"\x1b") and len(data) < LONGEST_KEY and self._is_typed(0.0):
            data += os.read(sys.stdin.fileno(), 1)
            if data[-1:].isalpha() or data[-1:] == b"~":
                break
        return data.decode("ascii", "replace")

    @staticmethod
    def _is_typed(patience_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], patience_s)
        return bool(ready)

    def _take(self) -> None:
        if self.has_keys:
            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())  # Ctrl-C and Ctrl-Z remain what they are
        self._write(ENTER)

    def _give_back(self) -> None:
        try:
            self._write(LEAVE)
            if self._before is not None:
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)  # type: ignore[arg-type]
        except (OSError, termios.error):
            pass  # the terminal is gone
        self._before = None

    def _end(self, signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: as if this program knew nothing of it, but with the terminal as it was."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._take()

    @staticmethod
    def _write(text: str) -> None:
        data = text.encode(sys.stdout.encoding or "ascii", "replace")
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
