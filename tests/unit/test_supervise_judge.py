"""The answer of two looks: what was seen, what works, and what is proved. The looks are built, not taken."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.capture.look import MAX_CHILDREN, Look, ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import Evidence, Frame, GilTest, ProcessState, StackSample, Thread, ThreadState
from safelaunch.supervise import judge
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.watch.work import Background
from tests.support.evidence import at, entry, in_c10d, in_user, job, past, record, waiting
from tests.support.evidence import rank as side

TORN_APART = job(
    waiting(0),
    waiting(1, flight=record(*past(3), entry("all_gather", 4, line=60))),
)  # under one number, two operations


def process(pid: int, frames: tuple[Frame, ...] = (), *, state: str = "S", kind: str = "", **more: Any) -> ProcessLook:
    thread = ThreadState(pid, "python", state, **more)
    kernel = ProcessState(pid, 1, pid, 0.0, "python", (), state, (thread,))
    stack = StackSample(pid, 0.0, "", (Thread(frames, "MainThread", pid),)) if frames else None
    return ProcessLook(pid, kernel, Result(stack, "py-spy", 0.1, missing="" if stack else "no answer", kind=kind))


def looks(*ranks: RankLook, used_ms: dict[int, int] | None = None, entries: tuple[int, int] = (4, 4)) -> Looks:
    """Two looks at ``ranks``, ten seconds apart, with the CPU time between them by pid."""
    look = Look(0.0, 0.1, {one.rank: one for one in ranks})
    mains = {one.rank: one.main.pid for one in ranks if one.main is not None}

    def counters(at_s: float, used: dict[int, int]) -> Counters:
        found = {
            (each.pid, each.pid): ProcessCounters(mains[one.rank], threads={each.pid: CpuTime(used.get(each.pid, 0))})
            for one in ranks
            for each in one.processes
        }
        return Counters(at_s, int(at_s * 100), found)

    first, second = counters(0.0, {}), counters(10.0, used_ms or {})
    return Looks(
        tuple(Target(one.rank, one.rank, mains.get(one.rank, 0), 0) for one in ranks),
        taken=(look, look),
        entries=tuple(dict.fromkeys(mains, newest) for newest in entries),
        counters=((first, first), (second, second)),
    )


IN_CALL = (RankLook(0, process(1000, in_c10d("all_reduce", 50))), RankLook(1, process(1010, in_c10d("all_gather", 60))))


def judged(taken: Looks, evidence: Evidence = TORN_APART, *, covers: bool = True) -> judge.Judgement:
    return judge.judge(taken, evidence, Background(), covers=covers, mark_s=time.monotonic() - 60)


def test_closed_set_of_waits_is_dead() -> None:
    assert judged(looks(*IN_CALL)).condition == "dead"


def test_proof_counts_despite_other_work() -> None:
    assert judged(looks(*IN_CALL, used_ms={1000: 9000})).condition == "dead"


@pytest.mark.parametrize(("pid", "found"), [(1000, "alive"), (2000, "dead")])
def test_arriving_bytes_prevent_a_proof(pid: int, found: str) -> None:
    """A peer that has sent them is elsewhere by then. What a child downloads is no message of a rank's."""
    taken = looks(RankLook(0, IN_CALL[0].main, (process(2000, in_user(8)),)), IN_CALL[1])
    (first, _), (last, _) = taken.counters
    moved = ProcessCounters(1000, sockets={7: 5_000_000})
    quiet = ProcessCounters(1000, sockets={7: 0})
    begin = dataclasses.replace(first, processes={**first.processes, (pid, pid): quiet})
    end = dataclasses.replace(last, processes={**last.processes, (pid, pid): moved})
    assert judged(dataclasses.replace(taken, counters=((begin, begin), (end, end)))).condition == found


def test_proof_reads_the_source(tmp_path: Path) -> None:
    """``isend(...).wait()`` rests in c10d without a frame of it: what the line calls is all that tells."""
    script = tmp_path / "pipeline.py"
    script.write_text("import torch.distributed as dist\n\ndist.isend(tensor, 1).wait()\n")
    sending = side(0, (at(3, "<module>", str(script)),), flight=record(*past(3)))
    assert sending.main is not None
    states = tuple(
        replace(state, threads=tuple(replace(thread, rests_in="libtorch_cpu.so") for thread in state.threads))
        for state in sending.main.states
    )
    told = GilTest(True, True, groups={"0": (0, 1)})
    sending = replace(sending, main=replace(sending.main, states=states), gil=told)
    assert judge.proves(job(sending, waiting(1)))
    script.write_text("import mine\n\nmine.take(tensor)\n")
    assert not judge.proves(job(sending, waiting(1)))


def test_part_of_a_job_proves_nothing() -> None:
    assert judged(looks(*IN_CALL), covers=False).condition == "unknown"


def test_new_collectives_are_work() -> None:
    assert judged(looks(*IN_CALL, entries=(4, 5))).condition == "alive"


UNIX, UDP, TCP, EPOLL = "unix socket:[7] (unnamed, e.g. a socketpair)", "udp 0.0.0.0:9", "tcp 1:1 -> 2:2", "eventpoll"


def woken(pid: int, call: str, target: str, limit_s: float | None, times: int, **more: Any) -> tuple[ProcessLook, ...]:
    """A process in two looks, ten seconds apart, in each of which its thread rests in ``call``."""
    found = []
    for at_s, slices in ((0.0, 0), (10.0, times)):
        ends_s = None if limit_s is None else at_s + limit_s
        one = process(pid, in_user(7), syscall_name=call, fd_target=target, slices=slices, ends_s=ends_s, **more)
        found.append(dataclasses.replace(one, state=replace(one.state, at_s=at_s)))  # type: ignore[type-var]
    return tuple(found)


@pytest.mark.parametrize(
    ("call", "target", "limit_s", "times", "found"),
    [
        ("recvfrom", UNIX, None, 100, "alive"),
        ("recvfrom", UNIX, None, 10, "unknown"),
        ("futex", UNIX, None, 100, "unknown"),
        ("read", "pipe:[7]", None, 100, "unknown"),
        ("recvfrom", UDP, None, 100, "alive"),
        ("recvmsg", "netlink", None, 100, "alive"),
        ("recvfrom", TCP, None, 100, "unknown"),  # its bytes are counted
        ("splice", "pipe:[7]", None, 100, "alive"),
        ("epoll_wait", EPOLL, None, 100, "alive"),  # a selector: asyncio, multiprocessing.connection, zmq
        ("epoll_wait", EPOLL, None, 10, "unknown"),  # a heartbeat
        ("select", "", 60.0, 100, "alive"),
        ("poll", UDP, 0.5, 200, "alive"),
        ("poll", UDP, 0.5, 20, "unknown"),  # polls, twice per second
        ("poll", UDP, 0.1, 100, "unknown"),
        ("poll", UDP, 0.1, 250, "unknown"),  # the same, on a busy machine
        ("select", "", 0.001, 9000, "unknown"),
        ("select", "", 0.2, 50, "unknown"),  # ``time.sleep(0.2)`` of Python 3.10
        ("clock_nanosleep", "", 0.2, 50, "unknown"),  # ``while not os.path.exists(path): time.sleep(0.2)``
        ("", EPOLL, None, 100, "unknown"),  # a call that could not be read
    ],
)
def test_frequently_woken_main_thread_is_receiving(
    call: str, target: str, limit_s: float | None, times: int, found: str
) -> None:
    """The kernel counts no bytes of ``recv`` on Unix and UDP sockets, nor of ``splice``. Of pipes and TCP it does."""
    one, other = woken(1000, call, target, limit_s, times)
    assert judged_twice(RankLook(0, one), RankLook(0, other)) == found


def judged_twice(first: RankLook, second: RankLook, peer: RankLook = IN_CALL[1]) -> str:
    taken = dataclasses.replace(
        looks(first, peer), taken=(Look(0.0, 0.1, {0: first, 1: peer}), Look(10.0, 10.1, {0: second, 1: peer}))
    )
    return judged(taken, job(side(0, in_user(7)), waiting(1))).condition


def test_wake_ups_from_socket_timeouts_are_not_work() -> None:
    one, other = woken(1000, "recvfrom", UDP, None, 100, times_out=True)
    assert judged_twice(RankLook(0, one), RankLook(0, other)) == "unknown"


def test_wake_ups_of_awaited_children_and_unix_sockets_count() -> None:
    one, other = woken(2000, "epoll_wait", EPOLL, None, 100)
    waits = process(1000, (Frame("/usr/lib/python3.11/subprocess.py", 1264, "Popen.wait"), *in_user(7)))
    assert judged_twice(RankLook(0, waits, (one,)), RankLook(0, waits, (other,))) == "alive"
    sleeps = process(1000, in_user(7))
    assert judged_twice(RankLook(0, sleeps, (one,)), RankLook(0, sleeps, (other,))) == "unknown"
    one, other = woken(2000, "recvfrom", UNIX, None, 100)
    assert judged_twice(RankLook(0, sleeps, (one,)), RankLook(0, sleeps, (other,))) == "alive"
    one, other = woken(1000, "epoll_wait", EPOLL, None, 100)
    peers = in_c10d("all_reduce", 50)
    ones = [dataclasses.replace(each, stack=process(1000, peers).stack) for each in (one, other)]
    assert judge.work_in(looks(RankLook(0, ones[1])), Background()) == ()


def test_main_thread_cpu_is_work_unless_awaiting_peers() -> None:
    computing = RankLook(0, process(1000, in_user(7)))
    assert judged(looks(computing, used_ms={1000: 9000}), job(side(0, in_user(7)))).condition == "alive"
    spinning = looks(IN_CALL[0], used_ms={1000: 9000})
    assert judge.work_in(spinning, Background()) == ()


def test_awaited_process_is_never_background() -> None:
    child = process(2000, (at(9, "encode"),))
    main = process(1000, (Frame("/usr/lib/python3.11/subprocess.py", 1264, "Popen.wait"), *in_user(7)))
    taken = looks(RankLook(0, main, (child,)), used_ms={2000: 4000})
    from safelaunch.supervise.watch import work

    known = work.learn(Background(), taken.counters[0][0], taken.counters[1][0])
    assert [found.pid for found in judge.work_in(taken, known)] == [2000]
    beside = looks(RankLook(0, process(1000, in_user(7)), (child,)), used_ms={2000: 4000})
    assert judge.work_in(beside, known) == ()


STOPPED = process(1000, in_user(7), state="t")
UNSEEN: dict[str, tuple[RankLook, str]] = {
    "no look": (RankLook(0, None), "rank 0 was not seen, or has ended"),
    "no stack": (RankLook(0, process(1000)), "no stack of rank 0 (no answer)"),
    "a child without a state": (
        RankLook(0, process(1000, in_user(7)), (ProcessLook(2000, None, Result(None, "", 0.0)),)),
        "process 2000 of rank 0 was not seen",
    ),
    "a child's stack too late": (
        RankLook(0, process(1000, in_user(7)), (process(2000, kind="timeout"),)),
        "no stack of process 2000 of rank 0 in time",
    ),
    "a child under a debugger": (
        RankLook(0, process(1000, in_user(7)), (process(2000, in_user(8), state="t"),)),
        "process 2000 of rank 0 is stopped",
    ),
    "many children": (
        RankLook(0, process(1000, in_user(7)), tuple(process(2000 + n, in_user(8)) for n in range(MAX_CHILDREN))),
        "more than 48 child processes",
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_missing_evidence_is_unseen_not_dead(case: str) -> None:
    rank, words = UNSEEN[case]
    found = judged(looks(rank, IN_CALL[1]))
    assert (found.condition, words in found.unseen) == ("unseen", True), found


def test_child_without_python_needs_no_stack() -> None:
    shell = process(2000, kind="absent")
    assert (
        judged(looks(RankLook(0, process(1000, in_user(7)), (shell,))), job(side(0, in_user(7)))).condition == "unknown"
    )


def test_suspended_job_is_stopped_not_judged() -> None:
    assert judged(looks(RankLook(0, STOPPED))).condition == "stopped"
    assert judged(looks(RankLook(0, STOPPED), IN_CALL[1])).condition == "unseen"


def test_limit_is_the_first_timeout_of_awaited_groups() -> None:
    now_ns = time.time_ns()
    call = replace(entry("all_reduce", 4, line=50), created_ns=now_ns - 50 * 10**9, timeout_ms=600_000)
    waits = waiting(0, flight=record(*past(3), call))
    found = judged(looks(*IN_CALL), job(waits, side(1, in_user(7), "sleep")))
    assert found.limits.raises and found.limits.abort_s == pytest.approx(610, abs=5)
    assert found.limits.before_abort_s == pytest.approx(550, abs=6)
    assert judged(looks(*IN_CALL), job(side(0, in_user(7), "sleep"))).limits.abort_s is None
