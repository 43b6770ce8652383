"""``safelaunch gpus``: this node's GPUs, who holds a lease, who uses one without, and what dead runs left behind."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from safelaunch.console import say
from safelaunch.leases.choose import Inventory
from safelaunch.leases.claims import MOST_UNLEASED_BYTES
from safelaunch.leases.holder import Holder
from safelaunch.leases.nvml import inventory
from safelaunch.leases.store import Store, store_of
from safelaunch.leases.users import User, look
from safelaunch.settings.values import parse_size

from .gpu_rows import COLUMNS, RIGHT, STYLES, Row, document, rows, waiting_line

LEAST = 12  # characters of a command or name that are shown on the narrowest terminal


def main(argv: list[str]) -> int:
    """Prints what there is; 0 also where there is no GPU, 1 when the driver cannot be asked."""
    parser = argparse.ArgumentParser(
        prog="safelaunch gpus",
        description="The GPUs of this node: free, leased (by whom, since when), used without a lease, or left behind "
        "by a run that is over.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--gpu-busy-memory", metavar="SIZE", default="", help="as for a job [256MB]")
    words = parser.parse_args(argv)
    try:
        most_bytes = parse_size(words.gpu_busy_memory) if words.gpu_busy_memory else MOST_UNLEASED_BYTES
    except ValueError:
        parser.error(f"--gpu-busy-memory: {words.gpu_busy_memory!r} is not a size")
    found = inventory(os.environ)
    held, waiting = _leases(found, store_of(os.environ))
    table = rows(found.gpus, held, _users(found), most_bytes)
    if words.json:
        print(json.dumps(document(table, waiting, found.missing), indent=2))
    elif not found.gpus:
        say(f"no GPU to show: {found.missing}")
    elif sys.stdout.isatty():
        _print_rich(table, waiting)
    else:
        print("\n".join([*plain(table), *(waiting_line(one) for one in waiting)]))
    return 1 if "did not answer" in found.missing else 0


def _leases(found: Inventory, store: Store) -> tuple[dict[str, Holder], list[Holder]]:
    return store.look(gpu.uuid for gpu in found.gpus), store.waiting()


def _users(found: Inventory) -> dict[int, User]:
    """What can be seen of the processes that NVML lists."""
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
    """For a terminal: where it is narrow, commands and names are cut, numbers and states are not."""
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
        shown.add_row(*(Text(cell) for cell in row.cells), style=STYLES[row.state])
    return shown


def _print_rich(table: Sequence[Row], waiting: Sequence[Holder]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(picture(table, console.width))
    for one in waiting:
        console.print(Text(waiting_line(one), style="dim"))
    console.print(Text(time.strftime("%H:%M:%S"), style="dim"))
