"""A rank that holds up its peers by its own doing: cause, rank and line, wherever in the job it is."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import (
    MODULE,
    SCRIPT,
    SITE,
    STDLIB,
    WORKER_IDLE,
    at,
    behind,
    in_backward,
    in_c10d,
    in_init,
    in_loader,
    in_user,
    in_worker,
    job,
    process,
    rank,
    waiting,
    with_culprit,
)
from msgspec import structs

from safelaunch.model import Frame, GilTest, RankEvidence, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose

WORLDS = [(2, 0), (2, 1), (4, 0), (4, 2), (8, 7)]

BY_KERNEL: list[tuple[str, str, tuple[Frame, ...], dict[str, Any]]] = [
    ("stuck-in-user-code", "sleep", in_user(7, "load"), {}),
    ("stuck-in-user-code", "select", in_user(7, "load"), {}),
    ("stuck-in-user-code", "stdin", in_user(7, "load"), {}),
    ("stuck-in-user-code", "wait4", (Frame(f"{STDLIB}/subprocess.py", 1, "Popen.wait"), *in_user(7, "load")), {}),
    ("stuck-in-user-code", "pipe", (Frame(f"{STDLIB}/subprocess.py", 1, "Popen.communicate"), *in_user(7, "load")), {}),
    (
        "stuck-in-user-code",
        "epoll",
        (Frame(f"{STDLIB}/asyncio/base_events.py", 1, "BaseEventLoop._run_once"), *in_user(7, "load")),
        {},
    ),
    ("blocking-io", "pipe", in_user(7, "load"), {}),
    ("blocking-io", "fifo", in_user(7, "load"), {}),
    ("blocking-io", "connect", (Frame(f"{STDLIB}/socket.py", 1, "create_connection"), *in_user(7, "load")), {}),
    ("blocking-io", "poll", (Frame(f"{SITE}/requests/api.py", 1, "get"), *in_user(7, "load")), {}),
    ("uninterruptible-io", "disk", in_user(7, "load"), {}),
    ("busy-loop", "run", in_user(7, "load"), {}),
    ("rank-stopped", "stop", in_user(7, "load"), {}),
    ("rank-stopped", "stop", in_c10d("all_reduce", 7, "load"), {}),
    ("rank-stopped", "sleep", in_user(7, "load"), {"frozen": True}),
    ("lock-deadlock", "futex", in_user(7, "load"), {}),
    ("lock-deadlock", "restart_futex", in_user(7, "load"), {}),
    ("lock-deadlock", "futex", (Frame(f"{STDLIB}/queue.py", 1, "Queue.get"), *in_user(7, "load")), {}),
    ("lock-deadlock", "futex", (Frame(f"{STDLIB}/threading.py", 1, "Condition.wait"), *in_user(7, "load")), {}),
    ("lock-deadlock", "", (Frame(f"{STDLIB}/threading.py", 1, "wait"), *in_user(7, "load")), {}),
    ("gil-held", "sleep", in_user(7, "load"), {"gil": GilTest(ping=True, python=False), "owns_gil": True}),
    ("gil-held", "run", in_user(7, "load"), {"gil": GilTest(ping=True, python=False), "owns_gil": True}),
    ("gil-held", "sleep", in_user(7, "load"), {"gil": GilTest(), "owns_gil": True}),
]


@pytest.mark.parametrize(("world", "culprit"), WORLDS)
@pytest.mark.parametrize(
    ("cause", "kernel", "frames", "fields"), BY_KERNEL, ids=[f"{n}-{c[0]}-{c[1]}" for n, c in enumerate(BY_KERNEL)]
)
def test_own_condition(
    cause: str, kernel: str, frames: tuple[Frame, ...], fields: dict[str, Any], world: int, culprit: int
) -> None:
    verdict = diagnose(with_culprit(rank(culprit, frames, kernel, flight=behind(), **fields), world))
    assert verdict.cause == cause
    assert [c.rank for c in verdict.culprits] == [culprit]
    assert verdict.culprits[0].frame == at(7, "load")
    assert verdict.culprits[0].process == "main"
    assert verdict.culprits[0].step == 60
    assert verdict.confidence in ("high", "medium")
    assert_sound(verdict, world)


def assert_sound(verdict: Verdict, world: int) -> None:
    """What holds for every verdict: each claim points into the bundle, the summary names a line, advice is given."""
    assert verdict.evidence
    for claim in verdict.evidence:
        assert claim.file == "launch.json" or claim.file.startswith("ranks/")
    assert verdict.suggestions
    assert all(f"ank {c.rank}" in c.reason for c in verdict.culprits)
    named = {c.rank for c in verdict.culprits}
    assert len(named) == len(verdict.culprits)
    assert verdict.summary.endswith(".")
    assert "train.py:" in verdict.summary or world == 1


def test_the_summary_says_who_does_what_and_what_the_others_wait_in() -> None:
    verdict = diagnose(with_culprit(rank(1, in_user(7, "load"), "sleep", flight=behind()), 4))
    assert verdict.summary == (
        "Rank 1 is asleep in train.py:7 (load), while ranks 0,2-3 wait in all_reduce at train.py:50 (train)."
    )
    assert verdict.victims == "0,2-3"


def test_several_are_equally_at_fault() -> None:
    sleepers = [rank(n, in_user(7, "load"), "sleep", flight=behind()) for n in (1, 3)]
    verdict = diagnose(job(waiting(0), sleepers[0], waiting(2), sleepers[1]))
    assert verdict.cause == "stuck-in-user-code"
    assert [c.rank for c in verdict.culprits] == [1, 3]
    assert verdict.summary.startswith("Each of ranks 1,3 is asleep")


def test_causes_that_differ_lower_the_confidence_and_name_both() -> None:
    verdict = diagnose(
        job(
            waiting(0),
            rank(1, in_user(7), "sleep", flight=behind()),
            rank(2, in_user(9), "pipe", flight=behind()),
        )
    )
    assert [c.rank for c in verdict.culprits] == [1, 2]
    assert verdict.confidence == "medium"


def test_a_stopped_rank_overrides_what_another_does() -> None:
    verdict = diagnose(
        job(waiting(0), rank(1, in_user(7), "sleep", flight=behind()), rank(2, in_user(9), "stop", flight=behind()))
    )
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-stopped", [2])


def test_stacks_alone_are_enough_for_a_sleeping_rank() -> None:
    peers = [rank(n, in_c10d("all_reduce", 50)) for n in (0, 2)]
    verdict = diagnose(job(peers[0], rank(1, in_user(7, "load"), "sleep"), peers[1]))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])


def test_a_chain_is_followed_to_its_end() -> None:
    """0 waits for 1 in group 5; 1 waits in the world for 2, which sleeps."""
    from evidence import entry, past, record

    groups = {"5": (0, 1), "0": (0, 1, 2)}
    first = rank(
        0, in_c10d("all_reduce", 60), flight=record(*past(3), entry("all_reduce", 1, group="5"), groups=groups)
    )
    second = waiting(1, flight=record(*past(3), entry("all_reduce", 4, line=50), groups=groups))
    third = rank(2, in_user(7), "sleep", flight=record(*past(3), groups=groups))
    verdict = diagnose(job(first, second, third))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [2])


def test_a_spinning_loop_that_answers_does_not_hold_the_gil() -> None:
    spinner = rank(0, in_user(7), "run", flight=behind(), owns_gil=True, gil=GilTest(ping=True, python=True))
    assert diagnose(with_culprit(spinner, 2)).cause == "busy-loop"


def test_computing_inside_a_library_may_be_honest_work() -> None:
    frames = (Frame(f"{SITE}/torch/nn/modules/linear.py", 1, "Linear.forward"), *in_user(7))
    verdict = diagnose(with_culprit(rank(0, frames, "run", flight=behind()), 2))
    assert (verdict.cause, verdict.confidence) == ("busy-loop", "medium")


# --- threads and locks ------------------------------------------------------------------------------------------------

JOIN = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), *in_user(20, "wait_all"))
OTHER = (at(31, "other"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))
IDLE_POOL = (Frame(f"{STDLIB}/concurrent/futures/thread.py", 81, "_worker"), Frame(f"{STDLIB}/threading.py", 1, "run"))


def culprit_of(**fields: Any) -> tuple[str, int, str]:
    frames = fields.pop("frames")
    verdict = diagnose(with_culprit(rank(1, frames, "futex", flight=behind(), **fields), 3))
    assert [c.rank for c in verdict.culprits] == [1]
    frame = verdict.culprits[0].frame
    assert frame is not None
    return verdict.cause, frame.line, verdict.confidence


def test_two_threads_in_each_others_locks() -> None:
    got = culprit_of(frames=in_user(7), threads=[("t", OTHER, "futex")])
    assert got == ("lock-deadlock", 7, "high")


def test_a_lock_beside_a_sleeping_thread_is_still_the_lock() -> None:
    assert culprit_of(frames=in_user(7), threads=[("timer", OTHER, "sleep")]) == ("lock-deadlock", 7, "medium")


@pytest.mark.parametrize(
    ("kernel", "cause"), [("sleep", "stuck-in-user-code"), ("pipe", "blocking-io"), ("futex", "lock-deadlock")]
)
def test_a_join_is_followed_into_the_thread(kernel: str, cause: str) -> None:
    assert culprit_of(frames=JOIN, threads=[("t", OTHER, kernel), ("pool", IDLE_POOL, "futex")])[:2] == (cause, 31)


def test_a_future_is_followed_into_the_pool() -> None:
    result = (Frame(f"{STDLIB}/threading.py", 327, "Condition.wait"),)
    frames = (*result, Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "Future.result"), *in_user(20))
    assert culprit_of(frames=frames, threads=[("pool-0", OTHER, "sleep")])[:2] == ("stuck-in-user-code", 31)


def test_a_queue_is_followed_to_a_blocked_producer_not_to_a_timer() -> None:
    frames = (Frame(f"{STDLIB}/queue.py", 171, "Queue.get"), *in_user(20))
    assert culprit_of(frames=frames, threads=[("reader", OTHER, "pipe")])[:2] == ("blocking-io", 31)
    assert culprit_of(frames=frames, threads=[("timer", OTHER, "sleep")])[:2] == ("lock-deadlock", 20)


def test_a_thread_that_computes_may_be_what_a_queue_waits_for() -> None:
    frames = (Frame(f"{STDLIB}/queue.py", 171, "Queue.get"), *in_user(20))
    assert culprit_of(frames=frames, threads=[("filler", OTHER, "run")]) == ("lock-deadlock", 20, "medium")


def test_a_thread_that_computes_may_hold_the_lock() -> None:
    frames = (Frame(f"{STDLIB}/threading.py", 1, "_RLock.acquire"), *in_user(20))
    assert culprit_of(frames=frames, threads=[("indexer", OTHER, "run")]) == ("lock-deadlock", 20, "medium")


def test_c_frames_tell_a_lock_from_a_wait_for_peers() -> None:
    lock = [Frame("/usr/lib/libpython3.11.so.1.0", 0, "PyThread_acquire_lock_timed")]
    assert culprit_of(frames=in_user(7), native=lock) == ("lock-deadlock", 7, "high")
    recv = [Frame(f"{SITE}/torch/lib/libtorch_cpu.so", 0, "c10d::ProcessGroupGloo::RecvWork::wait")]
    waiter = rank(0, in_user(9), native=recv, flight=behind())
    verdict = diagnose(job(waiter, rank(1, in_user(7), "sleep", flight=behind())))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])


BUFFER = """class Buffer:
    def put(self, item):
        with self.lock:
            self.items.put(item)
    def log(self):
        with self.lock:
            pass
    def update(self):
        with self.stats:
            with self.lock:
                pass
    def publish(self):
        with self.lock:
            with self.stats:
                pass
    def close(self):
        with self.lock:
            self.saver.join()
    def take(self):
        with self.lock:
            self.lock.wait()
    def save(self):
        self.pipe.read()
class Other:
    def put(self, item):
        with self.lock:
            self.items.put(item)
"""
THREAD = Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
PUT = Frame(f"{STDLIB}/queue.py", 140, "Queue.put")
EVENT = Frame(f"{STDLIB}/threading.py", 327, "Condition.wait")


def locked(*frames: Frame, threads: list[tuple[str, tuple[Frame, ...], str]]) -> Verdict:
    culprit = rank(1, (*frames, MODULE), "futex", flight=behind(), threads=threads)
    verdict = diagnose(with_culprit(culprit, 3), lambda path: BUFFER)
    assert [one.rank for one in verdict.culprits] == [1]
    return verdict


def place_of(verdict: Verdict) -> tuple[str, int]:
    frame = verdict.culprits[0].frame
    assert frame is not None
    return verdict.cause, frame.line


@pytest.mark.parametrize(
    ("inside", "kernel", "cause", "does"),
    [
        ((PUT,), "futex", "lock-deadlock", "waits for a queue"),
        ((), "pipe", "blocking-io", "is blocked in I/O"),
        ((), "sleep", "stuck-in-user-code", "is asleep in"),
    ],
)
def test_a_lock_is_followed_to_the_thread_that_holds_it(
    inside: tuple[Frame, ...], kernel: str, cause: str, does: str
) -> None:
    holder = ("producer", (*inside, at(4, "Buffer.put"), THREAD), kernel)
    beside = ("logger", (at(6, "Buffer.log"), THREAD), "futex")
    verdict = locked(at(6, "Buffer.log"), threads=[beside, holder])
    assert place_of(verdict) == (cause, 4)
    told = "waits for a lock (`self.lock`) at train.py:6 (Buffer.log); its thread 'producer' has held it since line 3"
    assert f"{told} and {does}" in verdict.summary
    assert verdict.suggestions[0].startswith("Don't block while holding a lock")


@pytest.mark.parametrize(
    "other",
    [
        (PUT, at(27, "Other.put"), THREAD),  # another class's lock
        (EVENT, at(21, "Buffer.take"), THREAD),  # waits on the lock, so it does not hold it
        (PUT, at(7, "Buffer.log", "/home/me/else.py"), THREAD),
    ],
)
def test_a_lock_of_which_nobody_is_seen_to_be_the_holder(other: tuple[Frame, ...]) -> None:
    verdict = locked(at(6, "Buffer.log"), threads=[("other", other, "futex")])
    assert place_of(verdict) == ("lock-deadlock", 6) and "has held it" not in verdict.summary


def test_threads_that_hold_each_others_locks() -> None:
    verdict = locked(at(10, "Buffer.update"), threads=[("t", (at(14, "Buffer.publish"), THREAD), "futex")])
    assert (*place_of(verdict), verdict.confidence) == ("lock-deadlock", 10, "high")
    told = (
        "waits for a lock (`self.lock`) at train.py:10 (Buffer.update); its thread 't' has held it since train.py:13"
        " (Buffer.publish) and waits for a lock (`self.stats`) at train.py:14 (Buffer.publish); its main thread has"
        " held it since train.py:9 (Buffer.update)"
    )
    assert told in verdict.summary
    assert verdict.suggestions[0].startswith(LOCKS)


def test_a_join_with_the_lock_held_that_the_thread_needs() -> None:
    verdict = locked(JOIN[0], at(18, "Buffer.close"), threads=[("t", (at(6, "Buffer.log"), THREAD), "futex")])
    assert place_of(verdict) == ("lock-deadlock", 18)
    assert "its thread 't' waits for a lock (`self.lock`) at train.py:6 (Buffer.log); its main thread has held it" in (
        verdict.summary
    )
    assert verdict.suggestions[0].startswith("Don't block while holding a lock")


def test_a_queue_that_is_full_because_its_reader_needs_the_lock() -> None:
    reader = ("reader", (at(6, "Buffer.log"), THREAD), "futex")
    verdict = locked(PUT, at(4, "Buffer.put"), threads=[reader])
    assert place_of(verdict) == ("lock-deadlock", 4)
    assert "while thread 'reader' waits for a lock (`self.lock`) at train.py:6 (Buffer.log), which" in verdict.summary
    assert "its main thread has held since line 3" in verdict.summary
    assert verdict.suggestions[0].startswith("Don't block while holding a lock")


@pytest.mark.parametrize("result", [JOIN[:1], (EVENT, Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "result"))])
@pytest.mark.parametrize("with_source", [True, False])
def test_a_join_is_not_the_lock_that_another_thread_waits_for(result: tuple[Frame, ...], with_source: bool) -> None:
    """The main thread holds a lock that a third thread wants; what it waits for is the end of another one."""
    saver = ("saver", (at(23, "Buffer.save"), THREAD), "pipe")
    stats = ("stats", (at(6, "Buffer.log"), THREAD), "futex")
    frames = (*result, at(18, "Buffer.close"), MODULE)
    culprit = rank(1, frames, "futex", flight=behind(), threads=[stats, saver])
    verdict = diagnose(with_culprit(culprit, 3), (lambda path: BUFFER) if with_source else None)
    assert place_of(verdict) == ("blocking-io", 23)


def test_a_join_of_one_of_several_is_no_deadlock_of_locks() -> None:
    waits = [("a", (PUT, at(4, "Buffer.put"), THREAD), "futex"), ("b", (EVENT, at(21), THREAD), "futex")]
    asleep = [(name, OTHER, "sleep") for name in ("a", "b")]
    for threads, cause in ((waits, "lock-deadlock"), (asleep, "stuck-in-user-code")):
        verdict = locked(JOIN[0], at(30), threads=threads)
        assert place_of(verdict) == (cause, 30) and "each other's locks" not in verdict.summary


def test_a_future_is_the_work_of_a_pool_not_of_any_thread() -> None:
    result = (EVENT, Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "Future.result"))
    pool = ("pool", (at(31, "fetch"), IDLE_POOL[0], THREAD), "pipe")
    verdict = locked(*result, at(30), threads=[("reader", (at(40, "read"), THREAD), "pipe"), pool])
    assert place_of(verdict) == ("blocking-io", 31)


# --- child processes --------------------------------------------------------------------------------------------------

IN_CHILD = at(31, "preprocess")
MESSAGE = (
    Frame(f"{STDLIB}/multiprocessing/connection.py", 395, "Connection._recv"),
    Frame(f"{STDLIB}/multiprocessing/queues.py", 103, "Queue.get"),
)
TRACKER = process(71, (Frame("<string>", 1, "<module>"),), "pipe", role="resource tracker")


def parent(frames: tuple[Frame, ...], kernel: str, *children: Any) -> Verdict:
    verdict = diagnose(with_culprit(rank(1, frames, kernel, flight=behind(), children=children), 3))
    assert [c.rank for c in verdict.culprits] == [1]
    return verdict


def test_waitpid_is_followed_into_the_child() -> None:
    child = process(72, (IN_CHILD, MODULE), "sleep", role="child")
    (found,) = parent(in_user(7), "wait4", TRACKER, child).culprits
    assert (found.frame, found.pid, found.process) == (IN_CHILD, 72, "child (pid 72)")


@pytest.mark.parametrize(("kernel", "cause"), [("futex", "lock-deadlock"), ("pipe", "blocking-io")])
def test_a_message_is_followed_to_the_child_that_is_to_send_it(kernel: str, cause: str) -> None:
    child = process(72, (IN_CHILD, MODULE), kernel, role="child")
    verdict = parent((*MESSAGE, *in_user(7)), "pipe", TRACKER, child)
    assert (verdict.cause, verdict.confidence, verdict.culprits[0].frame) == (cause, "medium", IN_CHILD)


@pytest.mark.parametrize(("inner", "kernel"), [((), "sleep"), (MESSAGE, "pipe")])
def test_a_message_is_not_followed_to_a_timer_nor_to_one_that_waits_for_messages(
    inner: tuple[Frame, ...], kernel: str
) -> None:
    child = process(72, (*inner, IN_CHILD, MODULE), kernel, role="child")
    (found,) = parent((*MESSAGE, *in_user(7)), "pipe", child).culprits
    assert (found.frame, found.process) == (at(7), "main")


def test_a_child_that_is_dead_sends_nothing() -> None:
    verdict = parent((*MESSAGE, *in_user(7)), "pipe", TRACKER, process(72, (), "zombie", role="child"))
    assert (verdict.cause, verdict.culprits[0].frame) == ("blocking-io", at(7))
    assert "its child process 72 has ended and not been reaped" in verdict.summary
    assert any(claim.claim.endswith("child process 72: state Z") for claim in verdict.evidence)


# --- file locks between ranks -----------------------------------------------------------------------------------------


def _locked_out(number: int) -> RankEvidence:
    return rank(number, in_user(9, "cache_lock"), "flock", flight=behind())


def test_a_collective_with_a_file_locked_that_its_peers_need_is_a_deadlock_of_all() -> None:
    verdict = diagnose(job(_locked_out(0), waiting(1, "barrier", line=23), _locked_out(2)))
    assert (verdict.cause, verdict.confidence) == ("lock-deadlock", "medium")  # nobody is left innocent
    assert [(c.rank, c.frame and c.frame.line) for c in verdict.culprits] == [(0, 9), (1, 23), (2, 9)]
    assert (
        "Each of ranks 0,2 waits for a file lock at train.py:9 (cache_lock) that rank 1 holds, while rank 1 waits in"
        in (verdict.summary)
    )


@pytest.mark.parametrize("peer", [waiting, _locked_out])
def test_a_rank_that_keeps_a_file_locked_is_named_not_those_who_wait_for_it(peer: Any) -> None:
    verdict = diagnose(job(_locked_out(0), rank(1, in_user(7), "sleep", flight=behind()), peer(2)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])
    assert verdict.culprits[0].frame == at(7)
    assert "with a file locked that rank" in verdict.summary and verdict.victims == "0,2"


def test_a_lock_that_is_held_outside_the_job_stays_blocking_io() -> None:
    verdict = diagnose(job(_locked_out(0), structs.replace(waiting(1), pid=7)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("blocking-io", [0])


def test_a_sleeper_beside_a_lock_comes_first() -> None:
    asleep = rank(3, in_user(7), "sleep", flight=behind())
    verdict = diagnose(job(_locked_out(0), waiting(1), waiting(2), asleep))
    assert 3 in [c.rank for c in verdict.culprits] and 1 not in [c.rank for c in verdict.culprits]


# --- data loading -----------------------------------------------------------------------------------------------------


def worker(pid: int, frames: tuple[Frame, ...], kernel: str, **fields: Any) -> Any:
    return process(pid, frames, kernel, role="dataloader worker", **fields)


@pytest.mark.parametrize(("world", "culprit"), WORLDS)
@pytest.mark.parametrize("kernel", ["sleep", "pipe", "disk", "stop", "futex", "run"])
def test_the_stuck_worker_is_named_not_the_idle_one(kernel: str, world: int, culprit: int) -> None:
    workers = [worker(91, WORKER_IDLE, "poll"), worker(92, in_worker(12), kernel), worker(93, WORKER_IDLE, "poll")]
    verdict = diagnose(with_culprit(rank(culprit, in_loader(30), "poll", flight=behind(), children=workers), world))
    assert verdict.cause == "data-loading"
    assert [c.rank for c in verdict.culprits] == [culprit]
    assert verdict.culprits[0].process == "dataloader worker (pid 92)"
    assert verdict.culprits[0].pid == 92
    assert verdict.culprits[0].frame == at(12, "Data.__getitem__", "/home/me/data.py")
    assert (" a lock" in verdict.culprits[0].reason) == (kernel == "futex")
    assert_sound(verdict, world)


def test_a_dead_worker_is_named() -> None:
    workers = [worker(91, WORKER_IDLE, "poll"), worker(92, (), "zombie")]
    verdict = diagnose(with_culprit(rank(0, in_loader(30), "poll", flight=behind(), children=workers), 2))
    assert verdict.culprits[0].process == "dataloader worker (pid 92)"
    assert verdict.culprits[0].frame == at(30)


def test_no_worker_to_blame_leaves_the_rank() -> None:
    verdict = diagnose(with_culprit(rank(1, in_loader(30), "poll", flight=behind()), 2))
    assert (verdict.cause, verdict.confidence) == ("data-loading", "medium")
    assert verdict.culprits[0].process == "main"
    assert verdict.culprits[0].frame == at(30)


def test_idle_workers_of_a_waiting_rank_are_innocent() -> None:
    peers = [waiting(n, children=[worker(90 + n, WORKER_IDLE, "poll")]) for n in (0, 2)]
    verdict = diagnose(job(peers[0], rank(1, in_user(7), "sleep", flight=behind()), peers[1]))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])


# --- initialisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "culprit"), WORLDS)
@pytest.mark.parametrize("kernel", ["sleep", "pipe", "run", "futex"])
def test_a_rank_that_never_reached_init(kernel: str, world: int, culprit: int) -> None:
    evidence = with_culprit(
        rank(culprit, in_user(7, "load"), kernel, step=None), world, lambda n: rank(n, in_init(), "poll", step=None)
    )
    verdict = diagnose(evidence)
    assert (verdict.cause, verdict.confidence) == ("init-not-joined", "high")
    assert [c.rank for c in verdict.culprits] == [culprit]
    assert verdict.culprits[0].frame == at(7, "load")
    assert "never reached init_process_group: it " in verdict.culprits[0].reason
    assert_sound(verdict, world)


def test_ranks_unseen_at_init_are_listed_not_blamed() -> None:
    verdict = diagnose(job(rank(0, in_init(), "poll"), rank(2, in_init(), "poll"), missing_ranks=(1, 3)))
    assert (verdict.cause, verdict.culprits) == ("init-not-joined", ())
    assert any("1,3" in text for text in verdict.missing)


def making_store(number: int, *, again_in_s: float = 3.0) -> RankEvidence:
    """A rank that sleeps between two attempts to reach the store of init_process_group."""
    store = Frame(f"{SITE}/torch/distributed/rendezvous.py", 190, "_create_c10d_store")
    one = rank(number, (store, *in_init()[1:]), "sleep", step=None)
    assert one.main is not None
    states = tuple(
        structs.replace(
            state, threads=(structs.replace(state.threads[0], ends_s=state.at_s + again_in_s), *state.threads[1:])
        )
        for state in one.main.states
    )
    return structs.replace(one, main=structs.replace(one.main, states=states))


def test_ranks_that_do_not_reach_the_store() -> None:
    past = [rank(n, in_init(), "poll", step=None) for n in (0, 2)]
    verdict = diagnose(job(past[0], making_store(1), past[1]))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("init-not-joined", [1])
    assert "Rank 1 keeps trying to connect to the store" in verdict.summary
    assert verdict.suggestions[0].startswith("Print `MASTER_ADDR` and `MASTER_PORT`")
    assert not any("slow or rank-dependent work" in text for text in verdict.suggestions)
    nobody = diagnose(job(*(making_store(n) for n in range(3))))
    assert (nobody.cause, nobody.culprits) == ("init-not-joined", ())
    assert "nothing answers at its address" in nobody.summary


def test_who_hosts_the_store_and_naps_until_all_have_come_is_not_astray() -> None:
    hosts = making_store(0, again_in_s=0.01)
    verdict = diagnose(job(hosts, making_store(1), making_store(2)))
    assert (verdict.cause, verdict.culprits) == ("init-not-joined", ()), "either side may have the wrong address"
    assert "Each of ranks 1-2 keeps trying" in verdict.summary
    assert "keeps trying" not in diagnose(job(hosts, rank(1, in_init(), "poll", step=None))).summary


def test_a_store_that_lets_nobody_go_on() -> None:
    """Something else has its port, or it was told of more ranks."""
    everyone = [rank(n, making_store(n).main.stacks[0].threads[0].frames, "pipe", step=None) for n in range(2)]
    verdict = diagnose(job(*everyone))
    assert (verdict.cause, verdict.culprits) == ("init-not-joined", ())
    assert "all are blocked at the store" in verdict.summary
    beyond = diagnose(job(*everyone, rank(2, in_init(), "poll", step=None)))
    assert "blocked at the store" not in beyond.summary


def test_ranks_that_have_all_come_to_init_are_told_nothing_of_broadcasts() -> None:
    verdict = diagnose(job(*(rank(n, in_init(), "poll", step=None) for n in range(3))))
    assert verdict.cause == "no-rank-stands-out"
    assert not any("src or dst" in text for text in verdict.suggestions)


def test_a_later_group_is_not_init() -> None:
    frames = (*in_init()[:1], *(Frame(f.file, f.line, "new_group") for f in in_init()[1:2]), *in_user(40))
    peers = [rank(n, frames, "poll", flight=behind()) for n in (0, 1)]
    verdict = diagnose(job(*peers, rank(2, in_user(7), "sleep", flight=behind())))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [2])


# --- leaving, and nobody ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "culprit"), WORLDS)
@pytest.mark.parametrize(
    ("frames", "kernel", "page"),
    [
        ((Frame(f"{STDLIB}/threading.py", 1590, "_shutdown"),), "futex", "torch"),
        ((at(80, "close_log"),), "sleep", "torch"),
        ((at(80, "close_log"), MODULE), "sleep", "exited"),
        (in_c10d("destroy_process_group", 80), "futex", "torch"),
        ((), "futex", "exited"),
    ],
)
def test_a_rank_that_left_the_loop(frames: tuple[Frame, ...], kernel: str, page: str, world: int, culprit: int) -> None:
    verdict = diagnose(with_culprit(rank(culprit, frames, kernel, flight=behind(), page=page), world))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [culprit])
    assert_sound(verdict, world)


def test_a_rank_kept_alive_by_a_thread_shows_the_thread() -> None:
    shutdown = (Frame(f"{STDLIB}/threading.py", 1590, "_shutdown"),)
    left = rank(1, shutdown, flight=behind(), threads=[("uploader", OTHER, "sleep")])
    verdict = diagnose(with_culprit(left, 2))
    assert (verdict.cause, verdict.culprits[0].frame) == ("uneven-batches", OTHER[0])


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kernel", ["sleep", "pipe", "run", "futex"])
def test_all_at_the_same_line_singles_nobody_out(kernel: str, world: int) -> None:
    verdict = diagnose(job(*(rank(n, in_user(7), kernel, flight=behind()) for n in range(world))))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert verdict.confidence != "high"
    assert any("outside the job" in advice for advice in verdict.suggestions)
    assert not any("transport" in advice for advice in verdict.suggestions)


def test_all_arrived_singles_nobody_out() -> None:
    verdict = diagnose(job(*(waiting(n) for n in range(4))))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert "every rank has arrived" in verdict.summary


def test_one_against_one_with_nobody_waiting_is_not_guessed() -> None:
    verdict = diagnose(job(rank(0, in_user(7), "sleep"), rank(1, in_user(9), "pipe")))
    assert (verdict.cause, verdict.culprits, verdict.confidence) == ("no-rank-stands-out", (), "low")


def test_an_odd_one_out_without_waits_is_named_with_low_confidence() -> None:
    ranks = [rank(n, in_user(7), "sleep") for n in range(4)]
    ranks[2] = rank(2, in_user(9), "pipe")
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == ("blocking-io", [2], "low")
    unseen = diagnose(job(*ranks, world=5, missing_ranks=(4,)))
    assert unseen.culprits == ()


def test_a_single_rank_is_its_own_culprit() -> None:
    verdict = diagnose(job(rank(0, in_user(7), "sleep")))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == (
        "stuck-in-user-code",
        [0],
        "high",
    )


def test_a_dump_of_a_moving_job_accuses_nobody() -> None:
    ranks = (rank(0, in_user(7), "run"), waiting(1))
    verdict = diagnose(job(*ranks, outcome="dump", moving=True, stall_s=0.5))
    assert (verdict.cause, verdict.culprits, verdict.victims) == ("slow-not-stuck", (), "")
    stuck = diagnose(job(rank(0, in_user(7), "sleep", flight=behind()), waiting(1), outcome="dump"))
    assert (stuck.cause, [c.rank for c in stuck.culprits]) == ("stuck-in-user-code", [0])


def test_no_evidence_at_all() -> None:
    verdict = diagnose(job(rank(0, seen=False), rank(1, seen=False)))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert diagnose(job(world=2, missing_ranks=(0, 1))).cause == "no-rank-stands-out"


def test_who_was_killed_while_it_waited_is_no_cause() -> None:
    """Rank 0 waited in a backward pass, was killed between the two looks, and took its Flight Recorder along."""
    victim = rank(0, in_backward(50), "futex", more={"exit": RankExit(-9, 5.0)})
    assert victim.main is not None
    first, last = victim.main.states
    dead = structs.replace(last, state="Z", threads=())
    victim = structs.replace(victim, main=structs.replace(victim.main, states=(first, dead)))
    verdict = diagnose(job(victim, rank(1, in_user(7, "load"), "sleep")))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])
    assert verdict.victims == "0"
    crashed = diagnose(job(victim, rank(1, in_user(7, "load"), "sleep"), outcome="crash"))
    assert (crashed.cause, [c.rank for c in crashed.culprits]) == ("rank-killed", [0])


# --- advice that fits -------------------------------------------------------------------------------------------------

LOCKS = "Acquire locks in the same order"
FUTURE = (Frame(f"{STDLIB}/threading.py", 327, "wait"), Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "result"))
LOOP = (
    Frame(f"{STDLIB}/asyncio/events.py", 80, "Handle._run"),
    Frame(f"{STDLIB}/asyncio/base_events.py", 1922, "BaseEventLoop._run_once"),
    Frame(f"{STDLIB}/asyncio/base_events.py", 607, "BaseEventLoop.run_forever"),
)


def test_the_order_of_locks_is_advice_for_locks_alone() -> None:
    locked = diagnose(with_culprit(rank(1, in_user(7), "futex", flight=behind()), 3))
    assert any(one.startswith(LOCKS) for one in locked.suggestions)
    future = diagnose(with_culprit(rank(1, (*FUTURE, *in_user(7)), "futex", flight=behind()), 3))
    assert future.cause == "lock-deadlock"
    assert not any(one.startswith(LOCKS) for one in future.suggestions)
    assert "event loop" not in future.summary


def test_a_future_that_is_awaited_on_the_thread_of_a_loop() -> None:
    on_loop = (*FUTURE, at(14, "call"), *LOOP, Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))
    waits = rank(1, (*FUTURE, *in_user(7)), "futex", flight=behind(), threads=[("loop", on_loop, "futex")])
    verdict = diagnose(with_culprit(waits, 3))
    assert "its thread 'loop' waits for Future.result at train.py:14 (call), on the thread of an event loop" in (
        verdict.summary
    )
    assert verdict.suggestions[0].startswith("`await` the coroutine")


def at_store(number: int, line: int, **values: str) -> RankEvidence:
    """A rank in a call of the store, at ``line``; ``values``: of its local variables."""
    one = rank(number, in_user(line, "wait"), "poll", flight=behind())
    assert one.main is not None
    states = []
    for state in one.main.states:
        polls = structs.replace(state.threads[0], fd=3, fd_target="tcp6 [::1]:36420 -> [::1]:41283 (established)")
        states.append(structs.replace(state, threads=(polls, *state.threads[1:])))
    stacks = [
        structs.replace(sample, threads=tuple(structs.replace(t, names=tuple(values.items())) for t in sample.threads))
        for sample in one.main.stacks
    ]
    return structs.replace(one, main=structs.replace(one.main, states=tuple(states), stacks=tuple(stacks)))


def test_a_key_of_the_store_that_nobody_sets() -> None:
    waits = with_culprit(at_store(1, 2, step="15"), 3)
    source = "def wait(store, step):\n    return store.get(f'export/{step}')\n"
    verdict = diagnose(waits, lambda path: source)
    assert verdict.cause == "blocking-io"
    assert verdict.summary.startswith("Rank 1 waits at train.py:2 (wait) for the key `f'export/{step}'` (export/15) of")
    assert "which rank should set this key" in verdict.suggestions[0]
    assert "is blocked in I/O" in diagnose(waits, lambda path: "def wait(x):\n    return x.recv(4)\n").summary


def test_a_key_of_the_store_that_one_rank_alone_would_set() -> None:
    source = """\
def share(store, step, resumed):
    if rank == 0:
        if not resumed:
            store.set(f"run/{step}", name())
    else:
        store.get(f"run/{step}")
"""
    gone_on = waiting(0, flight=None, line=50)
    evidence = job(gone_on, at_store(1, 6, step="15"), at_store(2, 6, step="15"))
    verdict = diagnose(evidence, lambda path: source)
    assert (verdict.cause, [one.rank for one in verdict.culprits], verdict.victims) == ("blocking-io", [0], "1-2")
    assert verdict.culprits[0].frame == Frame(SCRIPT, 4, "")
    assert verdict.summary == (
        "Each of ranks 1-2 waits at train.py:6 (wait) for the key `f'run/{step}'` (run/15) of the store, while rank 0"
        " waits in all_reduce at train.py:50 (train). Rank 0 alone sets it, at train.py:4, behind `if rank == 0"
        " (train.py:2)` and `if not resumed (train.py:3)`."
    )
    unknown = diagnose(evidence, lambda path: source.replace("rank == 0", "rank == options.publisher"))
    assert [one.rank for one in unknown.culprits] == [0], "the others are on the other side of the same condition"
    asleep = job(rank(0, in_user(9), "sleep"), at_store(1, 6), at_store(2, 6))
    verdict = diagnose(asleep, lambda path: source)
    assert [one.rank for one in verdict.culprits] == [0]
    assert "the one to set the key of the store that ranks 1-2 wait for" in verdict.summary


def test_a_key_of_the_store_that_all_ranks_wait_for() -> None:
    source = "def wait():\n    if rank == 0 and names:\n        store.set('names', '1')\n    store.wait(['names'])\n"
    everyone = job(*(at_store(number, 4) for number in range(3)))
    verdict = diagnose(everyone, lambda path: source)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("blocking-io", [0])
    assert "Rank 0 alone sets it, at train.py:3, behind `if rank == 0 and names (train.py:2)`." in verdict.summary
    verdict = diagnose(everyone, lambda path: source.replace("rank == 0 and ", ""))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert "Nobody has set it: train.py:3 does, under `if names (train.py:2)`." in verdict.summary
    assert verdict.suggestions[0].startswith("Find out which rank should set this key")
    assert not any("outside the job" in text for text in verdict.suggestions)


def test_a_thread_that_keeps_a_rank_from_its_end() -> None:
    queue = (
        Frame(f"{STDLIB}/threading.py", 327, "wait"),
        Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
        at(18, "upload"),
    )
    shutdown = (Frame(f"{STDLIB}/threading.py", 1590, "_shutdown"),)
    kept = rank(1, shutdown, "futex", threads=[("upload", queue, "futex")])
    gone = rank(0, seen=False, more={"exit": RankExit(0, 90.0)})
    verdict = diagnose(job(gone, kept))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("stuck-in-user-code", [1])
    assert verdict.summary.startswith(
        "Rank 1 has ended its script, and its thread 'upload' keeps it from exiting: it waits for a queue at train.py"
    )
    assert verdict.suggestions[0].startswith("Make the thread a daemon")
    waited_for = diagnose(with_culprit(structs.replace(kept, flight_record=behind()), 3))
    assert waited_for.cause == "uneven-batches", "its peers wait for it in a collective"
