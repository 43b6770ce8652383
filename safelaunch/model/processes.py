"""The records of one process: its stacks, its threads, what they wait for. Stack frames are ordered innermost first."""

from __future__ import annotations

import msgspec


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
    ``torn``: it ran while it was read, so its frames may be of two moments.
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


class StackSample(Record, frozen=True):
    """All threads of one process at one moment. ``how`` names the reader, e.g. ``py-spy --nonblocking``."""

    pid: int
    at_s: float
    how: str
    threads: tuple[Thread, ...]
    native: bool = False

    @property
    def main_thread(self) -> Thread | None:
        """The thread whose kernel id is the pid, else the one called MainThread, else None."""
        for thread in self.threads:
            if thread.os_tid == self.pid:
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
    - ``inode``: of the pipe or socket behind ``fd``
    - ``ends``: who has the other end of it, the process itself included; None where that was not looked for
    - ``child``: the process for whose end the call waits
    - ``rests_in``: of a futex, whose it is: ``lock`` (one of Python's), ``gil``, or a library (``libtorch_cpu.so``)
    - ``started_ns``: when it began (CLOCK_REALTIME), as exact as the kernel's ticks
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
    inode: int | None = None
    ends: tuple[OtherEnd, ...] | None = None
    child: int | None = None
    rests_in: str = ""
    started_ns: int | None = None


class FileLock(Record, frozen=True):
    """An exclusive lock on a file that some process has open, or asks for. ``pid``: who holds it, which may be that
    process. ``program``: of another holder, what it runs and since when, in brackets."""

    path: str
    pid: int
    program: str = ""


class ProcessState(Record, frozen=True):
    """One process at one moment. ``pid`` and ``start_ticks`` (field 22 of ``stat``) together identify a process.

    ``throttled_ms``: how long CPU limits have throttled its control groups so far. ``locks``: the file locks that it
    holds, and, while its main thread sleeps as if it asked for one repeatedly, the locks of others on files that it
    has open. ``wait_status``: of a zombie; 0 where it exited cleanly, and where that is not to be seen.
    ``handles_signals``: a timer, or somebody outside, may end a wait of its main thread (SIGALRM, SIGUSR1, ...);
    ``handles_child_ends``: the end of a child of its may (SIGCHLD).
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
    handles_child_ends: bool = False
    note: str = ""  # why a field above is missing

    @property
    def main_thread(self) -> ThreadState | None:
        return next((t for t in self.threads if t.tid == self.pid), None)


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
