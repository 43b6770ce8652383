"""Where a running sweep is shown: a live table in a terminal, else a line for each thing that happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from safelaunch.atmost import at_most
from safelaunch.cli.colaunch_rows import COLUMNS, GAP, cells, choose, columns, headline, typical_s
from safelaunch.colaunch.view import Screen, Snapshot
from safelaunch.console import PREFIX, say

REFRESH_S = 0.5
WRITE_DEADLINE_S = 0.3
STUCK_RETRY_S = 5.0
PLAIN_REFRESH_S = 60.0
_RIGHT = {"step", "rate", "elapsed", "estimate"}
_STYLES = {"running": "bold", "succeeded": "green", "failed": "red", "hung": "red", "timed-out": "red"}


@contextmanager
def open_screen() -> Iterator[Screen]:
    """The one that suits stdout; a terminal is left as it was."""
    if not sys.stdout.isatty():
        yield PlainScreen()
        return
    from rich.live import Live

    live = Live(auto_refresh=False, vertical_overflow="crop")
    live.start()
    try:
        yield TerminalScreen(live)
    finally:
        with suppress(OSError):  # the terminal may have gone meanwhile
            live.stop()


class PlainScreen:
    """safelaunch's own lines on stderr; once a minute how far the whole is."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PLAIN_REFRESH_S

    def note(self, text: str) -> None:
        say(text)

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PLAIN_REFRESH_S
            say(headline(snapshot()))


class TerminalScreen:
    """A table that is drawn again and again, below what has happened. A terminal that does not read (Ctrl-S, a dead
    connection) is tried now and then, and never for long: the sweep goes on.
    """

    def __init__(self, live: Any) -> None:
        self._live = live
        self._next_s = 0.0
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        self._notes.append(text)

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + REFRESH_S
        from rich.text import Text

        try:
            with at_most(WRITE_DEADLINE_S):
                for text in self._notes:
                    self._live.console.print(Text(PREFIX + text))
                self._notes.clear()
                size = self._live.console.size
                self._live.update(picture(snapshot(), size.height, size.width), refresh=True)
        except OSError:  # the terminal has gone, or does not read
            self._next_s = time.monotonic() + STUCK_RETRY_S


def picture(snapshot: Snapshot, height: int, width: int) -> Any:
    """The table, as much of it as has room, and the line that sums it up."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = choose(snapshot, max(3, height - 5))
    typical = typical_s(snapshot)
    rows = [cells(job, typical.get(job.job.group)) for job in shown]
    kept = columns(rows, width)
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="dim")
    for name in kept:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for job, row in zip(shown, rows, strict=True):
        said = dict(zip(COLUMNS, row, strict=True))
        table.add_row(*(Text(said[name]) for name in kept), style=_STYLES.get(job.state, "dim"))
    more = len(snapshot.jobs) - len(shown)
    rest = [Text(f"... and {more} more", style="dim")] if more else []
    return Group(table, *rest, Text(headline(snapshot), style="bold"))
