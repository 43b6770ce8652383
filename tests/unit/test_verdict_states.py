"""A rank that holds up its peers by its own doing: cause, rank and line, wherever in the job it is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from safelaunch.model import Frame, RankEvidence, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    MODULE,
    SCRIPT,
    SITE,
    STDLIB,
    at,
    behind,
    in_c10d,
    in_init,
    in_user,
    job,
    process,
    rank,
    waiting,
    with_culprit,
)

# --- threads and locks ------------------------------------------------------------------------------------------------

JOIN = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), *in_user(20, "wait_all"))
OTHER = (at(31, "other"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))


def culprit_of(**fields: Any) -> tuple[str, int, str]:
    frames = fields.pop("frames")
    verdict = diagnose(with_culprit(rank(1, frames, "futex", flight=behind(), **fields), 3))
    assert [c.rank for c in verdict.culprits] == [1]
    frame = verdict.culprits[0].frame
    assert frame is not None
    return verdict.cause, frame.line, verdict.confidence


def test_a_thread_that_computes_may_hold_the_lock() -> None:
    frames = (Frame(f"{STDLIB}/threading.py", 1, "_RLock.acquire"), *in_user(20))
    assert culprit_of(frames=frames, threads=[("indexer", OTHER, "run")]) == ("lock-deadlock", 20, "medium")


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
    def swap(self):
        with self.lock:
            with self.lock:
                pass
"""
THREAD = Frame(f"{STDLIB}/threading.py", 982, "Thread.run")
PUT = Frame(f"{STDLIB}/queue.py", 140, "Queue.put")


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
    assert verdict.suggestions[0].startswith("Don't block with a lock held")


def test_a_join_with_the_lock_held_that_the_thread_needs() -> None:
    verdict = locked(JOIN[0], at(18, "Buffer.close"), threads=[("t", (at(6, "Buffer.log"), THREAD), "futex")])
    assert place_of(verdict) == ("lock-deadlock", 18)
    assert "its thread 't' waits for a lock (`self.lock`) at train.py:6 (Buffer.log); its main thread has held it" in (
        verdict.summary
    )
    assert verdict.suggestions[0].startswith("Don't block with a lock held")


def test_a_lock_that_the_thread_has_taken_itself() -> None:
    verdict = locked(at(30, "Other.swap"), threads=[])
    assert place_of(verdict) == ("lock-deadlock", 30)
    assert "which it has taken itself at train.py:29" in verdict.summary
    assert verdict.suggestions[0].startswith("Release the lock before taking it again, or make it an `RLock`")


# --- child processes --------------------------------------------------------------------------------------------------

MESSAGE = (
    Frame(f"{STDLIB}/multiprocessing/connection.py", 395, "Connection._recv"),
    Frame(f"{STDLIB}/multiprocessing/queues.py", 103, "Queue.get"),
)
TRACKER = process(71, (Frame("<string>", 1, "<module>"),), "pipe", role="resource tracker")


def parent(frames: tuple[Frame, ...], kernel: str, *children: Any) -> Verdict:
    verdict = diagnose(with_culprit(rank(1, frames, kernel, flight=behind(), children=children), 3))
    assert [c.rank for c in verdict.culprits] == [1]
    return verdict


def test_a_child_that_is_dead_sends_nothing() -> None:
    verdict = parent((*MESSAGE, *in_user(7)), "pipe", TRACKER, process(72, (), "zombie", role="child"))
    assert (verdict.cause, verdict.culprits[0].frame) == ("blocking-io", at(7))
    assert "its child process 72 has ended and has not been reaped" in verdict.summary
    assert any(claim.claim.endswith("child process 72: state Z") for claim in verdict.evidence)


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_ranks_unseen_at_init_are_listed_not_blamed() -> None:
    verdict = diagnose(job(rank(0, in_init(), "poll"), rank(2, in_init(), "poll"), missing_ranks=(1, 3)))
    assert (verdict.cause, verdict.culprits) == ("init-not-joined", ())
    assert any("1,3" in text for text in verdict.missing)


def making_store(number: int) -> RankEvidence:
    """A rank that sleeps between two attempts to reach the store of init_process_group."""
    store = Frame(f"{SITE}/torch/distributed/rendezvous.py", 190, "_create_c10d_store")
    return rank(number, (store, *in_init()[1:]), "sleep", step=None, told={"ends_in_s": 3.0})


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


# --- leaving, and nobody ----------------------------------------------------------------------------------------------


def test_an_odd_one_out_without_waits_is_named_with_low_confidence() -> None:
    ranks = [rank(n, in_user(7), "sleep") for n in range(4)]
    ranks[2] = rank(2, in_user(9), "pipe")
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == ("blocking-io", [2], "low")
    unseen = diagnose(job(*ranks, world=5, missing_ranks=(4,)))
    assert unseen.culprits == ()


def test_no_evidence_at_all() -> None:
    verdict = diagnose(job(rank(0, seen=False), rank(1, seen=False)))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert diagnose(job(world=2, missing_ranks=(0, 1))).cause == "no-rank-stands-out"


# --- advice that fits -------------------------------------------------------------------------------------------------

FUTURE = (Frame(f"{STDLIB}/threading.py", 327, "wait"), Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "result"))
LOOP = (
    Frame(f"{STDLIB}/asyncio/events.py", 80, "Handle._run"),
    Frame(f"{STDLIB}/asyncio/base_events.py", 1922, "BaseEventLoop._run_once"),
    Frame(f"{STDLIB}/asyncio/base_events.py", 607, "BaseEventLoop.run_forever"),
)


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
    polls = {"fd": 3, "fd_target": "tcp6 [::1]:36420 -> [::1]:41283 (established)"}
    names = tuple(values.items())
    return rank(number, in_user(line, "wait"), "poll", flight=behind(), told=polls, names=names)


def test_a_key_of_the_store_that_all_ranks_wait_for() -> None:
    source = "def wait():\n    if rank == 0 and names:\n        store.set('names', '1')\n    store.wait(['names'])\n"
    everyone = job(*(at_store(number, 4) for number in range(3)))
    verdict = diagnose(everyone, lambda path: source)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("blocking-io", [0])
    assert "Rank 0 alone sets it, at train.py:3, behind `if rank == 0 and names (train.py:2)`." in verdict.summary
    verdict = diagnose(everyone, lambda path: source.replace("rank == 0 and ", ""))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert "Nobody has set it: train.py:3 does, under `if names (train.py:2)`." in verdict.summary
    assert verdict.suggestions[0].startswith("Find which rank should set this key")
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


def test_a_thread_that_waits_for_peers_with_a_lock_held_which_its_main_thread_wants() -> None:
    source = "def sync():\n    with L:\n        dist.all_reduce(x)\ndef train():\n    with L:\n        step()\n"
    syncs = (*in_c10d("all_reduce", 3)[:2], at(3, "sync"), Frame(f"{STDLIB}/threading.py", 982, "Thread.run"))
    main = rank(1, (at(5, "train"), MODULE), "futex", threads=[("stats", syncs, "futex")])
    verdict = diagnose(job(waiting(0, flight=None), main), lambda path: source if path == SCRIPT else None)
    words = "which has held since line 2 the lock for which its main thread waits at train.py:5 (train)"
    assert words in verdict.summary
    assert verdict.suggestions[0].startswith("Don't block with a lock held")
