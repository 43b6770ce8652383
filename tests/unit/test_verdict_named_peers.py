"""Peers and roots read from the arguments of a pending call: sends, receives and broadcasts.

gloo records neither. The stack reader sees them as local variables of c10d's own frames.
"""

from __future__ import annotations

from safelaunch.model import Frame, GilTest, Posted, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import in_user, job, past, rank, record


def named(verdict: Verdict) -> tuple[str, list[int], str]:
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


RECV, SEND = (Frame("libtorch_cpu.so", 0, f"c10d::ProcessGroupGloo::{name}::wait") for name in ("RecvWork", "SendWork"))


def in_batch(number: int, native: Frame | None, *posted: Posted) -> RankEvidence:
    """In ``work.wait()`` on the user's own line. gloo records no batch."""
    gil = GilTest(ping=True, python=True, posted=posted)
    here = in_user(33, "exchange")
    return rank(number, here, "futex", flight=record(*past(3)), gil=gil, native=[native] if native else [], ident=77)


def ring(number: int, to: int | None = None, source: int | None = None) -> RankEvidence:
    to, source = (number + 1) % 4 if to is None else to, (number - 1) % 4 if source is None else source
    return in_batch(number, SEND, Posted(77, sends=True, peer=to), Posted(77, sends=False, peer=source))


def test_consistent_send_ring_is_a_cycle_without_wrong_neighbour() -> None:
    assert named(diagnose(job(*map(ring, range(4)))))[0] == "p2p-cycle"
    turned = [ring(n, to=(n + 2) % 4) for n in range(4)]
    assert named(diagnose(job(*turned)))[0] == "p2p-cycle"


# --- without a record: a job that safelaunch has not started ----------------------------------------------------------
