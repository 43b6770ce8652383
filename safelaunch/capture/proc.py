"""What the kernel says of a process: ``/proc/<pid>``, read directly (proc(5)).

Works on processes that answer nothing else: stopped, frozen, in D state, or gone (zombie). Files behind locks
that a stuck process may hold for ever (``cmdline``, ``syscall``, ``io``) are read under a deadline of their
own.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from safelaunch import procstat
from safelaunch.capture import filelocks, redact, sockets, syscalls
from safelaunch.capture.cgroups import is_frozen
from safelaunch.capture.result import within
from safelaunch.errors import CaptureError
from safelaunch.model import ProcessState, StackSample, ThreadState

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_PATH = 4096
MAX_THREADS = 4096


def parse_syscall(text: str) -> tuple[int, tuple[int, ...]] | None:
    """``/proc/<pid>/syscall`` as number and arguments; None when running or blocked outside a call."""
    fields = text.split()
    if len(fields) < 7 or fields[0] in ("running", "-1"):
        return None
    return int(fields[0]), tuple(int(field, 16) for field in fields[1:7])


def parse_io(text: str) -> int | None:
    """``rchar + wchar`` of ``/proc/<pid>/io`` in bytes, or None."""
    counts = [int(n) for n in re.findall(r"^[rw]char: (\d+)$", text, re.MULTILINE)]
    return sum(counts) if len(counts) == 2 else None


def read_process(pid: int, *, clock: Callable[[], float] = time.monotonic, deadline_s: float = 2.0) -> ProcessState:
    """The state of a process and of its threads now; at most ``deadline_s`` seconds.

    What may not be read (another user's process) or does not answer is left out and said in ``note``. The
    command line is redacted. Raises ``CaptureError`` only when there is no such process.
    """
    quick = read_quick(pid, clock=clock)
    if quick.state in "ZX":
        return structs.replace(quick, note="zombie: it has ended and nobody has reaped it")
    try:
        threads, cmdline, notes = within(deadline_s, f"/proc/{pid}", lambda: _details(pid, quick.state))
    except CaptureError as error:
        return structs.replace(quick, note=error.message)
    except Exception as error:  # noqa: BLE001 - the boundary: what was read without blocking still counts
        return structs.replace(quick, note=f"details of /proc/{pid}: {type(error).__name__}: {error}")
    threads = threads or quick.threads
    letter = next((t.state for t in threads if t.tid == pid), quick.state)  # of the same moment as the rest
    return structs.replace(quick, state=letter, threads=threads, cmdline=cmdline, note="; ".join(notes))


def read_quick(pid: int, *, clock: Callable[[], float] = time.monotonic) -> ProcessState:
    """The part of ``read_process`` that never blocks and any user may read: states, names, CPU time, memory.

    Raises ``CaptureError`` when there is no such process.
    """
    stat = procstat.read(pid)
    if stat is None:
        raise CaptureError(f"process {pid} is gone")
    return ProcessState(
        pid=pid,
        ppid=stat.ppid,
        start_ticks=stat.start_ticks,
        at_s=clock(),
        name=stat.name,
        cmdline=(),
        state=stat.state,
        threads=_threads(pid, _quick_thread),
        rss_bytes=stat.rss_bytes,
        frozen=is_frozen(pid),
    )


def state_letter(pid: int) -> str:
    """The state of the process (R S D T t Z X), ``""`` when it is gone."""
    stat = procstat.read(pid)
    return stat.state if stat is not None else ""


def process_table() -> dict[int, tuple[int, int]]:
    """Every process now: pid → (ppid, start_ticks). One scan serves the trees of all ranks."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := procstat.read(int(entry.name))) is not None:  # not vanished meanwhile
            table[stat.pid] = (stat.ppid, stat.start_ticks)
    return table


def process_tree(pid: int, table: dict[int, tuple[int, int]] | None = None) -> list[tuple[int, int]]:
    """The descendants of ``pid`` (without itself) as (pid, start_ticks), parents before children."""
    table = process_table() if table is None else table
    children: dict[int, list[int]] = {}
    for child, (ppid, _) in table.items():
        children.setdefault(ppid, []).append(child)
    found: list[tuple[int, int]] = []
    queue = [pid]
    seen = {pid}
    for parent in queue:  # grows while it is walked: breadth first
        for child in sorted(children.get(parent, ())):
            if child not in seen:
                seen.add(child)
                queue.append(child)
                found.append((child, table[child][1]))
    return found


def role_of(state: ProcessState | None, stacks: tuple[StackSample, ...] = ()) -> str:
    """What a child of a rank is: ``dataloader worker``, ``resource tracker``, ``forkserver`` or ``child``.

    A loader worker is known by its stack (``_worker_loop`` of ``torch/utils/data/_utils/worker.py``),
    whatever start method made it; the helpers of multiprocessing by their command line, which their forked
    children share.
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


def _details(pid: int, letter: str) -> tuple[tuple[ThreadState, ...], tuple[str, ...], list[str]]:
    """Threads, command line and notes: the part that may block."""
    notes: list[str] = []
    denied: set[str] = set()
    threads = _threads(pid, lambda pid, tid: _full_thread(pid, tid, denied))
    if denied:
        notes.append(
            f"{', '.join(sorted(denied))} of its threads: permission denied"
            " (needs the same user, or CAP_SYS_PTRACE in a container)"
        )
    cmdline: tuple[str, ...] = ()
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
        cmdline = tuple(redact.redact_argv(raw.decode("utf-8", "replace").split("\0"))) if raw else ()
        if letter in "Tt":
            tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
            notes += [f"traced by process {tracer[1]}"] if tracer else []
    except OSError as error:
        notes.append(f"command line: {error.strerror}")
    return threads, cmdline, notes


def _threads(pid: int, read: Callable[[int, int], ThreadState]) -> tuple[ThreadState, ...]:
    try:
        tids = sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return ()
    found: list[ThreadState] = []
    for tid in tids[:MAX_THREADS]:
        try:
            found.append(read(pid, tid))
        except (OSError, ValueError):
            continue  # the thread ended meanwhile
    return tuple(found)


def _thread_stat(pid: int, tid: int) -> procstat.Stat:
    stat = procstat.read(pid, tid)
    if stat is None:
        raise ProcessLookupError(f"thread {tid} of process {pid} is gone")
    return stat


def _quick_thread(pid: int, tid: int) -> ThreadState:
    stat = _thread_stat(pid, tid)
    return ThreadState(tid=tid, name=stat.name, state=stat.state, cpu_ms=stat.cpu_ms)


def _full_thread(pid: int, tid: int, denied: set[str]) -> ThreadState:
    task = Path(f"/proc/{pid}/task/{tid}")
    stat = _thread_stat(pid, tid)

    def optional(name: str) -> str:
        try:
            return _text(task / name)
        except PermissionError:
            denied.add(name)
        except OSError:
            pass  # the kernel was built without it, or the thread just ended
        return ""

    call = parse_syscall(optional("syscall"))
    wchan = optional("wchan")
    number, arguments = call if call else (None, ())
    name = syscalls.name_of(number) if number is not None else ""
    fd, target = _target(pid, name, arguments)
    return ThreadState(
        tid=tid,
        name=stat.name,
        state=stat.state,
        wchan="" if wchan == "0" else wchan,
        syscall=number,
        syscall_name=name,
        fd=fd,
        fd_target=target,
        cpu_ms=stat.cpu_ms,
        io_bytes=parse_io(optional("io")),
    )


def _target(pid: int, name: str, arguments: tuple[int, ...]) -> tuple[int | None, str]:
    """The descriptor a call works on and what it points at; for a call that names a path, the path."""
    fd: int | None = None
    if name in syscalls.FD_FIRST:
        fd = arguments[0] & 0xFFFFFFFF
    elif name in ("poll", "ppoll") and arguments[1] == 1:  # one descriptor: a read or connect with a timeout
        pollfd = _memory(pid, arguments[0], 4)
        fd = struct.unpack("=i", pollfd)[0] if len(pollfd) == 4 else None
    elif name in syscalls.PATH_ARGUMENT:
        raw, ended, _ = _memory(pid, arguments[syscalls.PATH_ARGUMENT[name]], _MAX_PATH).partition(b"\0")
        return None, redact.redact_text(raw.decode("utf-8", "replace")) if ended else ""
    if fd is None or not 0 <= fd < 1 << 24:
        return None, ""
    try:
        target = str(Path(f"/proc/{pid}/fd/{fd}").readlink())
    except OSError:
        return fd, ""
    if name in filelocks.CALLS and (holder := filelocks.holder(pid, fd)) is not None:
        target += f", locked by pid {holder}"
    inode = re.fullmatch(r"socket:\[(\d+)\]", target)
    return fd, redact.redact_text(sockets.describe(pid, int(inode[1])) if inode else target)


def _memory(pid: int, address: int, size: int) -> bytes:
    """Up to ``size`` bytes of the process's memory; a string near the end of a mapping gives fewer."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            first = min(size, _PAGE - address % _PAGE)
            data = os.pread(memory.fileno(), first, address)
            return data if len(data) == size or b"\0" in data else data + _rest(memory.fileno(), address, data, size)
    except (OSError, OverflowError):
        return b""


def _rest(descriptor: int, address: int, data: bytes, size: int) -> bytes:
    try:
        return os.pread(descriptor, size - len(data), address + len(data))
    except OSError:
        return b""


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip()


def times_scheduled(pid: int) -> int:
    """How often the kernel has put the process's main thread on a CPU (the third number of ``schedstat``); 0 if gone.

    Changes whenever it wakes up, be it for a moment; none of its other threads counts.
    """
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[2])
    except (OSError, IndexError, ValueError):
        return 0
