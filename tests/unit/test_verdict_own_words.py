"""What ranks at fault say of the reason themselves: an exception that is being handled, a thread that has died."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from evidence import MODULE, STDLIB, Frame, at, in_c10d, in_user, job, rank, waiting

from safelaunch.model import GilTest, HandledException, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.reading.tracebacks import of_threads

MAIN = 7001
RAISED = (at(14, "batch"), at(20, "train"))
LOG = """13:00:49.591 err| Exception in thread prefetch:
13:00:49.591 err| Traceback (most recent call last):
13:00:49.592 err|   File "/usr/lib/python3.11/threading.py", line 982, in run
13:00:49.592 err|     self._target(*self._args, **self._kwargs)
13:00:49.592 err|   File "/home/me/data.py", line 28, in read_records
13:00:49.592 err|     n = int(header)
13:00:49.592 err|         ^^^^^^^^^^^
13:00:49.592 err| ValueError: invalid literal for int() with base 10: '<html>'
13:00:50.000 out| step 77
"""
IN_QUEUE = (
    Frame(f"{STDLIB}/threading.py", 327, "Condition.wait"),
    Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
    at(21, "Prefetch.__iter__"),
    MODULE,
)


def in_finally(thread: int, ident: int = MAIN) -> RankEvidence:
    handled = HandledException(thread, "ValueError", "label 17 out of range", RAISED)
    one = rank(1, in_c10d("barrier", 24, "close"), gil=GilTest(True, True, (handled,)))
    assert one.main is not None
    stacks = tuple(
        msgspec.structs.replace(sample, threads=(msgspec.structs.replace(sample.threads[0], ident=ident),))
        for sample in one.main.stacks
    )
    return msgspec.structs.replace(one, main=msgspec.structs.replace(one.main, stacks=stacks))


def test_an_exception_that_is_handled_where_the_rank_waits() -> None:
    verdict = diagnose(job(waiting(0, flight=None), in_finally(MAIN), waiting(2, flight=None)))
    assert [c.rank for c in verdict.culprits] == [1]
    assert "Rank 1 does so while it handles ValueError: label 17 out of range, raised at train.py:14" in verdict.summary
    assert any(claim.file == "ranks/1/rank.json" and "ValueError" in claim.claim for claim in verdict.evidence)


@pytest.mark.parametrize(("thread", "ident"), [(7002, MAIN), (MAIN, 0)])
def test_an_exception_of_another_thread_is_not_told(thread: int, ident: int) -> None:
    verdict = diagnose(job(waiting(0, flight=None), in_finally(thread, ident), waiting(2, flight=None)))
    assert "ValueError" not in verdict.summary


@pytest.mark.parametrize(("log", "told"), [(LOG, True), ("", False), (LOG.replace("Exception in", "About"), False)])
def test_the_exception_that_ended_a_thread_for_which_the_rank_waits(log: str, told: bool) -> None:
    odd = rank(1, IN_QUEUE, more={"log_tail": log})
    verdict = diagnose(job(waiting(0), odd))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("lock-deadlock", [1])
    error = "ValueError: invalid literal for int() with base 10: '<html>' at data.py:28"
    assert (f"Its thread 'prefetch' has ended by {error}" in verdict.summary) == told


def test_a_rank_that_waits_for_no_thread_of_its_own_has_lost_none_that_matters() -> None:
    verdict = diagnose(job(waiting(0), rank(1, in_user(7), "sleep", more={"log_tail": LOG})))
    assert "prefetch" not in verdict.summary


@pytest.mark.parametrize("cut", range(0, len(LOG), 37))
def test_a_log_that_is_cut_off_makes_nothing_up(cut: int) -> None:
    for text in (LOG[:cut], LOG[cut:]):
        for found in of_threads(text):
            assert all(frame.file in LOG for frame in found.frames)


# --- past the end of the script ---------------------------------------------------------------------------------------


def at_exit(**fields: Any) -> RankEvidence:
    frames = (Frame(f"{STDLIB}/threading.py", 1119, "Thread.join"), at(32, "Run.finish"))
    upload = (at(28, "Run._upload"), at(40, "Run._work"))
    return rank(0, frames, threads=[("uploader", upload, "connect")], page="exited", **fields)


def test_a_rank_past_its_end_that_nobody_waits_for_is_held_by_what_it_does_there() -> None:
    verdict = diagnose(job(at_exit(), rank(1, in_user(7), "sleep", page="exited")))
    reasons = {c.rank: c.reason for c in verdict.culprits}
    assert verdict.cause != "uneven-batches"
    assert not reasons or "has ended its script, and waits for Thread.join at train.py:32" in reasons[0]


def test_a_rank_past_its_end_that_peers_wait_for_has_left_the_loop() -> None:
    verdict = diagnose(job(at_exit(), waiting(1), waiting(2)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [0])
