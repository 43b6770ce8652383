"""Faults that only several nodes show: a node that is gone, cut off, without launcher, or lagging."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import (
    Evidence,
    Frame,
    NcclCommunicator,
    NcclProcess,
    NcclState,
    NcclWitness,
    NodeEvidence,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.model.evidence import all_nodes
from safelaunch.report.sentences import nccl_lines
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.nccl_witness import nccl_states
from tests.support.evidence import SITE, at, behind, in_c10d, in_user, job, rank, waiting

RESET = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
ENGINE = Frame(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward")
A = NodeEvidence("a", 1, (0, 1), here=True)
B = NodeEvidence("b", 2, (2, 3))
GONE = replace(B, silent_s=20.0)


def thrown_out(number: int, kind: str = "RuntimeError", message: str = RESET, when: float = -1.0) -> RankEvidence:
    frames = (ENGINE, at(41), at(100, "<module>")) if message == RESET else (at(41), at(100, "<module>"))
    more = {"exception": RankException(kind, message, when, frames), "exit": RankExit(1, when)}
    return replace(rank(number, seen=False, more=more), host="a" if number < 2 else "b")


def half(*ranks: RankEvidence, nodes: tuple[NodeEvidence, ...] = (A, GONE), **fields: Any) -> Evidence:
    missing = tuple({0, 1, 2, 3} - {each.rank for each in ranks})
    return job(*ranks, world=4, missing_ranks=missing, nodes=nodes, **fields)


def said(verdict: Verdict) -> tuple[str, str, list[str]]:
    assert not verdict.culprits or verdict.cause != "node-lost"
    return verdict.cause, verdict.confidence, [f"{node.host}:{node.ranks}" for node in verdict.nodes_at_fault]


# --- a node that is only silent ---------------------------------------------------------------------------------------


NO_ROUTE = replace(GONE, probe="no route", store="unreachable")


def test_node_without_a_network_route_is_at_fault() -> None:
    verdict = diagnose(half(waiting(0), waiting(1), nodes=(A, NO_ROUTE)))
    assert said(verdict) == ("node-unreachable", "medium", ["a:0-1"])
    assert (
        "Node a (ranks 0-1) is cut off from node b (ranks 2-3): its own network interface is down, or has no link"
        in verdict.summary
    )
    other = half(
        waiting(2), waiting(3), nodes=(replace(B, here=True), replace(NO_ROUTE, host="a", slot=1, ranks=(0, 1)))
    )
    sides = (half(waiting(0), waiting(1), nodes=(A, NO_ROUTE)), other)  # the cable between two interfaces
    both = diagnose(job(*(one for side in sides for one in side.ranks), nodes=all_nodes(sides)))
    assert said(both)[0::2] == ("node-unreachable", ["b:2-3", "a:0-1"])
    crash = diagnose(half(thrown_out(0), thrown_out(1), nodes=(A, NO_ROUTE), outcome="crash"))
    assert crash.nodes_at_fault == ()


def test_node_without_route_is_named_among_three_nodes() -> None:
    c = NodeEvidence("c", 3, (4, 5), here=True)
    sides = (
        half(waiting(0), waiting(1), nodes=(A, NO_ROUTE, replace(c, here=False, silent_s=20.0, probe="no route"))),
        half(waiting(4), nodes=(c, replace(GONE, silent_s=9.0), replace(A, here=False, silent_s=9.0))),
    )
    nodes = all_nodes(sides)
    assert [(node.host, node.probe) for node in nodes[2:]] == [("b", ""), ("c", "no route"), ("a", "")]
    ranks = (one for side in sides for one in side.ranks)
    verdict = diagnose(job(*ranks, world=6, missing_ranks=(2, 3, 5), nodes=nodes))
    assert said(verdict)[0::2] == ("node-unreachable", ["a:0-1"])


def test_partition_seen_from_both_sides_names_both_nodes() -> None:
    sides = (
        half(waiting(0), waiting(1)),
        half(waiting(2), waiting(3), nodes=(replace(B, here=True), replace(A, here=False, store="unreachable"))),
    )
    ranks = tuple(each for side in sides for each in side.ranks)
    verdict = diagnose(job(*ranks, nodes=all_nodes(sides)))
    assert said(verdict) == ("node-unreachable", "high", ["b:2-3", "a:0-1"])
    assert "both sides are alive" in verdict.summary


# --- a node that is behind --------------------------------------------------------------------------------------------


def behind_as_a_node(kernel: str, *numbers: int) -> Evidence:
    late = [rank(n, in_user(7), kernel, flight=behind()) for n in numbers]
    early = [waiting(n) for n in range(4) if n not in numbers]
    ranks = sorted((replace(r, host="a" if r.rank < 2 else "b") for r in [*late, *early]), key=lambda r: r.rank)
    return job(*ranks)


@pytest.mark.parametrize(("kernel", "confidence"), [("disk", "high"), ("stop", "high"), ("pipe", "medium")])
@pytest.mark.parametrize("told", [False, True], ids=["by their hosts", "as the nodes say"])
def test_culprits_filling_one_node_are_named_as_node(kernel: str, confidence: str, told: bool) -> None:
    evidence = behind_as_a_node(kernel, 2, 3)
    if told:
        evidence = replace(evidence, nodes=(A, B), ranks=tuple(replace(r, host="vm") for r in evidence.ranks))
    verdict = diagnose(evidence)
    assert said(verdict) == ("node-behind", confidence, ["b:2-3"])
    assert (verdict.culprits, verdict.victims) == ((), "0-1")
    assert verdict.summary.startswith("Node b is behind as a whole: ranks 2-3, and no others.")


# --- versions, clocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart_s", "confidence"), [(0.5, "medium"), (30.0, "high")])
def test_first_failure_across_nodes_is_limited_by_clock_accuracy(apart_s: float, confidence: str) -> None:
    first, second = thrown_out(1, "ValueError", "a", -40.0), thrown_out(2, "KeyError", "b", -40.0 + apart_s)
    verdict = diagnose(half(thrown_out(0), first, second, thrown_out(3), nodes=(A, B), outcome="crash"))
    assert (verdict.cause, verdict.confidence, [c.rank for c in verdict.culprits]) == (
        "rank-exception",
        confidence,
        [1],
    )


# --- which ranks NCCL means -------------------------------------------------------------------------------------------

FILE = "node/a/nccl_ras.txt"


def seen(number: int, pid: int, host: str = "a") -> RankEvidence:
    return replace(rank(number, in_c10d("all_reduce", 41)), pid=pid, host=host)


def process(number: int, pid: int, state: NcclState = "answers", host: str = "10.0.0.1") -> NcclProcess:
    return NcclProcess(host, pid, number, number % 8, state)


def with_word(evidence: Evidence, *communicators: NcclCommunicator, named: tuple[NcclProcess, ...] = ()) -> Evidence:
    return replace(evidence, nccl=NcclWitness("2.29.7", communicators, named, FILE))


def of(size: int, *processes: NcclProcess) -> NcclCommunicator:
    return NcclCommunicator(size, processes)


TWO = job(seen(0, 10), seen(1, 11))
FOUR = job(seen(0, 10), seen(1, 11), world=4, missing_ranks=(2, 3))


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (TWO, {}),
        (with_word(TWO, of(2, process(0, 10), process(1, 11, "dead"))), {0: "answers", 1: "dead"}),
        (with_word(FOUR, of(4, *(process(n, 10 + n) for n in range(3)), process(3, 13, "unresponsive"))),
         {0: "answers", 1: "answers", 2: "answers", 3: "unresponsive"}),
        (with_word(FOUR, of(4, process(0, 11), process(1, 10), process(2, 12), process(3, 13))), {}),
        (with_word(FOUR, of(4, *(process(n, -1, "dead") for n in range(4)))), {}),
        (with_word(FOUR, of(4, process(0, 10), process(7, 17, "dead"))), {}),
        (with_word(TWO, of(1, process(0, 10)), of(1, process(0, 11, "dead"))), {0: "answers", 1: "dead"}),
        (with_word(TWO, named=(process(-1, 11, "dead"),)), {1: "dead"}),
        (with_word(TWO, named=(process(-1, 99, "dead"),)), {}),
        (with_word(FOUR, named=(process(-1, 11, "dead"),)), {}),
        (with_word(job(seen(0, 10), seen(1, 10, "b")), named=(process(-1, 10, "dead"),)), {}),
        (with_word(job(seen(0, 10), seen(1, 11, "b")), named=(process(-1, 11, "dead", "10.0.0.2"),)), {1: "dead"}),
        (with_word(job(seen(0, 10), seen(1, 10, "b")),
                   of(1, process(0, 10)), of(1, process(0, 10, "dead", "10.0.0.2"))), {}),
        (with_word(job(seen(0, 10), world=2, missing_ranks=(1,)),
                   of(1, process(0, 10)), of(1, process(0, 10, "dead", "10.0.0.2"))), {}),
    ],
    ids=[
        "nothing asked", "numbered by the communicator of all", "an unseen rank, by its number",
        "another order", "no pid agrees", "numbers beyond the world", "by pid, in smaller communicators",
        "text: by pid", "text: another process", "text: possibly of the unseen node",
        "text: a pid of two nodes", "text: a pid of one node", "equal pids on two nodes",
        "the unseen node might have the same pids",
    ],
)  # fmt: skip
def test_nccl_process_is_matched_only_to_an_unambiguous_rank(
    evidence: Evidence, expected: dict[int, NcclState]
) -> None:
    assert nccl_states(evidence) == expected


def test_nccl_report_lists_unresponsive_processes() -> None:
    witness = with_word(TWO, of(2, process(0, 10), process(1, 11, "dead"))).nccl
    assert nccl_lines(witness) == [
        "NCCL 2.29.7, of its processes: answers from 1, none from 0, 1 given up",
        "pid 11 on 10.0.0.1, GPU 1: dead",
        f"The raw answer: {FILE}",
    ]
    assert nccl_lines(None) == []
