"""Which ranks NCCL means, and what its word adds to a verdict."""

from __future__ import annotations

import pytest
from evidence import in_c10d, job, rank, waiting
from msgspec.structs import replace
from test_verdict_rules_nodes import GONE, A, B, half

from safelaunch.model import Evidence, NcclCommunicator, NcclProcess, NcclState, NcclWitness, RankEvidence
from safelaunch.report.report import nccl_lines
from safelaunch.verdict.rules_nodes import nccl_states

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
        "nothing asked", "numbered by the communicator of all", "a rank that nobody saw, by its number",
        "another order", "no pid agrees", "numbers beyond the world", "by pid, in smaller communicators",
        "text: by pid", "text: another process", "text: it may be of the node that nobody saw",
        "text: a pid of two nodes", "text: a pid of one node", "pids of two nodes alike",
        "the node that nobody saw may have the same pids",
    ],
)  # fmt: skip
def test_a_process_is_a_rank_only_where_it_can_be_no_other(evidence: Evidence, expected: dict[int, NcclState]) -> None:
    assert nccl_states(evidence) == expected


# --- a node that is silent --------------------------------------------------------------------------------------------


def silent(state: NcclState, *, probe: bool) -> Evidence:
    node = replace(GONE, probe="answers") if probe else replace(B, silent_s=3.0)
    evidence = half(waiting(0), waiting(1), nodes=(A, node))
    here = [process(one.rank, one.pid) for one in evidence.ranks]
    return with_word(evidence, of(4, *here, process(2, 52, state, "10.0.0.2"), process(3, 53, state, "10.0.0.2")))


# --- in words ---------------------------------------------------------------------------------------------------------


def test_the_report_counts_and_lists_what_does_not_answer() -> None:
    witness = with_word(TWO, of(2, process(0, 10), process(1, 11, "dead"))).nccl
    assert nccl_lines(witness) == [
        "NCCL 2.29.7, of its processes: answers from 1, none from 0, 1 given up",
        "pid 11 on 10.0.0.1, GPU 1: dead",
        f"The raw answer: {FILE}",
    ]
    assert nccl_lines(None) == []
