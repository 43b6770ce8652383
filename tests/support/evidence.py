"""Small builders of evidence for the tests of diagnose and report: a rank is its stack and its kernel state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safelaunch.capture.look import ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import (
    CallArguments,
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    GilTest,
    ProcessEvidence,
    ProcessState,
    Progress,
    RankEvidence,
    StackSample,
    Thread,
    ThreadState,
    Verdict,
)

SCRIPT = "/home/me/train.py"
STDLIB = "/usr/lib/python3.11"
SITE = "/opt/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOGGER = f"{SITE}/torch/distributed/c10d_logger.py"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
WORKER = f"{SITE}/torch/utils/data/_utils/worker.py"


def at(line: int, function: str = "train", file: str = SCRIPT) -> Frame:
    return Frame(file, line, function)


MODULE = at(100, "<module>")


def script(source: str, first: int = 40) -> Callable[[str], str | None]:
    """Returns a reader of the script in which ``source`` begins at line ``first``."""
    return {SCRIPT: "\n" * (first - 1) + source}.get


WRAPPER = Frame(LOGGER, 83, "_exception_logger.<locals>.wrapper")


def in_user(line: int, function: str = "train") -> tuple[Frame, ...]:
    return (at(line, function), MODULE)


def in_c10d(op: str, line: int, function: str = "train") -> tuple[Frame, ...]:
    return (Frame(C10D, 3252, op), WRAPPER, at(line, function), MODULE)


def in_init(line: int = 10) -> tuple[Frame, ...]:
    helper = Frame(C10D, 2169, "_new_process_group_helper")
    return (helper, Frame(C10D, 1899, "init_process_group"), WRAPPER, at(line, "setup"), MODULE)


def in_backward(line: int) -> tuple[Frame, ...]:
    engine = Frame(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward")
    return (engine, Frame(f"{SITE}/torch/_tensor.py", 623, "Tensor.backward"), at(line), MODULE)


def in_loader(line: int) -> tuple[Frame, ...]:
    return (
        Frame(f"{STDLIB}/selectors.py", 415, "_PollLikeSelector.select"),
        Frame(f"{STDLIB}/multiprocessing/queues.py", 113, "Queue.get"),
        Frame(LOADER, 1291, "_MultiProcessingDataLoaderIter._try_get_data"),
        Frame(LOADER, 725, "_BaseDataLoaderIter.__next__"),
        at(line),
        MODULE,
    )


_FORKED = (
    Frame(f"{STDLIB}/multiprocessing/process.py", 108, "BaseProcess.run"),
    Frame(f"{STDLIB}/multiprocessing/process.py", 314, "BaseProcess._bootstrap"),
    Frame(LOADER, 505, "DataLoader.__iter__"),
    at(30),
    MODULE,
)
WORKER_IDLE = (
    Frame(f"{STDLIB}/selectors.py", 415, "_PollLikeSelector.select"),
    Frame(f"{STDLIB}/multiprocessing/queues.py", 113, "Queue.get"),
    Frame(WORKER, 334, "_worker_loop"),
    *_FORKED,
)


def in_worker(line: int, function: str = "Data.__getitem__") -> tuple[Frame, ...]:
    fetch = Frame(f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
    return (at(line, function, "/home/me/data.py"), fetch, Frame(WORKER, 374, "_worker_loop"), *_FORKED)


KERNEL: dict[str, dict[str, Any]] = {
    "sleep": {"wchan": "hrtimer_nanosleep", "syscall": 230, "syscall_name": "clock_nanosleep", "ends_s": 86_400.0},
    "nap": {"wchan": "hrtimer_nanosleep", "syscall": 230, "syscall_name": "clock_nanosleep", "ends_s": 3.0},
    "futex": {"wchan": "futex_do_wait", "syscall": 202, "syscall_name": "futex"},
    "timed_futex": {"wchan": "futex_do_wait", "syscall": 202, "syscall_name": "futex", "ends_in_s": 0.5},
    "pipe": {"wchan": "anon_pipe_read", "syscall": 0, "syscall_name": "read", "fd": 7, "fd_target": "pipe:[1]"},
    "pipe-write": {"wchan": "anon_pipe_write", "syscall": 1, "syscall_name": "write", "fd": 7, "fd_target": "pipe:[1]"},
    "socket": {
        "wchan": "sk_wait_data",
        "syscall": 45,
        "syscall_name": "recvfrom",
        "fd": 7,
        "fd_target": "tcp 127.0.0.1:4 -> 127.0.0.1:5 (established)",
    },
    "stdin": {"wchan": "anon_pipe_read", "syscall": 0, "syscall_name": "read", "fd": 0, "fd_target": "pipe:[1]"},
    "flock": {
        "wchan": "locks_lock_inode_wait",
        "syscall": 73,
        "syscall_name": "flock",
        "fd": 8,
        "fd_target": "/data/.lock, locked by pid 1010",
        "locked_by": 1010,
    },  # rank 1's
    "flock-elsewhere": {
        "wchan": "nlmclnt_block",
        "syscall": 73,
        "syscall_name": "flock",
        "fd": 8,
        "fd_target": "/data/cache.db",
    },
    "fifo": {"wchan": "wait_for_partner", "syscall": 257, "syscall_name": "openat"},
    "connect": {"wchan": "inet_stream_connect", "syscall": 42, "syscall_name": "connect", "fd": 9},
    "poll": {"wchan": "poll_schedule_timeout", "syscall": 7, "syscall_name": "poll"},
    "epoll": {"wchan": "do_epoll_wait", "syscall": 232, "syscall_name": "epoll_wait"},
    "wait4": {"wchan": "do_wait", "syscall": 61, "syscall_name": "wait4"},
    "select": {"wchan": "do_select", "syscall": 23, "syscall_name": "select"},
    "restart_futex": {"wchan": "futex_do_wait", "syscall": 219, "syscall_name": "restart_syscall"},
    "logs": {"wchan": "hrtimer_nanosleep", "syscall": 230, "syscall_name": "clock_nanosleep", "cpu": 100},
    "run": {"state": "R", "wchan": "0", "cpu": 2000},
    "disk": {"state": "D", "wchan": "rpc_wait_bit_killable"},
    "stop": {"state": "T", "wchan": "do_signal_stop"},
    "zombie": {"state": "Z"},
    "": {},
}


def process(
    pid: int,
    frames: Sequence[Frame] = (),
    kernel: str = "futex",
    *,
    role: str = "main",
    threads: Sequence[tuple[str, Sequence[Frame], str]] = (),
    owns_gil: bool = False,
    native: Sequence[Frame] = (),
    samples: int = 2,
    frozen: bool = False,
    call: CallArguments | None = None,
    told: Mapping[str, Any] | None = None,
    **thread: Any,
) -> ProcessEvidence:
    """Returns a process with its kernel states and stacks, two of each unless ``samples`` says otherwise.

    Args:
        kernel: key of KERNEL, the state of the main thread
        threads: further threads as (name, frames, key of KERNEL)
        native: C frames inside the main thread's innermost Python frame
        call: arguments of the main thread's c10d call
        told: further fields of the main thread's kernel state
        thread: further fields of all threads on the stacks, such as ident and names
    """
    every = [("MainThread", tuple(frames), kernel), *((n, tuple(f), k) for n, f, k in threads)]
    states, stacks = [], []
    for number in range(samples):
        kernel_threads = []
        for offset, (name, _, how) in enumerate(every):
            fields = {**KERNEL[how], **(told or {} if offset == 0 else {})}
            cpu = fields.pop("cpu", 0) * number
            if "ends_in_s" in fields:
                fields["ends_s"] = 2.0 * number + fields.pop("ends_in_s")
            kernel_threads.append(
                ThreadState(tid=pid + offset, name=name, state=fields.pop("state", "S"), cpu_ms=10 + cpu, **fields)
            )
        letter = KERNEL[kernel].get("state", "S")
        states.append(
            ProcessState(pid, 1, 5, 2.0 * number, "python", ("python",), letter, tuple(kernel_threads), frozen=frozen)
        )
        stacks.append(_sample(pid, 2.0 * number, every, owns_gil, (), call, **thread))
    if native:
        stacks.append(_sample(pid, 9.0, every, owns_gil, tuple(native), **thread))
    shown = [s for s in stacks if any(t.frames for t in s.threads)]
    return ProcessEvidence(role, tuple(states), tuple(shown))


def looked_at(number: int, frames: Sequence[Frame], kernel: str = "futex") -> RankLook:
    """Returns one look at a rank, of its main process alone."""
    one = process(1000 + 10 * number, frames, kernel)
    stack = Result(one.stacks[-1] if one.stacks else None, "py-spy", 0.1)
    return RankLook(number, ProcessLook(one.states[-1].pid, one.states[-1], stack))


def _sample(
    pid: int,
    at_s: float,
    every: Sequence[tuple[str, tuple[Frame, ...], str]],
    gil: bool,
    native: tuple[Frame, ...],
    call: CallArguments | None = None,
    **thread: Any,
) -> StackSample:
    threads = tuple(
        Thread(
            (native if i == 0 else ()) + frames,
            name,
            pid + i,
            active=kernel == "run",
            owns_gil=gil and i == 0,
            call=call if i == 0 else None,
            **thread,
        )
        for i, (name, frames, kernel) in enumerate(every)
    )
    return StackSample(pid, at_s, "py-spy dump --json", threads, native=bool(native))


def entry(
    op: str,
    seq: int,
    *,
    done: bool = False,
    group: str = "0",
    line: int = 0,
    size: tuple[int, ...] = (4,),
    dtype: str = "Float",
    p2p: bool = False,
) -> Collective:
    """Returns a Flight Recorder entry, without frames if ``line`` is 0."""
    frames = (Frame(C10D, 3245, op), Frame(LOGGER, 83, "wrapper"), at(line), MODULE) if line else ()
    return Collective(
        group=group,
        seq=seq,
        op=op if ":" in op else f"gloo:{op}",
        completed=done,
        state="scheduled",
        description="default_pg" if group == "0" else "undefined",
        is_p2p=p2p,
        p2p_seq=seq if p2p else 0,
        record_id=seq,
        input_sizes=(size,) if op != "barrier" else (),
        input_dtypes=(dtype,) if op != "barrier" else (),
        frames=frames,
    )


def record(*entries: Collective, groups: dict[str, tuple[int, ...]] | None = None) -> FlightRecord:
    return FlightRecord("2.10", tuple(entries), groups or {})


def past(count: int, op: str = "all_reduce", line: int = 50) -> tuple[Collective, ...]:
    """Returns ``count`` completed collectives, numbered from 1."""
    return tuple(entry(op, n, done=True, line=line) for n in range(1, count + 1))


def progress(rank: int, step: int | None = 60, state: str = "torch") -> Progress:
    return Progress(rank, rank, 4, 0, 1000 + 10 * rank, 5, state, step=step)


def rank(
    number: int,
    frames: Sequence[Frame] = (),
    kernel: str = "futex",
    *,
    flight: FlightRecord | None = None,
    gil: GilTest | None = None,
    children: Sequence[ProcessEvidence] = (),
    seen: bool = True,
    step: int | None = 60,
    page: str = "torch",
    more: dict[str, Any] | None = None,
    **of_process: Any,
) -> RankEvidence:
    """Returns a rank whose process id is 1000 + 10 * its number.

    Args:
        seen: whether it has kernel states and stacks
        page: state of its progress page
        more: further fields of RankEvidence, such as exception and exit
        of_process: arguments of :func:`process`
    """
    pid = 1000 + 10 * number
    return RankEvidence(
        rank=number,
        host="node1",
        pid=pid,
        progress=progress(number, step, page),
        main=process(pid, frames, kernel, **of_process) if seen else None,
        children=tuple(children),
        flight_record=flight,
        gil=gil or GilTest(ping=True, python=True),
        **(more or {}),
    )


def waiting(number: int, op: str = "all_reduce", seq: int = 4, line: int = 50, **fields: Any) -> RankEvidence:
    """Returns a rank that waits in a collective: stack and Flight Recorder agree."""
    flight = record(*past(seq - 1), entry(op, seq, line=line))
    return rank(number, in_c10d(op, line), flight=fields.pop("flight", flight), **fields)


def behind(seq: int = 4) -> FlightRecord:
    """Returns the record of a rank that has not entered collective ``seq`` yet."""
    return record(*past(seq - 1))


def job(*ranks: RankEvidence, outcome: Any = "hang", world: int = 0, **fields: Any) -> Evidence:
    missing = fields.pop("missing_ranks", ())
    size = world or len(ranks) + len(missing)
    return Evidence(outcome, size, tuple(ranks), missing_ranks=missing, **{"stall_s": 30.0, **fields})


def with_culprit(culprit: RankEvidence, world: int, peer: Any = waiting) -> Evidence:
    """Returns a job in which every other rank is ``peer(number)``."""
    return job(*(culprit if n == culprit.rank else peer(n) for n in range(world)))


def decided(verdict: Verdict) -> tuple[str, list[tuple[int, int]], str]:
    """Returns cause, (rank, line) of the culprits, and confidence."""
    culprits = [(one.rank, one.frame.line if one.frame else 0) for one in verdict.culprits]
    return verdict.cause, culprits, verdict.confidence


NEW_GROUP = (Frame(C10D, 5100, "_new_group_with_tag"), Frame(C10D, 5000, "new_group"), WRAPPER, at(14), MODULE)

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.00 GiB of which 512.00 "
    "MiB is free. Process 4711 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "73.50 GiB memory in use. Of the allocated memory 66.00 GiB is allocated by PyTorch, with 46.00 MiB "  # english: ok
    "allocated in private pools (e.g., CUDA Graphs), and 6.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation."
)

EVIL = "\x1b]0;owned\x07\x1b[2J<script>alert(1)</script>|`*x*\r\n# no\u202e"
