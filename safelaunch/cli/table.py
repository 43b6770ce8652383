"""Tables of the subcommands, for a terminal or as plain text. rich is imported only to draw a table."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safelaunch.system.console import redact

GAP = 2
ENDLESS = 1 << 16  # columns


@dataclass(frozen=True, slots=True)
class TextTable:
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()  # columns of numbers
    styles: Sequence[str] = ()  # rich's, by row
    less_wanted: tuple[str, ...] = ()  # columns to leave out, in this order

    def width_of(self, column: str) -> int:
        return max(map(len, (column, *(row[self.columns.index(column)] for row in self.rows))))

    def without(self, column: str) -> TextTable:
        at = self.columns.index(column)
        rows = [[*row[:at], *row[at + 1 :]] for row in self.rows]
        return replace(self, columns=(*self.columns[:at], *self.columns[at + 1 :]), rows=rows)

    def fitted(self, width: int, last: int = ENDLESS) -> TextTable:
        """Returns the table with as many columns as fit into ``width``, if the last column needs the width ``last``."""
        table = self
        empty = [name for name in self.columns[1:] if {row[self.columns.index(name)] for row in self.rows} <= {"-"}]
        for name in dict.fromkeys(
            (*(column for column in self.less_wanted if column in empty), *empty, *self.less_wanted)
        ):
            *widths, final = [table.width_of(column) for column in table.columns]
            if sum(widths) + min(final, last) + GAP * len(widths) <= width:
                break
            table = table.without(name) if name in table.columns else table
        return table

    def drawn(self, *, cut: Mapping[str, int] | None = None) -> Any:
        """Returns a rich table, whose last column wraps.

        Args:
            cut: Columns to truncate, with their widths.
        """
        from rich.table import Table as Drawn
        from rich.text import Text

        cut = cut or {}
        rich_table = Drawn(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        for name in self.columns:
            side: Any = "right" if name in self.right else "left"
            whole = bool(cut) or name != self.columns[-1]
            rich_table.add_column(name, justify=side, no_wrap=whole, overflow="ellipsis", width=cut.get(name))
        for at, row in enumerate(self.rows):
            rich_table.add_row(*(Text(redact(cell)) for cell in row), style=self.styles[at] if self.styles else None)
        return rich_table

    def lines(self, width: int = ENDLESS, indent: str = "") -> list[str]:
        return [f"{indent}{line}".rstrip() for line in as_text(self.drawn(), width - len(indent))]


def as_text(drawn: Any, width: int) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(drawn)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]
