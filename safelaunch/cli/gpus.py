"""``safelaunch gpus``: shows this node's GPUs, their leases, their use without a lease, and leftovers of dead runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from safelaunch.leases.choose import Inventory, LeasableGpu, users_of
from safelaunch.leases.holder import LeaseHolder, User, look, moment
from safelaunch.leases.inventory import inventory
from safelaunch.leases.store import LeaseStore, store_of
from safelaunch.system.console import cut, redact, say, show, show_json
from safelaunch.system.errors import StoreError
from safelaunch.system.printable import clean

from .parsing import Parser
from .table import GAP, TextTable

# --- the lines: the state of each GPU, from leases and NVML -----------------------------------------------------------


COLUMNS = ("gpu", "name", "memory", "state", "pid", "user", "since", "command")
RIGHT = frozenset({"gpu", "memory", "pid"})
State = Literal["free", "leased", "ranks only", "unleased use", "left behind", "fault"]
STYLES: dict[State, str] = {
    "free": "green",
    "leased": "",
    "ranks only": "yellow",
    "unleased use": "yellow",
    "left behind": "bold red",
    "fault": "bold red",
}


@dataclass(frozen=True, slots=True)
class Row:
    gpu: LeasableGpu
    state: State
    holder: LeaseHolder | None
    users: tuple[User, ...]
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.gpu.label,
            clean(self.gpu.name).removeprefix("NVIDIA ") or "-",
            _memory(self.gpu),
            self.state,
            *self._who,
        )

    @property
    def _who(self) -> tuple[str, str, str, str]:
        if self.holder is not None:
            lease_holder = self.holder
            return (
                str(lease_holder.pid or "-"),
                lease_holder.user,
                moment(lease_holder.since_unix_s),
                cut(clean(lease_holder.command), 60),
            )
        if not self.users:
            return "-", "-", "-", self.note or "-"
        first, further = self.users[0], self.users[1:]
        command = cut(clean(first.command), 60) if first.command else "not visible from here"
        more = f" (and pid {', '.join(str(user.pid) for user in further)})" if further else ""
        return str(first.pid), first.user or "-", moment(first.since_unix_s), command + more


def rows(gpus: Sequence[LeasableGpu], holders: Mapping[str, LeaseHolder], users: Mapping[int, User]) -> tuple[Row, ...]:
    table_rows = []
    for gpu in gpus:
        on_it = tuple(users.get(process.pid, User(process.pid)) for process in gpu.processes)
        holder = holders.get(gpu.uuid)
        use = users_of(gpu)
        note = "" if on_it or not use else use if gpu.error else "no process is visible on it"
        table_rows.append(Row(gpu, _state(gpu, holder, on_it, use), holder, on_it, note))
    return tuple(table_rows)


def _state(gpu: LeasableGpu, holder: LeaseHolder | None, users: Sequence[User], use: str) -> State:
    if gpu.error:
        return "fault"
    if holder is not None:
        return "ranks only" if holder.by == "ranks" else "leased"
    if any(user.left_over for user in users):
        return "left behind"
    return "unleased use" if use else "free"


@dataclass(frozen=True)
class LeaseDocument:
    """A process that holds a GPU or waits for one."""

    pid: int
    user: str
    uid: int
    run_name: str
    command: str
    since_unix_s: float
    by: str
    alive: bool  # False if only ranks of a dead run are left


@dataclass(frozen=True)
class ProcessDocument:
    """A process that uses a GPU."""

    pid: int
    user: str
    command: str
    since_unix_s: float
    left_over: bool
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuDocument:
    """A GPU, or a MIG instance of one."""

    gpu: str
    uuid: str
    name: str
    parent: str | None  # UUID of the instance's GPU
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    state: State
    note: str
    lease: LeaseDocument | None
    processes: list[ProcessDocument]


@dataclass(frozen=True)
class Document:
    missing: str
    gpus: list[GpuDocument]
    waiting: list[LeaseDocument]


def document(table: Sequence[Row], waiting: Sequence[LeaseHolder], missing: str) -> Document:
    return Document(missing, [_gpu(row) for row in table], [_holder(waiter) for waiter in waiting])


def _gpu(row: Row) -> GpuDocument:
    gpu = row.gpu
    processes = zip(row.users, gpu.processes, strict=True)
    return GpuDocument(
        gpu.label,
        gpu.uuid,
        gpu.name,
        gpu.parent or None,
        gpu.memory_used_bytes,
        gpu.memory_total_bytes,
        row.state,
        gpu.error or row.note,
        _holder(row.holder) if row.holder is not None else None,
        [ProcessDocument(**asdict(user), memory_bytes=process.memory_bytes) for user, process in processes],
    )


def _holder(holder: LeaseHolder) -> LeaseDocument:
    alive = holder.by != "ranks"  # a pid means nothing in another pid namespace
    return LeaseDocument(
        holder.pid, holder.user, holder.uid, holder.name, holder.command, holder.since_unix_s, holder.by, alive
    )


def waiting_line(waiter: LeaseHolder) -> str:
    command = cut(clean(waiter.command), 60)
    return f"waiting: pid {waiter.pid} ({waiter.user}) since {moment(waiter.since_unix_s)}: {command}"


def _memory(gpu: LeasableGpu) -> str:
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return "-"
    return f"{gpu.memory_used_bytes / (1 << 30):.1f}/{gpu.memory_total_bytes / (1 << 30):.0f} GiB"


LEAST = 12  # characters


def main(argv: list[str]) -> int:
    """Prints the GPUs; returns 0, or 1 if the driver doesn't respond."""
    words = parser().parse_args(argv)
    gpu_inventory = inventory(os.environ)
    holders, waiting = _leases(gpu_inventory, store_of(os.environ))
    table = rows(gpu_inventory.gpus, holders, _users(gpu_inventory))
    if words.json:
        show_json(asdict(document(table, waiting, gpu_inventory.missing)))
    elif not gpu_inventory.gpus:
        say(f"no GPUs to show: {gpu_inventory.missing}")
    elif sys.stdout.isatty():
        _print_rich(table, waiting)
    else:
        show("\n".join([*as_table(table).lines(), *(waiting_line(waiter) for waiter in waiting)]), fold=True)
    return 1 if gpu_inventory.trouble == "silent" else 0


def parser() -> Parser:
    command_line = Parser(
        "gpus",
        description="The GPUs of this node: free, leased (by whom, since when), used without a lease, or left behind "
        "by a run that has ended.",
    )
    command_line.add_argument("--json", action="store_true", help="print one JSON document")
    return command_line


def _leases(gpu_inventory: Inventory, store: LeaseStore) -> tuple[dict[str, LeaseHolder], list[LeaseHolder]]:
    try:
        return store.look(gpu.uuid for gpu in gpu_inventory.gpus), store.waiting()
    except StoreError as error:
        say(f"the table shows no leases: {error}")
        return {}, []


def _users(gpu_inventory: Inventory) -> dict[int, User]:
    pids = {process.pid for gpu in gpu_inventory.gpus for process in gpu.processes}
    return {pid: look(pid) for pid in pids}


# --- the screen -------------------------------------------------------------------------------------------------------


def as_table(table_rows: Sequence[Row]) -> TextTable:
    return TextTable(COLUMNS, [row.cells for row in table_rows], RIGHT, [STYLES[row.state] for row in table_rows])


def picture(table_rows: Sequence[Row], width: int) -> Any:
    """Returns a table for a terminal. If the terminal is narrow, commands and names are truncated."""
    table = as_table(table_rows)
    widths = {name: table.width_of(name) for name in COLUMNS}
    for name in ("command", "name"):
        excess = sum(widths.values()) + GAP * (len(COLUMNS) - 1) - width
        widths[name] = max(min(widths[name], LEAST), widths[name] - max(0, excess))
    return table.drawn(cut=widths)


def _print_rich(table: Sequence[Row], waiting: Sequence[LeaseHolder]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(picture(table, console.width))
    for waiter in waiting:
        console.print(Text(redact(waiting_line(waiter)), style="dim"))
    console.print(Text(time.strftime("%H:%M:%S"), style="dim"))
