"""A rank that blocks its peers by itself: cause, rank and line, at any place in the job."""

from __future__ import annotations

import pytest

from safelaunch.model import Frame, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    MODULE,
    STDLIB,
    at,
    behind,
    in_user,
    rank,
    with_culprit,
)

# --- threads and locks ------------------------------------------------------------------------------------------------

JOIN = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), *in_user(20, "wait_all"))


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
def test_lock_wait_is_followed_to_the_holding_thread(
    inside: tuple[Frame, ...], kernel: str, cause: str, does: str
) -> None:
    holder = ("producer", (*inside, at(4, "Buffer.put"), THREAD), kernel)
    beside = ("logger", (at(6, "Buffer.log"), THREAD), "futex")
    verdict = locked(at(6, "Buffer.log"), threads=[beside, holder])
    assert place_of(verdict) == (cause, 4)
    told = "waits for a lock (`self.lock`) at train.py:6 (Buffer.log); its thread 'producer' has held it since line 3"
    assert f"{told} and {does}" in verdict.summary
    assert verdict.suggestions[0].startswith("Don't block while holding a lock")


def test_join_while_holding_a_needed_lock_is_a_deadlock() -> None:
    verdict = locked(JOIN[0], at(18, "Buffer.close"), threads=[("t", (at(6, "Buffer.log"), THREAD), "futex")])
    assert place_of(verdict) == ("lock-deadlock", 18)
    assert "its thread 't' waits for a lock (`self.lock`) at train.py:6 (Buffer.log); its main thread has held it" in (
        verdict.summary
    )
    assert verdict.suggestions[0].startswith("Don't block while holding a lock")


def test_lock_already_taken_by_its_thread_is_a_deadlock() -> None:
    verdict = locked(at(30, "Other.swap"), threads=[])
    assert place_of(verdict) == ("lock-deadlock", 30)
    assert "which it already took at train.py:29" in verdict.summary
    assert verdict.suggestions[0].startswith("Release the lock before taking it again, or make it an `RLock`")


# --- advice that fits -------------------------------------------------------------------------------------------------
