"""Several threads of a rank in collectives: whose call is whose, and two that race in one group."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from evidence import C10D, LOGGER, MODULE, at, in_c10d, in_user, job, rank, record

from safelaunch.capture.flight_dump import parse_json, to_json
from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence, StackSample
from safelaunch.verdict.diagnose import diagnose

MAIN, OTHER = 7001, 7002


def made(text: str, *, frames: bool = True) -> tuple[Collective, ...]:
    """``"a50 b9*"``: the main thread called at line 50, the other one at line 9 and has not completed it."""
    found = []
    for number, word in enumerate(text.split(), 1):
        thread, line = (MAIN if word[0] == "a" else OTHER), int(word[1:].rstrip("*"))
        outer = MODULE if thread == MAIN else at(100, "publish_metrics")
        stack = (Frame(C10D, 3245, "all_reduce"), Frame(LOGGER, 83, "wrapper"), at(line), outer)
        one = Collective("0", number, "gloo:all_reduce", completed=not word.endswith("*"), state="scheduled")
        more: dict[str, Any] = {"record_id": number, "input_sizes": ((line,),), "input_dtypes": ("Float",)}
        found.append(msgspec.structs.replace(one, frames=stack if frames else (), thread=thread, **more))
    return tuple(found)


def of_threads(number: int, text: str, *, main: int, other: int, flight: FlightRecord | None = None) -> RankEvidence:
    """Both threads of the rank wait in an all_reduce: the main one at line ``main``."""
    metrics = (*in_c10d("all_reduce", other)[:3], at(100, "publish_metrics"))
    one = rank(
        number,
        in_c10d("all_reduce", main),
        flight=flight or record(*made(text)),
        threads=[("metrics", metrics, "futex")],
    )
    assert one.main is not None
    stacks = tuple(map(_with_idents, one.main.stacks))
    return msgspec.structs.replace(one, main=msgspec.structs.replace(one.main, stacks=stacks))


def _with_idents(sample: StackSample) -> StackSample:
    named = zip(sample.threads, (MAIN, OTHER), strict=True)
    threads = tuple(msgspec.structs.replace(thread, ident=ident) for thread, ident in named)
    return msgspec.structs.replace(sample, threads=threads)


def racing(*orders: str) -> list[RankEvidence]:
    return [of_threads(n, order, main=50, other=9) for n, order in enumerate(orders)]


@pytest.mark.parametrize(
    "orders",
    [
        ("a50 b9 a50* b9*", "a50 b9 b9* a50*"),
        ("a50 b9 a50* b9*", "a50 b9 b9* a50*", "a50 b9 a50* b9*", "a50 b9 b9* a50*"),
        ("a50 b9 a50* b9*", "a50 b9 b9* a50*", "a50 b9 a50* b9*"),  # a majority says nothing here
    ],
)
def test_two_threads_that_race_in_one_group(orders: tuple[str, ...]) -> None:
    verdict = diagnose(job(*racing(*orders)))
    assert (verdict.cause, verdict.culprits, verdict.confidence) == ("collective-mismatch", (), "high")
    assert "Two threads of each rank call collectives of group '0', in no fixed order: collective #3" in verdict.summary
    assert "give each its own group" in verdict.suggestions[0]
    assert verdict.victims == f"0-{len(orders) - 1}"


@pytest.mark.parametrize(
    "orders",
    [
        ("a50 b9 a50* b9*", "a50 b9 b9*", "a50 b9 a50* b9*"),  # rank 1 has not made a call that its peers made
        ("a50 b9 a50*", "a50 b9 a51*", "a50 b9 a50*"),  # one thread made another call
        ("a50 a51 a50*", "a50 a51 a51*", "a50 a51 a50*"),  # one thread alone
    ],
)
def test_what_is_no_race(orders: tuple[str, ...]) -> None:
    verdict = diagnose(job(*racing(*orders)))
    assert not any("a group of its own" in text for text in verdict.suggestions)
    assert "in no fixed order" not in verdict.summary


def test_without_frames_the_threads_cannot_be_told() -> None:
    plain = [
        of_threads(n, "", main=50, other=9, flight=record(*made(order, frames=False)))
        for n, order in enumerate(("a50* b9*", "b9* a50*"))
    ]
    assert "in no fixed order" not in diagnose(job(*plain)).summary


EXECUTOR = Frame("/usr/lib/python3.11/concurrent/futures/thread.py", 58, "run")
STARTED = Frame("/usr/lib/python3.11/threading.py", 1002, "_bootstrap")


def of_library(one: Collective, begin: str, thread: int) -> Collective:
    """Called by a thread that runs nothing of the user's: it begins in a function of torch's."""
    saver = Frame("/env/lib/python3.11/site-packages/torch/distributed/checkpoint/saver.py", 30, begin)
    return msgspec.structs.replace(one, frames=(*one.frames[:2], saver, EXECUTOR, STARTED), thread=thread)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("one_thread", "races"),
    [(False, True), (True, False)],  # a single thread that calls in another order is no race
)
def test_a_thread_of_a_library_races_with_the_main_thread(backend: str, one_thread: bool, races: bool) -> None:
    """Threads have another number on each rank, and each checkpoint a thread of its own."""
    ranks = []
    for number, order in enumerate(["a50 b9 a50 b9* a50*", "a50 b9 a50 a50* b9*", "a50 b9 a50 b9* a50*"]):
        entries = []
        for count, one in enumerate(made(order)):
            call = msgspec.structs.replace(one, op=f"{backend}:all_reduce")
            if one.thread == OTHER:
                call = of_library(call, "save", MAIN if one_thread and count > 2 else 9000 + 10 * number + count)
            entries.append(call)
        ranks.append(rank(number, in_c10d("all_reduce", 50), flight=record(*entries)))
    verdict = diagnose(job(*ranks))
    assert ("in no fixed order" in verdict.summary) is races
    if races:
        assert (verdict.culprits, verdict.confidence) == ((), "high")
        assert "collective #4 of group '0' is all_reduce called from saver.py:30 (save) on ranks 0,2" in verdict.summary


def test_the_main_thread_is_not_given_the_call_of_another() -> None:
    """It rests in its own code; a metrics thread beside it waits in a broadcast of line 9."""
    engine = Frame("/env/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")
    flight = record(*made("a50 b9*"))
    metrics = (*in_c10d("all_reduce", 9)[:3], at(100, "publish_metrics"))
    asleep = rank(1, in_user(7), "sleep", flight=record(*made("a50")))
    both = rank(0, (engine, at(60), MODULE), flight=flight, threads=[("metrics", metrics, "futex")])
    assert both.main is not None
    stacks = tuple(map(_with_idents, both.main.stacks))
    told = msgspec.structs.replace(both, main=msgspec.structs.replace(both.main, stacks=stacks))
    assert "train.py:60" in diagnose(job(both, asleep)).summary  # nobody knows which thread called
    assert "all_reduce at train.py:60" not in diagnose(job(told, asleep)).summary


ENGINE = Frame("/env/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")
IN_QUEUE = (
    Frame("/usr/lib/python3.11/threading.py", 327, "Condition.wait"),
    Frame("/usr/lib/python3.11/queue.py", 171, "Queue.get"),
    at(80, "finish"),
    MODULE,
)


def trains_in_a_thread(number: int, frames: tuple[Frame, ...], kernel: str, *pending: Collective) -> RankEvidence:
    """Its main thread waits at a queue for results."""
    outer = at(100, "train_func")
    flight = record(*pending)
    one = rank(number, IN_QUEUE, flight=flight, threads=[("trainer", (*frames, outer), kernel)])
    assert one.main is not None
    stacks = tuple(map(_with_idents, one.main.stacks))
    return msgspec.structs.replace(one, main=msgspec.structs.replace(one.main, stacks=stacks))


def call_of_thread(line: int) -> Collective:
    (one,) = made(f"b{line}*")
    return msgspec.structs.replace(one, frames=(*one.frames[:-1], at(100, "train_func")))


def test_a_thread_in_a_backward_pass_waits_for_what_it_has_called() -> None:
    waits = [trains_in_a_thread(n, (ENGINE, at(41)), "futex", call_of_thread(41)) for n in (1, 2, 3)]
    odd = trains_in_a_thread(0, in_c10d("all_gather", 30)[:3], "futex", call_of_thread(30))
    verdict = diagnose(job(odd, *waits))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [0])
    assert "ranks 1-3 wait in all_reduce" in verdict.summary


def test_a_thread_that_sleeps_where_its_peers_threads_wait_for_it() -> None:
    waits = [trains_in_a_thread(n, (ENGINE, at(41)), "futex", call_of_thread(41)) for n in (0, 2, 3)]
    asleep = trains_in_a_thread(1, (at(13, "download"),), "sleep")
    verdict = diagnose(job(asleep, *waits))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])
    assert "its thread 'trainer' is asleep in train.py:13 (download)" in verdict.summary


def test_threads_come_back_from_a_dump() -> None:
    one = record(*made("a50 b9 a50*"))
    assert [entry.thread for entry in parse_json(to_json(one)).entries] == [MAIN, OTHER, MAIN]
    damaged = parse_json(to_json(one).replace(b'"7001"', b'"x"'))
    assert damaged.damaged == ("thread_id",)
    assert [entry.thread for entry in damaged.entries] == [0, OTHER, 0]
