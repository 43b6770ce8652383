"""The records of a job: its nodes, early looks, wrong results, all the evidence of an incident; and the verdict.

Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from safelaunch.model.ranks import Frame, RankEvidence, Record

# --- a node -----------------------------------------------------------------------------------------------------------

# What a node's agent is to its own supervisor: it runs, a signal has stopped it, or it is gone. "": not known.
AgentState = Literal["", "running", "stopped", "gone"]
# What a store that is lost says to those who connect again: the connection was closed and nobody listens, it accepts
# and does not answer, no packet comes back. "": it is not lost.
Lost = Literal["", "closed", "silent", "unreachable"]
# A connection to a node, tried at the time of the evidence. "no route": this node itself has no address or no route to
# try it from, which says nothing of the other one. "": not tried.
ServerProbe = Literal["", "answers", "no answer", "no route"]


class NodeEvidence(Record, frozen=True):
    """One node of the job: what its supervisor says of itself, or what the others know of one that says nothing.

    - ``ranks``: those under its supervisor, as it said last
    - ``here``: this evidence is its own
    - ``silent_s``: how long its supervisor has not been heard; 0: it is heard, or was until its end
    - ``last``: its last words: it watches, its ranks fail, somebody stops the job there, it has ended
    - ``trouble``: what failed there independently of the others
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
    probe: ServerProbe = ""
    torch: str = ""
    safelaunch: str = ""
    script: str = ""

    @property
    def is_gone(self) -> bool:
        """It is not heard any more, and has not said why."""
        return bool(self.silent_s or self.store) and not self.trouble and self.last in ("", "watching")


class GpuProcess(Record, frozen=True):
    """A process that has memory of a GPU. ``size``: in bytes, None where the driver does not say. ``name``: empty where
    no such process was found: its pid is of another container.
    """

    pid: int = 0
    size: int | None = msgspec.field(default=None, name="memory_bytes")
    name: str = ""


class Gpu(Record, frozen=True, omit_defaults=False):
    """A GPU of a node. ``index``: NVML's number. None: it does not report that. ``error``: why it can't be asked."""

    index: int = -1
    name: str | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_errors: float | None = None  # uncorrected, since the driver was loaded
    processes: tuple[GpuProcess, ...] | None = None
    error: str = ""
    uuid: str | None = None
    sm_clock_mhz: float | None = None


class Gpus(Record, frozen=True):
    """``gpus.json``: what the driver says. ``missing``: why it says nothing; ``installed``: its Python package is."""

    driver: str | None = None
    cuda_driver: int | None = None
    gpus: tuple[Gpu, ...] = ()
    missing: str = ""
    installed: bool = True

    def uses(self, host: str) -> tuple[GpuUse, ...]:
        """Who has memory of which GPU."""
        return tuple(GpuUse(host, one.index, one.uuid or "", one.processes) for one in self.gpus if one.processes)


class GpuUse(Record, frozen=True):
    """Who has memory of a GPU of the node ``host``. ``index``: NVML's number."""

    host: str
    index: int
    uuid: str = ""
    processes: tuple[GpuProcess, ...] = ()


class Resources(Record, frozen=True, omit_defaults=False):
    """``resources.json``: of a node, and of the control group and limits of one of its ranks.

    ``disks``: place → total, used and free bytes, or the reason for having none. ``network``: interface, or port of an
    InfiniBand device (``mlx5_0/1``) → state, speed, MTU, and error counters that are not 0. ``out_of_memory_kills``:
    the kernel's counts ``at_start`` of the job and ``now``.
    """

    cpus: int | None = None
    load: tuple[float, ...] = ()
    memory_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    cgroup: dict[str, str] = msgspec.field(default_factory=dict)
    limits: dict[str, str] = msgspec.field(default_factory=dict)
    network: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    disks: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    out_of_memory_kills: dict[str, Any] = msgspec.field(default_factory=dict)


class NodeFiles(Record, frozen=True):
    """The files of ``node/<host>/``: each field is one, a text (``.txt``) or a record (``.json``), by its type.

    ``capture.node.sources`` collects them; they are written, and in a hang sent to other nodes, by this list.
    """

    gpus: Gpus | None = None
    nvidia_smi: str = ""
    kernel_log: str = ""
    pressure: str = ""  # how long tasks have waited for CPU, memory and I/O, as the kernel says it
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    resources: Resources | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)  # of a rank, when it was started


def node_file(field: str) -> str:
    """The file name of a field of :class:`NodeFiles`."""
    return f"{field}.txt" if NodeFiles.__annotations__[field] == "str" else f"{field}.json"


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


WRONG_RESULTS_KEY = "inconsistent"  # in documents
WRONG_RESULTS_FILE = f"{WRONG_RESULTS_KEY}.json"  # in a bundle


class WrongResult(Record, frozen=True):
    """A wrong result that no collective shows, found by a monitor of a job that otherwise runs.

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
    ``distributed_debug``: the job's ``TORCH_DISTRIBUTED_DEBUG``. ``command``: what ran, without secrets.
    """

    typed: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    torch: str = ""
    distributed_debug: str = ""
    run_name: str = ""
    host: str = ""
    command: tuple[str, ...] = ()
    safelaunch: str = ""

    @property
    def as_typed(self) -> tuple[str, ...]:
        """The command line as the user knows it; what ran, if nothing was typed."""
        return ("safelaunch", *self.typed) if self.typed else self.command


class Evidence(Record, frozen=True):
    """One job at the moment of capture. ``missing_ranks``: ranks of the world that were not found.

    ``nodes``: of a job of several nodes, as far as they are known. ``early``: of this node.
    ``launched``: None for a job that safelaunch did not start. ``stopped``: ranks that their own supervisor stopped
    before the others were looked at. ``gpus``: of the nodes whose driver was asked. ``printed``: of evidence that is
    nothing but what a job has printed, the ranks whose lines are known to be theirs. ``time``: when it was collected
    (UTC, ISO 8601). ``versions``: of what the job runs on, by name, on one of its nodes.

    ``labels``: the processes whose rank is not known, by the number that stands for each of them in ``ranks``: what
    the text calls them (``process 688514``, ``worker-2``). ``world_guessed``: nothing gives the number of ranks, and
    ``world_size`` is the least that it can be.
    """

    outcome: Outcome
    world_size: int
    ranks: tuple[RankEvidence, ...]
    missing_ranks: tuple[int, ...] = ()
    stall_s: float = 0.0  # how long the slowest rank had made no progress at the capture
    threshold_s: float = 0.0  # the time without a step that raised the suspicion; 0: something else did
    threshold_why: str = ""
    moving: bool = False  # some rank progressed, or computed, between the confirmation samples
    for_finding: bool = False  # requested for something that was found, so it needs no look at the steps
    notes: tuple[str, ...] = ()  # what slowed the job down: a straggler, a shared GPU
    nodes: tuple[NodeEvidence, ...] = ()
    nccl: NcclWitness | None = None
    rendezvous: Rendezvous | None = None
    early: tuple[EarlyLook, ...] = ()  # the newest ones, oldest first
    wrong_results: tuple[WrongResult, ...] = msgspec.field(default=(), name=WRONG_RESULTS_KEY)  # in order of time
    launched: Launched | None = None
    stopped: tuple[int, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    earlier: tuple[tuple[str, ...], ...] | None = None  # the GPUs and hosts that each of the last bundles blames
    answer: Answer | None = None  # of the watch, where it has asked
    work: tuple[str, ...] = ()  # what worked between the last two looks, in words
    ends: bool = False  # the time has come to end the job without a proof
    printed: tuple[int, ...] | None = None
    labels: dict[int, str] = msgspec.field(default_factory=dict)
    world_guessed: bool = False
    may_be_caught: bool = False  # the processes that raised printed more afterwards, as one that goes on does
    time: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


_OF_THE_MACHINE = frozenset({"system", "kernel", "machine", "python_executable", "torch_git"})


def software(versions: Mapping[str, str]) -> dict[str, str]:
    """The versions of Python, torch and what belongs to it, of all those in ``versions.json``."""
    return {name: version for name, version in versions.items() if name not in _OF_THE_MACHINE}


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
            gone[key] = max(gone.get(key, node), node, key=_known_of)
        else:
            kept.setdefault(key, node)
    return (*kept.values(), *gone.values())


def _known_of(gone: NodeEvidence) -> tuple[bool, bool, float]:
    return gone.probe != "no route", bool(gone.probe or gone.store), gone.silent_s


# --- the verdict ------------------------------------------------------------------------------------------------------


class Artifact(Record, frozen=True):
    """One file of a bundle, or the reason why it is missing.

    ``path`` is relative to the bundle. ``how``: the source (``py-spy dump --json``). ``missing``: the reason, empty if
    the file exists.
    """

    path: str
    how: str
    duration_s: float
    missing: str = ""
    bytes: int = 0
    note: str = ""


Confidence = Literal["high", "medium", "low"]


class Culprit(Record, frozen=True, omit_defaults=False):
    """One rank at fault."""

    rank: int
    """its global rank"""
    host: str
    """the host it ran on"""
    pid: int
    """the pid of the process at fault"""
    process: str
    """``main``, ``dataloader worker (pid N)``, or another child's role and pid"""
    frame: Frame | None
    """the innermost frame of your own code in that process: ``file``, ``line``, ``function``"""
    step: int | None
    """its last step"""
    reason: str
    """why it is named"""
    gpu: str | msgspec.UnsetType = msgspec.UNSET
    """the UUID of its GPU, only if the GPU itself may be broken"""
    left: Frame | msgspec.UnsetType = msgspec.UNSET
    """the first line of the loop that it has left and its peers are still in, only if the source shows that loop"""


class ProcessAtFault(Record, frozen=True, omit_defaults=False):
    """One process at fault whose rank is not known."""

    label: str
    """what the evidence calls it: ``process 688514``, ``worker-2``"""
    host: str
    """the host it ran on, if it is known"""
    pid: int
    """the pid of the process at fault; 0 if it is not known"""
    process: str
    """``main``, ``dataloader worker (pid N)``, or another child's role and pid"""
    frame: Frame | None
    """the innermost frame of your own code in that process: ``file``, ``line``, ``function``"""
    step: int | None
    """its last step"""
    reason: str
    """why it is named"""


class Claim(Record, frozen=True, omit_defaults=False):
    """One piece of evidence: a claim, and the file of the bundle that supports it."""

    claim: str
    file: str


class NodeAtFault(Record, frozen=True, omit_defaults=False):
    """A node that is to blame as a whole. ``ranks``: those on it, as ranges; empty where they are not known."""

    host: str
    ranks: str
    reason: str


class NextStep(Record, frozen=True, omit_defaults=False):
    """A command that can be pasted as it stands, but for the number of a node (``N``), and what for."""

    why: str
    command: str


class BundlePlace(Record, frozen=True, omit_defaults=False):
    """Where the bundle is from which the verdict of several nodes was reached: the claims point at its files.

    ``whole``: it is this one, and holds every rank.
    """

    host: str
    path: str
    whole: bool


class ProofEdge(Record, frozen=True, omit_defaults=False):
    """A wait in a proof. Any one of ``waits_for`` could end it, and all of these wait in turn; empty: nothing can.

    ``why``: what has to happen, and cannot; ``file``: of the bundle, which shows it.
    """

    who: str
    waits_for: tuple[str, ...]
    why: str
    file: str


class Verdict(Record, frozen=True, omit_defaults=False):
    """The document of ``verdict.json``."""

    schema: int
    """1"""
    outcome: Outcome
    """``hang``; ``suspect`` if the job may be hung and was left running; ``crash``; ``dump``"""
    cause: str
    """one of the causes that ``safelaunch explain`` lists"""
    confidence: Confidence
    """``high``, ``medium`` or ``low``"""
    summary: str
    """what happened, in one to three sentences"""
    culprits: tuple[Culprit, ...]
    """one entry per rank at fault: all members of a cycle, none if no rank stands out"""
    victims: str
    """the ranks that wait for the culprits, as ranges: ``0-2,5``"""
    evidence: tuple[Claim, ...]
    """each claim, with the file of the bundle that supports it"""
    ruled_out: tuple[str, ...]
    """what was checked on every rank and not found"""
    missing: tuple[str, ...]
    """evidence that could not be collected"""
    suggestions: tuple[str, ...]
    """what to do next"""
    bundle: BundlePlace | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: ``host`` and ``path`` of the bundle with every rank's evidence, to whose files the claims
    refer; ``whole`` is true in that bundle"""
    nodes: tuple[NodeAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: nodes at fault as a whole, with ``host``, ``ranks`` and ``reason``"""
    processes: tuple[ProcessAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    """logs and saved stacks only: the processes at fault whose rank is not known"""
    doubts: tuple[str, ...] = ()
    """why the confidence is not high, one sentence each"""
    next: NextStep | None = None
    """one command to run next, and ``why``; null if the run's command is unknown or contains a secret. For a log: the
    job under safelaunch; for stacks and dumps: a dump of the job"""
    blamed_before: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """how many of the last bundles name the same GPU or node, one sentence each"""
    proof: tuple[ProofEdge, ...] = ()
    """the waits that prove the hang: ``who`` waits, ``why``, and the ``file`` that shows it. ``waits_for`` lists what
    could end the wait, all of it stuck as well; it is empty if nothing can. Without a proof, the list is empty"""
    recovered: bool | msgspec.UnsetType = msgspec.UNSET
    """true if the job made progress after this bundle was written"""
    run: str = ""
    """the run's name; this and the next fields are empty if they aren't known, as from a plain folder of dumps"""
    host: str = ""
    """the host on which the verdict was reached"""
    time: str = ""
    """when the evidence was collected: UTC, ISO 8601"""
    world_size: int = 0
    """number of ranks in the job"""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """versions of ``python``, ``torch``, ``safelaunch`` and others, as far as they are known"""
    command: tuple[str, ...] = ()
    """the job's command line as it was typed, without secrets"""

    def on_record(self, evidence: Evidence) -> Verdict:
        """The same with what identifies the job and the moment."""
        launched = evidence.launched or Launched()
        known = {"torch": launched.torch, "safelaunch": launched.safelaunch}
        return msgspec.structs.replace(
            self,
            run=launched.run_name,
            host=launched.host,
            time=evidence.time,
            world_size=0 if evidence.world_guessed else evidence.world_size,
            versions={name: version for name, version in {**known, **evidence.versions}.items() if version},
            command=launched.as_typed,
        )

    @property
    def nodes_at_fault(self) -> tuple[NodeAtFault, ...]:
        return self.nodes or ()

    @property
    def processes_at_fault(self) -> tuple[ProcessAtFault, ...]:
        return self.processes or ()


# --- the manifest -----------------------------------------------------------------------------------------------------


class Moment(Record, frozen=True):
    """When a stage of an incident was reached, on both clocks."""

    stage: str = ""
    unix_s: float = 0.0
    monotonic_s: float = 0.0


class Watched(Record, frozen=True, omit_defaults=False):
    """What the watch knew. The fields of :class:`Evidence` say more."""

    stalled_s: float = 0.0
    threshold_s: float = 0.0
    why: str = ""
    answer: Answer | None = None
    work: tuple[str, ...] = ()


class GroupMembers(Record, frozen=True, omit_defaults=False):
    """A process group: its description, and its ranks as ranges."""

    called: str = ""
    ranks: str = ""


class JobShape(Record, frozen=True, omit_defaults=False):
    """The job at the moment of capture; each dict is by rank, except ``mesh`` (dimension) and ``groups`` (name).

    ``devices``: the GPU that the variables give it; ``computes_on``: the one that it was seen to use; ``batches``: of
    each DataLoader. ``global_batch_if_data_parallel``: None unless all ranks were seen with one batch.
    """

    outcome: Outcome = "hang"
    world_size: int = 0
    moving: bool = False
    for_finding: bool = False
    mesh: dict[str, int] = msgspec.field(default_factory=dict)
    groups: dict[str, GroupMembers] = msgspec.field(default_factory=dict)
    devices: dict[str, str] = msgspec.field(default_factory=dict)
    computes_on: dict[str, int] = msgspec.field(default_factory=dict)
    batch: dict[str, int] = msgspec.field(default_factory=dict)
    global_batch_if_data_parallel: int | None = None
    batches: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class Manifest(Record, frozen=True, omit_defaults=False):
    """``manifest.json``. ``timeline`` begins with the last progress; ``missing``: the paths of missing artifacts."""

    schema: int = 1
    host: str = ""
    written_unix_s: float = 0.0
    user: int = -1
    watch: Watched = Watched()
    job: JobShape = msgspec.field(default_factory=JobShape)
    notes: tuple[str, ...] = ()
    earlier: tuple[tuple[str, ...], ...] | None = None
    timeline: tuple[Moment, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def taken(self) -> tuple[float, float]:
        """From the last progress to when it was written, in Unix seconds; zeros where that is not known."""
        return (self.timeline[0].unix_s, self.written_unix_s) if self.timeline else (0.0, 0.0)
