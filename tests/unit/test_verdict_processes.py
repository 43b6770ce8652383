"""A rank and its own processes: who has the other end of a pipe, who waits for whom in a circle, who ends a queue."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import MODULE, STDLIB, at, behind, in_loader, in_user, in_worker, process, rank, with_culprit
from msgspec import structs

from safelaunch.model import Frame, OtherEnd, ProcessEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose

QUEUES = f"{STDLIB}/multiprocessing/queues.py"
RECV = Frame(f"{STDLIB}/multiprocessing/connection.py", 395, "Connection._recv")
POPEN = Frame(f"{STDLIB}/subprocess.py", 2046, "Popen._wait")
JOIN = Frame(f"{STDLIB}/multiprocessing/popen_fork.py", 27, "Popen.poll")
BOOTSTRAP = Frame(f"{STDLIB}/multiprocessing/process.py", 314, "BaseProcess._bootstrap")
SERVES = at(44, "serve", "/home/me/server.py")
RANK = 1010  # the pid of rank 1


def beside(
    one: ProcessEvidence, *pids: int, thread: int = 0, child: int | None = None, call: str = ""
) -> ProcessEvidence:
    """``one``, where the pipe at which its thread waits has its other end in these processes. ``child``: whom its
    ``wait4()`` names."""
    states = []
    for state in one.states:
        threads = list(state.threads)
        ends = tuple(OtherEnd(pid, f"name{pid}") for pid in pids) if pids else None
        name = call or threads[thread].syscall_name
        threads[thread] = structs.replace(threads[thread], ends=ends, inode=1, child=child, syscall_name=name)
        states.append(structs.replace(state, threads=tuple(threads)))
    return structs.replace(one, states=tuple(states))


def below(one: ProcessEvidence, parent: int) -> ProcessEvidence:
    return structs.replace(one, states=tuple(structs.replace(state, ppid=parent) for state in one.states))


def parent(main: ProcessEvidence, *children: ProcessEvidence, world: int = 4) -> Verdict:
    culprit = structs.replace(rank(1, flight=behind(), children=children), main=main)
    return diagnose(with_culprit(culprit, world))


def named(verdict: Verdict) -> tuple[str, int, int | None, str]:
    (one,) = verdict.culprits
    return verdict.cause, one.rank, one.frame and one.frame.line, one.process


def waits_for(child: int, *frames: Frame, line: int = 7) -> ProcessEvidence:
    return beside(process(RANK, (*frames, *in_user(line)), "wait4"), child=child)


# --- a full pipe ------------------------------------------------------------------------------------------------------


def test_a_child_that_fills_a_pipe_which_its_waiting_parent_is_to_read() -> None:
    """Also where the child's code is in no file: the line to change is the rank's."""
    child = beside(process(70, (Frame("<string>", 1, "<module>"),), "pipe"), RANK, call="write")
    verdict = parent(waits_for(70, POPEN), child)
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert verdict.confidence == "high"
    assert verdict.summary.startswith(
        "Rank 1 waits for a subprocess at train.py:7 (train); child process 70 cannot go on writing: the pipe is full,"
        " and this process is to read it, while"
    )
    assert "communicate()" in verdict.suggestions[0]


def test_the_writer_below_a_shell_is_found() -> None:
    shell = beside(process(70, (), "wait4", role="child"))
    writer = below(beside(process(71, (), "pipe", role="child"), RANK, call="write"), 70)
    beside_it = below(beside(process(72, (), "pipe", role="child"), 71, call="write"), 70)
    verdict = parent(waits_for(70, POPEN), below(shell, RANK), beside_it, writer)
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert "child process 71 cannot go on writing" in verdict.summary


def test_processes_that_are_each_others_children_are_in_no_real_tree() -> None:
    """As in a bundle that somebody has made up."""
    ring = [beside(process(pid, (), "wait4", role="child"), child=other) for pid, other in ((70, 71), (71, 70))]
    assert named(parent(waits_for(70, POPEN), *ring)) == ("stuck-in-user-code", 1, 7, "main")


def test_a_child_that_writes_elsewhere_is_blocked_itself() -> None:
    child = beside(process(70, (SERVES, MODULE), "pipe", role="child"), 4711, call="write")
    verdict = parent(waits_for(70, POPEN), child)
    assert named(verdict) == ("blocking-io", 1, 44, "child (pid 70)")
    assert "the other end is process 4711 (name4711), not one of this job's ranks" in verdict.summary


def test_the_feeder_of_a_child_that_was_to_end() -> None:
    """``Process.join`` before the queue is drained; siblings have inherited the end that nobody reads."""
    ends = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), Frame(QUEUES, 199, "Queue._finalize_join"), BOOTSTRAP)
    feeder = (RECV, Frame(QUEUES, 250, "Queue._feed"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))
    child = process(70, ends, "futex", role="child", threads=[("QueueFeederThread", feeder, "pipe")])
    alone = parent(waits_for(70, JOIN), beside(child, RANK, thread=1, call="write"))
    assert named(alone) == ("stuck-in-user-code", 1, 7, "main")
    assert (alone.confidence, "the pipe is full" in alone.summary) == ("high", True)
    sibling = process(72, ends, "futex", role="child")
    among = parent(waits_for(70, JOIN), beside(child, RANK, 72, thread=1, call="write"), sibling)
    assert named(among) == ("stuck-in-user-code", 1, 7, "main")
    assert among.confidence == "medium"


# --- waiting for each other -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_a_child_that_waits_for_what_its_joining_parent_is_to_send(world: int) -> None:
    child = beside(process(70, (RECV, SERVES, MODULE), "pipe", role="child"), RANK)
    verdict = parent(waits_for(70, JOIN), child, world=world)
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert "child process 70 waits at server.py:44 (serve) for what this process is to send" in verdict.summary
    assert "sentinel" in verdict.suggestions[0]


def test_a_child_of_a_pipeline_is_followed_to_the_sibling_that_feeds_it() -> None:
    """The rank has that end as well, as it has made the pipe."""
    child = beside(process(70, (RECV, SERVES, MODULE), "pipe", role="child"), RANK, 71)
    feeder = process(71, (at(50, "tokenize", "/home/me/server.py"), MODULE), "sleep", role="child")
    verdict = parent(waits_for(70, JOIN), child, feeder)
    assert named(verdict)[:3] == ("stuck-in-user-code", 1, 50)
    assert verdict.confidence == "medium"


def test_a_joined_child_that_is_asleep_is_no_circle() -> None:
    child = beside(process(70, (SERVES, MODULE), "sleep", role="child"))
    assert named(parent(waits_for(70, JOIN), child)) == ("stuck-in-user-code", 1, 44, "child (pid 70)")


def test_a_child_that_a_thread_of_its_parent_may_serve() -> None:
    child = beside(process(70, (RECV, SERVES, MODULE), "pipe", role="child"), RANK)
    serving = [("server", (at(60, "accept"), MODULE), "connect")]
    main = beside(process(RANK, (JOIN, *in_user(7)), "wait4", threads=serving), child=70)
    assert named(parent(main, child)) == ("blocking-io", 1, 44, "child (pid 70)")


def test_a_loader_worker_that_its_own_rank_serves_is_named() -> None:
    worker = beside(process(91, in_worker(12), "pipe", role="dataloader worker"), RANK)
    verdict = parent(process(RANK, in_loader(30), "poll"), worker)
    assert named(verdict) == ("data-loading", 1, 12, "dataloader worker (pid 91)")


# --- a pipe that never ends -------------------------------------------------------------------------------------------


def reads(*pids: int) -> ProcessEvidence:
    return beside(process(RANK, in_user(7), "pipe"), *pids)


def test_a_pipe_that_only_the_reader_has_open() -> None:
    verdict = parent(reads(RANK), process(70, (), "zombie", role="child"))
    assert named(verdict) == ("blocking-io", 1, 7, "main")
    assert "its child process 70 has ended and not been reaped" in verdict.summary
    assert "process 1010 itself alone has the write end open" in verdict.summary
    assert "Close the other end of the pipe here" in verdict.suggestions[0]


@pytest.mark.parametrize(("status", "words"), [(9, " by SIGKILL"), (3 << 8, " with code 3"), (0, "")])
def test_a_queue_whose_only_writer_has_died(status: int, words: str) -> None:
    """Who takes from a queue has both its ends open by design."""
    dead = process(70, (), "zombie", role="child")
    states = tuple(structs.replace(state, wait_status=status) for state in dead.states)
    main = beside(process(RANK, (RECV, Frame(QUEUES, 103, "Queue.get"), *in_user(7)), "pipe"), RANK)
    verdict = parent(main, structs.replace(dead, states=states))
    assert named(verdict) == ("blocking-io", 1, 7, "main")
    assert f"its child process 70 has ended{words} and not been reaped, while" in verdict.summary
    assert "why the child process that should have sent this exited" in verdict.suggestions[0]


@pytest.mark.parametrize("frames", [(), (SERVES, MODULE)])
def test_a_pipe_that_another_child_has_inherited(frames: tuple[Frame, ...]) -> None:
    """Be it a program or forked: the one that was to write has ended."""
    other = process(71, frames, "sleep", role="child")
    verdict = parent(reads(RANK, 71), other, process(70, (), "zombie", role="child"))
    assert named(verdict) == ("blocking-io", 1, 7, "main")
    assert "the write end is still open in process 71 (name71)" in verdict.summary
    assert any("pass_fds" in advice for advice in verdict.suggestions)


def test_the_one_process_that_can_write_is_followed() -> None:
    verdict = parent(reads(71), process(71, (SERVES, MODULE), "sleep", role="child"))
    assert named(verdict) == ("stuck-in-user-code", 1, 44, "child (pid 71)")


@pytest.mark.parametrize("pids", [(), (71, 72)])
def test_where_ends_are_not_known_or_several_nothing_is_said_of_them(pids: tuple[int, ...]) -> None:
    children = [process(pid, (SERVES, MODULE), "sleep", role="child") for pid in (71, 72)]
    verdict = parent(reads(*pids), *children)
    assert (verdict.cause, verdict.culprits[0].frame) == ("blocking-io", at(7))
    assert "alone" not in verdict.summary


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


def test_a_worker_that_is_at_an_item_holds_up_the_queue() -> None:
    takes = (Frame(QUEUES, 103, "Queue.get"), at(20, "score"), MODULE)
    joins = (Frame(QUEUES, 331, "JoinableQueue.join"), *in_user(7))
    at_work = process(71, (at(23, "score"), MODULE), "connect", role="child")
    verdict = parent(process(RANK, joins, "futex"), process(70, takes, "pipe", role="child"), at_work)
    assert named(verdict) == ("blocking-io", 1, 23, "child (pid 71)")
    assert verdict.confidence == "medium"


# --- a pool whose worker has ended ------------------------------------------------------------------------------------


def pool_frames(function: str) -> Frame:
    return Frame(f"{STDLIB}/multiprocessing/pool.py", 340, function)


WORKER = (RECV, Frame(QUEUES, 365, "SimpleQueue.get"), pool_frames("worker"), BOOTSTRAP)
RESULT = (Frame(f"{STDLIB}/threading.py", 327, "Condition.wait"), pool_frames("ApplyResult.get"), *in_user(7))


def later(one: ProcessEvidence, ticks: int) -> ProcessEvidence:
    return structs.replace(one, states=tuple(structs.replace(state, start_ticks=ticks) for state in one.states))


def test_a_worker_that_took_the_place_of_one_that_ended() -> None:
    first = process(70, (*WORKER, pool_frames("Pool.__init__"), *in_user(3)), "pipe", role="child")
    second = process(71, (*WORKER, pool_frames("Pool._maintain_pool")), "futex", role="child")
    verdict = parent(process(RANK, RESULT, "futex"), below(first, RANK), later(below(second, RANK), 1105))
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert verdict.summary.startswith(
        "Rank 1 waits for a pool's result at train.py:7 (train); process 71 has replaced a worker that ended, whose"
        " task a pool never returns"
    )
    assert "ProcessPoolExecutor" in verdict.suggestions[0]
    assert not any("Take locks" in one for one in verdict.suggestions)


def test_the_kernel_says_how_a_worker_died() -> None:
    first = process(70, (*WORKER, pool_frames("Pool.__init__"), *in_user(3)), "pipe", role="child")
    second = process(75, (*WORKER, pool_frames("Pool._maintain_pool")), "futex", role="child")
    line = "2026-11-22 16:49:22 python[73]: segfault at 65a16c621cc0 ip 00007f1ec918b809 sp 00007ffe3da7e3a8 error 4"
    children = (below(first, RANK), below(second, RANK))
    culprit = rank(1, flight=behind(), children=children, more={"deaths": (line,)})
    verdict = diagnose(with_culprit(structs.replace(culprit, main=process(RANK, RESULT, "futex")), 4))
    assert any(one.claim.endswith(line) and one.file == "node/node1/kernel_log.txt" for one in verdict.evidence)


def test_a_pool_with_all_of_its_first_workers() -> None:
    workers = [process(pid, (*WORKER, pool_frames("Pool.__init__"), *in_user(3)), "pipe") for pid in (70, 71)]
    verdict = parent(process(RANK, RESULT, "futex"), *(below(one, RANK) for one in workers))
    assert named(verdict) == ("stuck-in-user-code", 1, 7, "main")
    assert "took the place" not in verdict.summary


# --- advice that fits -------------------------------------------------------------------------------------------------


def test_a_child_that_writes_into_a_pipe_of_which_nothing_more_is_known() -> None:
    child = process(70, (SERVES, MODULE), "pipe", role="child")
    unknown = parent(waits_for(70, POPEN), beside(child, call="write"))
    assert "communicate()" in unknown.suggestions[0]
    elsewhere = parent(waits_for(70, POPEN), beside(child, 4711, call="write"))
    assert not any("communicate()" in one for one in elsewhere.suggestions)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_whose_workers_wait_for_a_lock_that_was_held_at_the_fork(workers: int) -> None:
    """A thread beside them, which took it then, has nothing to do with what the pool is to return."""
    frames = (at(9, "decode"), pool_frames("worker"), BOOTSTRAP, pool_frames("Pool.__init__"), *in_user(3))
    stuck = [below(process(70 + n, frames, "futex", role="child"), RANK) for n in range(workers)]
    main = process(RANK, RESULT, "futex", threads=[("refresher", (at(16, "refresher"), MODULE), "nap")])
    verdict = parent(main, *stuck)
    assert named(verdict) == ("lock-deadlock", 1, 9, "child (pid 70)")
    assert "if another thread held that lock when the process was forked" in verdict.summary
