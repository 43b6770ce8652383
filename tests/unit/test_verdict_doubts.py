"""How sure a verdict is, whatever rule it comes from."""

from __future__ import annotations

import pytest
from evidence import behind, in_user, job, rank, waiting

from safelaunch.model import RankException
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt, confidence_of


@pytest.mark.parametrize(
    ("asleep", "world", "confidence"),
    [(1, 2, "high"), (1, 3, "high"), (2, 3, "medium"), (2, 4, "high"), (3, 4, "medium"), (1, 1, "high")],
)
def test_who_names_more_ranks_than_are_left_innocent_is_never_sure(asleep: int, world: int, confidence: str) -> None:
    sleepers = [rank(n, in_user(7), "sleep", flight=behind()) for n in range(asleep)]
    verdict = diagnose(job(*sleepers, *(waiting(n) for n in range(asleep, world))))
    assert (verdict.confidence, [c.rank for c in verdict.culprits]) == (confidence, list(range(asleep)))


def test_a_rank_that_may_not_run_is_at_fault_however_many_are() -> None:
    stopped = [rank(n, in_user(7), "stop", flight=behind()) for n in range(3)]
    assert diagnose(job(*stopped, waiting(3))).confidence == "high"


def test_so_is_one_that_has_failed() -> None:
    error = {"exception": RankException("ValueError", "no such label", 5.0, in_user(7))}
    failed = [rank(n, in_user(7), "futex", flight=behind(), more=error) for n in range(3)]
    verdict = diagnose(job(*failed, waiting(3), outcome="crash"))
    assert (verdict.cause, verdict.confidence, len(verdict.culprits)) == ("rank-exception", "high", 3)


def test_doubts_about_one_part_count_once() -> None:
    assert confidence_of([Doubt.NO_MAJORITY, Doubt.SEVERAL_CAUSES]) == "medium"
    assert confidence_of([Doubt.NO_MAJORITY, Doubt.MAY_END]) == "low"


def test_how_many_are_named_counts_only_where_nothing_else_is_to_doubt() -> None:
    assert confidence_of([Doubt.MORE_NAMED]) == "medium"
    assert confidence_of([Doubt.MORE_NAMED, Doubt.DAMAGED_RECORD, Doubt.MAY_END]) == "medium"
