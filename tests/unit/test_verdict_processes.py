"""A rank and its own processes: who has the other end of a pipe, who waits for whom in a circle, who ends a queue."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from safelaunch.model import Frame, OtherEnd, ProcessEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import MODULE, STDLIB, at, behind, in_user, process, rank, with_culprit

QUEUES = f"{STDLIB}/multiprocessing/queues.py"
RECV = Frame(f"{STDLIB}/multiprocessing/connection.py", 395, "Connection._recv")
POPEN = Frame(f"{STDLIB}/subprocess.py", 2046, "Popen._wait")
JOIN = Frame(f"{STDLIB}/multiprocessing/popen_fork.py", 27, "Popen.poll")
BOOTSTRAP = Frame(f"{STDLIB}/multiprocessing/process.py", 314, "BaseProcess._bootstrap")
SERVES = at(44, "serve", "/home/me/server.py")
RANK = 1010  # the pid of rank 1


def ends(*pids: int, **told: Any) -> dict[str, Any]:
    """What the kernel says of a thread that waits at a pipe whose other end these processes have."""
    others = tuple(OtherEnd(pid, f"name{pid}") for pid in pids) if pids else None
    return {"ends": others, "inode": 1, **told}


def below(one: ProcessEvidence, parent: int) -> ProcessEvidence:
    return structs.replace(one, states=tuple(structs.replace(state, ppid=parent) for state in one.states))


def parent(main: ProcessEvidence, *children: ProcessEvidence, world: int = 4) -> Verdict:
    culprit = structs.replace(rank(1, flight=behind(), children=children), main=main)
    return diagnose(with_culprit(culprit, world))


def named(verdict: Verdict) -> tuple[str, int, int | None, str]:
    (one,) = verdict.culprits
    return verdict.cause, one.rank, one.frame and one.frame.line, one.process


def waits_for(child: int, *frames: Frame, line: int = 7) -> ProcessEvidence:
    return process(RANK, (*frames, *in_user(line)), "wait4", told={"child": child})


# --- a full pipe ------------------------------------------------------------------------------------------------------


def test_a_child_that_fills_a_pipe_which_its_waiting_parent_is_to_read() -> None:
    """Also where the child's code is in no file: the line to change is the rank's."""
    child = process(70, (Frame("<string>", 1, "<module>"),), "pipe", told=ends(RANK, syscall_name="write"))
    verdict = parent(waits_for(70, POPEN), child)
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert verdict.confidence == "high"
    assert verdict.summary.startswith(
        "Rank 1 waits for a subprocess at train.py:7 (train); child process 70 is blocked writing: the pipe is full,"
        " and this process should read it, while"
    )
    assert "communicate()" in verdict.suggestions[0]


def test_processes_that_are_each_others_children_are_in_no_real_tree() -> None:
    """As in a bundle that somebody has made up."""
    ring = [process(pid, (), "wait4", role="child", told={"child": other}) for pid, other in ((70, 71), (71, 70))]
    assert named(parent(waits_for(70, POPEN), *ring)) == ("stuck-in-user-code", 1, 7, "main")


# --- waiting for each other -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_a_child_that_waits_for_what_its_joining_parent_is_to_send(world: int) -> None:
    child = process(70, (RECV, SERVES, MODULE), "pipe", role="child", told=ends(RANK))
    verdict = parent(waits_for(70, JOIN), child, world=world)
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert "child process 70 waits at server.py:44 (serve) for what this process should send" in verdict.summary
    assert "sentinel" in verdict.suggestions[0]


# --- a pipe that never ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends_closed", "who"),
    [(True, "process 1010 itself alone has"), (False, "of those in sight, only process 1010 has")],
)
def test_a_pipe_that_only_the_reader_has_open(ends_closed: bool, who: str) -> None:
    reads = process(RANK, in_user(7), "pipe", told=ends(RANK, ends_closed=ends_closed))
    verdict = parent(reads, process(70, (), "zombie", role="child"))
    assert named(verdict) == ("blocking-io", 1, 7, "main")
    assert "its child process 70 has ended and has not been reaped" in verdict.summary
    assert f"{who} the write end open" in verdict.summary
    assert "Close the other end of the pipe here" in verdict.suggestions[0]


# --- the items of a queue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["threads", "children"])
def test_a_queue_whose_items_are_taken_and_not_reported(of: str) -> None:
    file = f"{STDLIB}/queue.py" if of == "threads" else QUEUES
    takes = (Frame(file, 103, "Queue.get"), at(20, "score"), MODULE)
    joins = (Frame(file, 331, "JoinableQueue.join"), *in_user(7))
    workers: dict[str, Any] = {"threads": [("a", takes, "futex"), ("b", takes, "futex")]} if of == "threads" else {}
    children = [process(70 + n, takes, "pipe", role="child") for n in range(2)] if of == "children" else []
    verdict = parent(process(RANK, joins, "futex", **workers), *children)
    assert named(verdict) == ("lock-deadlock", 1, 7, "main")
    assert "each of its 2 workers waits for the next item at train.py:20 (score)" in verdict.summary
    assert any("task_done()" in advice for advice in verdict.suggestions)


# --- a pool whose worker has ended ------------------------------------------------------------------------------------


def pool_frames(function: str) -> Frame:
    return Frame(f"{STDLIB}/multiprocessing/pool.py", 340, function)


WORKER = (RECV, Frame(QUEUES, 365, "SimpleQueue.get"), pool_frames("worker"), BOOTSTRAP)
RESULT = (Frame(f"{STDLIB}/threading.py", 327, "Condition.wait"), pool_frames("ApplyResult.get"), *in_user(7))


def test_the_kernel_says_how_a_worker_died() -> None:
    first = process(70, (*WORKER, pool_frames("Pool.__init__"), *in_user(3)), "pipe", role="child")
    second = process(75, (*WORKER, pool_frames("Pool._maintain_pool")), "futex", role="child")
    line = "2026-11-22 16:49:22 python[73]: segfault at 65a16c621cc0 ip 00007f1ec918b809 sp 00007ffe3da7e3a8 error 4"
    children = (below(first, RANK), below(second, RANK))
    culprit = rank(1, flight=behind(), children=children, more={"deaths": (line,)})
    verdict = diagnose(with_culprit(structs.replace(culprit, main=process(RANK, RESULT, "futex")), 4))
    assert any(one.claim.endswith(line) and one.file == "node/node1/kernel_log.txt" for one in verdict.evidence)


# --- advice that fits -------------------------------------------------------------------------------------------------


def test_a_child_that_writes_into_a_pipe_of_which_nothing_more_is_known() -> None:
    unknown, elsewhere = (
        parent(
            waits_for(70, POPEN),
            process(70, (SERVES, MODULE), "pipe", role="child", told=ends(*pids, syscall_name="write")),
        )
        for pids in ((), (4711,))
    )
    assert "communicate()" in unknown.suggestions[0]
    assert not any("communicate()" in one for one in elsewhere.suggestions)


# --- a lock, or a queue, whose other side is gone ---------------------------------------------------------------------


def test_a_forked_child_that_waits_for_a_lock_of_a_thread_that_it_does_not_have() -> None:
    child = process(70, (at(44, "serve", "/home/me/server.py"), MODULE), "futex", role="child")
    verdict = parent(waits_for(70, JOIN), child)
    assert named(verdict) == ("lock-deadlock", 1, 44, "child (pid 70)")
    assert "never released there if another thread held it when the process was forked" in verdict.summary
    assert "start method `spawn`" in verdict.suggestions[0]
    assert not any("in one order" in text for text in verdict.suggestions)


def test_a_queue_that_nobody_fills_asks_for_who_should() -> None:
    takes = (Frame(f"{STDLIB}/queue.py", 171, "Queue.get"), *in_user(7))
    verdict = parent(process(RANK, takes, "futex"))
    assert named(verdict) == ("lock-deadlock", 1, 7, "main")
    assert "the other end of this queue" in verdict.suggestions[0]


@pytest.mark.parametrize(("fd", "name"), [(1, "standard output, "), (2, "standard error, "), (7, "")])
def test_a_pipe_that_is_standard_output_is_called_so(fd: int, name: str) -> None:
    verdict = parent(process(RANK, in_user(7), "pipe", told=ends(8, 9, fd=fd, syscall_name="write")))
    assert f"(write on {name}pipe:[1])" in verdict.summary
    assert "is open in processes 8 (name8), 9 (name9), none of this job's ranks" in verdict.summary


def test_a_lock_that_is_waited_for_with_a_time_limit_says_how_long() -> None:
    acquires = (Frame(f"{STDLIB}/threading.py", 1, "_RLock.acquire"), *in_user(7))
    verdict = parent(process(RANK, acquires, "futex", told={"ends_s": 40.0}))
    assert "waits for a lock or semaphore at train.py:7 (train) (38 s more at most)" in verdict.summary
    assert verdict.suggestions[0].startswith("This wait has a time limit") and len(verdict.suggestions) == 1


def test_a_timer_beside_a_queue_that_nobody_fills_is_not_mentioned() -> None:
    beats = (Frame(f"{STDLIB}/threading.py", 355, "Condition.wait"), at(48, "beat"), MODULE)
    takes = (Frame(f"{STDLIB}/queue.py", 171, "Queue.get"), *in_user(7))
    verdict = parent(process(RANK, takes, "futex", threads=[("heartbeat", beats, "timed_futex")]))
    assert "Rank 1 waits for a queue at train.py:7 (train), while" in verdict.summary
    assert "heartbeat" not in verdict.summary
