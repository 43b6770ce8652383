"""What two looks at a job that makes no step say: is it proved dead, does something work, or is neither known?

``ask`` has it put into words, for the first word about a quiet job.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from safelaunch.capture import command
from safelaunch.capture.look import MAX_CHILDREN, Look, ProcessLook, RankLook
from safelaunch.model import Answer, Evidence, FirstWord, JobCondition, ThreadState
from safelaunch.supervise.cluster.evidence import condensed, received
from safelaunch.supervise.looks import Looks, main_thread
from safelaunch.supervise.watch import work
from safelaunch.supervise.watch.stall import UNLIMITED, Limits
from safelaunch.supervise.watch.work import Background, ObservedWork
from safelaunch.system.decoding import from_json, from_msgpack
from safelaunch.system.errors import CaptureError

if TYPE_CHECKING:
    from safelaunch.verdict.proof import ProofResult
    from safelaunch.verdict.waits import Case


@dataclass(frozen=True)
class Judgement:
    """``unseen``: what was not seen, or is stopped, in a clause; empty for nothing. ``free``: what could still release
    the ranks, in a clause, if that is what a proof lacks. ``group``: whose time limit is the first to end, in words.
    """

    found: JobCondition
    work: tuple[ObservedWork, ...] = ()
    unseen: str = ""
    free: str = ""
    limits: Limits = UNLIMITED
    group: str = ""

    @property
    def answer(self) -> Answer:
        """As a bundle states it."""
        return "alive" if self.found == "moving" else "unseen" if self.found == "stopped" else self.found


def work_in(looks: Looks, background: Background) -> tuple[ObservedWork, ...]:
    """The work between the last two looks, and before the first; what the ranks wait for counts in full."""
    last = looks.taken[-1]
    waiting, foreground = set[int](), set[int]()
    for rank in last.ranks.values():
        waits, awaited = _awaited(rank)
        waiting |= waits
        foreground |= awaited
    found = (work.found(*window, background, foreground=foreground, waiting=waiting) for window in looks.windows)
    mains = {rank.main.pid for rank in last.ranks.values() if rank.main is not None}
    before, after = looks.taken[-2:]
    return next(filter(None, found), ()) or tuple(_fed(before, after, (mains | foreground) - waiting))


_READS = ("read", "readv")
_RECEIVES = ("recvfrom", "recvmsg", "recvmmsg")
_MOVES = ("splice", "sendfile", "copy_file_range", "io_uring_enter", "io_getevents")
_WAITS = ("select", "pselect6", "poll", "ppoll", "epoll_wait", "epoll_pwait", "epoll_pwait2")
_LEAST_PER_S = 2.0  # a heartbeat is less
_SHORT_S = 0.05  # a wait with a shorter limit is part of a polling loop, whatever it receives
_TURNS = 4.0  # per limit: on a busy machine, or with a busy GIL, a loop is interrupted between two waits


def _fed(before: Look, after: Look, awaited: Collection[int]) -> Iterator[ObservedWork]:
    """Yields the threads that were woken by data that they receive, if the kernel doesn't count its bytes.

    A wait with a time limit ends by itself once in that time, so a loop that only polls wakes no more often than its
    limit explains; a thread that receives wakes more often, or has no limit.

    ``awaited``: processes whose main thread counts, because it is a rank's, or a rank's main thread waits for the
    process. Other threads count only if they rest in a receive on a Unix socket.
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
                one = earlier.get(thread.tid)
                if one is None or one.slices is None or thread.slices is None:
                    continue
                woken, seconds = thread.slices - one.slices, now.at_s - was.at_s
                is_main = thread.tid == process.pid and process.pid in awaited
                receives = all(map(_is_fed if is_main else _is_on_unix_socket, (one, thread)))
                polls = max(_turns_per_s(one, was.at_s), _turns_per_s(thread, now.at_s))
                if receives and woken > max(_LEAST_PER_S, polls) * seconds:
                    yield ObservedWork(rank.main.pid, process.pid, thread.tid, "messages", woken / seconds)


def _turns_per_s(thread: ThreadState, at_s: float) -> float:
    """Returns how often per second a loop around this call may be given a core though it receives nothing."""
    if thread.times_out:
        return math.inf  # after a time that is not known
    if thread.ends_s is None:
        return 0.0
    limit_s = thread.ends_s - at_s
    return _TURNS / limit_s if limit_s > _SHORT_S else math.inf


def _is_fed(thread: ThreadState) -> bool:
    """Returns whether the call may wait for data that the kernel doesn't count."""
    name = thread.syscall_name
    is_receiving = name in _RECEIVES and not thread.fd_target.startswith("tcp")
    return is_receiving or name in _WAITS or name in _MOVES or _is_on_unix_socket(thread)


def _is_on_unix_socket(thread: ThreadState) -> bool:
    return thread.syscall_name in (*_READS, *_RECEIVES) and thread.fd_target.startswith("unix ")


def _awaited(rank: RankLook) -> tuple[set[int], set[int]]:
    """The pids of the processes whose main thread waits for peers or a device, and of those that a main one awaits."""
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
    """Every main thread waits for its peers or its device, or sleeps while another waits for it: what threads and
    processes of their own do changes nothing.
    """
    from safelaunch.stacks.kernel import kind_of

    waiting = [bool(_awaited(rank)[0]) for rank in ranks]
    states = [rank.main.state.main_thread if rank.main and rank.main.state else None for rank in ranks]
    asleep = [state is not None and kind_of(state) == "sleep" for state in states]
    return any(waiting) and all(map(or_, waiting, asleep))


def all_are_stopped(look: Look) -> bool:
    """Every rank is stopped by a signal, a debugger or its control group: the job is suspended."""
    states = [rank.main.state for rank in look.ranks.values() if rank.main is not None and rank.main.state is not None]
    return bool(states) and all(state.state in "Tt" or state.frozen for state in states)


def what_was_not_seen(look: Look, looks: Looks) -> str:
    """What a look lacks, or which process is stopped, in a clause; empty for nothing."""
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
    """Whether the evidence proves that the job is dead; a fault of a rule's proves nothing."""
    try:
        return bool(_examined(_case_of(evidence)).proof)
    except Exception:  # noqa: BLE001 - the verdict will say what the rule failed on
        return False


def _case_of(evidence: Evidence) -> Case:
    from safelaunch.capture import user_source
    from safelaunch.verdict.waits import Case

    return Case.of(replace(evidence, outcome="hang"), user_source.text)


def _examined(case: Case) -> ProofResult:
    from safelaunch.verdict.proof import examine

    return examine(case)


def _limits_of(case: Case, mark_s: float) -> tuple[Limits, str]:
    """When torch itself would end the job, as far as the recorded calls tell: the first time limit of a group in which
    a rank waits, and that group in words.
    """
    from safelaunch.verdict.c10d import label_of

    found: list[tuple[float, str, bool]] = []
    for rank, one in case.ranks.items():
        wait = one.wait
        if wait is None or wait.group is None or wait.seq is None:
            continue
        calls_of = [*case.alignment.pending(rank), case.alignment.entry(rank, wait.group, wait.seq)]
        for entry in calls_of:
            if entry is not None and entry.group == wait.group and entry.timeout_ms and entry.created_ns:
                unix_s = entry.created_ns / 1e9 + entry.timeout_ms / 1000
                found.append((unix_s, label_of(entry), entry.by_gloo))
    if not found:
        return UNLIMITED, ""
    unix_s, group, raises = min(found)
    return Limits(unix_s - time.time() + time.monotonic() - mark_s, raises), group


def judge(looks: Looks, evidence: Evidence, background: Background, *, covers: bool, mark_s: float) -> Judgement:
    """The answer of two looks at what is here. ``covers``: that is every rank of the job; else nothing is proved.

    ``mark_s``: since when it makes no step.
    """
    last = looks.taken[-1]
    if all_are_stopped(last):
        return Judgement("stopped")
    done = () if looks.collectives_moved else work_in(looks, background)
    unseen = what_was_not_seen(last, looks)
    try:
        case = _case_of(evidence)
        examined, (limits, group) = _examined(case), _limits_of(case, mark_s)
    except Exception as error:  # noqa: BLE001 - a fault of a rule's is no reason to end a job
        return Judgement(
            "alive" if done else "unseen", done, f"the evidence was not understood: {type(error).__name__}"
        )
    # Who has sent may be elsewhere while its bytes are still on their way: gloo records no send.
    arriving = looks.collectives_moved or any(one.kind == "network" and one.pid == one.rank for one in done)
    if examined.proof and covers and not unseen and not arriving:
        return Judgement("dead", done, limits=limits, group=group)
    if done or looks.collectives_moved:
        return Judgement("alive", done, unseen, limits=limits, group=group)
    free = examined.free.claim if examined.free is not None else ""
    return Judgement("unseen" if unseen else "unknown", done, unseen, free, limits, group)


# --- asked of a process of its own ------------------------------------------------------------------------------------


DEADLINE_S = 30.0  # of a busy machine, where an interpreter alone takes seconds
_ROOT = Path(__file__).resolve().parents[2]


class _JudgeInput(msgspec.Struct, frozen=True):
    """``active``: the ranks that compute, read or write; None: none moves. ``prove``: everything was seen."""

    evidence: list[bytes]
    missing_ranks: tuple[int, ...] = ()
    active: tuple[int, ...] | None = None
    prove: bool = False


def ask(evidence: Evidence, active: Collection[int] | None, place: Path, *, prove: bool = False) -> FirstWord:
    """What an early look has found, in words: by a process of its own that ends at once, or empty if that fails.

    Most jobs are quiet now and then, and few of them hang. So the supervisor never loads the diagnosis for it, which
    would stay in its memory, and no fault there reaches the watch. Takes ``DEADLINE_S`` at most. ``place``: for a file.

    ``prove``: also whether the evidence, which lacks nothing, proves that the job is dead.
    """
    ranks = tuple(active) if active is not None else None
    question = _JudgeInput(condensed(evidence), evidence.missing_ranks, ranks, prove)
    try:
        place.write_bytes(msgspec.msgpack.encode(question))
        # The working directory may hold anybody's modules.
        program = f"import sys; sys.path[:] = [{str(_ROOT)!r}, *filter(None, sys.path)]; from {__name__} import main; "
        output = command.run([sys.executable, "-c", f"{program}main({str(place)!r})"], deadline_s=DEADLINE_S)
        return from_json(output.stdout, FirstWord)
    except (OSError, CaptureError, msgspec.DecodeError):
        return FirstWord(common=True)
    finally:
        with suppress(OSError):
            place.unlink()


def main(place: str) -> None:
    """Prints the answer to the question in the file ``place``."""
    from safelaunch.capture import user_source
    from safelaunch.verdict.first_word import first_word, first_word_of_active

    question = from_msgpack(Path(place).read_bytes(), _JudgeInput)
    evidence, _ = received(question.evidence)
    evidence = msgspec.structs.replace(evidence, missing_ranks=question.missing_ranks)
    if question.active is None:
        found = first_word(evidence, user_source.text)
        found = msgspec.structs.replace(found, proved=question.prove and proves(evidence))
    else:
        found = first_word_of_active(evidence, question.active)
    sys.stdout.buffer.write(msgspec.json.encode(found))
