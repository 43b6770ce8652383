"""Reads the kernel's view of a process from ``/proc/<pid>`` (proc(5)).

This works even if the process is stopped, frozen, in D state, or a zombie. If a process is stuck, reading ``cmdline``,
``syscall`` and ``io`` might wait for a lock forever, so these are read within a deadline.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from safelaunch.capture import file_locks, sockets, waits
from safelaunch.capture.cgroups import is_frozen, throttled_ms
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.native_waits import Resting
from safelaunch.capture.result import within
from safelaunch.job import process
from safelaunch.job.process import ProcessId
from safelaunch.model import FileLock, ProcessState, StackSample, ThreadState
from safelaunch.stacks.kernel import kind_of
from safelaunch.system import procstat
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of

_MAX_PATH = 4096
MAX_THREADS = 4096
_MOST_READINGS = 3  # of a thread that is awake, or that wakes or falls asleep between its state and its system call
_WAKES_S = 0.005


@dataclass(frozen=True, slots=True)
class Own:
    """Facts that a process reported about itself. To read them, other processes need the right to trace it."""

    calls: Mapping[int, str]  # threads' ``syscall`` files
    waits: Mapping[int, str]  # threads' ``wchan`` files
    memory: int = -1  # descriptor of its memory; -1 without one

    def of(self, name: str, tid: int) -> str:
        """Returns the contents of a thread's file ``name``; empty if not reported, or if the kernel doesn't have it."""
        text = {"syscall": self.calls, "wchan": self.waits}.get(name, {}).get(tid, "")
        return "" if text == "0" else text


NOTHING = Own({}, {})


def parse_syscall(text: str) -> tuple[int, tuple[int, ...]] | None:
    """Parses ``/proc/<pid>/syscall`` into the call's number and arguments; None if the thread isn't in a call."""
    fields = text.split()
    if len(fields) < 7 or fields[0] in ("running", "-1"):
        return None
    return int(fields[0]), tuple(int(field, 16) for field in fields[1:7])


def parse_io(text: str) -> tuple[int, int] | None:
    counts = [int(n) for n in re.findall(r"^[rw]char: (\d+)$", text, re.MULTILINE)]
    return (counts[0], counts[1]) if len(counts) == 2 else None


def parse_schedstat(text: str) -> tuple[int, int] | None:
    """Parses ``/proc/<pid>/task/<tid>/schedstat`` into milliseconds of waiting for a core, and time slices."""
    fields = text.split()
    if len(fields) != 3 or not (fields[1].isdigit() and fields[2].isdigit()):
        return None
    return int(fields[1]) // 1_000_000, int(fields[2])


def read_process(
    pid: int, *, deadline_s: float = 2.0, locks: Sequence[file_locks.LockRow] | None = None, own: Own = NOTHING
) -> ProcessState:
    """Reads the current state of a process and its threads within ``deadline_s`` seconds.

    The result's ``note`` names the files that weren't readable or didn't respond. Raises ``CaptureError`` only if the
    process doesn't exist.

    Args:
        locks: The node's file locks, if they have been read.
        own: Facts that the process reported about itself.
    """
    quick = read_quick(pid)
    if quick.state in "ZX":
        return structs.replace(quick, note="zombie: it has ended, but its parent has not reaped it")
    try:
        threads, cmdline, file_locks, notes = within(
            deadline_s, f"/proc/{pid}", lambda: _details(pid, quick.state, locks, own)
        )
    except CaptureError as error:
        return structs.replace(quick, note=error.message)
    except Exception as error:  # noqa: BLE001 - the boundary: everything read so far still counts
        return structs.replace(quick, note=f"details of /proc/{pid}: {type(error).__name__}: {error}")
    threads = threads or quick.threads
    letter = next((t.state for t in threads if t.tid == pid), quick.state)  # from the same moment as the rest
    return structs.replace(
        quick, state=letter, threads=threads, cmdline=cmdline, locks=file_locks, note="; ".join(notes)
    )


def read_quick(pid: int) -> ProcessState:
    """Reads states, names, CPU time and memory. Never blocks, and needs no rights.

    Raises ``CaptureError`` if the process doesn't exist.
    """
    stat = procstat.read(pid)
    if stat is None:
        raise CaptureError(f"process {pid} is gone")
    handled = procstat.handled(pid)
    return ProcessState(
        pid=pid,
        ppid=stat.ppid,
        start_ticks=stat.start_ticks,
        at_s=time.monotonic(),
        name=stat.name,
        cmdline=(),
        state=stat.state,
        threads=_threads(pid, _quick_thread),
        rss_bytes=stat.rss_bytes,
        frozen=is_frozen(pid),
        throttled_ms=throttled_ms(pid),
        wait_status=stat.wait_status if stat.state in "ZX" else 0,
        handles_signals=handled.own,
        handles_termination=handled.termination,
        handles_child_ends=handled.child_ends,
    )


def is_fork(pid: int, page_name: str) -> bool:
    """Returns True if a child runs its rank's program: it maps the rank's page, and has no POSIX timer."""
    try:
        timers = _text(Path(f"/proc/{pid}/timers"))
        return not timers and f"/pages/{page_name}\n" in _text(Path(f"/proc/{pid}/maps")) + "\n"
    except OSError:  # it has ended, belongs to another user, or the kernel doesn't show timers
        return False


def state_letter(pid: int) -> str:
    """Returns the state of the process (R S D T t Z X); empty if it is gone."""
    stat = procstat.read(pid)
    return stat.state if stat is not None else ""


def orphans(pid: int, table: process.ProcessTable) -> list[ProcessId]:
    """Returns the processes in the session led by ``pid`` (as ranks under torchrun do) that have lost their parents."""
    if _session(pid) != pid:
        return []
    family = {pid, *(descendant.pid for descendant in process.descendants([pid], table=table))}
    return [
        ProcessId(candidate, ticks)
        for candidate, (_, ticks) in sorted(table.items())
        if candidate not in family and _session(candidate) == pid
    ]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return 0


def role_of(state: ProcessState | None, stacks: tuple[StackSample, ...] = ()) -> str:
    """Returns the role of a rank's child: ``dataloader worker``, ``resource tracker``, ``forkserver`` or ``child``.

    The stack identifies a DataLoader's worker for every start method (``_worker_loop`` of
    ``torch/utils/data/_utils/worker.py``). The command line identifies multiprocessing's helpers. A forked child has
    the same command line as its parent.
    """
    frames = [frame for sample in stacks for thread in sample.threads for frame in thread.frames]
    if any(f.function == "_worker_loop" and f.file.endswith("utils/data/_utils/worker.py") for f in frames):
        return "dataloader worker"
    if any(f.function.endswith("_bootstrap") and f.file.endswith("multiprocessing/process.py") for f in frames):
        return "child"
    command = " ".join(state.cmdline) if state else ""
    for helper in ("resource_tracker", "forkserver"):
        if f"multiprocessing.{helper}" in command:
            return helper.replace("_", " ")
    return "child"


def _details(
    pid: int, letter: str, locks: Sequence[file_locks.LockRow] | None, own: Own
) -> tuple[tuple[ThreadState, ...], tuple[str, ...], tuple[FileLock, ...], list[str]]:
    """Returns threads, command line, file locks, and notes. Reading the first three can block."""
    notes: list[str] = []
    denied: set[str] = set()
    memory = ProcessMemory(pid, own.memory)
    resting = Resting(memory)
    read = lambda pid, tid: _full_thread(pid, tid, denied, resting, memory, own)  # noqa: E731
    threads = _threads(pid, read)
    for _ in range(_MOST_READINGS - 1):
        # A thread that only wakes briefly, as gloo's loop does, is seen where it rests.
        awake = {thread.tid for thread in threads if thread.state == "R"} - {pid}
        if not awake:
            break
        time.sleep(_WAKES_S)
        again = {thread.tid: thread for thread in _threads(pid, read, awake)}
        threads = tuple(again.get(thread.tid, thread) for thread in threads)
    if denied:
        notes.append(
            f"{', '.join(sorted(denied))} of its threads: permission denied"
            " (needs the same user, or CAP_SYS_PTRACE in a container)"
        )
    cmdline: tuple[str, ...] = ()
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
        cmdline = tuple(raw.decode("utf-8", "replace").split("\0")) if raw else ()
        if letter in "Tt":
            tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
            notes += [f"traced by process {tracer[1]}"] if tracer else []
    except OSError as error:
        notes.append(f"command line: {error.strerror}")
    return threads, cmdline, _locks(pid, threads, locks), notes


def _locks(
    pid: int, threads: tuple[ThreadState, ...], node_locks: Sequence[file_locks.LockRow] | None
) -> tuple[FileLock, ...]:
    """Returns the process's file locks.

    Includes other processes' locks only if the main thread sleeps, because then it might be polling for one.
    """
    asleep = any(thread.tid == pid and kind_of(thread) in ("sleep", "select") for thread in threads)
    try:
        return file_locks.locks_of(pid, of_others=asleep, table=node_locks)
    except OSError:
        return ()  # another user's process


def _threads(
    pid: int, read: Callable[[int, int], ThreadState], only: Iterable[int] | None = None
) -> tuple[ThreadState, ...]:
    try:
        tids = sorted(only or (int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return ()
    threads: list[ThreadState] = []
    for tid in tids[:MAX_THREADS]:
        try:
            threads.append(read(pid, tid))
        except (OSError, ValueError):
            continue  # the thread has ended
    return tuple(threads)


def _thread_stat(pid: int, tid: int) -> procstat.Stat:
    stat = procstat.read(pid, tid)
    if stat is None:
        raise ProcessLookupError(f"thread {tid} of process {pid} is gone")
    return stat


def _quick_thread(pid: int, tid: int) -> ThreadState:
    stat = _thread_stat(pid, tid)
    return ThreadState(tid=tid, name=stat.name, state=stat.state, cpu_ms=stat.cpu_ms)


def _full_thread(
    pid: int, tid: int, denied: set[str], resting: Resting, memory: ProcessMemory, own: Own
) -> ThreadState:
    task = Path(f"/proc/{pid}/task/{tid}")

    def optional(name: str) -> str:
        try:
            return _text(task / name)
        except PermissionError:
            if text := own.of(name, tid):
                return text
            denied.add(name)
        except OSError:
            pass
        return ""

    for _ in range(_MOST_READINGS):
        stat, text = _thread_stat(pid, tid), optional("syscall")
        if (text == "running") == (stat.state == "R"):
            break
    call = parse_syscall(text)
    wchan = optional("wchan")
    number, arguments = call if call else (None, ())
    name = waits.name_of(number) if number is not None else ""
    io, scheduled = parse_io(optional("io")), parse_schedstat(optional("schedstat"))
    futex, futex_file = resting.shared_futex(arguments) if name == "futex" else ("", "")
    rests_in = resting.rests_in(text)
    thread = ThreadState(
        tid=tid,
        name=stat.name,
        state="R" if text == "running" and stat.state == "S" else stat.state,
        wchan=own.of("wchan", tid) if wchan in ("", "0") else wchan,
        syscall=number,
        syscall_name=name,
        fd_target=futex,
        futex_file=futex_file,
        cpu_ms=stat.cpu_ms,
        io_bytes=sum(io) if io is not None else None,
        written_bytes=io[1] if io is not None else None,
        queued_ms=scheduled[0] if scheduled is not None else None,
        slices=scheduled[1] if scheduled is not None else None,
        ends_s=waits.ends_s(name, arguments, memory.read),
        child=waits.child_of(name, arguments),
        rests_in=rests_in,
        libraries=resting.libraries(text) if rests_in not in ("lock", "gil") else (),
    )
    return _with_target(thread, pid, arguments, memory)


def _with_target(thread: ThreadState, pid: int, arguments: tuple[int, ...], memory: ProcessMemory) -> ThreadState:
    name, fd = thread.syscall_name, None
    if name in waits.FD_FIRST:
        fd = arguments[0] & 0xFFFFFFFF
    elif name in ("poll", "ppoll") and arguments[1] == 1:  # a read or connect with a timeout polls one descriptor
        pollfd = memory.read(arguments[0], 4)
        fd = struct.unpack("=i", pollfd)[0] if len(pollfd) == 4 else None
    elif name in waits.PATH_ARGUMENT:
        raw, ended, _ = memory.read(arguments[waits.PATH_ARGUMENT[name]], _MAX_PATH).partition(b"\0")
        return structs.replace(thread, fd_target=raw.decode("utf-8", "replace") if ended else "")
    if fd is None or not 0 <= fd < 1 << 24:
        return thread
    target = link_of(f"/proc/{pid}/fd/{fd}")
    if not target:
        return structs.replace(thread, fd=fd)
    holder, *sharers = (file_locks.holders(pid, fd) if name in file_locks.CALLS else ()) or (None,)
    if holder is not None:
        target += f", locked by pid {holder}{file_locks.program(holder)}"
    link = re.fullmatch(r"(socket|pipe):\[(\d+)\]", target)
    is_socket = link is not None and link[1] == "socket"
    return structs.replace(
        thread,
        fd=fd,
        fd_target=sockets.describe(pid, int(link[2])) if link and is_socket else target,
        locked_by=holder,
        lock_sharers=tuple(sharers),
        times_out=is_socket and sockets.times_out(pid, fd),
        inode=int(link[2]) if link else None,
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip()


class Scheduled(NamedTuple):
    """A thread's scheduling state. If its ``marks`` are equal at two moments, it didn't run in between."""

    runs: bool
    marks: tuple[int | str, ...]


def scheduled(pid: int) -> dict[int, Scheduled]:
    """Returns each thread's scheduling; empty if the process is gone. Never blocks, and needs no rights."""
    by_tid: dict[int, Scheduled] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/task").iterdir():
            tid = int(entry.name)
            if (stat := procstat.read(pid, tid)) is not None:
                by_tid[tid] = Scheduled(stat.state == "R", (stat.cpu_ms, _slices(pid, tid)))
    return by_tid


def tids_inside(pid: int) -> dict[int, int]:
    """Maps thread ids inside a process's container to ids here; empty if it shares this pid namespace."""
    tids: dict[int, int] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/task").iterdir():
            numbers = re.search(r"^NSpid:[ \t]*(\d+)[ \t].*?(\d+)$", _text(entry / "status"), re.MULTILINE)
            if numbers is None:
                return {}
            tids[int(numbers[2])] = int(numbers[1])
    return tids


def _slices(pid: int, tid: int) -> str:
    for name, pattern in (("schedstat", ".+"), ("status", r"(?s)voluntary_ctxt_switches.*")):  # some kernels lack one
        with suppress(OSError):
            if match := re.search(pattern, _text(Path(f"/proc/{pid}/task/{tid}/{name}"))):
                return match[0]
    return ""


_TID_AT = {"x86_64": 720, "aarch64": 208}  # offset in glibc's struct pthread, to which pthread_self() points


def tid_of(memory: ProcessMemory, ident: int, tids: Collection[int]) -> int | None:
    """Returns the kernel id, among ``tids``, of the thread with ``pthread_self()`` equal to ``ident``."""
    at = _TID_AT.get(platform.machine())
    data = memory.read(ident + at, 4) if at and ident else b""
    tid = int.from_bytes(data, sys.byteorder)
    if tid not in tids:
        tid = tids_inside(memory.pid).get(tid, tid)
    return tid if len(data) == 4 and tid in tids else None
