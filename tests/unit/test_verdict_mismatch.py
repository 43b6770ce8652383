"""Ranks that do not meet in a collective, by Flight Recorder and by stacks alone."""

from __future__ import annotations

import msgspec
import pytest

from safelaunch.model import Verdict
from safelaunch.verdict.alignment import Alignment
from safelaunch.verdict.c10d import signature
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.mismatch import mismatch_at
from tests.support.evidence import (
    at,
    behind,
    entry,
    in_c10d,
    in_user,
    job,
    past,
    rank,
    record,
    waiting,
)
from tests.support.verdict_cases import calls_in


def test_the_same_number_of_elements_matches() -> None:
    assert signature(entry("all_reduce", 1, size=(4, 1))) == signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("all_reduce", 1, size=(4, 2))) != signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("gather", 1, size=(4,))) != signature(entry("gather", 1, size=(8,)))
    assert signature(entry("scatter", 1, size=(4,))) == signature(entry("scatter", 1, size=(8,)))  # the root's input
    assert signature(entry("all_to_all", 1, size=(4,))) == signature(entry("all_to_all", 1, size=(8,)))


def test_a_window_that_wrapped_does_not_mismatch() -> None:
    long, short = record(*past(3), entry("all_reduce", 4)), record(entry("all_reduce", 4))
    ranks = [rank(0, flight=long), rank(1, flight=short)]
    assert mismatch_at(Alignment(ranks, 2), "0", 4) is None


def test_the_missing_rank_is_the_cause_and_a_mismatch_the_runner_up() -> None:
    odd = rank(0, in_c10d("all_gather", 41), flight=record(*past(3), entry("all_gather", 4, line=41)))
    verdict = diagnose(job(odd, waiting(1), waiting(2), rank(3, in_user(7), "sleep", flight=behind())))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [3])
    assert any("runner-up" in text for text in verdict.ruled_out)
    assert verdict.confidence != "high"


# --- without stacks, without a recorder, without some ranks -----------------------------------------------------------


def test_unseen_members_leave_nobody_named_by_majority() -> None:
    odd = rank(0, in_c10d("all_gather", 41), flight=record(*past(3), entry("all_gather", 4, line=41)))
    verdict = diagnose(job(odd, waiting(1), waiting(2), missing_ranks=(3,)))
    assert (verdict.cause, verdict.culprits, verdict.confidence) == ("collective-mismatch", (), "low")
    assert any("3" in text for text in verdict.missing)
    verdict = diagnose(job(waiting(0), waiting(1), missing_ranks=(2,)))
    assert (verdict.cause, verdict.culprits) == ("missing-from-collective", ())


# --- groups and point to point ----------------------------------------------------------------------------------------


TWO = {"1": (0, 1), "2": (0, 1)}


def _two_groups(odd: int, rounds: str, usual: str, other: str) -> Verdict:
    """Two ranks after the same rounds: ``odd`` waits in the call ``other``, its peer in ``usual``."""
    ranks = []
    for n in range(2):
        pending = other if n == odd else usual
        flight = record(*calls_in(f"{rounds} {pending}*"), groups=TWO)
        ranks.append(rank(n, in_c10d("all_reduce", flight.entries[-1].frames[2].line), flight=flight))
    return diagnose(job(*ranks, *(waiting(n, seq=1) for n in (2, 3))))  # those wait for both


@pytest.mark.parametrize("odd", [0, 1])
def test_a_call_left_out_of_one_group_is_known_by_the_ranks_own_habit(odd: int) -> None:
    verdict = _two_groups(odd, "1@60 2@61 " * 4, "1@60", "2@61")
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [odd]), verdict.summary
    assert verdict.confidence == "medium" and any("different orders" in text for text in verdict.ruled_out)
    assert f"Rank {odd} skipped all_reduce at train.py:60 (train) (#5 of group '1')" in verdict.summary
    assert verdict.culprits[0].frame == at(60)


# --- loops and history ------------------------------------------------------------------------------------------------


def test_a_list_of_tensors_has_as_many_elements_as_one() -> None:
    listed = msgspec.structs.replace(entry("reduce_scatter", 4), input_sizes=((4,),) * 3, input_dtypes=("Float",) * 3)
    single = entry("_reduce_scatter_base", 4, size=(12,))
    assert signature(listed) == signature(single)
    assert signature(entry("_reduce_scatter_base", 4, size=(9,))) != signature(single)
