"""Which ranks NCCL means, and what its word adds to a verdict."""

from __future__ import annotations

import pytest
from evidence import in_c10d, job, rank, waiting
from msgspec.structs import replace
from test_verdict_rules_nodes import GONE, A, B, half, said

from safelaunch.model import Evidence, NcclCommunicator, NcclProcess, NcclState, NcclWitness, RankEvidence
from safelaunch.report.report import nccl_lines
from safelaunch.verdict import nccl_witness
from safelaunch.verdict.diagnose import diagnose

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
    assert nccl_witness.states(evidence) == expected


def test_the_verdict_tells_what_nccl_says_of_ranks_and_of_strangers() -> None:
    sick = with_word(
        TWO,
        of(2, process(0, 10), process(1, 11, "unresponsive")),
        of(1, process(0, 77, "dead", "10.0.0.7")),
    )
    told = [claim for claim in diagnose(sick).evidence if claim.file == FILE]
    assert [claim.claim for claim in told] == [
        "NCCL has no answer from rank 1 (pid 11 on 10.0.0.1, GPU 1)",
        "NCCL has given up a process that is no known rank (pid 77 on 10.0.0.7, GPU 0)",
    ]


def test_nccls_word_alone_names_nobody() -> None:
    """Its processes are given up or silent; the ranks wait where they waited without it."""
    healthy = job(waiting(0), waiting(1))
    pids = [one.pid for one in healthy.ranks]
    sick = with_word(healthy, of(2, process(0, pids[0]), process(1, pids[1], "dead")))
    before, after = diagnose(healthy), diagnose(sick)
    assert (before.cause, before.culprits, before.confidence) == (after.cause, after.culprits, after.confidence)
    assert len(after.evidence) == len(before.evidence) + 1


def test_where_every_rank_answers_no_process_is_dead() -> None:
    healthy = with_word(TWO, of(2, process(0, 10), process(1, 11)))
    assert any("NCCL has an answer from each of ranks 0-1" in text for text in diagnose(healthy).ruled_out)
    partly = with_word(TWO, of(1, process(0, 10)))
    assert not any("NCCL" in text for text in diagnose(partly).ruled_out)


def test_a_thousand_dead_ranks_are_a_few_claims() -> None:
    many = with_word(TWO, of(1000, *(process(n, 5000 + n, "dead") for n in range(1000))))
    told = [claim.claim for claim in diagnose(many).evidence if claim.file == FILE]
    assert len(told) == nccl_witness.MOST
    assert told[-1].endswith(", and 996 more")
    assert len(nccl_lines(many.nccl)) < 20


# --- a node that is silent --------------------------------------------------------------------------------------------


def silent(state: NcclState, *, probe: bool) -> Evidence:
    node = replace(GONE, probe="answers") if probe else replace(B, silent_s=3.0)
    evidence = half(waiting(0), waiting(1), nodes=(A, node))
    here = [process(one.rank, one.pid) for one in evidence.ranks]
    return with_word(evidence, of(4, *here, process(2, 52, state, "10.0.0.2"), process(3, 53, state, "10.0.0.2")))


@pytest.mark.parametrize(
    ("evidence", "cause", "confidence"),
    [
        (silent("answers", probe=False), "launcher-stopped", "low"),
        (silent("dead", probe=False), "node-unreachable", "high"),
        (silent("unresponsive", probe=True), "node-unreachable", "high"),
        (silent("answers", probe=True), "launcher-stopped", "medium"),
    ],
    ids=["its ranks live", "its ranks are dead", "the host answers, its ranks do not", "all of it answers"],
)
def test_nccl_knows_whether_the_ranks_of_a_silent_node_live(evidence: Evidence, cause: str, confidence: str) -> None:
    assert said(diagnose(evidence)) == (cause, confidence, ["b:2-3"])


# --- in words ---------------------------------------------------------------------------------------------------------


def test_the_report_counts_and_lists_what_does_not_answer() -> None:
    witness = with_word(TWO, of(2, process(0, 10), process(1, 11, "dead"))).nccl
    assert nccl_lines(witness) == [
        "NCCL 2.29.7, of its processes: answers from 1, none from 0, 1 given up",
        "pid 11 on 10.0.0.1, GPU 1: dead",
        f"The raw answer: {FILE}",
    ]
    assert nccl_lines(None) == []
