"""An exception that a rank caught explains that it is behind, where it lies at the point at which the ranks parted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from evidence import at, entry, in_c10d, job, rank, record

from safelaunch.diagnose import diagnose
from safelaunch.model import CaughtException, Collective, Evidence, RankEvidence, Verdict

SECOND = 1_000_000_000


def caught(after: float, line: int = 30, kind: str = "ValueError") -> CaughtException:
    """``after`` is a time: call number n is made at second n."""
    return CaughtException(kind, "a truncated image", after, at(line, "decode"), at(62))


def waits(number: int, calls: Sequence[tuple[str, int]], *exceptions: CaughtException) -> RankEvidence:
    """``calls``: (operation, line) from number 1 on; it waits in the last one."""
    entries: list[Collective] = [
        msgspec.structs.replace(entry(op, seq, done=seq < len(calls), line=line), created_ns=seq * SECOND)
        for seq, (op, line) in enumerate(calls, 1)
    ]
    op, line = calls[-1]
    return rank(number, in_c10d(op, line), flight=record(*entries), more={"caught": exceptions})


STEP, END = ("all_reduce", 50), ("barrier", 70)
WHOLE = [STEP] * 10


def reached(evidence: Evidence) -> tuple[str, list[int], str]:
    verdict = diagnose(evidence)
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_step_left_out_where_all_steps_are_alike(culprit: int) -> None:
    ranks = [waits(n, WHOLE) for n in range(3)]
    ranks[culprit] = waits(culprit, [*WHOLE[1:], END], caught(5.5))
    verdict: Verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == (
        "swallowed-exception",
        [culprit],
        "medium",
    )
    assert verdict.culprits[0].frame == at(30, "decode")
    assert "raised ValueError at train.py:30 (decode) and went on from train.py:62" in verdict.summary
    assert verdict.evidence[0].file == f"ranks/{culprit}/caught.json"


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_it_tells_which_side_it_was(culprit: int) -> None:
    ranks = [waits(n, WHOLE) for n in range(2)]
    ranks[culprit] = waits(culprit, [*WHOLE[1:], END])
    assert reached(job(*ranks))[:2] == ("collective-mismatch", [0, 1])
    ranks[culprit] = waits(culprit, [*WHOLE[1:], END], caught(5.5))
    assert reached(job(*ranks)) == ("swallowed-exception", [culprit], "medium")


def test_where_the_records_show_the_place_too() -> None:
    calls = [("all_reduce", 50), ("broadcast", 51), ("all_gather", 52)] * 4
    ranks = [waits(n, calls[:10]) for n in range(3)]
    ranks[1] = waits(1, [*calls[:4], *calls[5:10], END], caught(4.5))
    assert reached(job(*ranks)) == ("swallowed-exception", [1], "high")
    ranks[1] = waits(
        1, [*calls[:4], *calls[5:10], END], caught(1.5)
    )  # that one was before, and no call is missing there
    assert reached(job(*ranks))[:2] == ("collective-mismatch", [1])


def test_peers_that_caught_the_same_went_on_all_the_same() -> None:
    ranks = [waits(n, WHOLE, caught(5.4)) for n in range(3)]
    ranks[1] = waits(1, [*WHOLE[1:], END], caught(5.5))
    assert reached(job(*ranks))[:2] == ("collective-mismatch", [1])


def test_one_that_left_after_it_and_calls_no_more() -> None:
    ranks = [waits(n, WHOLE[:6]) for n in range(3)]
    ranks[2] = waits(2, [*WHOLE[:5], END], caught(5.5))
    assert reached(job(*ranks)) == ("swallowed-exception", [2], "high")


def test_a_rank_that_is_level_with_its_peers_has_swallowed_nothing() -> None:
    ranks = [waits(n, WHOLE) for n in range(3)]
    ranks[1] = waits(1, WHOLE, caught(5.5))
    assert reached(job(*ranks))[0] != "swallowed-exception"
