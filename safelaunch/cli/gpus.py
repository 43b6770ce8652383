"""``safelaunch gpus``: this node's GPUs, who leases them, who uses them without a lease, and leftovers of dead runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from safelaunch.leases.choose import Inventory
from safelaunch.leases.holder import Holder
from safelaunch.leases.inventory import inventory
from safelaunch.leases.store import Store, store_of
from safelaunch.leases.users import User, look
from safelaunch.system.console import redact, say, show, show_json
from safelaunch.system.errors import StoreError

from .gpu_rows import COLUMNS, RIGHT, STYLES, Row, document, rows, waiting_line
from .parsing import Parser

LEAST = 12  # characters of a command or name on the narrowest terminal


def main(argv: list[str]) -> int:
    """Prints the GPUs; returns 0, even without GPUs, and 1 if the driver does not answer."""
    words = parser().parse_args(argv)
    found = inventory(os.environ)
    held, waiting = _leases(found, store_of(os.environ))
    table = rows(found.gpus, held, _users(found))
    if words.json:
        show_json(document(table, waiting, found.missing))
    elif not found.gpus:
        say(f"no GPUs to show: {found.missing}")
    elif sys.stdout.isatty():
        _print_rich(table, waiting)
    else:
        show("\n".join([*plain(table), *(waiting_line(one) for one in waiting)]), fold=True)
    return 1 if found.trouble == "silent" else 0


def parser() -> Parser:
    """The command line of ``safelaunch gpus``."""
    found = Parser(
        "gpus",
        description="The GPUs of this node: free, leased (by whom, since when), used without a lease, or left behind "
        "by a run that has ended.",
    )
    found.add_argument("--json", action="store_true", help="print one JSON document")
    return found


def _leases(found: Inventory, store: Store) -> tuple[dict[str, Holder], list[Holder]]:
    try:
        return store.look(gpu.uuid for gpu in found.gpus), store.waiting()
    except StoreError as error:
        say(f"the table shows no leases: {error}")
        return {}, []


def _users(found: Inventory) -> dict[int, User]:
    """What /proc shows about the processes that NVML lists."""
    pids = {process.pid for gpu in found.gpus for process in gpu.processes}
    return {pid: look(pid) for pid in pids}


# --- showing ----------------------------------------------------------------------------------------------------------


def plain(table: Sequence[Row]) -> list[str]:
    """Aligned lines."""
    cells = [COLUMNS, *(row.cells for row in table)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = []
    for line in cells:
        parts = [
            cell.rjust(width) if name in RIGHT else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, line, widths, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return lines


def picture(table: Sequence[Row], width: int) -> Any:
    """A table for a terminal. On a narrow one, commands and names are cut, but numbers and states are not."""
    from rich.table import Table
    from rich.text import Text

    widths = {name: max(len(name), *(len(row.cells[at]) for row in table)) for at, name in enumerate(COLUMNS)}
    for name in ("command", "name"):
        excess = sum(widths.values()) + 2 * (len(COLUMNS) - 1) - width
        widths[name] = max(min(widths[name], LEAST), widths[name] - max(0, excess))
    shown: Any = Table(box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        side: Any = "right" if name in RIGHT else "left"
        shown.add_column(name, justify=side, no_wrap=True, overflow="ellipsis", width=widths[name])
    for row in table:
        shown.add_row(*(Text(redact(cell)) for cell in row.cells), style=STYLES[row.state])
    return shown


def _print_rich(table: Sequence[Row], waiting: Sequence[Holder]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(picture(table, console.width))
    for one in waiting:
        console.print(Text(redact(waiting_line(one)), style="dim"))
    console.print(Text(time.strftime("%H:%M:%S"), style="dim"))
