"""The table of rules, and how doubts make a confidence. ``conftest.py`` holds every verdict against the table."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from evidence import job, waiting

from safelaunch.diagnose import _conclude
from safelaunch.diagnose.causes import CAUSES
from safelaunch.diagnose.doubts import Doubt, confidence_of
from safelaunch.diagnose.rules import RULES
from safelaunch.diagnose.waits import Case


def test_the_rules_conclude_the_catalogue_and_nothing_else() -> None:
    declared = {cause for rule in RULES for cause in rule.concludes}
    # No rule finds these: they say why, or where, what a rule found is so.
    assert declared == set(CAUSES) - {"swallowed-exception", "node-behind"}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_in_a_sentence_what_it_is_about(rule) -> None:  # type: ignore[no-untyped-def]
    assert rule.says.endswith((".", "?"))
    assert len(rule.says) < 130


def test_a_rule_that_concludes_what_it_does_not_declare_fails_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    (last,) = RULES[-1:]
    monkeypatch.setattr(sys.modules[_conclude.__module__], "RULES", (replace(last, concludes=("group-order",)),))
    with pytest.raises(AssertionError, match="nobody_stands_out concludes no-rank-stands-out"):
        _conclude(Case.of(job(waiting(0), waiting(1))))


def test_a_rule_is_not_asked_where_what_it_needs_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    last = replace(RULES[-1], needs=("a crash",))
    monkeypatch.setattr(sys.modules[_conclude.__module__], "RULES", (last, RULES[-1]))
    case = Case.of(job(waiting(0), waiting(1)))
    assert last.ask(case) == ""
    assert _conclude(case)[0].cause == "no-rank-stands-out"


@pytest.mark.parametrize(
    ("doubts", "confidence"),
    [
        ((), "high"),
        ((Doubt.NO_MAJORITY,), "medium"),
        ((Doubt.LINES_ALONE,), "low"),
        ((Doubt.NOT_IN_TURNS, Doubt.HABIT_BROKEN), "medium"),  # both about the calls
        ((Doubt.STACKS_ALONE, Doubt.NO_MAJORITY), "low"),
        ((Doubt.STATE_UNKNOWN, Doubt.UNSEEN_RANKS, Doubt.MISMATCH_TOO), "low"),
        ((Doubt.DAMAGED_RECORD,), "medium"),
        ((Doubt.DAMAGED_RECORD, Doubt.NO_MAJORITY), "medium"),  # of the evidence: counts only alone
    ],
)
def test_doubts_about_one_part_count_once_and_about_several_add_up(doubts: tuple[Doubt, ...], confidence: str) -> None:
    assert confidence_of(doubts) == confidence


def test_every_doubt_has_a_reason_of_its_own() -> None:
    assert len({doubt.why for doubt in Doubt}) == len(Doubt)
    assert all(doubt.why.endswith(".") and doubt.levels in (1, 2) for doubt in Doubt)
