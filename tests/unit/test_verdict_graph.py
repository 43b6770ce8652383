"""The graph of waits: walks and circles, and what they lead to over files and background threads."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import (
    C10D,
    SITE,
    STDLIB,
    WRAPPER,
    at,
    behind,
    entry,
    in_loader,
    in_user,
    in_worker,
    job,
    past,
    process,
    rank,
    record,
    waiting,
)
from msgspec import structs

from safelaunch.model import Evidence, FileLock, Frame, ProcessEvidence, RankEvidence, Verdict
from safelaunch.report.overview import overview
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.graph import Edge, Graph


def graph(text: str) -> Graph:
    """``"a>bc b>c"``: a waits for b and c, b for c."""
    parts = (word.split(">") for word in text.split())
    return Graph(Edge(of, tuple(on), "call") for of, on in parts)


@pytest.mark.parametrize(
    ("edges", "sinks"),
    [
        ("a>b", ["b"]),
        ("a>bc b>c", ["c"]),
        ("a>b b>a", ["ab"]),
        ("a>b b>c c>b", ["bc"]),
        ("a>b b>ac", ["c"]),
        ("a>b c>d d>c", ["b", "cd"]),
        ("a>a", ["a"]),
        ("", []),
    ],
)
def test_every_wait_ends_somewhere_or_in_a_circle(edges: str, sinks: list[str]) -> None:
    assert ["".join(sorted(map(str, sink))) for sink in graph(edges).sinks] == sinks


@pytest.mark.parametrize(("edges", "path"), [("a>b b>c", "bc"), ("b>c", ""), ("a>b b>a", "ba"), ("a>cb", "c")])
def test_a_walk_ends_where_nobody_waits_or_a_circle_closes(edges: str, path: str) -> None:
    assert "".join(str(edge.on[0]) for edge in graph(edges).path("a")) == path


def test_long_chains_need_no_recursion() -> None:
    chain = Graph(Edge(n, (n + 1,), "call") for n in range(20_000))
    assert chain.sinks == ((20_000,),)
    assert len(chain.path(0)) == 20_000


def decided(verdict: Verdict) -> tuple[str, list[tuple[int, int]], str]:
    """Cause, (rank, line) of the culprits, confidence."""
    culprits = [(one.rank, one.frame.line if one.frame else 0) for one in verdict.culprits]
    return verdict.cause, culprits, verdict.confidence


# --- files ------------------------------------------------------------------------------------------------------------

DATABASE = "/data/cache.db"


def with_locks(one: ProcessEvidence, *locks: FileLock) -> ProcessEvidence:
    return structs.replace(one, states=tuple(structs.replace(state, locks=locks) for state in one.states))


def has_locked(one: RankEvidence, path: str = DATABASE) -> RankEvidence:
    assert one.main is not None
    return structs.replace(one, main=with_locks(one.main, FileLock(path, one.pid)))


def asks_again(number: int, holder: int, native: tuple[Frame, ...] = (), **fields: Any) -> RankEvidence:
    """Waits for rank 1's database as sqlite does: short sleeps, in C."""
    one = rank(number, in_user(9, "write"), fields.pop("kernel", "nap"), flight=behind(), native=native, **fields)
    assert one.main is not None
    return structs.replace(one, main=with_locks(one.main, FileLock(DATABASE, holder)))


SQLITE = (Frame("/usr/lib/libc.so.6", 0, "clock_nanosleep"), Frame("/usr/lib/libsqlite3.so.0", 0, "sqlite3_step"))
SLEEPS = (Frame("/usr/lib/libc.so.6", 0, "clock_nanosleep"), Frame("/usr/lib/libpython3.11.so", 0, "time_sleep"))


@pytest.mark.parametrize("native", [(), SQLITE])
def test_who_asks_again_and_again_for_a_lock_waits_for_its_holder(native: tuple[Frame, ...]) -> None:
    holder = has_locked(rank(1, in_user(7), "sleep", flight=behind()))
    verdict = diagnose(job(asks_again(0, 1010, native), holder, waiting(2)))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 7)], "high" if native else "medium")
    assert "with a file locked that rank 0 waits for" in verdict.summary
    assert any(
        claim.claim == f"rank 0: it has {DATABASE} open, which process 1010 has locked" for claim in verdict.evidence
    )


def test_a_database_locked_in_a_collective_that_its_peers_cannot_come_to() -> None:
    verdict = diagnose(job(asks_again(0, 1010, SQLITE), waiting(1, line=23), asks_again(2, 1010, SQLITE)))
    assert decided(verdict) == ("lock-deadlock", [(0, 9), (1, 23), (2, 9)], "medium")


@pytest.mark.parametrize(
    ("native", "kernel"), [(SLEEPS, "nap"), ((), "sleep")], ids=["Python's own sleep", "a long sleep"]
)
def test_a_sleep_beside_a_locked_file_is_a_sleep(native: tuple[Frame, ...], kernel: str) -> None:
    verdict = diagnose(job(asks_again(0, 1010, native, kernel=kernel), waiting(1), waiting(2)))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(0, 9)])


def test_a_lock_that_no_rank_holds() -> None:
    verdict = diagnose(job(asks_again(0, 4711), waiting(1), waiting(2)))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "medium")
    assert "/data/cache.db, locked by pid 4711, which is not one of this job's ranks" in verdict.summary


def with_child(number: int, frames: tuple[Frame, ...], kernel: str) -> RankEvidence:
    """A rank that waits in the barrier, with a child whose pid is 77."""
    return waiting(number, "barrier", line=23, children=[process(77, frames, kernel, role="child")])


def test_a_lock_that_a_child_of_a_waiting_rank_holds() -> None:
    """The barrier is not what keeps the file locked: the child is named, with its line."""
    verdict = diagnose(job(asks_again(0, 77, SQLITE), with_child(1, in_user(31), "sleep"), asks_again(2, 77, SQLITE)))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 31)], "high")
    assert (verdict.culprits[0].process, verdict.culprits[0].pid, verdict.victims) == ("child (pid 77)", 77, "0,2")


def test_a_lock_held_by_a_child_that_waits_for_what_its_rank_sends() -> None:
    message = Frame(f"{STDLIB}/multiprocessing/connection.py", 250, "Connection.recv")
    verdict = diagnose(job(asks_again(0, 77, SQLITE), with_child(1, (message, *in_user(31)), "pipe")))
    assert decided(verdict) == ("lock-deadlock", [(0, 9), (1, 23)], "medium")


def test_ranks_that_hold_what_each_other_needs() -> None:
    verdict = diagnose(job(asks_again(0, 1010, SQLITE), asks_again(1, 1000, SQLITE), waiting(2)))
    assert decided(verdict) == ("lock-deadlock", [(0, 9), (1, 9)], "medium")


FILELOCK = (Frame(f"{SITE}/filelock/_api.py", 350, "BaseFileLock.acquire"), *in_user(9, "download"))


def test_the_library_filelock_waits_for_the_only_rank_that_holds_one() -> None:
    waiters = [rank(n, FILELOCK, "nap", flight=behind()) for n in (0, 2)]
    verdict = diagnose(job(waiters[0], has_locked(waiting(1, "barrier", line=23), "/hub/model.lock"), waiters[1]))
    assert decided(verdict) == ("lock-deadlock", [(0, 9), (1, 23), (2, 9)], "medium")
    assert any("alone has a file locked: /hub/model.lock" in claim.claim for claim in verdict.evidence)


def on_two_nodes(*ranks: RankEvidence) -> Evidence:
    """The last one is on a node of its own."""
    return job(*(structs.replace(one, host="a" if one is not ranks[-1] else "b") for one in ranks))


@pytest.mark.parametrize("stack", [FILELOCK, in_user(9, "write")], ids=["filelock", "sqlite"])
def test_a_lock_on_a_file_that_nodes_share_is_known_to_its_holders_node_alone(stack: tuple[Frame, ...]) -> None:
    native = SQLITE if stack is not FILELOCK else ()
    waiters = [rank(n, stack, "nap", flight=behind(), native=native) for n in (0, 2)]
    verdict = diagnose(on_two_nodes(waiters[0], waiters[1], has_locked(waiting(1, "barrier", line=23))))
    assert decided(verdict) == ("lock-deadlock", [(0, 9), (1, 23), (2, 9)], "medium")


@pytest.mark.parametrize(("path", "named"), [(DATABASE, [1]), ("/tmp/other.db", [0, 1])])
def test_a_lock_that_a_rank_of_another_node_has_on_a_file_of_this_name(path: str, named: list[int]) -> None:
    waits = rank(0, in_user(9, "write"), "flock-elsewhere", flight=behind())
    holder = has_locked(rank(1, in_user(7), "sleep", flight=behind()), path)
    verdict = diagnose(on_two_nodes(waits, waiting(2), holder))
    assert [one.rank for one in verdict.culprits] == named, verdict.summary


@pytest.mark.parametrize("holders", [(), (1, 2)])
def test_where_several_or_none_hold_a_lock_nobody_is_guessed(holders: tuple[int, ...]) -> None:
    others = [has_locked(waiting(n)) if n in holders else waiting(n) for n in (1, 2)]
    verdict = diagnose(job(rank(0, FILELOCK, "nap", flight=behind()), *others))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(0, 9)])
    assert ("a dead one left its lock file behind" in verdict.summary) == (not holders)
    assert any("SoftFileLock" in advice for advice in verdict.suggestions) == (not holders)


# --- background threads -----------------------------------------------------------------------------------------------

JOIN = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), *in_user(20, "save"))
QUEUE = (
    Frame(f"{STDLIB}/threading.py", 320, "Condition.wait"),
    Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
    *in_user(20),
)
LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), *in_user(20))
RUN = Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
SYNC = (Frame(C10D, 3252, "all_reduce"), WRAPPER, at(31, "sync"), RUN)
CHECKPOINT = (
    Frame(C10D, 2810, "gather_object"),
    WRAPPER,
    Frame(f"{SITE}/torch/distributed/checkpoint/utils.py", 180, "gather_object"),
    Frame(f"{STDLIB}/concurrent/futures/thread.py", 58, "_WorkItem.run"),
    RUN,
)
GROUPS = {"0": (0, 1, 2), "5": (0, 1)}


def side(number: int, *more: Any) -> Any:
    """The record of a rank that has done three steps in the world and two rounds in group 5."""
    rounds = [structs.replace(entry("all_reduce", n, group="5", line=31, done=True)) for n in (1, 2)]
    return record(*past(3), *rounds, *more, groups={"0": GROUPS["0"], **({"5": GROUPS["5"]} if number < 2 else {})})


PENDING = entry("all_reduce", 3, group="5", line=31)
STEP = entry("all_reduce", 4, line=50)


def joins(number: int, frames: tuple[Frame, ...] = JOIN, thread: tuple[Frame, ...] = SYNC) -> RankEvidence:
    """Its main thread waits for a thread that is in the third round of group 5."""
    return rank(number, frames, flight=side(number, PENDING), threads=[("sync", thread, "futex")])


@pytest.mark.parametrize("frames", [JOIN, QUEUE, LOCK], ids=["join", "queue", "lock"])
def test_a_thread_in_a_collective_is_a_wait_for_peers(frames: tuple[Frame, ...]) -> None:
    """Rank 1 joins a thread that waits in group 5 for rank 0, which sleeps; rank 2 waits for both."""
    asleep = rank(0, in_user(7), "sleep", flight=side(0))
    verdict = diagnose(job(asleep, joins(1, frames), waiting(2, flight=side(2, STEP))))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 7)], "high")
    assert verdict.victims == "1-2"
    assert "rank 1 waits in all_reduce at train.py:31 (sync) in a thread of its own" in verdict.summary
    assert any(claim.claim == "rank 1: its thread 'sync' waits at train.py:31 (sync)" for claim in verdict.evidence)


def test_a_checkpoint_written_meanwhile_is_a_wait_for_peers() -> None:
    """No frame of its thread is the user's."""
    future = (Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "Future.result"), *in_user(20))
    asleep = rank(0, in_user(7), "sleep", flight=side(0))
    verdict = diagnose(job(asleep, *(rank(n, future, threads=[("dcp", CHECKPOINT, "futex")]) for n in (1, 2))))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(0, 7)])


@pytest.mark.parametrize("kernel", ["sleep", "pipe"])
def test_a_background_thread_that_does_not_come_holds_up_all(kernel: str) -> None:
    """Rank 0 is where it should be; its thread is not, so rank 1's thread waits, and rank 1, and so all of them."""
    step = waiting(0, flight=side(0, STEP), threads=[("sync", (at(37, "compress"), at(30, "sync"), RUN), kernel)])
    thread = (*SYNC[:2], at(31, "reduce"), at(30, "sync"), RUN)
    verdict = diagnose(job(step, joins(1, thread=thread), waiting(2, flight=side(2, STEP))))
    cause = {"sleep": "stuck-in-user-code", "pipe": "blocking-io"}[kernel]
    assert decided(verdict) == (cause, [(0, 37)], "high")
    assert "Rank 0 waits in all_reduce at train.py:50 (train), and its thread 'sync' is" in verdict.summary
    assert verdict.victims == "1-2"


def test_a_background_thread_that_is_fed_by_its_main_thread_is_not_at_fault() -> None:
    idle = (Frame(f"{STDLIB}/queue.py", 171, "Queue.get"), at(30, "sync"), RUN)
    step = waiting(0, flight=side(0, STEP), threads=[("sync", idle, "futex")])
    verdict = diagnose(job(step, joins(1), waiting(2, flight=side(2, STEP))))
    assert verdict.cause == "group-order"


def test_a_thread_that_ends_by_itself_is_still_at_fault() -> None:
    """The join of a thread that is in no collective says where that thread is."""
    sleeper = rank(1, JOIN, flight=side(1), threads=[("sync", (at(31, "sync"), RUN), "sleep")])
    verdict = diagnose(job(waiting(0, flight=side(0, STEP)), sleeper, waiting(2, flight=side(2, STEP))))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 31)], "high")


def test_a_thread_that_waits_for_a_child_is_followed_into_it() -> None:
    runs = (Frame(f"{STDLIB}/subprocess.py", 1, "Popen.wait"), at(31, "sync"), RUN)
    child = process(77, in_user(44, "convert"), "sleep", role="child")
    sleeper = rank(1, JOIN, flight=side(1), threads=[("sync", runs, "wait4")], children=[child])
    verdict = diagnose(job(waiting(0, flight=side(0, STEP)), sleeper))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(1, 44)])
    assert verdict.culprits[0].process == "child (pid 77)"


def test_a_thread_that_loads_is_followed_to_the_worker() -> None:
    worker = process(91, in_worker(12), "pipe", role="dataloader worker")
    thread = (*in_loader(31)[:4], at(31, "prefetch"), RUN)
    waits = rank(1, JOIN, flight=side(1), threads=[("prefetch", thread, "poll")], children=[worker])
    verdict = diagnose(job(waiting(0, flight=side(0, STEP)), waits))
    assert (verdict.cause, verdict.culprits[0].process) == ("data-loading", "dataloader worker (pid 91)")
    assert "its thread 'prefetch' waits for its DataLoader; worker 91 is blocked in I/O" in verdict.summary


def test_the_overview_says_what_such_a_rank_waits_in() -> None:
    rows = overview(job(joins(0), joins(1))).rows
    assert [row.doing for row in rows] == ["waits in all_reduce at train.py:31 (sync) in a thread of its own"] * 2


def test_the_lock_of_a_build_that_nobody_makes_is_told_with_its_file() -> None:
    stack = (
        Frame(f"{SITE}/torch/utils/file_baton.py", 50, "FileBaton.wait"),
        Frame(f"{SITE}/torch/utils/cpp_extension.py", 1800, "_jit_compile"),
        *in_user(9, "build"),
    )
    ranks = []
    for number in range(2):
        one = rank(number, stack, "nap")
        assert one.main is not None
        stacks = tuple(
            structs.replace(
                sample, threads=tuple(structs.replace(thread, lock_file="/ext/m/lock") for thread in sample.threads)
            )
            for sample in one.main.stacks
        )
        ranks.append(structs.replace(one, main=structs.replace(one.main, stacks=stacks)))
    verdict = diagnose(job(*ranks))
    assert verdict.cause == "no-rank-stands-out" and "the lock file /ext/m/lock is still there" in verdict.summary
    assert verdict.suggestions[0].startswith("Delete that lock file if no process is building the extension")
    beside = diagnose(job(ranks[0], waiting(1)))
    assert (beside.cause, beside.suggestions[0]) == ("stuck-in-user-code", verdict.suggestions[0])
