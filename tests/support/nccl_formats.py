"""Writes Flight Recorder dumps of NCCL jobs in the formats of torch 2.5 to 2.15 and of torchcomms.

Torch 2.5 to 2.13 record as ``ProcessGroupNCCL``, torch 2.15 as ``nccl2``. A test lists a rank's calls in order, each
with its state at the time of the dump. These properties follow the recorder and the process group of each version:

- The numbers. A collective counts ``collective_seq_id``, a send or receive ``p2p_seq_id``, each per group; ``op_id``
  counts all. A batch of sends is one ``p2p_seq_id``, a block of collectives one ``collective_seq_id``. Before 2.6 the
  start of a batch or a block counted one collective, and each collective within a block another one.
- Members of a batch or a block have no events: they stay ``scheduled`` and are never retired. The entry that ends them
  has the state, no sizes, and ``is_p2p`` False, also after sends. Members of a block are recorded since format 2.7.
- ``pg_status`` uses the rank's own number of the group, and has the numbers of the last operation enqueued, sends
  included.
- Starts are known only with timing enabled; otherwise, an entry is ``scheduled`` until it is ``completed``.
- An entry that is retired without being completed has timed out.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["completed", "started", "scheduled", "timed out"]
SCRIPT = "/home/me/train.py"
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
BEGIN_NS = 1_724_779_239_936_775_119


@dataclass(frozen=True)
class Format:
    """One format version.

    Attributes:
        blocks: Collectives of a block get entries.
        bumps: A batch counts a collective.
    """

    torch: str
    version: str
    library: str = ""
    threads: bool = False
    blocks: bool = False
    bumps: bool = False


FORMATS = (
    Format("2.5", "2.3", bumps=True),
    Format("2.6", "2.4"),
    Format("2.7", "2.5"),
    Format("2.8", "2.7", library="nccl_version", blocks=True),
    Format("2.9", "2.9", library="nccl_version", threads=True, blocks=True),
    Format("2.10", "2.10", library="comm_lib_version", threads=True, blocks=True),
    Format("2.13", "2.10", library="comm_lib_version", threads=True, blocks=True),
)
NEWEST = FORMATS[-1]


@dataclass(frozen=True)
class Op:
    """One operation of a batch or a block. ``peer`` is its rank in the group."""

    name: str
    size: tuple[int, ...] = (4,)
    dtype: str = "Float"
    peer: int = 0


@dataclass
class Group:
    """A process group as one rank counts it. ``number`` is the rank's own, the key in ``pg_status``."""

    number: int
    ranks: Sequence[int]
    description: str = "undefined"
    collectives: int = 0
    transfers: int = 0
    ops: int = 0
    status: dict[str, int] = field(
        default_factory=lambda: {f"last_{what}_collective": -1 for what in ("enqueued", "started", "completed")}
    )


class Recorder:
    """One rank's recorder. ``groups`` maps a name to global ranks, the default group ``0`` first."""

    def __init__(
        self, rank: int, groups: Mapping[str, Sequence[int]], layout: Format = NEWEST, *, timing: bool = True
    ) -> None:
        self.rank, self.layout, self.timing = rank, layout, timing
        mine = [name for name, ranks in groups.items() if rank in ranks]
        self.groups = {
            name: Group(number, groups[name], "default_pg" if name == "0" else "undefined")
            for number, name in enumerate(mine)
        }
        self.entries: list[dict[str, Any]] = []

    def collective(
        self,
        op: str = "all_reduce",
        state: State = "completed",
        *,
        group: str = "0",
        size: tuple[int, ...] = (4,),
        dtype: str = "Float",
        output: tuple[int, ...] | None = None,
        line: int = 50,
    ) -> Recorder:
        self.groups[group].collectives += 1
        self.groups[group].ops += 1
        self._work(group, f"nccl:{op}", state, line, [size], [output or size], dtype)
        return self

    def send(self, peer: int, state: State = "completed", **of_op: Any) -> Recorder:
        return self._transfer("send", peer, state, **of_op)

    def recv(self, peer: int, state: State = "completed", **of_op: Any) -> Recorder:
        return self._transfer("recv", peer, state, **of_op)

    def _transfer(
        self,
        name: str,
        peer: int,
        state: State,
        *,
        group: str = "0",
        size: tuple[int, ...] = (4,),
        dtype: str = "Float",
        line: int = 60,
    ) -> Recorder:
        self.groups[group].transfers += 1
        self.groups[group].ops += 1
        self._work(group, self._title(group, Op(name, peer=peer)), state, line, [size], [size], dtype, is_p2p=True)
        return self

    def batch(
        self, ops: Sequence[Op], state: State | None = "completed", *, group: str = "0", line: int = 70
    ) -> Recorder:
        """Records ``batch_isend_irecv``, which hasn't ended yet if ``state`` is None."""
        mine = self.groups[group]
        mine.transfers += 1
        mine.collectives += self.layout.bumps
        for op in ops:
            mine.ops += 1
            self._entry(group, self._title(group, op), line, [op.size], [op.size], op.dtype, is_p2p=True)
        if state is not None:
            self._work(group, "nccl:coalesced", state, line, [], [], number=mine.transfers)
        return self

    def block(
        self,
        ops: Sequence[Op],
        state: State | None = "completed",
        *,
        group: str = "0",
        line: int = 80,
        kind: str = "",
    ) -> Recorder:
        """Records collectives under one launch, which hasn't ended yet if ``state`` is None.

        Args:
            kind: ``ALLGATHER`` if one uneven all_gather became several broadcasts.
        """
        mine = self.groups[group]
        mine.collectives += 1 + (len(ops) if self.layout.bumps else 0)
        for op in ops:
            mine.ops += 1
            if self.layout.blocks:
                self._entry(group, f"nccl:{op.name}", line, [op.size], [op.size], op.dtype)
        if state is not None:
            end = f"nccl:{kind}_coalesced" if kind and self.layout.blocks else "nccl:coalesced"
            self._work(group, end, state, line, [], [])
        return self

    def _title(self, group: str, op: Op) -> str:
        me = list(self.groups[group].ranks).index(self.rank)
        return f"nccl:{op.name} {me}{'->' if op.name == 'send' else '<-'}{op.peer}"

    def _entry(
        self,
        group: str,
        name: str,
        line: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        dtype: str = "Float",
        *,
        is_p2p: bool = False,
    ) -> dict[str, Any]:
        mine, number = self.groups[group], len(self.entries)
        entry = {
            "frames": _frames(name, line),
            "record_id": number,
            "pg_id": mine.number,
            "process_group": (group, mine.description),
            "collective_seq_id": mine.collectives,
            "p2p_seq_id": mine.transfers,
            "op_id": mine.ops,
            "profiling_name": name,
            "time_created_ns": BEGIN_NS + number * 10**6,
            "input_sizes": [list(size) for size in inputs],
            "input_dtypes": [dtype] * len(inputs),
            "output_sizes": [list(size) for size in outputs],
            "output_dtypes": [dtype] * len(outputs),
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600_000,
            "is_p2p": is_p2p,
        }
        if self.layout.threads:
            entry |= {"thread_id": "140298925697920", "thread_name": "python3"}
        self.entries.append(entry)
        return entry

    def _work(
        self,
        group: str,
        name: str,
        state: State,
        line: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        dtype: str = "Float",
        *,
        is_p2p: bool = False,
        number: int = 0,
    ) -> None:
        """Records an entry with events: the watchdog updates its state and the group's status."""
        entry = self._entry(group, name, line, inputs, outputs, dtype, is_p2p=is_p2p)
        mine, at_ns = self.groups[group], entry["time_created_ns"]
        number = number or (mine.transfers if is_p2p else mine.collectives)
        mine.status["last_enqueued_collective"] = number
        if state in ("started", "completed", "timed out") and self.timing:
            entry |= {"state": "started", "time_discovered_started_ns": at_ns + 1000}
            mine.status["last_started_collective"] = number
        if state == "completed":
            entry |= {"state": "completed", "time_discovered_completed_ns": at_ns + 9000, "retired": True}
            mine.status["last_completed_collective"] = number
            if self.timing:
                entry["duration_ms"] = 0.008
        entry["retired"] = state in ("completed", "timed out")

    def dump(self, window: int = 2000) -> dict[str, Any]:
        found: dict[str, Any] = {
            "version": self.layout.version,
            "pg_config": {
                name: {"name": name, "desc": mine.description, "ranks": json.dumps(list(mine.ranks))}
                for name, mine in self.groups.items()
            },
            "pg_status": {str(mine.number): dict(mine.status) for mine in self.groups.values() if mine.ops},
            "entries": self.entries[-window:],
        }
        if self.layout.library:
            found[self.layout.library] = "2.27.5"
        return found

    def json(self, window: int = 2000) -> bytes:
        """Converts a dump to the worker server's JSON: no frames, 0 for an unknown time, the status as strings."""
        dump = self.dump(window)
        entries = [
            {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
            for entry in dump["entries"]
        ]
        status = {key: {k: str(v) for k, v in numbers.items()} for key, numbers in dump["pg_status"].items()}
        return json.dumps({**dump, "entries": entries, "pg_status": status}).encode()


class Hooked(Recorder):
    """The recorder of one backend in torch 2.15: c10d's hooks write it around each call of the process group.

    - Each send and receive has a separate number, in a batch, too. Coalesced calls are one call with its own name;
      nothing marks the end of a batch, and the end of its sends is never recorded.
    - Starts are never recorded. An end is recorded if the work succeeded; a call that timed out keeps its state.
    - ``pg_status`` counts operations of both kinds. The rank numbers its groups across all backends.
    - ``early``: for a backend that reports no end (one in Python), each entry is retired as it is made, and stays
      ``scheduled``.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[str, Sequence[int]],
        backend: str = "nccl2",
        *,
        number: int = 0,
        early: bool = False,
    ) -> None:
        super().__init__(rank, groups, Format("2.15", "2.10", threads=True), timing=False)
        self.backend, self.early = backend, early
        for group in self.groups.values():
            group.number += number

    def batch(
        self, ops: Sequence[Op], state: State | None = "completed", *, group: str = "0", line: int = 70
    ) -> Hooked:
        for op in ops:
            self._transfer(op.name, op.peer, "scheduled", group=group, size=op.size, dtype=op.dtype, line=line)
        return self

    def _work(self, group: str, name: str, state: State, *rest: Any, **more: Any) -> None:
        super()._work(group, name, "scheduled" if state != "completed" else state, *rest, **more)
        entry, mine = self.entries[-1], self.groups[group]
        entry["profiling_name"] = f"{self.backend}:{name.partition(':')[2]}"
        entry["time_discovered_started_ns"] = entry["time_discovered_completed_ns"]
        mine.status["last_enqueued_collective"] = mine.ops
        if self.early:
            entry |= {"state": "scheduled", "retired": True}
            entry |= {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
        elif state == "completed":
            mine.status["last_completed_collective"] = mine.ops


class Pending(Recorder):
    """Its dump holds no completed calls, like the dump that the watchdog writes at a timeout."""

    def dump(self, window: int = 2000) -> dict[str, Any]:
        found = super().dump(window)
        return {**found, "entries": [entry for entry in found["entries"] if not entry["retired"]]}


class TorchComms(Recorder):
    """Dumps as torchcomms writes them.

    One number counts all calls of a rank from 0, in any group. Sends differ from collectives only by name.
    """

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        super().__init__(rank, groups, Format("torchcomms", "2.10", threads=True), timing=False)

    def dump(self, window: int = 2000) -> dict[str, Any]:
        entries = [
            {
                **entry,
                "profiling_name": entry["profiling_name"].replace("nccl:", "ncclx:"),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "is_p2p": False,
            }
            for number, entry in enumerate(self.entries)
        ]
        return {**super().dump(window), "entries": entries[-window:]}


def _frames(name: str, line: int) -> list[dict[str, Any]]:
    function = name.partition(":")[2].partition(" ")[0]
    return [
        {"name": function, "filename": f"{LIBRARY}/distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": f"{LIBRARY}/c10d_logger.py", "line": 83},
        {"name": "train", "filename": SCRIPT, "line": line},
        {"name": "<module>", "filename": SCRIPT, "line": 100},
    ]


def write(folder: Path, recorders: Sequence[Recorder], *, as_json: bool = False, window: int = 2000) -> Path:
    """Writes ``nccl_trace_rank_<rank>`` for each rank to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in recorders:
        data = one.json(window) if as_json else pickle.dumps(one.dump(window), protocol=2)
        (folder / f"nccl_trace_rank_{one.rank}").write_bytes(data)
    return folder
