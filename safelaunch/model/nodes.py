"""The records of the nodes: how they stand to the others, their GPUs, and what NCCL says of its communicators."""

from __future__ import annotations

from typing import Literal

from safelaunch.model.processes import Record

# --- a node -----------------------------------------------------------------------------------------------------------

# What a node's agent is to its own supervisor: it runs, a signal has stopped it, or it is gone. "": not known.
AgentState = Literal["", "running", "stopped", "gone"]
# What a store that is lost says to those who connect again: the connection was closed and nobody listens, it accepts
# and does not answer, no packet comes back. "": it is not lost.
Lost = Literal["", "closed", "silent", "unreachable"]
# A connection to a node, tried at the time of the evidence. "": not tried.
Probe = Literal["", "answers", "no answer"]


class NodeEvidence(Record, frozen=True):
    """One node of the job: what its supervisor says of itself, or what the others know of one that says nothing.

    - ``ranks``: those under its supervisor, as it said last
    - ``here``: this evidence is its own
    - ``silent_s``: how long its supervisor has not been heard; 0: it is heard, or was until its end
    - ``last``: its last words: it watches, its ranks fail, somebody stops the job there, it has ended
    - ``trouble``: what failed there on its own account
    - ``agent_error``: what its torchrun agent has failed of itself, not of a rank; known of this node alone
    - ``missed_s``: how long its supervisor was stopped itself until a moment before; known of this node alone
    - ``store``: how the store of torchrun's agents, which it hosts, was lost
    - ``script``: a digest of the script
    """

    host: str
    slot: int = 0
    ranks: tuple[int, ...] = ()
    here: bool = False
    silent_s: float = 0.0
    last: Literal["", "watching", "failing", "stopping", "ended"] = ""
    trouble: str = ""
    agent: AgentState = ""
    agent_error: str = ""
    missed_s: float = 0.0
    store: Lost = ""
    probe: Probe = ""
    torch: str = ""
    safelaunch: str = ""
    script: str = ""

    @property
    def is_gone(self) -> bool:
        """It is not heard any more, and has not said why."""
        return bool(self.silent_s or self.store) and not self.trouble and self.last in ("", "watching")


class GpuProcess(Record, frozen=True):
    """A process that has memory of a GPU. ``size``: in bytes, None where the driver does not say. ``name``: empty where
    no such process was found: its pid is of another container."""

    pid: int
    size: int | None = None
    name: str = ""


class GpuUse(Record, frozen=True):
    """Who has memory of a GPU of the node ``host``. ``index``: NVML's number."""

    host: str
    index: int
    uuid: str = ""
    processes: tuple[GpuProcess, ...] = ()


class Rendezvous(Record, frozen=True):
    """A rendezvous that has failed before any rank was started.

    - ``wanted``: how many nodes torchrun waited for; ``hosts``: those that have come, the first few of ``come``
    - ``absent_ranks``, ``absent_hosts``: node ranks and hosts that have not, as far as command line and scheduler tell
    - ``store``: why the store where nodes meet does not answer; empty where it did
    - ``error``: torchrun's own
    """

    wanted: int
    come: int
    hosts: tuple[str, ...] = ()
    absent_ranks: tuple[int, ...] = ()
    absent_hosts: tuple[str, ...] = ()
    waited_s: float = 0.0
    store: str = ""
    error: str = ""


# --- NCCL's own witness -----------------------------------------------------------------------------------------------


# What NCCL's RAS service says of a process: it has answered, it did not in time, or NCCL has given it up.
NcclState = Literal["answers", "unresponsive", "dead"]


class NcclProcess(Record, frozen=True):
    """A process in an answer of NCCL's RAS service. ``rank``: within its communicator; -1 where none is named.

    ``host``: an address, or ``unknown``. ``gpu``: NVML's number.
    """

    host: str
    pid: int
    rank: int = -1
    gpu: int = -1
    state: NcclState = "answers"


class NcclCommunicator(Record, frozen=True):
    size: int
    processes: tuple[NcclProcess, ...] = ()


class NcclWitness(Record, frozen=True):
    """What NCCL's RAS service said at the stall. ``processes``: those named outside any communicator.

    ``file``: where the bundle has the answer.
    """

    version: str
    communicators: tuple[NcclCommunicator, ...] = ()
    processes: tuple[NcclProcess, ...] = ()
    file: str = ""
