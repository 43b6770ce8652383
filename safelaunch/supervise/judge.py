"""Judges a job that completes no steps, from two looks: proved dead, alive because something works, or unknown."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import or_
from typing import TYPE_CHECKING

from msgspec.structs import replace

from safelaunch.capture.look import MAX_CHILDREN, Look, ProcessLook, RankLook
from safelaunch.model import Answer, Evidence, JobCondition, ThreadState
from safelaunch.supervise.looks import Looks, main_thread
from safelaunch.supervise.watch import work
from safelaunch.supervise.watch.stall import UNLIMITED, Limits
from safelaunch.supervise.watch.work import Background, ObservedWork

if TYPE_CHECKING:
    from safelaunch.verdict.proof import ProofResult
    from safelaunch.verdict.waits import Case


@dataclass(frozen=True)
class Judgement:
    condition: JobCondition
    work: tuple[ObservedWork, ...] = ()
    unseen: str = ""
    """clause about a stopped process, or one that the looks missed; empty: none"""
    free: str = ""
    """clause about what might release the ranks, if only that prevents a proof"""
    limits: Limits = UNLIMITED
    group: str = ""
    """group with the first timeout to expire"""

    @property
    def answer(self) -> Answer:
        return "alive" if self.condition == "moving" else "unseen" if self.condition == "stopped" else self.condition


def work_in(looks: Looks, background: Background) -> tuple[ObservedWork, ...]:
    """Returns the work between the last two looks; if there was none, the work before the first look.

    Work of processes that a rank is waiting for counts in full.
    """
    last = looks.taken[-1]
    waiting, foreground = set[int](), set[int]()
    for rank in last.ranks.values():
        waits, awaited = _waiting_and_awaited_pids(rank)
        waiting |= waits
        foreground |= awaited
    windows = (work.find_work(*window, background, foreground=foreground, waiting=waiting) for window in looks.windows)
    mains = {rank.main.pid for rank in last.ranks.values() if rank.main is not None}
    before, after = looks.taken[-2:]
    return next(filter(None, windows), ()) or tuple(_woken_receivers(before, after, (mains | foreground) - waiting))


_READS = ("read", "readv")
_RECEIVES = ("recvfrom", "recvmsg", "recvmmsg")
_MOVES = ("splice", "sendfile", "copy_file_range", "io_uring_enter", "io_getevents")
_WAITS = ("select", "pselect6", "poll", "ppoll", "epoll_wait", "epoll_pwait", "epoll_pwait2")
_LEAST_PER_S = 2.0  # a heartbeat is slower
_SHORT_S = 0.05  # a wait with a shorter limit belongs to a polling loop, whatever it receives
_TURNS = 4.0  # per limit: a busy machine or GIL interrupts a loop between two waits


def _woken_receivers(before: Look, after: Look, awaited: Collection[int]) -> Iterator[ObservedWork]:
    """Yields threads that were woken by received data that the kernel doesn't count.

    A polling loop wakes no more often than its wait's time limit explains; a receiver wakes more often or has no limit.

    Args:
        awaited: Processes in which the main thread counts: ranks, and processes that a rank's main thread waits for.
            Other
            threads count only if they rest in a receive on a Unix socket.
    """
    states = {
        process.pid: process.state
        for rank in before.ranks.values()
        for process in rank.processes
        if process.state is not None
    }
    for rank in after.ranks.values():
        for process in rank.processes:
            was, now = states.get(process.pid), process.state
            if rank.main is None or was is None or now is None:
                continue
            earlier = {thread.tid: thread for thread in was.threads}
            for thread in now.threads:
                previous = earlier.get(thread.tid)
                if previous is None or previous.slices is None or thread.slices is None:
                    continue
                woken, seconds = thread.slices - previous.slices, now.at_s - was.at_s
                is_main = thread.tid == process.pid and process.pid in awaited
                receives = all(map(_can_receive if is_main else _is_on_unix_socket, (previous, thread)))
                polls = max(_turns_per_s(previous, was.at_s), _turns_per_s(thread, now.at_s))
                if receives and woken > max(_LEAST_PER_S, polls) * seconds:
                    yield ObservedWork(rank.main.pid, process.pid, thread.tid, "messages", woken / seconds)


def _turns_per_s(thread: ThreadState, at_s: float) -> float:
    if thread.times_out:
        return math.inf
    if thread.ends_s is None:
        return 0.0
    limit_s = thread.ends_s - at_s
    return _TURNS / limit_s if limit_s > _SHORT_S else math.inf


def _can_receive(thread: ThreadState) -> bool:
    name = thread.syscall_name
    is_receiving = name in _RECEIVES and not thread.fd_target.startswith("tcp")
    return is_receiving or name in _WAITS or name in _MOVES or _is_on_unix_socket(thread)


def _is_on_unix_socket(thread: ThreadState) -> bool:
    return thread.syscall_name in (*_READS, *_RECEIVES) and thread.fd_target.startswith("unix ")


def _waiting_and_awaited_pids(rank: RankLook) -> tuple[set[int], set[int]]:
    """Returns the rank's pid if its main thread waits for peers or a device, and the pids of processes it waits for."""
    from safelaunch.stacks.calls import awaited, device_wait
    from safelaunch.stacks.frames import Stack, python_frames
    from safelaunch.stacks.kernel import kind_of

    main = rank.main
    thread = main_thread(main)
    if main is None or thread is None:
        return set(), set()
    kernel, stack = main.state.main_thread if main.state is not None else None, Stack(python_frames(thread))
    waits = awaited(stack, kind_of(kernel) if kernel is not None else "")
    if waits.peers is not None or device_wait(stack, (), main.pid):
        return {main.pid}, set()
    children = {child.pid for child in rank.children} if waits.processes else set()
    return set(), children | ({main.pid} if waits.threads else set())


def wait_for_each_other(ranks: Sequence[RankLook]) -> bool:
    """Returns whether every main thread is waiting for peers or its device, or sleeps while another one waits.

    If so, no other thread or process can end the waits.
    """
    from safelaunch.stacks.kernel import kind_of

    waiting = [bool(_waiting_and_awaited_pids(rank)[0]) for rank in ranks]
    states = [rank.main.state.main_thread if rank.main and rank.main.state else None for rank in ranks]
    asleep = [state is not None and kind_of(state) == "sleep" for state in states]
    return any(waiting) and all(map(or_, waiting, asleep))


def all_are_stopped(look: Look) -> bool:
    states = [rank.main.state for rank in look.ranks.values() if rank.main is not None and rank.main.state is not None]
    return bool(states) and all(state.state in "Tt" or state.frozen for state in states)


def describe_unseen(look: Look, looks: Looks) -> str:
    if looks.counters and looks.counters[-1][1].partial:
        return "not all processes of the job could be read"
    return next((why for target in looks.targets for why in _lacks(target.rank, look.ranks.get(target.rank))), "")


def _lacks(number: int, rank: RankLook | None) -> Iterator[str]:
    if rank is None or rank.main is None or rank.main.state is None:
        yield f"rank {number} was not seen, or has ended"
        return
    if rank.main.state.state in "ZX":
        return
    if main_thread(rank.main) is None:
        yield f"no stack of rank {number} ({rank.main.stack.missing or 'no main thread'})"
    if len(rank.children) >= MAX_CHILDREN:
        yield f"rank {number} has more than {MAX_CHILDREN} child processes"
    for process in rank.processes:
        yield from _hidden(number, process)


def _hidden(number: int, process: ProcessLook) -> Iterator[str]:
    state = process.state
    if state is None:
        yield f"process {process.pid} of rank {number} was not seen"
    elif state.frozen or any(thread.state in "Tt" for thread in state.threads):
        yield f"process {process.pid} of rank {number} is stopped by a debugger, a signal or its control group"
    elif state.note and state.state not in "ZX":
        yield f"process {process.pid} of rank {number}: {state.note}"
    elif process.stack.value is None and process.stack.kind == "timeout":
        yield f"no stack of process {process.pid} of rank {number} in time"


def proves(evidence: Evidence) -> bool:
    """Returns whether the evidence proves the job dead; False if a rule raises an error."""
    try:
        return bool(_examined(_case_of(evidence)).proof)
    except Exception:  # noqa: BLE001 - the verdict reports the error
        return False


def _case_of(evidence: Evidence) -> Case:
    from safelaunch.capture import user_source
    from safelaunch.verdict.waits import Case

    return Case.of(replace(evidence, outcome="hang"), user_source.text)


def _examined(case: Case) -> ProofResult:
    from safelaunch.verdict.proof import examine

    return examine(case)


def _limits_of(case: Case, mark_s: float) -> tuple[Limits, str]:
    """Returns when torch will end the first recorded call that a rank is waiting in, and the call's group in words."""
    limits: list[tuple[float, str, bool]] = []
    for rank, state in case.ranks.items():
        wait = state.wait
        if wait is None or wait.group is None or wait.seq is None:
            continue
        calls_of = [*case.alignment.pending(rank), case.alignment.entry(rank, wait.group, wait.seq)]
        for entry in calls_of:
            if entry is not None and entry.group == wait.group and entry.timeout_ms and entry.created_ns:
                unix_s = entry.created_ns / 1e9 + entry.timeout_ms / 1000
                limits.append((unix_s, entry.group, entry.by_gloo))
    if not limits:
        return UNLIMITED, ""
    unix_s, group, raises = min(limits)
    return Limits(unix_s - time.time() + time.monotonic() - mark_s, raises), case.group(group)


def judge(looks: Looks, evidence: Evidence, background: Background, *, covers: bool, mark_s: float) -> Judgement:
    """Judges two looks at this node's ranks.

    Args:
        covers: Whether these are all ranks of the job; only then is a proof possible.
        mark_s: Time of the last step.
    """
    last = looks.taken[-1]
    if all_are_stopped(last):
        return Judgement("stopped")
    done = () if looks.collectives_moved else work_in(looks, background)
    unseen = describe_unseen(last, looks)
    try:
        case = _case_of(evidence)
        examined, (limits, group) = _examined(case), _limits_of(case, mark_s)
    except Exception as error:  # noqa: BLE001 - a failing rule must not end a job
        return Judgement(
            "alive" if done else "unseen", done, f"the evidence could not be analyzed: {type(error).__name__}"
        )
    # A sender can have moved on while its bytes are under way.
    arriving = looks.collectives_moved or any(piece.kind == "network" and piece.pid == piece.rank for piece in done)
    if examined.proof and covers and not unseen and not arriving:
        return Judgement("dead", done, limits=limits, group=group)
    if done or looks.collectives_moved:
        return Judgement("alive", done, unseen, limits=limits, group=group)
    free = examined.free.claim if examined.free is not None else ""
    return Judgement("unseen" if unseen else "unknown", done, unseen, free, limits, group)
