"""Tables of the subcommands: rich lays them out, for a terminal and as plain text. It is imported as one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safelaunch.system.console import redact

GAP = 2
ENDLESS = 1 << 16  # columns: nothing is cut or broken


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells below ``columns``. ``right``: columns of numbers; ``styles``: rich's, one for each row.

    ``less_wanted``: the columns to leave out where there is no room for all, the first one first; empty ones go before.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()
    styles: Sequence[str] = ()
    less_wanted: tuple[str, ...] = ()

    def width_of(self, column: str) -> int:
        """The length of its longest cell."""
        return max(map(len, (column, *(row[self.columns.index(column)] for row in self.rows))))

    def without(self, column: str) -> TextTable:
        at = self.columns.index(column)
        rows = [[*row[:at], *row[at + 1 :]] for row in self.rows]
        return replace(self, columns=(*self.columns[:at], *self.columns[at + 1 :]), rows=rows)

    def fitted(self, width: int, last: int = ENDLESS) -> TextTable:
        """With as many columns as fit into ``width``. ``last``: the room that the last one needs at least."""
        table = self
        empty = [name for name in self.columns[1:] if {row[self.columns.index(name)] for row in self.rows} <= {"-"}]
        for name in dict.fromkeys((*(one for one in self.less_wanted if one in empty), *empty, *self.less_wanted)):
            *others, final = [table.width_of(column) for column in table.columns]
            if sum(others) + min(final, last) + GAP * len(others) <= width:
                break
            table = table.without(name) if name in table.columns else table
        return table

    def drawn(self, *, cut: Mapping[str, int] | None = None) -> Any:
        """As rich draws it: what does not fit into the last column goes on below. ``cut``: widths of columns that are
        cut off instead.
        """
        from rich.table import Table as Drawn
        from rich.text import Text

        cut = cut or {}
        found = Drawn(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        for name in self.columns:
            side: Any = "right" if name in self.right else "left"
            whole = bool(cut) or name != self.columns[-1]
            found.add_column(name, justify=side, no_wrap=whole, overflow="ellipsis", width=cut.get(name))
        for at, row in enumerate(self.rows):
            found.add_row(*(Text(redact(cell)) for cell in row), style=self.styles[at] if self.styles else None)
        return found

    def lines(self, width: int = ENDLESS, indent: str = "") -> list[str]:
        """As plain text."""
        return [f"{indent}{line}".rstrip() for line in as_text(self.drawn(), width - len(indent))]


def as_text(drawn: Any, width: int) -> list[str]:
    """What rich draws, as lines without colour."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(drawn)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]
