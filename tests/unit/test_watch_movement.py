"""Does a rank move? Its main thread, and what that waits for; never a thread beside it. And a server that waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from evidence import LOADER, MODULE, STDLIB, at, in_backward, in_c10d, in_user, process
from msgspec.structs import replace

from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import Frame, ProcessEvidence, ThreadState
from safelaunch.watch.movement import judge, perhaps_polling, perhaps_receiving

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


def looks(*ranks: ProcessEvidence, children: Sequence[ProcessEvidence] = ()) -> tuple[Look, Look]:
    """Two looks; ``children`` are those of every rank."""
    before, after = (
        Look(
            2.0 * n,
            2.0 * n,
            {
                rank: RankLook(rank, _looked(main, n), tuple(_looked(child, n) for child in children))
                for rank, main in enumerate(ranks)
            },
        )
        for n in range(2)
    )
    return before, after


def judged(main: ProcessEvidence, children: Sequence[ProcessEvidence] = ()) -> str:
    return judge(*looks(main, children=children))


@pytest.mark.parametrize("frames", [FUTURE, JOIN, QUEUE, EVENT, EVENT_LOOP])
def test_a_thread_that_is_waited_for_and_computes_moves(frames: tuple[Frame, ...]) -> None:
    assert judged(process(10, frames, threads=[("pool-0", WORK, "run")])) == "active"
    assert judged(process(10, frames, threads=[("pool-0", WORK, "sleep")])) == "still"


@pytest.mark.parametrize("frames", [FUTURE, JOIN])
def test_a_thread_that_waits_for_peers_does_not_move_whatever_it_burns(frames: tuple[Frame, ...]) -> None:
    assert judged(process(10, frames, threads=[("saver", in_c10d("barrier", 31), "run")])) == "still"


@pytest.mark.parametrize("name", ["pt_autograd_0", "logger"])
@pytest.mark.parametrize("line", [31, 32])
def test_a_backward_pass_moves_while_the_engine_runs_python(name: str, line: int) -> None:
    """As it compiles or recomputes there. The thread that spins at one line waits for its GPU."""
    first = process(10, in_backward(20), threads=[(name, WORK, "run")])
    then = process(10, in_backward(20), threads=[(name, (at(line, "compress"), *WORK[1:]), "run")])
    main = replace(first, stacks=(first.stacks[0], then.stacks[1]))
    assert judged(main) == ("active" if name.startswith("pt_") and line != 31 else "still")


@pytest.mark.parametrize(("frames", "moves"), [(FUTURE, True), (JOIN, True), (QUEUE, False), (EVENT_LOOP, False)])
def test_a_logger_does_not_move_what_waits_for_a_queue(frames: tuple[Frame, ...], moves: bool) -> None:
    assert judged(process(10, frames, threads=[("logger", WORK, "logs")])) == ("active" if moves else "still")


def test_a_child_that_computes_does_not_move_what_waits_for_a_thread() -> None:
    assert judged(process(10, QUEUE), [process(20, in_user(31), "run")]) == "still"


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


@pytest.mark.parametrize(
    ("kernel", "child", "polls"), [("sleep", "run", True), ("sleep", "sleep", False), ("futex", "run", False)]
)
def test_who_sleeps_while_a_child_computes_may_be_polling_it(kernel: str, child: str, polls: bool) -> None:
    seen = looks(process(10, in_user(7), kernel), children=[process(20, in_user(31), child)])
    assert perhaps_polling(*seen) == ((10,) if polls else ())


# --- runnable, and without a core -------------------------------------------------------------------------------------


def starved(states: str, *, queued_ms: int = 0, throttled_ms: int = 0, frames: tuple[Frame, ...] = ()) -> str:
    """Judged of a main thread that used next to no CPU: its state in both looks, and what it lost between them."""
    main = process(10, frames or in_user(7))
    kernel = [
        replace(
            state,
            state=letter,
            throttled_ms=number * throttled_ms,
            threads=(replace(state.threads[0], state=letter, queued_ms=number * queued_ms),),
        )
        for number, (state, letter) in enumerate(zip(main.states, states, strict=True))
    ]
    return judged(replace(main, states=tuple(kernel)))


@pytest.mark.parametrize(
    ("states", "lost", "moves"),
    [
        ("RR", {}, True),
        ("SR", {}, False),
        ("SR", {"throttled_ms": 90}, True),
        ("SS", {"throttled_ms": 90}, False),
        ("SS", {"queued_ms": 900}, True),
        ("SS", {"queued_ms": 40}, False),
    ],
    ids=["in both looks", "woken", "throttled", "asleep in a throttled group", "queued", "queued for our look"],
)
def test_who_is_runnable_and_gets_no_core_moves(states: str, lost: dict[str, int], moves: bool) -> None:
    assert starved(states, **lost) == ("active" if moves else "still")


def test_who_spins_for_its_peers_does_not_move() -> None:
    assert starved("RR", queued_ms=900, frames=in_c10d("all_reduce", 7)) == "still"


# --- servers ---------------------------------------------------------------------------------------------------------

SELECT = Frame(f"{STDLIB}/selectors.py", 415, "_PollLikeSelector.select")
SERVING = (SELECT, Frame(f"{STDLIB}/socketserver.py", 235, "BaseServer.serve_forever"), at(30), MODULE)
AT_A_QUEUE = (
    Frame(f"{STDLIB}/threading.py", 320, "Condition.wait"),
    Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
    at(30),
    MODULE,
)
IN_A_LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), at(30), MODULE)


def with_thread(frames: Sequence[Frame], other: Sequence[Frame] = ()) -> ProcessEvidence:
    return process(10, frames, "poll", threads=[("http", other, "poll")] if other else [])


PEER = process(20, in_c10d("broadcast", 50), "futex")


@pytest.mark.parametrize(
    ("server", "waits_for_callers"),
    [
        (with_thread(SERVING), True),
        (with_thread(EVENT_LOOP), True),
        (with_thread(AT_A_QUEUE, SERVING), True),
        (with_thread(AT_A_QUEUE), False),
        (with_thread(IN_A_LOCK, SERVING), False),
        (with_thread(in_user(7), SERVING), False),
        (with_thread(in_c10d("all_reduce", 9), SERVING), False),
    ],
    ids=["serves", "event loop", "fed by a server", "a queue alone", "a lock", "own code", "a collective"],
)
def test_a_server_without_steps_waits_for_callers(server: ProcessEvidence, waits_for_callers: bool) -> None:
    before, after = looks(server, PEER)
    assert judge(before, after, without_steps=True) == ("active" if waits_for_callers else "still")
    assert judge(before, after) == "still", "a training that stands is a hang, whatever serves beside it"


# --- signs of life that need no CPU to speak of ---------------------------------------------------------------------


def then(one: ProcessEvidence, tid: int, **fields: int) -> ProcessEvidence:
    """The same with ``fields`` of thread ``tid`` 0 in the first look and as given in the second."""
    states = []
    for state, known in zip(one.states, (dict.fromkeys(fields, 0), fields), strict=True):
        threads = tuple(replace(thread, **known) if thread.tid == tid else thread for thread in state.threads)
        states.append(replace(state, threads=threads))
    return replace(one, states=tuple(states))


@pytest.mark.parametrize(("written", "expected"), [(0, "still"), (40, "active")])
def test_a_main_thread_that_writes_a_line_now_and_then_moves(written: int, expected: str) -> None:
    assert judged(then(process(10, in_user(7), "nap"), 10, written_bytes=written)) == expected


def test_a_line_of_another_thread_moves_nothing() -> None:
    main = process(10, in_user(7), "sleep", threads=[("logger", WORK, "nap")])
    assert judged(then(main, 11, written_bytes=40)) == "still"


@pytest.mark.parametrize(
    ("kernel", "slices", "expected"),
    [("pipe", 4, "still"), ("pipe", 6, "active"), ("flock", 6, "active"), ("nap", 6, "still"), ("futex", 6, "still")],
)
def test_a_blocked_read_that_is_given_a_core_has_received(kernel: str, slices: int, expected: str) -> None:
    """A stack reader's stop is two; a sleep in a loop is no sign that anything arrives."""
    assert judged(then(process(10, in_user(7), kernel), 10, slices=slices)) == expected


@pytest.mark.parametrize(("slices", "expected"), [(4, "still"), (60, "active")])
def test_a_thread_that_receives_moves_what_waits_for_its_queue(slices: int, expected: str) -> None:
    main = process(10, QUEUE, threads=[("downloader", WORK, "pipe")])
    assert judged(then(main, 11, slices=slices)) == expected


def with_native(main: ProcessEvidence, name: str, cpu_ms: int) -> ProcessEvidence:
    """A further thread of the kernel's, which runs no Python."""
    states = [
        replace(state, threads=(*state.threads, ThreadState(tid=99, name=name, state="S", cpu_ms=cpu_ms * number)))
        for number, state in enumerate(main.states)
    ]
    return replace(main, states=tuple(states))


@pytest.mark.parametrize(
    ("frames", "kernel", "name", "cpu_ms", "expected"),
    [
        (in_user(7), "futex", "PTThreadPool", 1900, "active"),
        (in_user(7), "futex", "rayon-3", 1900, "active"),
        (in_user(7), "futex", "rayon-3", 300, "still"),
        (in_user(7), "futex", "NCCL Progress", 1900, "still"),
        (in_user(7), "futex", "cuda-EvtHandlr", 1900, "still"),
        (in_user(7), "sleep", "rayon-3", 1900, "still"),
        (in_c10d("all_reduce", 7), "futex", "rayon-3", 1900, "still"),
        (JOIN, "futex", "rayon-3", 1900, "still"),
    ],
)
def test_native_threads_move_a_call_into_c_that_waits_for_them(
    frames: tuple[Frame, ...], kernel: str, name: str, cpu_ms: int, expected: str
) -> None:
    assert judged(with_native(process(10, frames, kernel), name, cpu_ms)) == expected


# --- what moves slowly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "slices", "expected"), [("disk", 0, "still"), ("disk", 1, "active")])
def test_a_rank_that_comes_back_from_the_disk_moves(kernel: str, slices: int, expected: str) -> None:
    """Each look finds it in D; nothing but the disk gives it a core there."""
    assert judged(then(process(10, in_user(7), kernel), 10, slices=slices)) == expected


@pytest.mark.parametrize(
    ("kernel", "before", "after", "polls"),
    [
        ("nap", {"/data/lines": 60}, {"/data/lines": 120}, True),
        ("select", {"/data/lines": 60}, {"/data/lines": 120}, True),
        ("nap", {"/data/lines": 60}, {"/data/lines": 60}, False),
        ("nap", {}, {"/data/lines": 60}, False),
        ("futex", {"/data/lines": 60}, {"/data/lines": 120}, False),
    ],
)
def test_who_sleeps_while_a_file_that_it_reads_grows_may_be_polling_it(
    kernel: str, before: dict[str, int], after: dict[str, int], polls: bool
) -> None:
    seen = []
    for look, files in zip(looks(process(10, in_user(7), kernel)), (before, after), strict=True):
        main = look.ranks[0].main
        assert main is not None
        seen.append(Look(0.0, 0.0, {0: RankLook(0, dataclasses.replace(main, files=files))}))
    assert perhaps_polling(*seen) == ((10,) if polls else ())


@pytest.mark.parametrize(("kernel", "waits"), [("pipe", True), ("disk", True), ("futex", False), ("sleep", False)])
def test_who_waits_for_something_to_arrive(kernel: str, waits: bool) -> None:
    assert perhaps_receiving(looks(process(10, in_user(7), kernel))[1]) == ((10,) if waits else ())
