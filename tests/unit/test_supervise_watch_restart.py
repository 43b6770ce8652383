"""When is another attempt not worth it?"""

from __future__ import annotations

import pytest

from safelaunch.model import Culprit, Frame, RankException, Verdict
from safelaunch.supervise.watch.restart import AttemptFailure, failure_key, failure_of, why_give_up
from tests.support.evidence import job, rank

HANG = AttemptFailure("hang", "stuck-in-user-code", 40, frozenset({("/w/train.py", 7)}))


def verdict(*culprits: tuple[int, int | None, int]) -> Verdict:
    """``(rank, step, line)`` of each culprit."""
    named = tuple(
        Culprit(rank, "node", 100 + rank, "main", Frame("/w/train.py", line, "main"), step, "")
        for rank, step, line in culprits
    )
    return Verdict(1, "hang", "stuck-in-user-code", "high", "", named, "", (), (), (), ())


def test_first_failure_allows_another_attempt() -> None:
    assert why_give_up((), HANG) == ""


def test_repeated_failure_is_given_up_with_its_place() -> None:
    why = why_give_up((HANG,), HANG)
    assert "step 40" in why
    assert "/w/train.py:7" in why


@pytest.mark.parametrize(
    "other",
    [
        AttemptFailure("crash", "stuck-in-user-code", 40, HANG.places),
        AttemptFailure("hang", "blocking-io", 40, HANG.places),
        AttemptFailure("hang", "stuck-in-user-code", 41, HANG.places),
        AttemptFailure("hang", "stuck-in-user-code", 40, frozenset({("/w/train.py", 8)})),
        AttemptFailure("hang", "stuck-in-user-code", None, HANG.places),
    ],
)
def test_different_step_place_or_cause_is_another_failure(other: AttemptFailure) -> None:
    assert why_give_up((HANG,), other) == ""


def test_only_the_last_attempt_counts() -> None:
    other = AttemptFailure("hang", "blocking-io", 40, HANG.places)
    assert why_give_up((HANG, other), HANG) == ""


def test_renumbered_rank_is_the_same_failure() -> None:
    assert failure_of(verdict((1, 40, 7)), (40, 40)) == failure_of(verdict((0, 40, 7)), (40, 40))


def test_verdict_without_culprit_is_compared_by_slowest_step() -> None:
    assert failure_of(verdict(), (12, 11, 12)) == AttemptFailure("hang", "stuck-in-user-code", 11, frozenset())
    assert failure_of(verdict(), ()).step is None


def raised(kind: str, message: str) -> RankException:
    return RankException(kind, message, 100.0)


@pytest.mark.parametrize(
    ("again", "kind", "expected"),
    [
        (verdict((1, 50, 7)), "ValueError", True),  # it began at a checkpoint
        (verdict((1, 40, 8)), "ValueError", False),
        (verdict((1, 40, 7)), "KeyError", False),
        (verdict((1, 40, 7), (0, 40, 9)), "ValueError", False),
    ],
)
def test_failures_with_the_same_line_and_error_are_related(again: Verdict, kind: str, expected: bool) -> None:
    first = failure_key(
        verdict((1, 40, 7)), job(rank(0), rank(1, more={"exception": raised("ValueError", "loss 1.5")}))
    )
    second = failure_key(again, job(rank(0), rank(1, more={"exception": raised(kind, "loss 3.5")})))
    assert first is not None and (first == second) is expected


def test_failure_without_a_line_is_related_to_none() -> None:
    culprit = Culprit(1, "node", 101, "main", None, 40, "")
    assert (
        failure_key(Verdict(1, "crash", "rank-killed", "high", "", (culprit,), "", (), (), (), ()), job(rank(0)))
        is None
    )
