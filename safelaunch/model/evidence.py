"""Records of a job, its nodes and its verdict.

Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from safelaunch.model.ranks import Frame, RankEvidence, Record

# --- a node -----------------------------------------------------------------------------------------------------------

# State of a node's torchrun agent, for this node's supervisor. "stopped": by a signal. "": unknown.
AgentState = Literal["", "running", "stopped", "gone"]
# How a lost store responds to a new connection: refuses it, accepts it without answering, or sends no packet. "": not
# lost.
Lost = Literal["", "closed", "silent", "unreachable"]
# Result of connecting to a node when the evidence was collected. "no route": this node couldn't try, for lack of an
# address or route. "": not tried.
ServerProbe = Literal["", "answers", "no answer", "no route"]


class NodeEvidence(Record, frozen=True):
    """A node of the job as its supervisor reports it, or as other nodes see it if that supervisor doesn't respond."""

    host: str
    slot: int = 0
    ranks: tuple[int, ...] = ()
    here: bool = False  # the evidence was collected on this node
    silent_s: float = 0.0  # time since its supervisor last responded; 0: it responds, or did until its end
    last: Literal["", "watching", "failing", "stopping", "ended"] = ""  # last reported state
    trouble: str = ""  # failure that is independent of the other nodes
    agent: AgentState = ""
    agent_error: str = ""  # failure of the torchrun agent itself, not of a rank; this node only
    missed_s: float = 0.0  # how long its supervisor was stopped until a moment ago; this node only
    store: Lost = ""  # how the agents' store, which this node hosts, was lost
    probe: ServerProbe = ""
    torch: str = ""
    safelaunch: str = ""
    script: str = ""  # digest

    @property
    def is_gone(self) -> bool:
        """True if the node no longer responds and didn't give a reason."""
        return bool(self.silent_s or self.store) and not self.trouble and self.last in ("", "watching")


class GpuProcess(Record, frozen=True):
    pid: int = 0
    size: int | None = msgspec.field(default=None, name="memory_bytes")  # None: not reported by the driver
    name: str = ""  # empty if the pid belongs to another container


class Gpu(Record, frozen=True, omit_defaults=False):
    """A GPU of a node. A value is None if the GPU doesn't report it."""

    index: int = -1  # NVML index
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
    memory_utilisation_percent: float | None = None  # share of the time in which memory was read or written
    memory_clock_mhz: float | None = None
    power_limit_w: float | None = None
    clocks_event_reasons: tuple[str, ...] | None = None  # what limits the clocks, by nvidia-smi's names
    corrected_ecc_errors: float | None = None  # since the driver was loaded
    row_remap_pending: bool | None = None  # a memory row is replaced at the next reset
    row_remap_failed: bool | None = None  # no spare row is left for a bad one
    pcie_replays: float | None = None
    nvlink_errors: float | None = None  # replays, recoveries and CRC errors of all links


class Gpus(Record, frozen=True):
    """Contents of ``gpus.json``: the driver's report."""

    driver: str | None = None
    cuda_driver: int | None = None
    gpus: tuple[Gpu, ...] = ()
    missing: str = ""  # reason why there is no answer
    installed: bool = True  # the driver's Python package is installed
    before: tuple[Gpu, ...] = ()  # the first of two readings, about a second before ``gpus``
    usual: tuple[Gpu, ...] = ()  # last reading while the job was stepping

    def uses(self, host: str) -> tuple[GpuUse, ...]:
        """Returns the GPUs with processes, and those with two readings."""
        usual, before = ({gpu.index: gpu for gpu in reading} for reading in (self.usual, self.before))
        return tuple(
            GpuUse(
                host,
                one.index,
                one.uuid or past.uuid or "",
                one.processes or past.processes or (),
                tuple(replace(each, processes=None) for each in (before.get(one.index), one) if each is not None),
                replace(past, processes=None) if past.index >= 0 else None,
            )
            for one in self.gpus
            if (past := usual.get(one.index, Gpu())) and (one.processes or one.index in before)
        )


class GpuUse(Record, frozen=True):
    """One GPU of ``host``: the processes that use its memory, and its readings during the incident, oldest first."""

    host: str
    index: int  # NVML index
    uuid: str = ""
    processes: tuple[GpuProcess, ...] = ()
    looks: tuple[Gpu, ...] = ()
    usual: Gpu | None = None  # last reading while the job was stepping


class LinkErrors(Record, frozen=True):
    """Error counters of a node's links that have grown since the job became quiet: link -> counter -> growth."""

    host: str
    grown: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class Resources(Record, frozen=True, omit_defaults=False):
    """Contents of ``resources.json``: a node's resources, and the cgroup and limits of one of its ranks."""

    cpus: int | None = None
    load: tuple[float, ...] = ()
    memory_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    cgroup: dict[str, str] = msgspec.field(default_factory=dict)
    limits: dict[str, str] = msgspec.field(default_factory=dict)
    # Interface or InfiniBand port (``mlx5_0/1``) -> state, speed, MTU, and error counters that aren't 0.
    network: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    # The same links -> how much error counters have grown since the job became quiet. None: they weren't read then.
    link_errors: dict[str, dict[str, int]] | None = None
    # Path -> total, used and free bytes, or a reason.
    disks: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    # The kernel's counts ``at_start`` and ``now``.
    out_of_memory_kills: dict[str, Any] = msgspec.field(default_factory=dict)

    def links(self, host: str) -> tuple[LinkErrors, ...]:
        return (LinkErrors(host, self.link_errors),) if self.link_errors is not None else ()


class NodeFiles(Record, frozen=True):
    """Files in ``node/<host>/``, one for each field: a text (``.txt``) or a record (``.json``).

    ``capture.node.sources`` collects them. In a hang, they are also sent to other nodes.
    """

    gpus: Gpus | None = None
    nvidia_smi: str = ""
    kernel_log: str = ""
    pressure: str = ""  # kernel's figures of how long tasks waited for CPU, memory and I/O
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    resources: Resources | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)  # of a rank at its start


def node_file(field: str) -> str:
    return f"{field}.txt" if NodeFiles.__annotations__[field] == "str" else f"{field}.json"


class Rendezvous(Record, frozen=True):
    """A rendezvous that failed before any rank was started."""

    wanted: int  # nodes that torchrun waited for
    come: int  # nodes that joined
    hosts: tuple[str, ...] = ()  # first few hosts that joined
    absent_ranks: tuple[int, ...] = ()  # node ranks that didn't join, if the command line or the scheduler shows them
    absent_hosts: tuple[str, ...] = ()
    waited_s: float = 0.0
    store: str = ""  # reason why the rendezvous store doesn't respond; empty if it does
    error: str = ""


# --- NCCL's RAS service -----------------------------------------------------------------------------------------------


# State according to NCCL's RAS service. "unresponsive": no answer in time. "dead": NCCL considers it dead.
NcclState = Literal["answers", "unresponsive", "dead"]


class NcclProcess(Record, frozen=True):
    host: str  # address, or ``unknown``
    pid: int
    rank: int = -1  # in its communicator; -1: not given
    gpu: int = -1  # NVML index
    state: NcclState = "answers"


class NcclCommunicator(Record, frozen=True):
    size: int
    processes: tuple[NcclProcess, ...] = ()


class NcclWitness(Record, frozen=True):
    """The reply of NCCL's RAS service during the stall."""

    version: str
    communicators: tuple[NcclCommunicator, ...] = ()
    processes: tuple[NcclProcess, ...] = ()  # in no communicator
    file: str = ""  # the answer in the bundle


# --- early looks ------------------------------------------------------------------------------------------------------


class Place(Record, frozen=True):
    """The place of a rank: the user's frame in the process it is waiting in or for.

    The frame is None if it wasn't seen.
    """

    rank: int
    frame: Frame | None = None


class FirstWord(Record, frozen=True):
    """A description of what a quiet job's ranks are doing."""

    words: str = ""  # a clause; empty if there is nothing to report
    cause: str = ""  # as a verdict would name it
    places: tuple[Place, ...] = ()  # ranks that stand out
    common: bool = False  # many healthy starts look like this
    proved: bool = False  # the job is proved dead


class EarlyLook(Record, frozen=True):
    """The result of a look at the ranks of a quiet job, taken long before the threshold."""

    unix_s: float
    quiet_s: float  # time since the last progress
    usual_s: float = 0.0  # usual time of a step; 0: unknown
    movement: Literal["still", "active"] = "still"  # ``active``: something computed, read or wrote between two looks
    words: str = ""  # what the ranks did, as a clause
    cause: str = ""
    places: tuple[Place, ...] = ()  # ranks that a verdict would name
    said: bool = False  # it was printed
    lasted_s: float = 0.0  # duration of the quiet if it ended by itself; 0: it continues


WRONG_RESULTS_KEY = "inconsistent"  # in documents
WRONG_RESULTS_FILE = f"{WRONG_RESULTS_KEY}.json"  # in a bundle


class WrongResult(Record, frozen=True):
    """A wrong result that no collective shows. A monitor found it in a job that otherwise runs normally."""

    kind: Literal["replicas-diverged", "non-finite-gradient", "loss"]
    unix_s: float
    step: int  # first optimizer step with the wrong result
    since_step: int = 0  # last step known to be right; 0: none
    parameter: str = ""  # first affected parameter: by name, or for a gradient in the order of the backward pass
    count: int = 0  # affected parameters
    total: int = 0
    ranks: tuple[int, ...] = ()  # ranks that differ; empty without a majority
    sides: tuple[tuple[int, ...], ...] = ()  # groups of ranks that agree with each other
    words: str = ""  # all of this in a sentence

    @property
    def cause(self) -> str:
        return "loss-diverged" if self.kind == "loss" else self.kind


Outcome = Literal["hang", "suspect", "crash", "dump", "slow"]
"""``suspect``: the job might hang, and continued. ``slow``: a rank slows the job down, which continued."""

Answer = Literal["dead", "alive", "unknown", "unseen"]
"""State of a job that makes no step. ``dead``: proved. ``alive``: something works. ``unknown``: neither is shown,
although everything was seen. ``unseen``: something wasn't seen, or a process is stopped."""

JobCondition = Answer | Literal["moving", "stopped"]
"""Result of two looks at a job. ``moving``: a rank marked progress. ``stopped``: a signal stopped every rank."""


class Launched(Record, frozen=True):
    """How safelaunch started a job. Empty fields are unknown."""

    typed: tuple[str, ...] = ()  # typed after ``safelaunch``, without secrets
    presets: tuple[str, ...] = ()  # presets in force, of any origin
    torch: str = ""  # version
    distributed_debug: str = ""  # the job's ``TORCH_DISTRIBUTED_DEBUG``
    run_name: str = ""
    host: str = ""
    command: tuple[str, ...] = ()  # the command that ran, without secrets
    safelaunch: str = ""

    @property
    def as_typed(self) -> tuple[str, ...]:
        return ("safelaunch", *self.typed) if self.typed else self.command


class Evidence(Record, frozen=True):
    """One job at the moment of capture."""

    outcome: Outcome
    world_size: int
    ranks: tuple[RankEvidence, ...]
    missing_ranks: tuple[int, ...] = ()
    stall_s: float = 0.0  # time since the slowest rank's last progress, at the capture
    threshold_s: float = 0.0  # time without a step that raised the suspicion; 0: something else did
    threshold_why: str = ""
    moving: bool = False  # some rank progressed or computed between the confirmation samples
    for_finding: bool = False  # a monitor requested the evidence for its finding, so steps don't matter
    notes: tuple[str, ...] = ()  # causes of slowness: a straggler, a shared GPU
    nodes: tuple[NodeEvidence, ...] = ()  # only for a job on several nodes
    nccl: NcclWitness | None = None
    rendezvous: Rendezvous | None = None
    early: tuple[EarlyLook, ...] = ()  # newest ones of this node, oldest first
    wrong_results: tuple[WrongResult, ...] = msgspec.field(default=(), name=WRONG_RESULTS_KEY)
    launched: Launched | None = None  # None: safelaunch didn't start the job
    stopped: tuple[int, ...] = ()  # ranks that their own supervisor stopped before the others were sampled
    gpus: tuple[GpuUse, ...] = ()  # of nodes with a queried driver
    links: tuple[LinkErrors, ...] = ()  # of nodes whose counters were read twice
    earlier: tuple[tuple[str, ...], ...] | None = None  # GPUs and hosts that each of the last bundles blames
    answer: Answer | None = None  # of the watch, if it sampled the ranks
    work: tuple[str, ...] = ()  # what worked between the last two looks, in words
    ends: bool = False  # the time to end the job without a proof has come
    # Only if the evidence consists of printed lines: ranks with lines that are known to be theirs.
    printed: tuple[int, ...] | None = None
    # Processes of unknown rank: number in ``ranks`` -> name in the text (``process 688514``, ``worker-2``).
    labels: dict[int, str] = msgspec.field(default_factory=dict)
    world_guessed: bool = False  # nothing shows the number of ranks, so ``world_size`` is a minimum
    may_be_caught: bool = False  # processes printed more after their exception, so they might have caught it
    time: str = ""  # of the collection: UTC, ISO 8601
    versions: dict[str, str] = msgspec.field(default_factory=dict)  # of the job's software, on one node


_OF_THE_MACHINE = frozenset({"system", "kernel", "machine", "python_executable", "torch_git"})


def software(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name not in _OF_THE_MACHINE}


def all_nodes(halves: Sequence[Evidence]) -> tuple[NodeEvidence, ...]:
    """Merges the nodes of several pieces of evidence. Each piece has one node's own view, and its view of other nodes.

    A node without its own view is described by the piece that knows most about it.
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
    """A file in a bundle, or the reason why it is missing."""

    path: str  # relative to the bundle
    how: str  # source, e.g. ``py-spy dump --json``
    duration_s: float
    missing: str = ""  # reason; empty if the file exists
    bytes: int = 0
    note: str = ""


Confidence = Literal["high", "medium", "low"]


class Culprit(Record, frozen=True, omit_defaults=False):
    """A rank at fault."""

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
    """reason for naming it"""
    gpu: str | msgspec.UnsetType = msgspec.UNSET
    """the UUID of its GPU, only if the GPU itself might be broken"""
    left: Frame | msgspec.UnsetType = msgspec.UNSET
    """the first line of the loop that it has left and its peers are still in, only if the source shows that loop"""

    @property
    def does(self) -> str:
        """Returns the reason without the rank."""
        return self.reason.removeprefix(f"Rank {self.rank} ")


class ProcessAtFault(Record, frozen=True, omit_defaults=False):
    """A process at fault, if its rank isn't known."""

    label: str
    """its name in the evidence: ``process 688514``, ``worker-2``"""
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
    """reason for naming it"""


class Claim(Record, frozen=True, omit_defaults=False):
    """A piece of evidence: a claim, and the bundle file that supports it."""

    claim: str
    file: str


class NodeAtFault(Record, frozen=True, omit_defaults=False):
    """A node that is at fault as a whole."""

    host: str
    ranks: str  # as ranges; empty if unknown
    reason: str


class NextStep(Record, frozen=True, omit_defaults=False):
    """A command to paste unchanged, except for a node's number (``N``), and its purpose."""

    why: str
    command: str


class BundlePlace(Record, frozen=True, omit_defaults=False):
    """The bundle that supports a verdict about several nodes. Claims refer to files in this bundle."""

    host: str
    path: str
    whole: bool  # it is this bundle, which holds every rank


class ProofEdge(Record, frozen=True, omit_defaults=False):
    """One wait in a proof."""

    who: str
    waits_for: tuple[str, ...]  # each could end the wait, and each waits itself; empty: nothing can end it
    why: str  # what would have to happen, and can't
    file: str  # file of the bundle that shows it


class Slowdown(Record, frozen=True, omit_defaults=False):
    """A lasting slowdown of a job, for which the others wait for one rank."""

    step: int | None
    """first slow step, or first slow collective of a job without steps; null: the first one"""
    since: str
    """when that was: UTC, ISO 8601; empty if the job was slow from the start"""
    before_s: float
    """median duration of a step before; 0 if the job was slow from the start"""
    now_s: float
    """median duration of a step since then; 0 if unknown"""
    lost: float
    """share of the other ranks' time (0 to 1) that they wait for this rank more than it waits for them"""
    spent: float
    """share of the rank's time at the culprit's line; 0 if no line explains the difference"""
    spent_by_others: float
    """share of the other ranks' time at that line"""
    reason: str
    """``cpu-queue``, ``cpu-quota``, ``cpu-steal``, ``stopped``, ``disk``, ``memory``, ``garbage-collection``, ``gil``,
    ``gpu-clock``, ``gpu-shared``, ``device-error`` or ``network``; empty if no counter explains most of the loss"""
    explains: float
    """share of the rank's time that the reason takes; 0 without a reason"""


class Verdict(Record, frozen=True, omit_defaults=False):
    """The document of ``verdict.json``."""

    schema: int
    """1"""
    outcome: Outcome
    """``hang``; ``suspect`` if the job might be hung and was left running; ``crash``; ``dump``; ``slow`` if a rank
    slows the job down"""
    cause: str
    """one of the causes that ``safelaunch explain`` lists"""
    confidence: Confidence
    """``high``, ``medium`` or ``low``"""
    summary: str
    """the event, in one to three sentences"""
    culprits: tuple[Culprit, ...]
    """one entry per rank at fault: all members of a cycle, none if no rank stands out"""
    victims: str
    """the ranks that wait for the culprits, as ranges: ``0-2,5``"""
    evidence: tuple[Claim, ...]
    """each claim, with the file of the bundle that supports it"""
    ruled_out: tuple[str, ...]
    """conditions that were checked on every rank and not found"""
    missing: tuple[str, ...]
    """evidence that could not be collected"""
    suggestions: tuple[str, ...]
    """steps to take next"""
    bundle: BundlePlace | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: ``host`` and ``path`` of the bundle with every rank's evidence, to whose files the claims
    refer; ``whole`` is true in that bundle"""
    nodes: tuple[NodeAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    """several nodes only: nodes at fault as a whole, with ``host``, ``ranks`` and ``reason``"""
    processes: tuple[ProcessAtFault, ...] | msgspec.UnsetType = msgspec.UNSET
    """logs and saved stacks only: the processes at fault whose rank is not known"""
    doubts: tuple[str, ...] = ()
    """reasons why the confidence isn't high, one sentence each"""
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
    """the host on which the job was started"""
    time: str = ""
    """when the evidence was collected: UTC, ISO 8601"""
    world_size: int = 0
    """number of ranks in the job"""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """versions of ``python``, ``torch``, ``safelaunch`` and others, as far as they are known"""
    command: tuple[str, ...] = ()
    """the job's command line as it was typed, without secrets"""
    slow: Slowdown | msgspec.UnsetType = msgspec.UNSET
    """outcome ``slow`` only: since when the job is slow, what it costs, and why"""

    def with_job(self, evidence: Evidence) -> Verdict:
        """Returns the verdict with the fields that identify the job and the time of capture."""
        launched = evidence.launched or Launched()
        known = {"torch": launched.torch, "safelaunch": launched.safelaunch}
        return replace(
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
    """The time at which a stage of an incident was reached, on both clocks."""

    stage: str = ""
    unix_s: float = 0.0
    monotonic_s: float = 0.0


class Watched(Record, frozen=True, omit_defaults=False):
    """Facts that the watch knows; see the same fields of :class:`Evidence`."""

    stalled_s: float = 0.0
    threshold_s: float = 0.0
    why: str = ""
    answer: Answer | None = None
    work: tuple[str, ...] = ()


class GroupMembers(Record, frozen=True, omit_defaults=False):
    """A process group: its description, and ranges of its ranks."""

    called: str = ""
    ranks: str = ""


class JobShape(Record, frozen=True, omit_defaults=False):
    """The job at the moment of capture. Dicts are by rank, except ``mesh`` (dimension) and ``groups`` (name)."""

    outcome: Outcome = "hang"
    world_size: int = 0
    moving: bool = False
    for_finding: bool = False
    mesh: dict[str, int] = msgspec.field(default_factory=dict)
    groups: dict[str, GroupMembers] = msgspec.field(default_factory=dict)
    devices: dict[str, str] = msgspec.field(default_factory=dict)  # GPU according to the environment variables
    computes_on: dict[str, int] = msgspec.field(default_factory=dict)  # GPU that it was seen to use
    batch: dict[str, int] = msgspec.field(default_factory=dict)
    global_batch_if_data_parallel: int | None = None  # None unless all ranks were seen with the same batch size
    batches: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  # of each DataLoader


class Manifest(Record, frozen=True, omit_defaults=False):
    schema: int = 1
    host: str = ""
    written_unix_s: float = 0.0
    user: int = -1
    watch: Watched = Watched()
    job: JobShape = msgspec.field(default_factory=JobShape)
    notes: tuple[str, ...] = ()
    earlier: tuple[tuple[str, ...], ...] | None = None
    timeline: tuple[Moment, ...] = ()  # begins with the last progress
    artifacts: tuple[Artifact, ...] = ()
    missing: tuple[str, ...] = ()  # paths of missing artifacts

    @property
    def taken(self) -> tuple[float, float]:
        """Returns the Unix times, in seconds, of the last progress and of writing the bundle; zeros if unknown."""
        return (self.timeline[0].unix_s, self.written_unix_s) if self.timeline else (0.0, 0.0)
