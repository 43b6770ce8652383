"""How sure a verdict is, whatever rule it comes from."""

from __future__ import annotations

import pytest

from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt, confidence_of
from tests.support.evidence import behind, in_user, job, rank, waiting


@pytest.mark.parametrize(
    ("asleep", "world", "confidence"),
    [(1, 2, "high"), (1, 3, "high"), (2, 3, "medium"), (2, 4, "high"), (3, 4, "medium"), (1, 1, "high")],
)
def test_confidence_drops_if_culprits_outnumber_innocent_ranks(asleep: int, world: int, confidence: str) -> None:
    sleepers = [rank(n, in_user(7), "sleep", flight=behind()) for n in range(asleep)]
    verdict = diagnose(job(*sleepers, *(waiting(n) for n in range(asleep, world))))
    assert (verdict.confidence, [c.rank for c in verdict.culprits]) == (confidence, list(range(asleep)))


@pytest.mark.parametrize(
    ("doubts", "confidence"),
    [
        ((), "high"),
        ((Doubt.NO_MAJORITY,), "medium"),
        ((Doubt.LINES_ALONE,), "low"),
        ((Doubt.NO_FRAMES, Doubt.HABIT_ALONE), "medium"),  # both about the calls
        ((Doubt.STACKS_ALONE, Doubt.NO_MAJORITY), "low"),
        ((Doubt.STATE_UNKNOWN, Doubt.UNSEEN_RANKS, Doubt.MISMATCH_TOO), "low"),
        ((Doubt.NO_MAJORITY, Doubt.SEVERAL_CAUSES), "medium"),  # both about others
        ((Doubt.NO_MAJORITY, Doubt.MAY_END), "low"),
        ((Doubt.DAMAGED_RECORD,), "medium"),
        ((Doubt.DAMAGED_RECORD, Doubt.NO_MAJORITY), "medium"),  # of the evidence: counts only alone
        ((Doubt.MORE_NAMED,), "medium"),
        ((Doubt.MORE_NAMED, Doubt.DAMAGED_RECORD, Doubt.MAY_END), "medium"),  # so does how many are named
    ],
)
def test_doubts_add_up_only_across_parts(doubts: tuple[Doubt, ...], confidence: str) -> None:
    assert confidence_of(doubts) == confidence


def test_every_doubt_has_a_unique_reason() -> None:
    assert len({doubt.why for doubt in Doubt}) == len(Doubt)
    assert all(doubt.why.endswith(".") and doubt.levels in (1, 2) for doubt in Doubt)
