"""The records of one rank: its processes and their stacks, its Flight Recorder, what its beacon and its end tell.

Stack frames are ordered innermost first. Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

# --- processes --------------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every record. Decoding ignores the unknown keys of newer versions and checks the types of known ones."""


# --- stacks -----------------------------------------------------------------------------------------------------------


class Frame(Record, frozen=True):
    """One Python frame, or C frame in a native sample. ``file`` is absolute if the reader knows the path."""

    file: str
    line: int
    function: str


class CallArguments(Record, frozen=True):
    """Whom a call of c10d under way names: ranks of the world, or of the call's group. None: not given, or not seen."""

    src: int | None = None
    dst: int | None = None
    group_src: int | None = None
    group_dst: int | None = None
    tag: int | None = None


class Thread(Record, frozen=True):
    """One thread as a stack reader saw it. ``frames`` is innermost first. ``active``: on a CPU or runnable.

    ``ident``: Python's own number of it, which the Flight Recorder writes as well; 0 = unknown. ``call``: of its
    innermost frame in ``torch.distributed.distributed_c10d``; no backend but NCCL records these. ``names``: where its
    innermost line waits for a key of c10d's store, the local variables named there, and their values as Python writes
    them. ``lock_file``: for which the library ``filelock`` asks, or which stands for a build of torch's extensions.
    ``torn``: it ran while it was read, so its frames may be of two moments. ``cut``: it is from a text that may lack
    its outermost frames.
    """

    frames: tuple[Frame, ...]
    name: str = ""
    os_tid: int | None = None
    active: bool = False
    owns_gil: bool = False
    ident: int = 0
    call: CallArguments | None = None
    names: tuple[tuple[str, str], ...] = ()
    lock_file: str = ""
    torn: bool = False
    cut: bool = False


class StackSample(Record, frozen=True):
    """All threads of one process at one moment. ``how`` names the reader, e.g. ``py-spy --nonblocking``.

    ``leads``: the kernel id of the thread that runs the script; 0: it is the process's first one.
    """

    pid: int
    at_s: float
    how: str
    threads: tuple[Thread, ...]
    native: bool = False
    leads: int = 0

    @property
    def main_thread(self) -> Thread | None:
        """The thread that runs the script: by its kernel id, else the one called MainThread, else None."""
        for thread in self.threads:
            if thread.os_tid == (self.leads or self.pid):
                return thread
        return next((t for t in self.threads if t.name == "MainThread"), None)


# --- processes --------------------------------------------------------------------------------------------------------


class OtherEnd(Record, frozen=True):
    """A process that has the other end of a pipe or a connection. Of a pipe in which a thread waits to write, that is
    one that can read from it; and the other way round.
    """

    pid: int
    name: str = ""


class ThreadState(Record, frozen=True):
    """One kernel thread from ``/proc/<pid>/task/<tid>``.

    - ``state``: the letter in ``stat`` (R S D T t Z X)
    - ``syscall``: the x86-64 or aarch64 number; None if the thread is running or the number is unreadable
    - ``syscall_name``: its name if it matters (read, write, futex, ...)
    - ``fd``: the first argument of a call that takes a descriptor
    - ``fd_target``: what the descriptor points at (``pipe:[123]``, a path, ...)
    - ``cpu_ms``: user and system time used so far
    - ``io_bytes``: bytes read and written so far (rchar + wchar)
    - ``written_bytes``: those written; neither counts ``recv`` and ``send``
    - ``queued_ms``: time spent runnable but waiting for a core so far; None if the kernel does not report it
    - ``slices``: how often it was given a core so far; None if the kernel does not report it
    - ``ends_s``: when the call times out at the latest (CLOCK_MONOTONIC); None without a readable timeout
    - ``locked_by``: the process that holds the file lock which the call waits for; ``fd_target`` tells people as well
    - ``lock_sharers``: further processes that have that lock, as a child that inherits the open file does, or
      the socket that the call is on
    - ``times_out``: the socket that the call is on has a time limit of its own (SO_RCVTIMEO), or that can't be read
    - ``inode``: of the pipe or socket behind ``fd``
    - ``ends``: who has the other end of it, the process itself included; None where that was not looked for
    - ``ends_closed``: as far as descriptors tell, nobody out of sight can have been given such an end, or the lock
    - ``child``: the process for whose end the call waits
    - ``rests_in``: whose wait it is: a ``lock`` of Python's, ``gil``, or that of a file (``libtorch_cpu.so``)
    - ``libraries``: files whose code its native stack leads through, unless it rests in a lock of Python's; ``?``
      among them: perhaps others as well
    - ``futex_file``: device and inode of the mapped file in which the futex lies that it waits at, if other processes
      can wake it
    - ``rested_s``: for how long it has not run, as far as the counters since an earlier look tell; None: they don't
    """

    tid: int
    name: str
    state: str
    wchan: str = ""
    syscall: int | None = None
    syscall_name: str = ""
    fd: int | None = None
    fd_target: str = ""
    cpu_ms: int = 0
    io_bytes: int | None = None
    written_bytes: int | None = None
    queued_ms: int | None = None
    slices: int | None = None
    ends_s: float | None = None
    locked_by: int | None = None
    lock_sharers: tuple[int, ...] = ()
    times_out: bool = False
    inode: int | None = None
    ends: tuple[OtherEnd, ...] | None = None
    ends_closed: bool = False
    child: int | None = None
    rests_in: str = ""
    libraries: tuple[str, ...] = ()
    futex_file: str = ""
    rested_s: float | None = None


class FileLock(Record, frozen=True):
    """An exclusive lock on a file that some process has open, or asks for. ``pid``: who holds it, which may be that
    process. ``program``: of another holder, what it runs and since when, in brackets.
    """

    path: str
    pid: int
    program: str = ""


class ProcessState(Record, frozen=True):
    """One process at one moment. ``pid`` and ``start_ticks`` (field 22 of ``stat``) together identify a process.

    ``throttled_ms``: how long CPU limits have throttled its control groups so far. ``locks``: the file locks that it
    holds, and, while its main thread sleeps as if it asked for one repeatedly, the locks of others on files that it
    has open. ``wait_status``: of a zombie; 0 where it exited cleanly, and where that is not to be seen.
    ``handles_signals``: a timer, or somebody outside, may end a wait of its main thread (SIGALRM, SIGUSR1, ...);
    ``handles_termination``: SIGTERM may, unless its handler is the beacon's or torch's; ``handles_child_ends``: the end
    of a child of its may (SIGCHLD). ``is_fork``: a child that runs no other program than its rank (it has the rank's
    page mapped), and has no POSIX timer.
    """

    pid: int
    ppid: int
    start_ticks: int
    at_s: float
    name: str
    cmdline: tuple[str, ...]
    state: str
    threads: tuple[ThreadState, ...] = ()
    rss_bytes: int = 0
    frozen: bool = False  # its cgroup is frozen
    throttled_ms: int = 0
    locks: tuple[FileLock, ...] = ()
    wait_status: int = 0
    handles_signals: bool = False
    handles_termination: bool = False
    handles_child_ends: bool = False
    is_fork: bool = False
    note: str = ""  # why a field above is missing
    leads: int = 0  # as in ``StackSample``

    @property
    def main_thread(self) -> ThreadState | None:
        return next((t for t in self.threads if t.tid == (self.leads or self.pid)), None)


class ProcessEvidence(Record, frozen=True):
    """All samples of one process: its states and stacks, oldest first.

    ``role``: ``main`` for the rank itself, ``dataloader worker``, or ``child`` for any other child.
    """

    role: str
    states: tuple[ProcessState, ...] = ()
    stacks: tuple[StackSample, ...] = ()

    @property
    def pid(self) -> int:
        return self.states[-1].pid if self.states else self.stacks[-1].pid if self.stacks else 0


# --- Flight Recorder --------------------------------------------------------------------------------------------------


UNKNOWN_SIZES = ((-1,),)  # stands for sizes that the record does not give in readable form


class Collective(Record, frozen=True):
    """One Flight Recorder entry.

    - ``group``: the process group's name as the entry gives it (``"0"``, ...)
    - ``seq``: the group's collective sequence number; ``p2p_seq`` is the one for sends and receives
    - ``op``: the operation with its backend prefix (``gloo:all_reduce``)
    - sizes: as recorded, outermost tensor list first
    - ``completed``: ``state == "completed"``, or ``retired`` if the backend asks no device. An NCCL entry that is
      retired without being completed has timed out.
    - ``created_ns``: CLOCK_REALTIME
    - ``frames``: innermost first, empty in dumps without stacks
    - ``timeout_ms``: 0 = unknown
    - ``thread``: who called, as ``Thread.ident``; 0 = unknown
    """

    group: str
    seq: int
    op: str
    completed: bool
    state: str = ""
    description: str = ""
    is_p2p: bool = False
    p2p_seq: int = 0
    record_id: int = 0
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    started: bool | None = None
    timeout_ms: int = 0
    frames: tuple[Frame, ...] = ()
    thread: int = 0

    @property
    def by_gloo(self) -> bool:
        """Of the backend that uses no device: who has called it waits for it in the call, or in its ``Work``."""
        return self.op.startswith("gloo:")


class GroupStatus(Record, frozen=True):
    """Last sequence numbers of one process group on one rank. -1: the backend does not report it."""

    last_enqueued: int = -1
    last_started: int = -1
    last_completed: int = -1


class FlightRecord(Record, frozen=True):
    """One rank's Flight Recorder. ``groups`` maps a group's name to its global ranks if the dump lists them.

    ``entries`` is oldest first: a tuple or a :class:`~safelaunch.model.entries.Entries`. ``damaged`` names the fields
    in which the dump holds values that no torch writes. Those fields keep their defaults. ``library``: the version of
    NCCL, as NCCL gives it.
    """

    version: str
    entries: Sequence[Collective] = ()
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    status: dict[str, GroupStatus] = msgspec.field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    library: str = ""


# --- a rank -----------------------------------------------------------------------------------------------------------


class Progress(Record, frozen=True):
    """A rank's progress page. ``*_ns`` are CLOCK_MONOTONIC of its host; 0 = never.

    ``step``: the user's own count if the script calls ``safelaunch.step()``, else the highest count over optimizers.
    None before the first step. ``state``: ``started`` | ``torch`` (imported) | ``exception`` | ``exited``.
    ``returned_ns``: its function returned, and the process lives on to hand over the result (``safelaunch.launch``).
    ``sets_timers``: it, or a process forked from it, may have set a timer (``alarm``) that ends it.
    ``history``: some of its steps as the supervisor saw them, oldest first: when each was marked, and its number.
    """

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    start_ticks: int
    state: str
    step: int | None = None
    optimizer_steps: tuple[int, ...] = ()
    claimed_ns: int = 0
    first_step_ns: int = 0
    last_step_ns: int = 0
    phase: str = ""
    phase_since_ns: int = 0
    marked_ns: int = 0  # when a phase or a pause last began or ended
    phase_timeout_s: float = 0.0
    paused: bool = False
    exception_ns: int = 0
    exit_ns: int = 0
    returned_ns: int = 0
    sets_timers: bool = True
    history: tuple[tuple[int, int], ...] = ()

    def mean_step_s(self, steps: int) -> float:
        """The seconds of each of the first ``steps`` but the very first, with which the clock begins."""
        return (self.last_step_ns - self.first_step_ns) / 1e9 / max(1, steps - 1)


class EarlierException(Record, frozen=True):
    """An exception from which a later one came. ``frames``: innermost first, from its own line to the handler's.

    ``explicit``: the later one was raised ``from`` it; else it was raised while this one was handled.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    explicit: bool = False


class RankException(Record, frozen=True):
    """The first uncaught exception of a rank, recorded by its beacon.

    ``time_unix_s`` is CLOCK_REALTIME. ``frames`` is innermost first. ``text`` is the traceback as printed.
    ``earlier``: the exceptions from which it came, the first one first.
    """

    type: str
    message: str
    time_unix_s: float
    frames: tuple[Frame, ...] = ()
    text: str = ""
    earlier: tuple[EarlierException, ...] = ()


class CaughtException(Record, frozen=True):
    """An exception that the user's own code caught. ``message`` is empty unless its first argument is a string.

    ``raised``: the innermost user frame of its traceback. ``caught``: the handler's line.
    """

    type: str
    message: str
    time_unix_s: float
    raised: Frame
    caught: Frame


class FatalError(Record, frozen=True):
    """What faulthandler wrote at a fatal signal. ``message``: its name for the signal (``Segmentation fault``).

    ``frames``, innermost first, belong to the thread that received the signal, or to the main thread if that one runs
    no Python. ``threads``: those of all threads that run Python.
    """

    message: str
    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()


class ExitCall(Record, frozen=True):
    """The last call of ``sys.exit`` or ``os._exit`` (``function``). ``frames``: the caller's, innermost first."""

    function: str
    code: int
    frames: tuple[Frame, ...] = ()


class MemoryKills(Record, frozen=True):
    """Signs that the kernel's out-of-memory killer was active while the job ran.

    ``kernel_line``: the line of the kernel log that names this process, if any. ``cgroup``, ``node``: how many
    processes it killed in the job's control group and on this node. None: the kernel does not count.
    """

    kernel_line: str = ""
    cgroup: int | None = None
    node: int | None = None


class RankExit(Record, frozen=True):
    """How a rank's process ended, from the torchrun agent that reaped it.

    ``returncode`` follows ``subprocess``: a negative value is a signal number. ``before_close``: the process ended
    before the agent began to stop the others, so the agent did not cause it. ``time_unix_s``: when the agent noticed.
    ``file``: that says so.
    """

    returncode: int
    time_unix_s: float
    before_close: bool = True
    file: str = "launch.json"


class Allocations(Record, frozen=True):
    """Live blocks of the memory of a GPU: ``count`` of them, ``size`` bytes together, allocated at one place.

    ``frames`` is innermost first; empty if no history was kept: then they are blocks of one size.
    """

    size: int
    count: int
    frames: tuple[Frame, ...] = ()


class DeviceMemory(Record, frozen=True):
    """Where the memory of a GPU was when a rank ran out of it, in bytes; None: not known.

    - ``device``: the rank's own number of the GPU
    - ``asked``, ``total``, ``free``: of the allocation that failed
    - ``allocated``: in tensors, ``peak`` at most; ``reserved``: by torch, and ``largest_free`` the largest piece of it
      without a tensor; ``retries``: how often torch had to give its cached memory back to go on
    - ``largest``: the largest live block; ``blocks``: by place, the largest first
    - ``sharded``: of models that are sharded in part, this rank's shards; ``whole``: their parameters that it holds
      whole, the largest of which are ``whole_names``; None for other models
    - ``at_allocation``: taken where the allocation failed, not when the exception had ended the script
    - ``snapshot``: the allocator's own was written, too
    """

    device: int = -1
    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    retries: int | None = None
    largest: int | None = None
    largest_free: int | None = None
    blocks: tuple[Allocations, ...] = ()
    sharded: int | None = None
    whole: int | None = None
    whole_names: tuple[str, ...] = ()
    at_allocation: bool = False
    snapshot: bool = False


class HandledException(Record, frozen=True):
    """An exception that a thread is handling: it is in an ``except`` or a ``finally``. ``thread``: ``Thread.ident``.

    ``message`` is empty unless its first argument is a string. ``frames`` is innermost first.
    """

    thread: int
    type: str
    message: str = ""
    frames: tuple[Frame, ...] = ()


class Posted(Record, frozen=True):
    """A send to ``peer``, or a receive from it, of the batch (``P2POp``) that a thread is at.

    ``thread``: Python's own number of it.
    """

    thread: int
    sends: bool
    peer: int
    tag: int = 0


class NcclLog(Record, frozen=True):
    """What NCCL warned of in a process, oldest first. ``file``: where the bundle has its log."""

    file: str
    warnings: tuple[str, ...] = ()


class GilTest(Record, frozen=True):
    """Two requests to the worker server: ``ping`` needs no GIL, ``python`` (a Python handler) does.

    None: not sent, or the server was not up. ``ping`` True and ``python`` False means that a thread holds the GIL.
    The Python handler tells of more: ``handling``; ``groups``, the ranks of each process group that the rank is in, by
    its name; ``groups_made``: how many the rank has made, with those that it is not in; ``posted``: the sends and
    receives of the batches that threads are at; ``batches``: the batch size of each DataLoader, by its variable;
    ``called``: the description of each process group, by its name, in the order in which the groups were made;
    ``foreign_backend``: the backend of some group is not of torch's own; ``stores``: the address of the store by which
    the ranks of each group found each other, by the group's name; ``handlers``: the signals for which the script has a
    handler of its own; ``torch``: the directory of the imported torch, as frames and as
    the kernel name it.
    """

    ping: bool | None = None
    python: bool | None = None
    handling: tuple[HandledException, ...] = ()
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    groups_made: int | None = None
    posted: tuple[Posted, ...] = ()
    batches: dict[str, int] = msgspec.field(default_factory=dict)
    called: dict[str, str] = msgspec.field(default_factory=dict)
    foreign_backend: bool = False
    stores: dict[str, str] = msgspec.field(default_factory=dict)
    handlers: tuple[int, ...] | None = None
    torch: tuple[str, ...] = ()


class RankFile(Record, frozen=True, kw_only=True):
    """``ranks/<rank>/rank.json``: the parts of a rank's evidence that no other file of the bundle holds."""

    host: str = ""
    pid: int = 0
    local_rank: int = -1
    gil: GilTest = GilTest()
    exit: RankExit | None = None
    fatal: FatalError | None = None
    memory_kills: MemoryKills = MemoryKills()
    deaths: tuple[str, ...] = ()  # lines of the kernel log on processes that may have been its children
    gpu_errors: tuple[str, ...] = ()  # lines of the kernel log on errors (Xid) of its GPU, or of its work on one
    beacon: bool = True  # False: the rank runs without safelaunch's sitecustomize (python -I, a cleared PYTHONPATH)
    code_roots: tuple[str, ...] = ()  # directories of the standard library and installed packages in the rank
    gpu: str = ""  # its device's number or UUID, by its CUDA_VISIBLE_DEVICES and LOCAL_RANK
    nccl_log: NcclLog | None = None
    batch: int | None = None  # that its DataLoader gave it, seen at the first step
    device: int | None = None  # the number of the CUDA device on which it computed then, where it has a choice

    @staticmethod
    def of(rank: RankEvidence) -> RankFile:
        return RankFile(**{name: getattr(rank, name) for name in RankFile.__struct_fields__})

    @property
    def fields(self) -> dict[str, Any]:
        """All of it under the names that :class:`RankEvidence` has for the same."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class RankEvidence(RankFile, frozen=True, kw_only=True):
    """Everything collected from one rank. Any part may be missing, for a reason that the manifest gives."""

    rank: int
    host: str
    pid: int
    progress: Progress | None = None
    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()
    flight_record: FlightRecord | None = None
    exception: RankException | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()  # the newest ones, oldest first; Python 3.12+
    log_tail: str = ""  # the end of the rank's output, decoded
    device_memory: DeviceMemory | None = None


# The records of a rank's own, in ``ranks/<rank>/``: the file of each is called as its field.
OWN_RECORDS: dict[str, Any] = {
    "exception": RankException,
    "exit_call": ExitCall,
    "caught": tuple[CaughtException, ...],
    "device_memory": DeviceMemory,
}


class Processes(Record, frozen=True, omit_defaults=False):
    """``ranks/<rank>/proc.json``."""

    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()
