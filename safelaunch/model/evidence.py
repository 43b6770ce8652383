"""The records of a job: what was seen early, what is wrong in its results, and all the evidence of an incident.

Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from safelaunch.model.nodes import GpuUse, NcclWitness, NodeEvidence, Rendezvous
from safelaunch.model.processes import Frame, Record
from safelaunch.model.ranks import RankEvidence

# --- early looks ------------------------------------------------------------------------------------------------------


class Place(Record, frozen=True):
    """Where a rank was. ``frame``: the user's own, of the process that keeps it there; None if it was not seen."""

    rank: int
    frame: Frame | None = None


class FirstWord(Record, frozen=True):
    """What ranks do while a job is quiet. ``words``: a clause, empty if there is nothing to say.

    ``cause``: what a verdict would name; ``places``: the ranks that stand out. ``common``: many a healthy start looks
    like this. ``proved``: the job is dead.
    """

    words: str = ""
    cause: str = ""
    places: tuple[Place, ...] = ()
    common: bool = False
    proved: bool = False


class EarlyLook(Record, frozen=True):
    """What a look at the ranks found while the job was quiet, long before the threshold.

    - ``quiet_s``: since the last progress; ``usual_s``: the usual step, 0 if that was not known
    - ``movement``: whether something computed, read or wrote between two looks
    - ``words``: what the ranks did, in a clause; ``cause``: what a verdict would name; ``places``: the ranks it names
    - ``said``: it was printed
    - ``lasted_s``: how long the quiet lasted in all, if it ended by itself; 0: it lasts
    """

    unix_s: float
    quiet_s: float
    usual_s: float = 0.0
    movement: Literal["still", "active"] = "still"
    words: str = ""
    cause: str = ""
    places: tuple[Place, ...] = ()
    said: bool = False
    lasted_s: float = 0.0


class Inconsistency(Record, frozen=True):
    """A wrong result that no collective shows, found by comparing what the ranks' beacons computed.

    - ``step``: the first optimizer step at which it was seen; ``since_step``: the last one known to be right, 0: none
    - ``parameter``: the first by name that shows it (for a gradient, where the backward pass met it first); ``count``
      of ``total`` show it
    - ``ranks``: those that are off; empty if no side is in the majority. ``sides``: the ranks that agree, by side
    - ``words``: all of this, in a sentence
    """

    kind: Literal["replicas-diverged", "non-finite-gradient", "loss"]
    unix_s: float
    step: int
    since_step: int = 0
    parameter: str = ""
    count: int = 0
    total: int = 0
    ranks: tuple[int, ...] = ()
    sides: tuple[tuple[int, ...], ...] = ()
    words: str = ""

    @property
    def cause(self) -> str:
        """What a verdict calls it."""
        return "loss-diverged" if self.kind == "loss" else self.kind


Outcome = Literal["hang", "suspect", "crash", "dump"]
"""``suspect``: the job may hang, and continued."""

Answer = Literal["dead", "alive", "unknown", "unseen"]
"""What is known of a job that makes no step. ``dead``: proved. ``alive``: something works. ``unknown``: neither, though
everything was seen; ``unseen``: something was not, or a process is stopped."""


class Launched(Record, frozen=True):
    """How safelaunch started a job. ``typed``: what the user typed behind ``safelaunch``, without secrets.

    ``presets``: those in force, wherever they were named; ``torch``: its version. Empty: not known.
    ``distributed_debug``: the job's ``TORCH_DISTRIBUTED_DEBUG``.
    """

    typed: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    torch: str = ""
    distributed_debug: str = ""


class Evidence(Record, frozen=True):
    """One job at the moment of capture. ``missing_ranks``: ranks of the world that were not found.

    ``nodes``: of a job of several nodes, as far as they are known. ``early``: of this node.
    ``launched``: None for a job that safelaunch did not start. ``stopped``: ranks that their own supervisor stopped
    before the others were looked at. ``gpus``: of the nodes whose driver was asked.
    """

    outcome: Outcome
    world_size: int
    ranks: tuple[RankEvidence, ...]
    missing_ranks: tuple[int, ...] = ()
    stall_s: float = 0.0  # how long the slowest rank had made no progress at the capture
    threshold_s: float = 0.0  # the time without a step that raised the suspicion; 0: something else did
    threshold_why: str = ""
    moving: bool = False  # some rank progressed, or computed, between the confirmation samples
    for_finding: bool = False  # a finding of --check-every has asked for this, so it has its verdict
    notes: tuple[str, ...] = ()  # what slowed the job down: a straggler, a shared GPU
    nodes: tuple[NodeEvidence, ...] = ()
    nccl: NcclWitness | None = None
    rendezvous: Rendezvous | None = None
    early: tuple[EarlyLook, ...] = ()  # the newest ones, oldest first
    inconsistent: tuple[Inconsistency, ...] = ()  # what --check-every found, in order of time
    launched: Launched | None = None
    stopped: tuple[int, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    earlier: tuple[tuple[str, ...], ...] | None = None  # the GPUs and hosts that each of the last bundles blames
    answer: Answer | None = None  # of the watch, where it has asked
    work: tuple[str, ...] = ()  # what worked between the last two looks, in words
    ends: bool = False  # the time has come to end the job without a proof


def all_nodes(halves: Sequence[Evidence]) -> tuple[NodeEvidence, ...]:
    """What each half says of its own node, and what any says of one that it did not hear.

    Of a node whose own half is not here, what is said of it by the one who knows the most.
    """
    every = [node for half in halves for node in half.nodes]
    kept = {node.slot or node.host: node for node in every if node.here}
    gone: dict[int | str, NodeEvidence] = {}
    for node in (node for node in every if not node.here):
        key = node.slot or node.host
        if node.is_gone:
            gone[key] = max(gone.get(key, node), node, key=lambda one: (bool(one.probe or one.store), one.silent_s))
        else:
            kept.setdefault(key, node)
    return (*kept.values(), *gone.values())
