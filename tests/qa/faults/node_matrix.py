"""The fault matrix for nodes: every row, in the order of the table."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safelaunch.job.process import ProcessId, identify
from tests.qa.faults.fault_disks import bundles_on_a_disk, fill_bundles
from tests.qa.faults.node_row import CULPRIT, HANGS, Moment, NodeRow, Nodes, Promise
from tests.qa.faults.scene import FAST_S, Setting
from tests.support.paths import PROGRAMS

LEADER, OTHER = 0, 1
WHERE = {LEADER: "leader's node", OTHER: "another node"}
BRIEF_S = 1.2  # shorter than the stall timeout of these jobs
WHILE_S = 6.5  # longer than the gap that the watchdog takes for a suspended machine
SILENT_S = 20.0  # longer than it takes until a node counts as silent
PARTED_S = 10.0
SOON_S = 30.0  # --max-stall where a node will not come back

ROLES = ("rank", "DataLoader worker", "torchrun agent", "safelaunch", "guardian", "whole node")
Fault = Callable[[Nodes], None]

TRAINS = Promise(trains=True)
NAMED = Promise(hangs=True, named=frozenset({CULPRIT}), surely=True)


def _processes(nodes: Nodes, number: int, role: str) -> list[ProcessId]:
    scene = nodes.scenes[number]
    if role == "whole node":
        return scene.everything()
    roles: dict[str, Callable[[], int | None]] = {
        "rank": scene.rank,
        "DataLoader worker": scene.worker,
        "torchrun agent": scene.agent,
        "safelaunch": lambda: scene.pid,
        "guardian": scene.guardian,
    }
    found: list[ProcessId] = []

    def there() -> bool:
        pid = roles[role]()
        identity = identify(pid) if pid is not None else None
        found.extend([identity] if identity is not None else [])
        return bool(found)

    nodes.until(there, f"the {role}", poll_s=FAST_S)
    return found[:1]


def _send(processes: list[ProcessId], signum: int) -> None:
    for process in processes:
        process.send(signum)


def kill(number: int, role: str) -> Fault:
    """``kill -9``. A whole node loses its link first, as in a power failure: no node is informed of its end."""

    def inject(nodes: Nodes) -> None:
        victims = _processes(nodes, number, role)
        if role == "whole node":
            nodes.network.cut(number)
        _send(victims, signal.SIGKILL)
        while role == "whole node" and (rest := _processes(nodes, number, role)):  # what a guardian started in between
            _send(rest, signal.SIGKILL)

    return inject


def stop(number: int, role: str) -> Fault:
    """SIGSTOP; SIGCONT once the other nodes have ended."""

    def inject(nodes: Nodes) -> None:
        victims = _processes(nodes, number, role)
        _send(victims, signal.SIGSTOP)
        if role not in ("rank", "DataLoader worker"):
            nodes.stopped += victims

    return inject


def stop_a_while(number: int, role: str, seconds: float) -> Fault:
    def inject(nodes: Nodes) -> None:
        victims = _processes(nodes, number, role)
        _send(victims, signal.SIGSTOP)
        nodes.pass_time(seconds)
        _send(victims, signal.SIGCONT)

    return inject


def part(number: int, seconds: float | None) -> Fault:
    """Cuts a node off; ``seconds`` later its link is up again. None: never."""

    def inject(nodes: Nodes) -> None:
        nodes.network.cut(number)
        if seconds is not None:
            nodes.pass_time(seconds)
            nodes.network.mend(number)

    return inject


def then_hang(fault: Fault) -> Fault:
    def inject(nodes: Nodes) -> None:
        fault(nodes)
        nodes.steer("hang")

    return inject


def nothing(nodes: Nodes) -> None:
    return


def train_on(seconds: float) -> Fault:
    return lambda nodes: nodes.pass_time(seconds)


# --- processes --------------------------------------------------------------------------------------------------------


def _killed(role: str, moment: Moment, number: int) -> Promise:
    if role == "guardian":
        return NAMED if moment in HANGS else TRAINS
    # The rank that fails, and the rank that hangs if there is one: no verdict must name another.
    named = frozenset({CULPRIT}) if moment in HANGS else frozenset()
    if role in ("rank", "DataLoader worker"):
        return Promise(named=named | {number}, surely=moment in ("training", *HANGS))
    lost = frozenset({number}) if role == "whole node" else frozenset()
    return Promise(named=named, nodes=frozenset({number}), told=_others_than(number, moment), lost=lost)


def _others_than(number: int, moment: Moment) -> frozenset[int]:
    # Before the ranks have met, there might be nothing to report.
    return frozenset(WHERE) - {number} if moment != "start" else frozenset()


def _stopped(role: str, moment: Moment, number: int) -> Promise:
    if role == "guardian" or (role == "safelaunch" and moment not in HANGS):
        return NAMED if moment in HANGS else TRAINS
    if moment not in HANGS:
        hangs = role in ("rank", "DataLoader worker")
        if hangs:
            return Promise(hangs=True, named=frozenset({number}), surely=True)
        return Promise(nodes=frozenset({number}), told=_others_than(number, moment))
    if role in ("rank", "DataLoader worker"):
        return Promise(hangs=True, named=frozenset({CULPRIT, number}), surely=True)
    return Promise(named=frozenset({CULPRIT}), nodes=frozenset({number}), told=_others_than(number, moment))


def _rows_of_processes() -> list[NodeRow]:
    rows = []
    moments: tuple[Moment, ...] = ("start", "training", *HANGS)
    for role in ROLES:
        for moment in moments:
            for number, where in WHERE.items():
                begun = role in ("rank", "DataLoader worker")
                loading = role == "DataLoader worker"
                soon = SOON_S if role in ("whole node", "torchrun agent", "safelaunch") else 60.0
                about = {"moment": moment, "where": where, "loading": loading}
                rows.append(
                    NodeRow(
                        fault=f"kill -9 {role}",
                        promise=_killed(role, moment, number),
                        inject=kill(number, role),
                        max_stall_s=soon,
                        **about,  # type: ignore[arg-type]
                    )
                )
                # Nothing would end these jobs: they train without an agent, or torchrun waits for a store that does not
                # answer, and has no rank yet.
                endless = role == "torchrun agent" or (role == "whole node" and moment == "start" and number == LEADER)
                if moment in HANGS or not endless:
                    rows.append(
                        NodeRow(
                            fault=f"SIGSTOP {role}",
                            promise=_stopped(role, moment, number),
                            inject=stop(number, role),
                            max_stall_s=soon,
                            **about,  # type: ignore[arg-type]
                        )
                    )
                seconds = BRIEF_S if begun else WHILE_S if moment in HANGS or role == "whole node" else SILENT_S
                rows.append(
                    NodeRow(
                        fault=f"SIGSTOP {role}, SIGCONT",
                        promise=NAMED if moment in HANGS else TRAINS,
                        inject=stop_a_while(number, role, seconds),
                        **about,  # type: ignore[arg-type]
                    )
                )
    return rows


# --- links, disks, clocks, nodes that come late -----------------------------------------------------------------------


@contextmanager
def _small_disk_on(number: int, at: int, setting: Setting) -> Iterator[None]:
    if number != at:
        yield
        return
    with bundles_on_a_disk(setting):
        yield


def _full(number: int) -> NodeRow:
    return NodeRow(
        "bundle directory full",
        "training",
        NAMED,
        then_hang(lambda nodes: fill_bundles(nodes.scenes[number])),
        WHERE[number],
        arrange=lambda at, setting: _small_disk_on(number, at, setting),
    )


@contextmanager
def _wall_clock_ahead(number: int, setting: Setting) -> Iterator[None]:
    """Gives node 1 a wall clock that is ten minutes ahead."""
    if number == OTHER:
        library, offset = setting.scratch / "libclock.so", setting.scratch / "offset"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, PROGRAMS / "libclock.c"], check=True)
        offset.write_bytes(struct.pack("q", 600))
        setting.env |= {"LD_PRELOAD": os.fspath(library), "CLOCK_OFFSET": os.fspath(offset)}
    yield


def join(nodes: Nodes) -> None:
    """Starts a third node. If it joins a healthy job, torchrun 2.13 can lose the job, with or without safelaunch."""
    nodes.start()


def _others() -> list[NodeRow]:
    rows = []
    parts: tuple[Moment, ...] = ("start", "training", *HANGS)
    both = frozenset(WHERE)  # each side might take the other for gone
    alone = Promise(named=frozenset({CULPRIT}), nodes=both, told=both)
    for moment in parts:
        for number, where in WHERE.items():
            healed = NAMED if moment in HANGS else TRAINS
            lasting = alone if moment in HANGS else Promise(nodes=both, told=both if moment != "start" else frozenset())
            rows += [
                NodeRow("partition, healed", moment, healed, part(number, PARTED_S), where),
                NodeRow("partition", moment, lasting, part(number, None), where, max_stall_s=SOON_S),
            ]
    skewed = {"arrange": _wall_clock_ahead, "static": True}
    slow = {"slow": (0.2, 0.05), "own": ("--stall-timeout=15",), "max_stall_s": 90.0, "where": WHERE[OTHER]}
    late = {"own": ("--rdzv-conf=last_call_timeout=3",), "nnodes": "2:3", "where": "a third node"}
    rows += [
        NodeRow("200 ms delay, 5 % loss", "training", TRAINS, train_on(20.0), **slow),  # type: ignore[arg-type]
        NodeRow("200 ms delay, 5 % loss", "suspicion", NAMED, nothing, **slow),  # type: ignore[arg-type]
        NodeRow("uptime 10 min ahead", "training", TRAINS, train_on(20.0), WHERE[OTHER], skew_s=600),
        NodeRow("uptime 10 min ahead", "suspicion", NAMED, nothing, WHERE[OTHER], skew_s=600),
        NodeRow("wall clock 10 min ahead", "training", TRAINS, train_on(20.0), WHERE[OTHER], **skewed),  # type: ignore[arg-type]
        NodeRow("wall clock 10 min ahead", "suspicion", NAMED, nothing, WHERE[OTHER], **skewed),  # type: ignore[arg-type]
        *(_full(number) for number in WHERE),
        *(NodeRow("node joins", moment, NAMED, join, **late) for moment in ("suspicion", "capture")),  # type: ignore[arg-type]
    ]
    return rows


ROWS: tuple[NodeRow, ...] = (*_rows_of_processes(), *_others())
BY_NAME = {row.name: row for row in ROWS}
assert len(BY_NAME) == len(ROWS), "two rows of one name"

IN_CI = ("partition, healed, suspicion, another node",)
