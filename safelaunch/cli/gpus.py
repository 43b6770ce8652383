"""``safelaunch gpus``: this node's GPUs, who leases them, who uses them without a lease, and leftovers of dead runs."""

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

# --- The lines of ``safelaunch gpus``: the state of each GPU, from leases and NVML ------------------------------------


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
    """A GPU, its state, its holder (None: nobody) and the processes that NVML sees on it."""

    gpu: LeasableGpu
    state: State
    holder: LeaseHolder | None
    users: tuple[User, ...]
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's cells, in the order of ``COLUMNS``."""
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
            one = self.holder
            return str(one.pid or "-"), one.user, moment(one.since_unix_s), cut(clean(one.command), 60)
        if not self.users:
            return "-", "-", "-", self.note or "-"
        first, others = self.users[0], self.users[1:]
        command = cut(clean(first.command), 60) if first.command else "not visible from here"
        more = f" (and pid {', '.join(str(user.pid) for user in others)})" if others else ""
        return str(first.pid), first.user or "-", moment(first.since_unix_s), command + more


def rows(gpus: Sequence[LeasableGpu], held: Mapping[str, LeaseHolder], users: Mapping[int, User]) -> tuple[Row, ...]:
    """One row per GPU."""
    found = []
    for gpu in gpus:
        on_it = tuple(users.get(process.pid, User(process.pid)) for process in gpu.processes)
        holder = held.get(gpu.uuid)
        use = users_of(gpu)
        note = "" if on_it or not use else use if gpu.error else "no process is visible on it"
        found.append(Row(gpu, _state(gpu, holder, on_it, use), holder, on_it, note))
    return tuple(found)


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
    """Who holds a GPU, or waits for one. ``alive``: the supervisor holds it, not only ranks that it left behind."""

    pid: int
    user: str
    uid: int
    run_name: str
    command: str
    since_unix_s: float
    by: str
    alive: bool


@dataclass(frozen=True)
class ProcessDocument:
    """A process that uses a GPU. ``left_over``: of a run whose supervisor is gone."""

    pid: int
    user: str
    command: str
    since_unix_s: float
    left_over: bool
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuDocument:
    """A GPU, or a MIG instance of one. ``parent``: the UUID of the GPU."""

    gpu: str
    uuid: str
    name: str
    parent: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    state: State
    note: str
    lease: LeaseDocument | None
    processes: list[ProcessDocument]


@dataclass(frozen=True)
class Document:
    """The --json document. ``missing``: why there are no GPUs. ``waiting``: the jobs in the queue."""

    missing: str
    gpus: list[GpuDocument]
    waiting: list[LeaseDocument]


def document(table: Sequence[Row], waiting: Sequence[LeaseHolder], missing: str) -> Document:
    """For ``--json``."""
    return Document(missing, [_gpu(row) for row in table], [_holder(one) for one in waiting])


def _gpu(row: Row) -> GpuDocument:
    gpu = row.gpu
    seen = zip(row.users, gpu.processes, strict=True)
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
        [ProcessDocument(**asdict(user), memory_bytes=process.memory_bytes) for user, process in seen],
    )


def _holder(one: LeaseHolder) -> LeaseDocument:
    alive = one.by != "ranks"  # by its lock: a pid says nothing from another pid namespace
    return LeaseDocument(one.pid, one.user, one.uid, one.name, one.command, one.since_unix_s, one.by, alive)


def waiting_line(one: LeaseHolder) -> str:
    """One job in the queue."""
    return f"waiting: pid {one.pid} ({one.user}) since {moment(one.since_unix_s)}: {cut(clean(one.command), 60)}"


def _memory(gpu: LeasableGpu) -> str:
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return "-"
    return f"{gpu.memory_used_bytes / (1 << 30):.1f}/{gpu.memory_total_bytes / (1 << 30):.0f} GiB"


LEAST = 12  # characters of a command or name on the narrowest terminal


def main(argv: list[str]) -> int:
    """Prints the GPUs; returns 0, even without GPUs, and 1 if the driver does not answer."""
    words = parser().parse_args(argv)
    found = inventory(os.environ)
    held, waiting = _leases(found, store_of(os.environ))
    table = rows(found.gpus, held, _users(found))
    if words.json:
        show_json(asdict(document(table, waiting, found.missing)))
    elif not found.gpus:
        say(f"no GPUs to show: {found.missing}")
    elif sys.stdout.isatty():
        _print_rich(table, waiting)
    else:
        show("\n".join([*as_table(table).lines(), *(waiting_line(one) for one in waiting)]), fold=True)
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


def _leases(found: Inventory, store: LeaseStore) -> tuple[dict[str, LeaseHolder], list[LeaseHolder]]:
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


def as_table(found: Sequence[Row]) -> TextTable:
    return TextTable(COLUMNS, [row.cells for row in found], RIGHT, [STYLES[row.state] for row in found])


def picture(found: Sequence[Row], width: int) -> Any:
    """A table for a terminal. On a narrow one, commands and names are cut, but numbers and states are not."""
    table = as_table(found)
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
    for one in waiting:
        console.print(Text(redact(waiting_line(one)), style="dim"))
    console.print(Text(time.strftime("%H:%M:%S"), style="dim"))
