"""A majority that parts itself: whether its members stand at one place and go on with the same calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from evidence import C10D, LOGGER, MODULE, SCRIPT, at, calls, entry, job, past, rank, record, waiting

from safelaunch.model import Collective, Frame, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "nccl"])
Lines = tuple[int, ...]


def made(backend: str, number: int, op: str, lines: Lines, *, done: bool = False) -> Collective:
    """``lines``: of the user's frames, innermost first."""
    stack = (Frame(C10D, 3245, op), Frame(LOGGER, 83, "wrapper"), *(at(line, f"of_{line}") for line in lines), MODULE)
    return msgspec.structs.replace(entry(f"{backend}:{op}", number, done=done), frames=stack)


def at_number_4(number: int, backend: str, *what: tuple[str, Lines], done: int = 0) -> RankEvidence:
    """A rank that made three calls like everybody and then ``what``, of which it has completed the first ``done``.

    NCCL queues what follows the one that it waits in.
    """
    own = [made(backend, 4 + n, op, lines, done=n < done) for n, (op, lines) in enumerate(what)]
    if backend == "nccl":
        own = [msgspec.structs.replace(one, started=n <= done) for n, one in enumerate(own)]
    op, lines = what[min(done, len(what) - 1)]
    frames = (Frame(C10D, 3252, op), *(at(line, f"of_{line}") for line in lines), MODULE)
    return rank(number, frames, flight=record(*past(3, f"{backend}:all_reduce"), *own))


def verdict_of(ranks: Sequence[RankEvidence], source: str = "") -> Verdict:
    return diagnose(job(*ranks), lambda path: source if path == SCRIPT else None)


def named(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits]


BROADCAST = ("broadcast", (48, 57))
GATHER = ("all_gather", (51, 57))
EXCHANGE = ("all_to_all", (45, 57))


@BACKENDS
def test_each_rank_in_an_order_of_its_own(backend: str) -> None:
    """Three of four broadcast first, and then each goes on with another call."""
    orders = [(BROADCAST, GATHER), (BROADCAST,), (BROADCAST, EXCHANGE), (GATHER, BROADCAST)]
    done = [1, 0, 1, 0] if backend == "gloo" else [0, 0, 0, 0]
    verdict = verdict_of([at_number_4(n, backend, *order, done=done[n]) for n, order in enumerate(orders)])
    assert (verdict.cause, named(verdict), verdict.confidence) == ("collective-mismatch", [], "medium")
    assert "From collective #4 of group '0' on, the ranks go 4 different ways, without a majority" in verdict.summary
    assert (
        "rank 0 broadcast at train.py:48 (of_48), then all_gather; rank 1 broadcast at train.py:48" in verdict.summary
    )
    assert verdict.victims == "0-3"


@BACKENDS
@pytest.mark.parametrize(
    ("orders", "odd"),
    [
        ([(BROADCAST, GATHER), (BROADCAST,), (BROADCAST, GATHER), (GATHER, BROADCAST)], [3]),  # they agree further on
        ([(BROADCAST, GATHER)] * 5 + [(BROADCAST, EXCHANGE), (GATHER,)], [6]),  # one of them parts: five of seven agree
        ([(BROADCAST,)] * 3 + [(GATHER,)], [3]),
    ],
)
def test_a_majority_that_agrees_outvotes(
    backend: str, orders: list[tuple[tuple[str, Lines], ...]], odd: list[int]
) -> None:
    done = [len(order) - 1 if order[0] == BROADCAST and backend == "gloo" else 0 for order in orders]
    verdict = verdict_of([at_number_4(n, backend, *order, done=done[n]) for n, order in enumerate(orders)])
    assert (verdict.cause, named(verdict), verdict.confidence) == ("collective-mismatch", odd, "high")


LAYERS = """def forward(x):
    for block in blocks:
        if training and random() < drop:
            continue
        x = block(x)
"""


def layers(number: int, backend: str, forward: int, *backward: str) -> RankEvidence:
    """It gathers ``forward`` times from line 30, then calls ``backward`` from line 62; it waits in its last call."""
    return at_number_4(
        number,
        backend,
        *[("all_gather", (30, 60))] * forward,
        *((op, (62,)) for op in backward),
        done=forward + len(backward) - 1,
    )


@BACKENDS
def test_the_condition_that_parted_them_is_told(backend: str) -> None:
    """A layer that each rank draws: under number 7 one is still on its way forward, two gather, and one reduces."""
    ranks = [
        layers(0, backend, 4),
        layers(1, backend, 3, "all_gather"),
        layers(2, backend, 2, "all_gather", "all_reduce"),
        layers(3, backend, 3, "all_gather"),
    ]
    verdict = verdict_of(ranks, "\n" * 25 + LAYERS)
    assert (verdict.cause, named(verdict), verdict.confidence) == ("collective-mismatch", [], "medium")
    assert "the ranks go 3 different ways, without a majority: rank 0 all_gather at" in verdict.summary


ENGINE = Frame("/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")


def in_hook(number: int, op: str, line: int, *, queued: bool) -> RankEvidence:
    """It made the call in a hook of a backward pass, and its main thread is at ``line``."""
    hook = Frame("/opt/venv/lib/python3.11/site-packages/torch/distributed/fsdp/hooks.py", 60, op)
    own = [entry("all_gather", 3, done=True), entry(op, 4)]  # it has gathered there before
    own = [msgspec.structs.replace(one, frames=(hook,), started=True if queued else None) for one in own]
    return rank(number, (ENGINE, at(line), MODULE), flight=record(*past(2), *own))


def test_by_the_stacks_where_the_call_came_from_a_thread_of_the_backward_pass() -> None:
    """Entries of such a thread have no user frames: where calls block, the main thread's stack says where the rank is.
    Behind a device's queue it may be anywhere.
    """
    apart, together = (("all_gather", 30), ("all_gather", 62)), (("all_gather", 62), ("all_gather", 62))
    odd = in_hook(2, "all_reduce", 62, queued=False)
    blocked = verdict_of([*(in_hook(n, op, line, queued=False) for n, (op, line) in enumerate(apart)), odd])
    assert (named(blocked), blocked.confidence) == ([], "medium")
    agreed = verdict_of([*(in_hook(n, op, line, queued=False) for n, (op, line) in enumerate(together)), odd])
    assert (named(agreed), agreed.confidence) == ([2], "high")
    odd = in_hook(2, "all_reduce", 62, queued=True)
    queued = verdict_of([*(in_hook(n, op, line, queued=True) for n, (op, line) in enumerate(apart)), odd])
    assert (named(queued), queued.confidence) == ([2], "high")


@BACKENDS
@pytest.mark.parametrize(
    ("places", "odd"),
    [
        (
            [("broadcast", (10,)), *[("broadcast", (12,))] * 2, ("all_gather", (41,))],
            3,
        ),  # the root calls from elsewhere
        ([*[("all_reduce", (10,))] * 5, ("all_reduce", (12,)), ("all_gather", (41,))], 6),  # five are a majority
    ],
)
def test_places_that_may_differ(backend: str, places: list[tuple[str, Lines]], odd: int) -> None:
    verdict = verdict_of([at_number_4(n, backend, what) for n, what in enumerate(places)])
    assert (named(verdict), verdict.confidence) == ([odd], "high")


@pytest.mark.parametrize(("before", "expected"), [("0@10", [3]), ("0@50", [])])
def test_places_that_have_met_before_agree(before: str, expected: list[int]) -> None:
    """Rank 0 reduces at line 10 and ranks 1 and 2 at line 12, by design if they did so before and it was well."""
    others = "0@12" if expected else "0@50"
    texts = [f"0@50x3 {before} 0@50 0@10*", *[f"0@50x3 {others} 0@50 0@12*"] * 2]
    ranks = [
        rank(n, (Frame(C10D, 3252, "all_reduce"), at(12 if n else 10), MODULE), flight=record(*calls(text)))
        for n, text in enumerate(texts)
    ]
    odd = record(*calls(f"0@50x3 {others} 0@50 barrier:0@41*"))
    ranks.append(rank(3, (Frame(C10D, 3252, "barrier"), at(41), MODULE), flight=odd))
    assert named(verdict_of(ranks)) == expected


# --- replicas decide where the members cannot -------------------------------------------------------------------------


def replicas(*last: str) -> Verdict:
    """Two groups of two that train alike, ranks 0 and 2 and ranks 1 and 3; ``last``: each rank's newest calls."""
    ranks = []
    for number, text in enumerate(last):
        group = "1" if number % 2 == 0 else "2"
        flight = record(
            *calls(f"{group}@30 {group}@31 " * 6 + text.replace("G", group)), groups={"1": (0, 2), "2": (1, 3)}
        )
        line = int(text.rstrip("*").rpartition("@")[2])
        ranks.append(rank(number, (Frame(C10D, 3252, "all_reduce"), at(line), MODULE), flight=flight))
    return verdict_of(ranks)


def test_the_group_beside_decides_between_two() -> None:
    verdict = replicas("G@30*", "G@30 G@31*", "barrier:G@8*", "G@30 G@31*")
    assert named(verdict) == [2]
    assert "Rank 2 called barrier at train.py:8" in verdict.summary
    assert "where ranks 0-1,3, which had called alike until then, called all_reduce" in verdict.summary


def test_the_group_beside_decides_nothing_where_it_parts_as_well() -> None:
    verdict = replicas("G@30*", "G@30*", "barrier:G@8*", "barrier:G@8*")
    assert len(named(verdict)) > 1
    assert "which had called alike until then" not in verdict.summary


def test_one_sentence_once() -> None:
    odd = rank(
        0, (Frame(C10D, 3252, "all_gather"), at(41), MODULE), flight=record(*past(3), entry("all_gather", 4, line=41))
    )
    verdict = verdict_of([odd, waiting(1), waiting(2)])
    texts = [claim.claim for claim in verdict.evidence]
    assert len(texts) == len(set(texts))
    assert [one.file for one in verdict.evidence if one.claim.startswith("collective #4")] == [
        "ranks/0/flight_recorder.json"
    ]


def test_three_places_are_a_list() -> None:
    """Records hold no frames and stacks alone tell: three operations on three sides."""
    ops = ["all_gather", "broadcast", "all_reduce", "all_reduce", "all_reduce"]
    ranks = [rank(n, (Frame(C10D, 3252, op), at(41), MODULE)) for n, op in enumerate(ops)]
    summary = verdict_of(ranks).summary
    assert "while" not in summary
    assert (
        "Rank 0 waits in all_gather at train.py:41 (train), rank 1 in broadcast at train.py:41 (train) and" in summary
    )
