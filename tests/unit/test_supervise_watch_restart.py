"""When is another attempt not worth it?"""

from __future__ import annotations

import pytest

from safelaunch.model import Culprit, Frame, Verdict
from safelaunch.supervise.watch.restart import Failure, failure_of, why_give_up

HANG = Failure("hang", "stuck-in-user-code", 40, frozenset({("/w/train.py", 7)}))


def verdict(*culprits: tuple[int, int | None, int]) -> Verdict:
    """``(rank, step, line)`` of each culprit."""
    named = tuple(
        Culprit(rank, "node", 100 + rank, "main", Frame("/w/train.py", line, "main"), step, "")
        for rank, step, line in culprits
    )
    return Verdict(1, "hang", "stuck-in-user-code", "high", "", named, "", (), (), (), ())


def test_the_first_failure_is_worth_another_attempt() -> None:
    assert why_give_up((), HANG) == ""


def test_the_same_failure_again_is_not_and_the_reason_says_where() -> None:
    why = why_give_up((HANG,), HANG)
    assert "step 40" in why
    assert "/w/train.py:7" in why


@pytest.mark.parametrize(
    "other",
    [
        Failure("crash", "stuck-in-user-code", 40, HANG.places),
        Failure("hang", "blocking-io", 40, HANG.places),
        Failure("hang", "stuck-in-user-code", 41, HANG.places),
        Failure("hang", "stuck-in-user-code", 40, frozenset({("/w/train.py", 8)})),
        Failure("hang", "stuck-in-user-code", None, HANG.places),
    ],
)
def test_another_step_place_or_cause_is_another_failure(other: Failure) -> None:
    assert why_give_up((HANG,), other) == ""


def test_only_the_attempt_before_counts() -> None:
    other = Failure("hang", "blocking-io", 40, HANG.places)
    assert why_give_up((HANG, other), HANG) == ""


def test_a_renumbered_rank_is_the_same_failure() -> None:
    assert failure_of(verdict((1, 40, 7)), (40, 40)) == failure_of(verdict((0, 40, 7)), (40, 40))


def test_a_verdict_that_names_nobody_is_compared_by_the_slowest_step() -> None:
    assert failure_of(verdict(), (12, 11, 12)) == Failure("hang", "stuck-in-user-code", 11, frozenset())
    assert failure_of(verdict(), ()).step is None
