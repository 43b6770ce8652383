"""Records of one rank: its processes and stacks, its Flight Recorder, its beacon's reports, and how it ended.

Stack frames are ordered innermost first. Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

# --- processes --------------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every record. Decoding ignores the unknown keys of newer versions and checks types."""


# --- stacks -----------------------------------------------------------------------------------------------------------


class Frame(Record, frozen=True):
    """A Python frame, or a C frame in a native sample. ``file`` is absolute if the reader knows the path."""

    file: str
    line: int
    function: str


class CallArguments(Record, frozen=True):
    """Peers named by an active c10d call, by rank in the world or in the call's group; None if not given or seen."""

    src: int | None = None
    dst: int | None = None
    group_src: int | None = None
    group_dst: int | None = None
    tag: int | None = None


class Thread(Record, frozen=True):
    frames: tuple[Frame, ...]
    name: str = ""
    os_tid: int | None = None
    active: bool = False  # on a CPU, or runnable
    owns_gil: bool = False
    ident: int = 0  # ``Thread.ident``, as in the Flight Recorder; 0: unknown
    call: CallArguments | None = None  # of the innermost frame in ``torch.distributed.distributed_c10d``
    # If the innermost line waits for a c10d store key: the local variables on that line, and their values as printed.
    names: tuple[tuple[str, str], ...] = ()
    lock_file: str = ""  # file that ``filelock`` waits for, or lock file of a build of torch's extensions
    torn: bool = False  # it ran during the read, so its frames might be of two moments
    cut: bool = False  # from a text that might lack the outermost frames


class StackSample(Record, frozen=True):
    pid: int
    at_s: float
    how: str  # the reader, e.g. ``py-spy --nonblocking``
    threads: tuple[Thread, ...]
    native: bool = False
    leads: int = 0  # kernel id of the thread that runs the script; 0: the first thread

    @property
    def main_thread(self) -> Thread | None:
        """Returns the thread that runs the script; None if neither its kernel id nor the name MainThread is found."""
        for thread in self.threads:
            if thread.os_tid == (self.leads or self.pid):
                return thread
        return next((t for t in self.threads if t.name == "MainThread"), None)


# --- processes --------------------------------------------------------------------------------------------------------


class OtherEnd(Record, frozen=True):
    """A process at the other end of a pipe or connection.

    For a thread that waits to write to a pipe, this is a process that can read from the pipe, and vice versa.
    """

    pid: int
    name: str = ""


class ThreadState(Record, frozen=True):
    """A kernel thread, from ``/proc/<pid>/task/<tid>``."""

    tid: int
    name: str
    state: str  # letter in ``stat`` (R S D T t Z X)
    wchan: str = ""
    syscall: int | None = None  # number on x86-64 or aarch64; None if the thread runs or the number is unreadable
    syscall_name: str = ""  # only if it matters (read, write, futex, ...)
    fd: int | None = None  # first argument of a call that takes a descriptor
    fd_target: str = ""  # ``pipe:[123]``, a path, ...
    cpu_ms: int = 0  # user and system time
    io_bytes: int | None = None  # read and written so far (rchar + wchar), without ``recv`` and ``send``
    written_bytes: int | None = None
    queued_ms: int | None = None  # time spent runnable but waiting for a core; None: not reported
    slices: int | None = None  # times that it was given a core; None: not reported
    ends_s: float | None = None  # latest time at which the call times out; None without a readable timeout
    locked_by: int | None = None  # holder of the file lock that the call waits for
    lock_sharers: tuple[int, ...] = ()  # further processes with that lock, or with the call's socket
    times_out: bool = False  # the call's socket has a timeout (SO_RCVTIMEO), or the timeout is unreadable
    inode: int | None = None  # of the pipe or socket at ``fd``
    ends: tuple[OtherEnd, ...] | None = None  # processes at its other end, this one included; None: not searched
    ends_closed: bool = False  # descriptors show that no invisible process has that end, or the lock
    child: int | None = None  # process that the call waits for to exit
    rests_in: str = ""  # owner of its wait: a Python ``lock``, ``gil``, or a file (``libtorch_cpu.so``)
    libraries: tuple[str, ...] = ()  # files in its native stack, unless it waits for a Python lock; ``?``: incomplete
    futex_file: str = ""  # device and inode of the mapped file with its futex, if other processes can wake it
    rested_s: float | None = None  # time without running since an earlier look, by its counters; None: unknown


class FileLock(Record, frozen=True):
    """An exclusive lock on a file that a process has open or is waiting to lock."""

    path: str
    pid: int  # holder, possibly the process that has the file open
    program: str = ""  # what another holder runs and since when, in brackets


class ProcessState(Record, frozen=True):
    """A process at one moment. ``pid`` and ``start_ticks`` (field 22 of ``stat``) identify it."""

    pid: int
    ppid: int
    start_ticks: int
    at_s: float
    name: str
    cmdline: tuple[str, ...]
    state: str
    threads: tuple[ThreadState, ...] = ()
    rss_bytes: int = 0
    frozen: bool = False
    throttled_ms: int = 0  # time for which CPU limits have throttled its cgroups so far
    # Locks that it holds. While its main thread sleeps as if it retried a lock: also others' locks on its open files.
    locks: tuple[FileLock, ...] = ()
    wait_status: int = 0  # of a zombie; 0 if it exited cleanly, or if the status isn't visible
    handles_signals: bool = False  # a timer or another process can end its main thread's wait (SIGALRM, SIGUSR1)
    handles_termination: bool = False  # so can SIGTERM, with a handler other than the beacon's or torch's
    handles_child_ends: bool = False  # so can the end of a child (SIGCHLD)
    is_fork: bool = False  # a child that runs its rank's program (it maps the rank's page) and has no POSIX timer
    note: str = ""  # reason why a field above is missing
    leads: int = 0  # as in ``StackSample``

    @property
    def main_thread(self) -> ThreadState | None:
        return next((t for t in self.threads if t.tid == (self.leads or self.pid)), None)


class ProcessEvidence(Record, frozen=True):
    """Samples of one process, oldest first."""

    role: str  # ``main`` for the rank itself, ``dataloader worker``, or ``child``
    states: tuple[ProcessState, ...] = ()
    stacks: tuple[StackSample, ...] = ()

    @property
    def pid(self) -> int:
        return self.states[-1].pid if self.states else self.stacks[-1].pid if self.stacks else 0


# --- Flight Recorder --------------------------------------------------------------------------------------------------


UNKNOWN_SIZES = ((-1,),)  # no readable sizes in the record


class Collective(Record, frozen=True):
    """A Flight Recorder entry."""

    group: str  # name of the process group (``"0"``, ...)
    seq: int  # sequence number among the group's collectives
    op: str  # with its backend as a prefix (``gloo:all_reduce``)
    # ``state == "completed"``, or ``retired`` if the backend uses no device. A retired but not completed NCCL entry has
    # timed out.
    completed: bool
    state: str = ""
    description: str = ""
    is_p2p: bool = False
    p2p_seq: int = 0  # sequence number among the group's sends and receives
    record_id: int = 0
    input_sizes: tuple[tuple[int, ...], ...] = ()  # as recorded, outermost tensor list first
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    created_ns: int = 0  # CLOCK_REALTIME
    started: bool | None = None
    timeout_ms: int = 0  # 0: unknown
    frames: tuple[Frame, ...] = ()  # empty in dumps without stacks
    thread: int = 0  # ``Thread.ident`` of the caller; 0: unknown

    @property
    def by_gloo(self) -> bool:
        """True if the call's backend uses no device, so that the caller waits in the call or in its ``Work``."""
        return self.op.startswith("gloo:")


class GroupStatus(Record, frozen=True):
    """The last sequence numbers of a process group on one rank; -1 if the backend doesn't report them."""

    last_enqueued: int = -1
    last_started: int = -1
    last_completed: int = -1


class FlightRecord(Record, frozen=True):
    version: str
    entries: Sequence[Collective] = ()  # oldest first: a tuple or a :class:`~safelaunch.model.entries.Entries`
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)  # name -> global ranks, if listed
    status: dict[str, GroupStatus] = msgspec.field(default_factory=dict)
    damaged: tuple[str, ...] = ()  # fields with values that no torch writes; they keep their defaults
    library: str = ""  # NCCL's version, as NCCL prints it


# --- a rank -----------------------------------------------------------------------------------------------------------


class Progress(Record, frozen=True):
    """A rank's progress page. ``*_ns`` fields are CLOCK_MONOTONIC times of its host, or 0 for never."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    start_ticks: int
    state: str  # ``started`` | ``torch`` (imported) | ``exception`` | ``exited``
    step: int | None = None  # count of ``safelaunch.step()`` if used, else the highest count of an optimizer
    optimizer_steps: tuple[int, ...] = ()
    claimed_ns: int = 0
    first_step_ns: int = 0
    last_step_ns: int = 0
    phase: str = ""
    phase_since_ns: int = 0
    marked_ns: int = 0  # last time at which a phase or a pause began or ended
    phase_timeout_s: float = 0.0
    paused: bool = False
    exception_ns: int = 0
    exit_ns: int = 0
    returned_ns: int = 0  # its function returned; the process lives on to pass the result (``safelaunch.launch``)
    sets_timers: bool = True  # it, or a process forked from it, might have set a timer (``alarm``) that ends it
    history: tuple[tuple[int, int], ...] = ()  # some steps, oldest first: time of the mark, and number

    def mean_step_s(self, steps: int) -> float:
        """Returns the mean duration of the first ``steps`` steps, without the very first, which starts the clock."""
        return (self.last_step_ns - self.first_step_ns) / 1e9 / max(1, steps - 1)


class EarlierException(Record, frozen=True):
    type: str
    message: str
    frames: tuple[Frame, ...] = ()  # from the line that raised it to the handler's
    explicit: bool = False  # the later one was raised ``from`` it, rather than while it was being handled


class RankException(Record, frozen=True):
    """The first uncaught exception of a rank, as its beacon recorded it."""

    type: str
    message: str
    time_unix_s: float
    frames: tuple[Frame, ...] = ()
    text: str = ""
    earlier: tuple[EarlierException, ...] = ()  # exceptions that led to it, in order


class CaughtException(Record, frozen=True):
    type: str
    message: str  # empty unless the first argument is a string
    time_unix_s: float
    raised: Frame  # innermost user frame of the traceback
    caught: Frame


class FatalError(Record, frozen=True):
    """faulthandler's report of a fatal signal."""

    message: str  # faulthandler's name for the signal (``Segmentation fault``)
    # Of the thread that received the signal, or of the main thread if the receiver runs no Python.
    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()  # frames of every thread that runs Python


class ExitCall(Record, frozen=True):
    """The last call to ``sys.exit`` or ``os._exit``, with the caller's frames."""

    function: str
    code: int
    frames: tuple[Frame, ...] = ()


class MemoryKills(Record, frozen=True):
    """Signs that the kernel's out-of-memory killer was active during the job."""

    kernel_line: str = ""  # of the kernel log, about this process
    cgroup: int | None = None  # processes killed in the job's cgroup; None: not counted by the kernel
    node: int | None = None  # processes killed on this node


class RankExit(Record, frozen=True):
    """How a rank's process ended, as reported by the torchrun agent that reaped it."""

    returncode: int  # as in ``subprocess``: negative for a signal
    time_unix_s: float  # when the agent noticed
    before_close: bool = True  # it ended before the agent began to stop the others, so the agent isn't the cause
    file: str = "launch.json"


class Allocations(Record, frozen=True):
    """Live blocks of GPU memory allocated at the same place."""

    size: int  # total bytes
    count: int
    frames: tuple[Frame, ...] = ()  # empty without a history: then the blocks have the same size


class DeviceMemory(Record, frozen=True):
    """Memory of a GPU when a rank ran out of it, in bytes; None if unknown."""

    device: int = -1  # the rank's number of the GPU
    asked: int | None = None  # size of the failed allocation
    total: int | None = None
    free: int | None = None
    allocated: int | None = None  # in tensors
    reserved: int | None = None  # by torch
    peak: int | None = None  # maximum of ``allocated``
    retries: int | None = None  # times that torch released its cache to continue
    largest: int | None = None  # live block
    largest_free: int | None = None  # reserved piece without a tensor
    blocks: tuple[Allocations, ...] = ()  # by place, largest first
    sharded: int | None = None  # this rank's shards of partly sharded models; None for other models
    whole: int | None = None  # unsharded parameters of partly sharded models
    whole_names: tuple[str, ...] = ()  # largest unsharded parameters
    at_allocation: bool = False  # taken when the allocation failed, rather than when the exception had ended the script
    snapshot: bool = False  # the allocator's snapshot was written, too


class HandledException(Record, frozen=True):
    """An exception that a thread is handling, in an ``except`` or a ``finally``."""

    thread: int  # ``Thread.ident``
    type: str
    message: str = ""  # empty unless the first argument is a string
    frames: tuple[Frame, ...] = ()


class Posted(Record, frozen=True):
    """A send or receive in the batch (``P2POp``) that a thread is executing."""

    thread: int  # ``Thread.ident``
    sends: bool
    peer: int
    tag: int = 0


class NcclLog(Record, frozen=True):
    """The NCCL warnings of a process, oldest first."""

    file: str  # log in the bundle
    warnings: tuple[str, ...] = ()


class GilTest(Record, frozen=True):
    """Replies of a rank's worker server to two requests. Only the second one needs the GIL.

    If ``ping`` is True and ``python`` is False, a thread holds the GIL. The Python handler reports the other fields.
    """

    ping: bool | None = None  # without the GIL; None: not sent, or the server wasn't up
    python: bool | None = None  # with the GIL
    handling: tuple[HandledException, ...] = ()
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)  # the rank's groups: name -> ranks
    groups_made: int | None = None  # groups that the rank created, including groups without it
    posted: tuple[Posted, ...] = ()
    batches: dict[str, int] = msgspec.field(default_factory=dict)  # variable of a DataLoader -> batch size
    called: dict[str, str] = msgspec.field(default_factory=dict)  # group -> description, in order of creation
    foreign_backend: bool = False  # some group has a backend that isn't torch's
    stores: dict[str, str] = msgspec.field(default_factory=dict)  # group -> address of its rendezvous store
    handlers: tuple[int, ...] | None = None  # signals with a handler of the script
    torch: tuple[str, ...] = ()  # directory of the imported torch: as frames name it, and as the kernel does


class RankFile(Record, frozen=True, kw_only=True):
    """Contents of ``ranks/<rank>/rank.json``: evidence that no other bundle file contains."""

    host: str = ""
    pid: int = 0
    local_rank: int = -1
    gil: GilTest = GilTest()
    exit: RankExit | None = None
    fatal: FatalError | None = None
    memory_kills: MemoryKills = MemoryKills()
    deaths: tuple[str, ...] = ()  # kernel log lines about processes that might have been its children
    gpu_errors: tuple[str, ...] = ()  # kernel log lines about errors (Xid) of its GPU, or of its work on a GPU
    beacon: bool = True  # False: the rank runs without safelaunch's sitecustomize (python -I, a cleared PYTHONPATH)
    code_roots: tuple[str, ...] = ()  # the rank's directories of the standard library and installed packages
    gpu: str = ""  # number or UUID, by its CUDA_VISIBLE_DEVICES and LOCAL_RANK
    nccl_log: NcclLog | None = None
    batch: int | None = None  # size of its DataLoader's batch at the first step
    device: int | None = None  # CUDA device on which it computed at the first step, if it had a choice

    @staticmethod
    def of(rank: RankEvidence) -> RankFile:
        return RankFile(**{name: getattr(rank, name) for name in RankFile.__struct_fields__})

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


class RankEvidence(RankFile, frozen=True, kw_only=True):
    """Everything collected from one rank. Any part can be missing; the manifest gives the reason."""

    rank: int
    host: str
    pid: int
    progress: Progress | None = None
    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()
    flight_record: FlightRecord | None = None
    exception: RankException | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()  # newest ones, oldest first; Python 3.12+
    log_tail: str = ""
    device_memory: DeviceMemory | None = None


# Further records in ``ranks/<rank>/``, in files named like the fields.
OWN_RECORDS: dict[str, Any] = {
    "exception": RankException,
    "exit_call": ExitCall,
    "caught": tuple[CaughtException, ...],
    "device_memory": DeviceMemory,
}


class Processes(Record, frozen=True, omit_defaults=False):
    """Contents of ``ranks/<rank>/proc.json``."""

    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()
