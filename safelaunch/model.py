"""The records that travel between the layers: evidence, and the verdict reached over it.

All are immutable. They are ``msgspec`` structs because bundles are read back from disk (``safelaunch diagnose``),
where every field has to be checked for its type: msgspec does that while decoding, at the speed of its C parser.
Times are seconds of ``CLOCK_MONOTONIC`` unless a name says otherwise. Stack frames are ordered innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every record; decoding ignores keys of newer versions and checks the types of those it knows."""


# --- stacks -----------------------------------------------------------------------------------------------------------


class Frame(Record, frozen=True):
    """One Python (or, in a native sample, C) frame. ``file`` is absolute where the reader knows it."""

    file: str
    line: int
    function: str


class Thread(Record, frozen=True):
    """One thread as a stack reader saw it. ``frames`` is innermost first; ``active`` means on a CPU or runnable."""

    frames: tuple[Frame, ...]
    name: str = ""
    os_tid: int | None = None
    active: bool = False
    owns_gil: bool = False


class StackSample(Record, frozen=True):
    """All threads of one process at one moment. ``how`` names the reader, e.g. ``py-spy --nonblocking``."""

    pid: int
    at_s: float
    how: str
    threads: tuple[Thread, ...]
    native: bool = False

    @property
    def main_thread(self) -> Thread | None:
        """The thread whose kernel id is the pid; else the one called MainThread; else None."""
        for thread in self.threads:
            if thread.os_tid == self.pid:
                return thread
        return next((t for t in self.threads if t.name == "MainThread"), None)


# --- processes --------------------------------------------------------------------------------------------------------


class ThreadState(Record, frozen=True):
    """One kernel thread from ``/proc/<pid>/task/<tid>``.

    ``state`` is the letter of ``stat`` (R S D T t Z X). ``syscall`` is the x86-64/aarch64 number or None when running
    or unreadable; ``syscall_name`` its name where it matters (read, write, futex, ...); ``fd`` the first argument of
    a call that takes a descriptor and ``fd_target`` what that descriptor points at (``pipe:[123]``, a path, ...).
    ``cpu_ms``: user and system time used so far. ``io_bytes``: characters read and written so far (rchar + wchar).
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


class ProcessState(Record, frozen=True):
    """One process at one moment. ``start_ticks`` is field 22 of ``stat``: with ``pid`` it identifies the process."""

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
    note: str = ""  # why something above is missing

    @property
    def main_thread(self) -> ThreadState | None:
        return next((t for t in self.threads if t.tid == self.pid), None)


class ProcessEvidence(Record, frozen=True):
    """Everything seen of one process: states and stacks in the order they were taken (oldest first).

    ``role``: ``main`` for the rank itself, ``dataloader worker``, or another child's (``child``).
    """

    role: str
    states: tuple[ProcessState, ...] = ()
    stacks: tuple[StackSample, ...] = ()

    @property
    def pid(self) -> int:
        return self.states[-1].pid if self.states else self.stacks[-1].pid if self.stacks else 0


# --- Flight Recorder --------------------------------------------------------------------------------------------------


UNKNOWN_SIZES = ((-1,),)  # of tensors of which a record tells no sizes that can be read


class Collective(Record, frozen=True):
    """One Flight Recorder entry. ``group`` is the process group's name as the entry gives it (``"0"``, ...).

    ``seq`` is the collective sequence number of that group (``p2p_seq`` for sends and receives); ``op`` has its
    backend prefix (``gloo:all_reduce``). Shapes are as recorded, outermost tensor list first. ``completed`` is
    ``state == "completed"``, or ``retired`` where the backend asks no device (NCCL's that is retired without being
    completed has timed out). ``created_ns`` is CLOCK_REALTIME. ``frames`` is innermost first and empty
    in dumps without stacks. ``timeout_ms`` 0 = unknown.
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


class GroupStatus(Record, frozen=True):
    """Last sequence numbers of one process group on one rank; -1 where the backend does not say."""

    last_enqueued: int = -1
    last_started: int = -1
    last_completed: int = -1


class FlightRecord(Record, frozen=True):
    """One rank's Flight Recorder. ``groups`` maps a group's name to its global ranks where the dump says so.

    ``entries``: oldest first; a tuple, or a :class:`~safelaunch.entries.Entries`.
    """

    version: str
    entries: Sequence[Collective] = ()
    groups: dict[str, tuple[int, ...]] = {}
    status: dict[str, GroupStatus] = {}


# --- a rank -----------------------------------------------------------------------------------------------------------


class Progress(Record, frozen=True):
    """What a rank's progress page says. ``*_ns`` are CLOCK_MONOTONIC of its host; 0 = never.

    ``step``: the user's own count where ``safelaunch.step()`` is used, else the highest count over optimizers;
    None when the rank has marked no step. ``state``: ``started`` | ``torch`` (imported) | ``exception`` | ``exited``.
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
    phase_timeout_s: float = 0.0
    paused: bool = False
    exception_ns: int = 0
    exit_ns: int = 0


class RankException(Record, frozen=True):
    """The first uncaught exception of a rank, recorded by its beacon when it reached the top.

    ``time_unix_s`` is CLOCK_REALTIME. ``frames`` is innermost first. ``text`` is the traceback as printed.
    """

    type: str
    message: str
    time_unix_s: float
    frames: tuple[Frame, ...] = ()
    text: str = ""


class CaughtException(Record, frozen=True):
    """One that a rank raised and caught in the user's own code. ``message``: where its first argument is a text.

    ``raised``: the innermost line of the user's on its way; ``caught``: the line of the handler that took it.
    """

    type: str
    message: str
    time_unix_s: float
    raised: Frame
    caught: Frame


class FatalError(Record, frozen=True):
    """What faulthandler wrote when a fatal signal came. ``message``: the signal in its words (``Segmentation fault``).

    ``frames``, innermost first, are those of the thread that it met; of the main thread where that one runs no Python.
    """

    message: str
    frames: tuple[Frame, ...] = ()


class ExitCall(Record, frozen=True):
    """The last call of ``sys.exit`` or ``os._exit`` (``function``); ``frames`` of the caller, innermost first."""

    function: str
    code: int
    frames: tuple[Frame, ...] = ()


class MemoryKills(Record, frozen=True):
    """Signs that the kernel's out-of-memory killer was at work while the job ran.

    ``kernel_line``: the line of the kernel's log that names this process; empty without one. ``cgroup``, ``node``: how
    many processes it killed in the job's control group, and on this node; None where the kernel does not count.
    """

    kernel_line: str = ""
    cgroup: int | None = None
    node: int | None = None


class RankExit(Record, frozen=True):
    """How a rank's process ended, from the torchrun agent that reaped it.

    ``returncode`` follows ``subprocess``: negative is the signal's number. ``before_close``: it had ended before the
    agent began to stop the others, so it is not a consequence of that. ``time_unix_s``: when the agent noticed.
    """

    returncode: int
    time_unix_s: float
    before_close: bool = True


class GilTest(Record, frozen=True):
    """Two questions to the worker server: one that needs no GIL (``ping``), one that does (a Python handler).

    None = not asked or the server was not up. ``ping`` True and ``python`` False means that the GIL is not free.
    """

    ping: bool | None = None
    python: bool | None = None


class RankEvidence(Record, frozen=True):
    """Everything collected from one rank. Any part may be missing: the manifest says why."""

    rank: int
    host: str
    pid: int
    local_rank: int = -1
    progress: Progress | None = None
    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()
    flight_record: FlightRecord | None = None
    gil: GilTest = GilTest()
    exception: RankException | None = None
    exit: RankExit | None = None
    fatal: FatalError | None = None
    exit_call: ExitCall | None = None
    caught: tuple[CaughtException, ...] = ()  # the newest ones, the oldest first; Python 3.12 and later
    memory_kills: MemoryKills = MemoryKills()
    beacon: bool = True  # False: the rank runs without our sitecustomize (python -I, a wiped PYTHONPATH)
    code_roots: tuple[
        str, ...
    ] = ()  # directories of the standard library and of installed packages, as the rank saw them
    log_tail: str = ""  # decoded end of what the rank wrote


class RankFile(Record, frozen=True):
    """``ranks/<rank>/rank.json``: what a rank's evidence has that no other file of the bundle holds."""

    host: str = ""
    pid: int = 0
    local_rank: int = -1
    gil: GilTest = GilTest()
    exit: RankExit | None = None
    fatal: FatalError | None = None
    memory_kills: MemoryKills = MemoryKills()
    beacon: bool = True
    code_roots: tuple[str, ...] = ()

    @staticmethod
    def of(rank: RankEvidence) -> RankFile:
        return RankFile(
            host=rank.host,
            pid=rank.pid,
            local_rank=rank.local_rank,
            gil=rank.gil,
            exit=rank.exit,
            fatal=rank.fatal,
            memory_kills=rank.memory_kills,
            beacon=rank.beacon,
            code_roots=rank.code_roots,
        )


Outcome = Literal["hang", "crash", "dump"]


class Evidence(Record, frozen=True):
    """One job at the moment of capture. ``missing_ranks``: ranks of the world that were not seen at all."""

    outcome: Outcome
    world_size: int
    ranks: tuple[RankEvidence, ...]
    missing_ranks: tuple[int, ...] = ()
    stall_s: float = 0.0  # how long the slowest rank had made no progress when this was taken
    threshold_s: float = 0.0  # the time without a step after which it was suspected; 0: it was not for that
    threshold_why: str = ""
    moving: bool = False  # some rank was seen to progress between the confirmation samples
    notes: tuple[str, ...] = ()  # what slowed it down while it ran: a straggler, a shared GPU


# --- artifacts --------------------------------------------------------------------------------------------------------


class Artifact(Record, frozen=True):
    """One file of a bundle, or the reason why it is missing.

    ``path`` is relative to the bundle. ``how``: the source (``py-spy dump --json``). ``missing``: the reason; empty
    when the file is there.
    """

    path: str
    how: str
    duration_s: float
    missing: str = ""
    bytes: int = 0
    note: str = ""


# --- verdict ----------------------------------------------------------------------------------------------------------

Confidence = Literal["high", "medium", "low"]

CAUSES = (
    "collective-mismatch",
    "missing-from-collective",
    "uneven-batches",
    "group-order",
    "p2p-cycle",
    "init-not-joined",
    "data-loading",
    "blocking-io",
    "uninterruptible-io",
    "lock-deadlock",
    "gil-held",
    "busy-loop",
    "stuck-in-user-code",
    "swallowed-exception",
    "rank-stopped",
    "gpu-kernel",
    "rank-exited",
    "rank-killed",
    "rank-exception",
    "no-rank-stands-out",
    "slow-not-stuck",
)


class Culprit(Record, frozen=True, omit_defaults=False):
    """One rank at fault. ``process``: ``main``, ``dataloader worker (pid N)``, or another child's role and pid."""

    rank: int
    host: str
    pid: int
    process: str
    frame: Frame | None
    step: int | None
    reason: str


class Claim(Record, frozen=True, omit_defaults=False):
    """One piece of evidence: what is claimed, and the file of the bundle that shows it."""

    claim: str
    file: str


class Verdict(Record, frozen=True, omit_defaults=False):
    """The document of ``verdict.json``. ``victims`` is a list of ranks written as ranges (``"0-2,5"``)."""

    schema: int
    outcome: Outcome
    cause: str
    confidence: Confidence
    summary: str
    culprits: tuple[Culprit, ...]
    victims: str
    evidence: tuple[Claim, ...]
    ruled_out: tuple[str, ...]
    missing: tuple[str, ...]
    suggestions: tuple[str, ...]


def format_ranks(ranks: list[int] | tuple[int, ...] | set[int]) -> str:
    """Ranks as sorted ranges: ``{0, 1, 2, 5}`` → ``"0-2,5"``; empty → ``""``."""
    parts: list[str] = []
    run: list[int] = []
    for rank in sorted(set(ranks)):
        if run and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts.append(_range(run))
        run = [rank]
    if run:
        parts.append(_range(run))
    return ",".join(parts)


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
