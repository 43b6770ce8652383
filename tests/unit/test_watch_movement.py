"""Does a rank move? Its main thread, and what that waits for; never a thread beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from evidence import LOADER, STDLIB, at, in_c10d, in_user, process

from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import Frame, ProcessEvidence
from safelaunch.watch.movement import judge

WORK = (at(31, "compress"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))
LIBRARY = (Frame(f"{STDLIB}/selectors.py", 415, "select"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))


def library(*inner: tuple[str, str]) -> tuple[Frame, ...]:
    return (*(Frame(f"{STDLIB}/{file}", 1, function) for file, function in inner), *in_user(20))


FUTURE = library(("threading.py", "Condition.wait"), ("concurrent/futures/_base.py", "Future.result"))
JOIN = library(("threading.py", "Thread._wait_for_tstate_lock"), ("threading.py", "Thread.join"))
QUEUE = library(("threading.py", "Condition.wait"), ("queue.py", "Queue.get"))
EVENT = library(("threading.py", "Condition.wait"), ("threading.py", "Event.wait"))
POOL = library(("threading.py", "Event.wait"), ("multiprocessing/pool.py", "ApplyResult.get"))
MESSAGE = library(("multiprocessing/connection.py", "Connection._recv"), ("multiprocessing/queues.py", "Queue.get"))
SHARED_LOCK = library(("multiprocessing/synchronize.py", "Lock.__enter__"))


EVENT_LOOP = library(("selectors.py", "EpollSelector.select"), ("asyncio/base_events.py", "BaseEventLoop._run_once"))


def _looked(one: ProcessEvidence, number: int) -> ProcessLook:
    return ProcessLook(one.states[number].pid, one.states[number], Result(one.stacks[number], "py-spy", 0.1))


def judged(main: ProcessEvidence, children: Sequence[ProcessEvidence] = ()) -> str:
    before, after = (
        Look(2.0 * n, 2.0 * n, {0: RankLook(0, _looked(main, n), tuple(_looked(child, n) for child in children))})
        for n in range(2)
    )
    return judge(before, after)


@pytest.mark.parametrize("frames", [FUTURE, JOIN, QUEUE, EVENT, EVENT_LOOP])
def test_a_thread_that_is_waited_for_and_computes_moves(frames: tuple[Frame, ...]) -> None:
    assert judged(process(10, frames, threads=[("pool-0", WORK, "run")])) == "active"
    assert judged(process(10, frames, threads=[("pool-0", WORK, "sleep")])) == "still"


@pytest.mark.parametrize("frames", [in_user(7), in_c10d("all_reduce", 7)], ids=["a lock", "a collective"])
def test_a_thread_beside_the_loop_does_not_move_it(frames: tuple[Frame, ...]) -> None:
    assert judged(process(10, frames, threads=[("logger", WORK, "run")])) == "still"


def test_a_thread_without_code_of_the_users_does_not_move_what_waits_for_a_queue() -> None:
    assert judged(process(10, QUEUE, threads=[("uploader", LIBRARY, "run")])) == "still"


@pytest.mark.parametrize(
    ("frames", "kernel"),
    [
        (POOL, "futex"),
        (FUTURE, "futex"),
        (MESSAGE, "pipe"),
        (SHARED_LOCK, "futex"),
        (EVENT_LOOP, "epoll"),
        (in_user(20), "wait4"),
        ((Frame(LOADER, 1, "_MultiProcessingDataLoaderIter._try_get_data"), *in_user(20)), "poll"),
    ],
    ids=["a pool", "a future", "a message", "a shared lock", "an event loop", "os.waitpid", "a loader"],
)
def test_a_child_that_is_waited_for_and_computes_moves(frames: tuple[Frame, ...], kernel: str) -> None:
    assert judged(process(10, frames, kernel), [process(20, in_user(31), "run")]) == "active"
    assert judged(process(10, frames, kernel), [process(20, in_user(31), "sleep")]) == "still"


@pytest.mark.parametrize("kernel", ["futex", "sleep", "pipe"])
def test_a_child_beside_the_loop_does_not_move_it(kernel: str) -> None:
    assert judged(process(10, in_user(7), kernel), [process(20, in_user(31), "run")]) == "still"
