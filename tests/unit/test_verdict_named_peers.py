"""What the arguments of a call under way tell: whom a send or receive waits for, and the root of a broadcast.

gloo records neither. The stack reader sees them as local variables of c10d's own frames.
"""

from __future__ import annotations

import pytest

from safelaunch.model import Frame, GilTest, Posted, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import in_user, job, past, rank, record


def named(verdict: Verdict) -> tuple[str, list[int], str]:
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


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
