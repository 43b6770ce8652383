"""What the arguments of a call under way tell: whom a send or receive waits for, and the root of a broadcast.

gloo records neither. The stack reader sees them as local variables of c10d's own frames.
"""

from __future__ import annotations

import pytest

from safelaunch.model import CallArguments, Frame, GilTest, Posted, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import MODULE, at, entry, in_backward, in_c10d, in_user, job, past, rank, record, waiting


def sends(number: int, to: int, *, tag: int = 0, line: int = 30) -> RankEvidence:
    return _in_transfer(number, "send", line, CallArguments(dst=to, group_dst=to, tag=tag))


def receives(number: int, source: int, *, tag: int = 0, line: int = 31) -> RankEvidence:
    return _in_transfer(number, "recv", line, CallArguments(src=source, tag=tag))


def _in_transfer(number: int, op: str, line: int, call: CallArguments) -> RankEvidence:
    flight = record(*past(3), entry(op, 1, p2p=True, line=line))
    return rank(number, in_c10d(op, line), flight=flight, call=call)


def named(verdict: Verdict) -> tuple[str, list[int], str]:
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


def test_tags_that_differ() -> None:
    verdict = diagnose(job(sends(0, 1, tag=3), receives(1, 0, tag=7), waiting(2), waiting(3)))
    assert named(verdict) == ("collective-mismatch", [0, 1], "medium")
    assert "the tags differ, 3 and 7" in verdict.summary
    assert verdict.suggestions[0] == "Give the send and its receive the same `tag`."


def test_a_send_and_its_receive_with_one_tag_are_no_mismatch_of_tags() -> None:
    assert diagnose(job(sends(0, 1, tag=3), receives(1, 0, tag=3))).cause == "p2p-cycle"


@pytest.mark.parametrize("others", [(1, 2), (1, 2, 3)])  # how many are with the peer tells nothing of the two
def test_a_peer_that_waits_elsewhere_made_no_call_or_the_rank_one_too_many(others: tuple[int, ...]) -> None:
    verdict = diagnose(job(receives(0, 1), *map(waiting, others)))
    assert named(verdict) == ("collective-mismatch", [0, 1], "medium")
    assert "Rank 0 waits in recv from rank 1 at train.py:31 (train), and rank 1 in all_reduce" in verdict.summary
    assert "rank 0 has made one call too many, or rank 1 left out the other end" in verdict.summary


def test_from_where_ranks_come_to_a_helper_is_told() -> None:
    """As in a pipeline, where one function receives forwards and backwards."""
    flight = record(*past(3), entry("recv", 1, p2p=True, line=31))
    ranks = [
        rank(
            n,
            (*in_c10d("recv", 31)[:-1], at(61 if n == 0 else 52), MODULE),
            flight=flight,
            call=CallArguments(src=source),
        )
        for n, source in enumerate((1, 0, 1))
    ]
    summary = diagnose(job(*ranks)).summary
    assert (
        "To train.py:31 (train), rank 0 comes from train.py:61 (train) and ranks 1-2 come from train.py:52" in summary
    )


@pytest.mark.parametrize("peer", [9, -1])
def test_a_peer_that_is_no_rank_of_the_job(peer: int) -> None:
    assert diagnose(job(receives(0, peer), waiting(1))).cause in ("p2p-cycle", "collective-mismatch")


RECV, SEND = (Frame("libtorch_cpu.so", 0, f"c10d::ProcessGroupGloo::{name}::wait") for name in ("RecvWork", "SendWork"))


def in_batch(number: int, native: Frame | None, *posted: Posted) -> RankEvidence:
    """In ``work.wait()`` on the user's own line. No recorder of gloo's tells of the batch."""
    gil = GilTest(ping=True, python=True, posted=posted)
    here = in_user(33, "exchange")
    return rank(number, here, "futex", flight=record(*past(3)), gil=gil, native=[native] if native else [], ident=77)


def ring(number: int, to: int | None = None, source: int | None = None) -> RankEvidence:
    to, source = (number + 1) % 4 if to is None else to, (number - 1) % 4 if source is None else source
    return in_batch(number, SEND, Posted(77, sends=True, peer=to), Posted(77, sends=False, peer=source))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            ring(2, to=1),
            "Rank 2 sends to rank 1, which does not expect that, while rank 3 waits to receive from rank 2",
        ),
        (ring(2, source=3), "Rank 2 receives from rank 3, which does not expect that, while rank 1 waits to send to"),
    ],
)
def test_a_rank_of_a_ring_that_names_the_wrong_neighbour(odd: RankEvidence, words: str) -> None:
    verdict = diagnose(job(ring(0), ring(1), odd, ring(3)))
    assert named(verdict) == ("collective-mismatch", [2], "medium")
    assert words in verdict.summary and "chooses its peers" in verdict.suggestions[0]


def test_a_ring_whose_batches_fit_or_that_is_turned_by_all_names_no_wrong_neighbour() -> None:
    assert named(diagnose(job(*map(ring, range(4)))))[0] == "p2p-cycle"
    turned = [ring(n, to=(n + 2) % 4) for n in range(4)]
    assert named(diagnose(job(*turned)))[0] == "p2p-cycle"


# --- without a record: a job that safelaunch has not started ----------------------------------------------------------


def casts(number: int, root: int, *, src: int | None = None, line: int = 38) -> RankEvidence:
    call = CallArguments(src=root if src is None else src, group_src=root)
    return rank(number, in_c10d("broadcast", line), call=call)


def test_roots_that_differ_on_one_line() -> None:
    verdict = diagnose(job(casts(0, 1), casts(1, 2), casts(2, 1)))
    assert named(verdict) == ("collective-mismatch", [1], "low")
    assert "is group rank 1 on ranks 0,2 and group rank 2 on rank 1" in verdict.summary
    beside = diagnose(job(casts(0, 1), casts(1, 2), casts(2, 1), rank(3, in_backward(60))))
    assert named(beside) == ("collective-mismatch", [1], "low")


def test_the_same_root_of_each_group_is_no_mismatch() -> None:
    halves = [casts(number, 0, src=number // 2 * 2) for number in range(4)]
    assert diagnose(job(*halves)).cause == "no-rank-stands-out"
    assert diagnose(job(casts(0, 1), casts(1, 2, line=40), casts(2, 1))).summary.count("root") == 0


JOIN = (Frame("/usr/lib/python3.11/threading.py", 1119, "Thread.join"), *in_user(20, "train_in_a_thread"))


def test_a_backward_pass_in_a_thread_of_its_own() -> None:
    lines = {number: in_backward(60) if number != 1 else in_c10d("all_gather", 16) for number in range(4)}
    ranks = [rank(number, JOIN, "futex", threads=[("trainer", one, "futex")]) for number, one in lines.items()]
    verdict = diagnose(job(*ranks))
    assert named(verdict) == ("collective-mismatch", [1], "low")
    assert verdict.culprits[0].frame == at(16)


def test_a_work_that_a_line_waits_for_is_no_lock() -> None:
    text = "\n" * 31 + "def exchange(work):\n    work.wait()\n"
    ranks = [rank(0, in_user(33, "exchange"), "futex"), *(rank(n, in_backward(60), "futex") for n in (1, 2, 3))]
    verdict = diagnose(job(*ranks), read_source=lambda path: text)
    assert named(verdict) == ("collective-mismatch", [0], "low")
    assert "Rank 0 waits in work.wait() at train.py:33 (exchange)" in verdict.summary
