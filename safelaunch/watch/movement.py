"""Does anything still move? Judged from two looks some seconds apart. Pure.

Movement is judged on the training thread and on what it waits for, never on background threads: a logger's CPU and
writes say nothing about a frozen loop. What it waits for may be a thread, though, or a process: of a join, a future or
a pool's result, of a queue or an event. A rank that waits for its peers does not move, whatever CPU its wait burns.
Where it rests in native code, its process's native threads may be what it waits for.
An unchanged stack alone proves nothing: an evaluation loop, too, stands at one line. Nor does a lack of CPU time: what
is runnable and gets no core, for other processes or for the limit of its control group, is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.model import ProcessState, Thread, ThreadState
from safelaunch.reading.calls import (
    Awaited,
    awaited,
    in_event_loop,
    is_loader_worker,
    serves,
    torch_wait,
    worker_idle,
)
from safelaunch.reading.frames import Stack, python_frames
from safelaunch.reading.kernel import kind_of
from safelaunch.watch.stall import Movement

# CPU that a blocked main thread may show: timer wake-ups, and being stopped and read by us. Measured: 0-20 ms in 3 s.
CPU_SHARE = 0.03
# Of the time between two looks, spent runnable and waiting for a core. Being stopped and read by us costs a thread that
# sleeps a wait for a core as well: some milliseconds, on a machine with several processes for each core.
QUEUED_SHARE = 0.25
# Reading a pipe's poll flag or a few log lines is not a checkpoint being written.
IO_BYTES = 16 * 1024
# What a thread does that fills a queue with samples, unlike one that logs.
WORK_SHARE = 0.05
WORK_IO_BYTES = 4 << 20
# A thread blocked in a read or a recv without a time limit is given a core when something arrives, and when a stack
# reader stops it: twice for each of py-spy's dumps, of which there is one between two looks.
RECEIVED_SLICES = 4
# Native threads that spin, or wake up often, whatever the job does.
SPINNING_THREADS = ("pt_", "nccl", "cuda", "ucx", "ucs", "nv_", "nvidia", "gdr", "ibv", "mlx")
NATIVE_SHARE = 0.25
TOP_FRAMES = 6
ENGINE_THREADS = "pt_autograd"


def judge(before: Look, after: Look, outputs: frozenset[str] = frozenset(), *, without_steps: bool = False) -> Movement:
    """The job's movement between two looks; step marks are the caller's to compare.

    ``without_steps``: the job marks none, so it may be a server, whose ranks all wait while nobody calls. That is no
    hang; a training whose loop stands is one, whatever server runs beside it.

    ``outputs``: what the job's own standard output and error lead to (``pipe:[123]``, ``/dev/pts/4``). A rank that
    cannot go on writing there waits for whoever has stopped reading: that is not the job's fault, and may end any time.
    """
    seen = [rank for rank, look in after.ranks.items() if look.main is not None and look.main.state is not None]
    verdicts = [judge_rank(before.ranks.get(rank), after.ranks[rank]) for rank in seen]
    if verdicts and all(verdict == "stopped" for verdict in verdicts):
        return "stopped"
    unread = outputs and any(_waits_for_reader(after.ranks[rank], outputs) for rank in seen)
    idle = without_steps and any(_waits_for_callers(after.ranks[rank]) for rank in seen)
    return "active" if unread or idle or "active" in verdicts else "still"


def _waits_for_callers(look: RankLook) -> bool:
    """The main thread serves, or waits in an event loop or at a queue that a serving thread may fill."""
    thread = main_thread(look.main) if look.main is not None else None
    if thread is None or look.main is None or look.main.stack.value is None:
        return False
    waits = _awaited(look.main)
    inner = Stack(thread.frames).called
    if waits.peers is None and (serves(inner) or in_event_loop(inner)):
        return True
    others = (each for each in look.main.stack.value.threads if each is not thread)
    return waits.threads in ("work", "signal") and any(serves(other.frames) for other in others)


def _awaited(look: ProcessLook) -> Awaited:
    """Whom its main thread waits for."""
    thread, kernel = main_thread(look), look.state.main_thread if look.state is not None else None
    frames = python_frames(thread) if thread is not None else ()
    return awaited(Stack(frames), kind_of(kernel) if kernel is not None else "")


def _waits_for_reader(look: RankLook, outputs: frozenset[str]) -> bool:
    kernel = look.main.state.main_thread if look.main is not None and look.main.state is not None else None
    return kernel is not None and kernel.syscall_name in ("write", "writev") and kernel.fd_target in outputs


def judge_rank(before: RankLook | None, after: RankLook) -> Movement:
    """``active``, ``still`` or ``stopped`` for one rank."""
    main = after.main
    if main is None or main.state is None:
        return "still"
    if main.state.state in "Tt" or main.state.frozen:
        return "stopped"
    earlier = before.main if before is not None else None
    if earlier is None or earlier.state is None or earlier.state.start_ticks != main.state.start_ticks:
        return "active"  # a process that was not there before
    thread, waits = main_thread(main), _awaited(main)
    if waits.peers is not None:
        return "still"
    if _process_moved(earlier, main, main_only=True) or _wrote(earlier.state, main.state):
        return "active"
    if thread is not None and (_threads_moved(thread, waits, earlier, main) or _native_moved(waits, earlier, main)):
        return "active"
    if thread is None or waits.processes:
        assert before is not None
        return _children(before, after)
    return "still"


def _wrote(before: ProcessState, after: ProcessState) -> bool:
    """Whether the main thread has written anything: what waits in vain says nothing, and a loop that reports lives."""
    old, new = before.main_thread, after.main_thread
    if old is None or new is None or old.written_bytes is None or new.written_bytes is None:
        return False
    return new.written_bytes > old.written_bytes


def _threads_moved(waiting: Thread, waits: Awaited, before: ProcessLook, after: ProcessLook) -> bool:
    """Whether the threads move that ``waiting`` waits for: those that run code of the user's, for the library's wake up
    now and then. Of these, one that waits for other ranks does not move, whatever CPU its wait burns.

    Of a join or a future one of them is the one. A queue, an event or an event loop is fed by any of them or by none:
    there only real work counts, for a logger beside a loop that stands writes its lines as well.
    """
    if waits.threads == "engine":
        return _engine_moved(before, after)
    stack = after.stack.value
    if waits.threads not in ("work", "signal") or stack is None or before.state is None or after.state is None:
        return False
    others = ((thread.os_tid, Stack(python_frames(thread))) for thread in stack.threads if thread is not waiting)
    users = {tid for tid, theirs in others if theirs.user_frame is not None and torch_wait(theirs) is None}
    least = _Least() if waits.threads == "work" else _Least(WORK_SHARE, WORK_IO_BYTES)
    return _one_moved(before.state, after.state, lambda tid: tid in users, least)


def _native_moved(waits: Awaited, before: ProcessLook, after: ProcessLook) -> bool:
    """Whether native threads compute while the main thread rests in a futex that no Python code of a library explains:
    a call into C that has started them (``torch.jit.wait``, a thread pool of Rust's) waits for them there.

    ``with lock:`` looks the same, so a deadlock beside native threads that compute is left to --max-stall.
    """
    stack = after.stack.value
    kernel = after.state.main_thread if after.state is not None else None
    if before.state is None or after.state is None or stack is None or kernel is None:
        return False
    if waits.threads or waits.processes or kind_of(kernel) != "lock":
        return False
    known = {thread.os_tid for thread in stack.threads}
    if None in known:
        return False  # which of the kernel's threads run Python cannot be told
    native = {
        thread.tid
        for thread in after.state.threads
        if thread.tid not in known and not thread.name.lower().startswith(SPINNING_THREADS)
    }
    return _one_moved(before.state, after.state, lambda tid: tid in native, _Least(NATIVE_SHARE, WORK_IO_BYTES))


def _engine_moved(before: ProcessLook, after: ProcessLook) -> bool:
    """With CUDA ``backward()`` waits for a thread of the autograd engine, which runs what is Python in it: whether that
    is at another line, as it recomputes or compiles. Its CPU says nothing, for one that waits for its GPU spins.
    """
    if before.stack.value is None or after.stack.value is None or after.state is None:
        return False
    engine = {thread.tid for thread in after.state.threads if thread.name.startswith(ENGINE_THREADS)}
    old = {thread.os_tid: python_frames(thread)[:TOP_FRAMES] for thread in before.stack.value.threads}
    new = {thread.os_tid: python_frames(thread)[:TOP_FRAMES] for thread in after.stack.value.threads}
    return any(tid in old and tid in new and old[tid] != new[tid] for tid in engine)


def working_workers(look: Look) -> tuple[int, ...]:
    """The pids of the DataLoader workers that have work, of every rank whose main thread waits for them.

    Idle ones are left out: they wake up every few seconds to see whether their parent lives.
    """
    found: list[int] = []
    for rank in look.ranks.values():
        if rank.main is not None and _awaited(rank.main).processes == "workers":
            found += [child.pid for child in rank.children if _has_work(child)]
    return tuple(found)


def perhaps_polling(before: Look, after: Look) -> tuple[int, ...]:
    """The pids of the ranks that sleep while what they may ask for moves: a child of theirs computes
    (``while child.poll() is None: sleep(1)``), or a file that they read grows.

    One that polls wakes up, and one that is stuck in a sleep does not: that is for the caller to see.
    """
    found: list[int] = []
    for number, rank in after.ranks.items():
        kernel = rank.main.state.main_thread if rank.main is not None and rank.main.state is not None else None
        earlier = before.ranks.get(number)
        asleep = kernel is not None and kind_of(kernel) in ("sleep", "select")
        if rank.main is None or earlier is None or earlier.main is None or not asleep:
            continue
        if _children(earlier, rank) == "active" or _file_changed(earlier.main, rank.main):
            found.append(rank.main.pid)
    return tuple(found)


def _file_changed(before: ProcessLook, after: ProcessLook) -> bool:
    return any(before.files.get(name, size) != size for name, size in after.files.items())


def perhaps_receiving(look: Look) -> tuple[int, ...]:
    """The pids of the ranks whose main thread waits for something to arrive, or for a disk.

    What arrives in small pieces moves nothing else: a line each second costs no CPU. It wakes the thread up, again and
    again; one that is stuck there is never given a core: that is for the caller to see.
    """
    found: list[int] = []
    for rank in look.ranks.values():
        kernel = rank.main.state.main_thread if rank.main is not None and rank.main.state is not None else None
        if rank.main is not None and kernel is not None and (kernel.state == "D" or kind_of(kernel) == "io"):
            found.append(rank.main.pid)
    return tuple(found)


def _has_work(child: ProcessLook) -> bool:
    thread = main_thread(child)
    return thread is not None and is_loader_worker(thread.frames) and not worker_idle(thread.frames)


def _children(before: RankLook, after: RankLook) -> Movement:
    earlier = {child.pid: child for child in before.children}
    for child in after.children:
        if child.pid not in earlier or _process_moved(earlier[child.pid], child, main_only=False):
            return "active"
    return "still"


def main_thread(look: ProcessLook) -> Thread | None:
    return look.stack.value.main_thread if look.stack.value is not None else None


def _process_moved(before: ProcessLook, after: ProcessLook, *, main_only: bool) -> bool:
    if before.state is None or after.state is None:
        return False
    if _one_moved(before.state, after.state, lambda tid: not main_only or tid == after.pid, _Least()):
        return True
    first, second = main_thread(before), main_thread(after)
    if first is None or second is None:
        return False
    return first.frames[:TOP_FRAMES] != second.frames[:TOP_FRAMES]


@dataclass(frozen=True, slots=True)
class _Least:
    """What a thread must have done between two looks to have moved: one of the two."""

    cpu_share: float = CPU_SHARE
    io_bytes: int = IO_BYTES


def _one_moved(before: ProcessState, after: ProcessState, counts: Callable[[int], bool], least: _Least) -> bool:
    """Whether one of the threads moved whose number ``counts``."""
    elapsed_ms = max(1.0, (after.at_s - before.at_s) * 1000)
    old = {thread.tid: thread for thread in before.threads}
    new = [thread for thread in after.threads if thread.tid in old and counts(thread.tid)]
    throttled = after.throttled_ms > before.throttled_ms
    return any(
        _thread_moved(old[thread.tid], thread, elapsed_ms, least)
        or _is_runnable(old[thread.tid], thread, elapsed_ms, throttled)
        for thread in new
    )


def _is_runnable(before: ThreadState, after: ThreadState, elapsed_ms: float, throttled: bool) -> bool:
    """The thread would go on if it got a core: it is no wait that keeps it where it is.

    ``throttled``: its control group has used up its share of the CPU meanwhile.
    """
    if after.state == "R" and (before.state == "R" or throttled):
        return True
    if before.queued_ms is None or after.queued_ms is None:
        return False
    return after.queued_ms - before.queued_ms > QUEUED_SHARE * elapsed_ms


def _came_back(before: ThreadState, after: ThreadState) -> bool:
    """Whether a thread that each look found in D was out of it in between: no stack reader wakes it up there."""
    if before.slices is None or after.slices is None or not before.state == after.state == "D":
        return False
    return after.slices > before.slices


def _received(before: ThreadState, after: ThreadState) -> bool:
    """Whether something has arrived for a thread that is in a call without a time limit, or runs, in each look."""
    if before.slices is None or after.slices is None or before.ends_s is not None or after.ends_s is not None:
        return False
    blocked = [thread for thread in (before, after) if kind_of(thread) == "io"]
    others = [thread for thread in (before, after) if kind_of(thread) != "io"]
    if not blocked or any(thread.state != "R" for thread in others):
        return False
    return after.slices - before.slices > RECEIVED_SLICES


def _thread_moved(before: ThreadState, after: ThreadState, elapsed_ms: float, least: _Least) -> bool:
    if after.cpu_ms - before.cpu_ms > max(least.cpu_share * elapsed_ms, 20):
        return True
    if _received(before, after) or _came_back(before, after):
        return True
    if before.io_bytes is None or after.io_bytes is None:
        return False
    return after.io_bytes - before.io_bytes > least.io_bytes
