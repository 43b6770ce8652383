"""Does anything still move? Judged from two looks some seconds apart. Pure.

Movement is judged on the training thread and on what it waits for, never on background threads: a logger's CPU and
writes say nothing about a frozen loop. What it waits for may be a thread, though, or a process: of a join, a future or
a pool's result, of a queue or an event. A rank that waits for its peers does not move, whatever CPU its wait burns.
An unchanged stack alone proves nothing: an evaluation loop, too, stands at one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.diagnose.calls import (
    in_backward,
    in_event_loop,
    is_loader_worker,
    loader_wait,
    lock_wait,
    serves,
    torch_wait,
    waits_for_child,
    waits_for_message,
    worker_idle,
)
from safelaunch.diagnose.frames import python_frames, user_part
from safelaunch.model import ProcessState, Thread, ThreadState
from safelaunch.watch.stall import Movement

# CPU that a blocked main thread may show: timer wake-ups, and being stopped and read by us. Measured: 0-20 ms in 3 s.
CPU_SHARE = 0.03
# Reading a pipe's poll flag or a few log lines is not a checkpoint being written.
IO_BYTES = 16 * 1024
# What a thread does that fills a queue with samples, unlike one that logs.
WORK_SHARE = 0.25
WORK_IO_BYTES = 4 << 20
TOP_FRAMES = 6
ENGINE_THREADS = "pt_autograd"
SLEEP_CALLS = ("nanosleep", "clock_nanosleep")
CHILD_CALLS = ("wait4", "waitid", "waitpid")


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
    if thread is None or look.main is None or look.main.stack.value is None or torch_wait(thread.frames) is not None:
        return False
    inner, _ = user_part(thread.frames)
    if serves(inner) or in_event_loop(inner):
        return True
    wait = lock_wait(inner)
    others = (each for each in look.main.stack.value.threads if each is not thread)
    return wait is not None and wait.on != "lock" and any(serves(other.frames) for other in others)


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
    thread = main_thread(main)
    if thread is not None and torch_wait(thread.frames) is not None:
        return "still"
    if _process_moved(earlier, main, main_only=True):
        return "active"
    if thread is not None and _threads_moved(thread, earlier, main):
        return "active"
    if thread is None or _waits_for_processes(thread, main.state.main_thread):
        assert before is not None
        return _children(before, after)
    return "still"


def _waits_for_processes(thread: Thread, kernel: ThreadState | None) -> bool:
    """The thread waits, or may wait, for processes of its own: DataLoader workers, a subprocess, a pool, an actor."""
    inner, _ = user_part(python_frames(thread))
    if loader_wait(thread.frames) or waits_for_child(inner) or waits_for_message(inner) or in_event_loop(inner):
        return True
    lock = lock_wait(inner)
    return (kernel is not None and kernel.syscall_name in CHILD_CALLS) or (lock is not None and lock.by_processes)


def _threads_moved(waiting: Thread, before: ProcessLook, after: ProcessLook) -> bool:
    """Whether the threads move that ``waiting`` waits for: those that run code of the user's, for the library's wake up
    now and then.

    Of a join or a future one of them is the one. A queue, an event or an event loop is fed by any of them or by none:
    there only real work counts, for a logger beside a loop that stands writes its lines as well.
    """
    if in_backward(python_frames(waiting)):
        return _engine_moved(before, after)
    inner, _ = user_part(python_frames(waiting))
    lock, stack = lock_wait(inner), after.stack.value
    on = lock.on if lock is not None else "signal" if in_event_loop(inner) else "lock"
    if on == "lock" or stack is None or before.state is None or after.state is None:
        return False
    users = {t.os_tid for t in stack.threads if t is not waiting and user_part(python_frames(t))[1] is not None}
    least = _Least() if on == "work" else _Least(WORK_SHARE, WORK_IO_BYTES)
    return _one_moved(before.state, after.state, lambda tid: tid in users, least)


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
        thread = main_thread(rank.main) if rank.main is not None else None
        if thread is not None and loader_wait(thread.frames):
            found += [child.pid for child in rank.children if _has_work(child)]
    return tuple(found)


def perhaps_polling(before: Look, after: Look) -> tuple[int, ...]:
    """The pids of the ranks that sleep while a child of theirs computes: ``while child.poll() is None: sleep(1)``.

    One that polls wakes up, and one that is stuck in a sleep does not: that is for the caller to see.
    """
    found: list[int] = []
    for number, rank in after.ranks.items():
        kernel = rank.main.state.main_thread if rank.main is not None and rank.main.state is not None else None
        earlier = before.ranks.get(number)
        asleep = kernel is not None and kernel.syscall_name in SLEEP_CALLS
        if rank.main is not None and earlier is not None and asleep and _children(earlier, rank) == "active":
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
    return any(_thread_moved(old[thread.tid], thread, elapsed_ms, least) for thread in new)


def _thread_moved(before: ThreadState, after: ThreadState, elapsed_ms: float, least: _Least) -> bool:
    if after.cpu_ms - before.cpu_ms > max(least.cpu_share * elapsed_ms, 20):
        return True
    if before.io_bytes is None or after.io_bytes is None:
        return False
    return after.io_bytes - before.io_bytes > least.io_bytes
