"""The table of rules. ``conftest.py`` holds every verdict against the table."""

from __future__ import annotations

import cProfile
import sys
from dataclasses import replace

import pytest

from safelaunch.model import Evidence, GilTest, Launched
from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.diagnose import _conclude, diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.rules import RULES
from safelaunch.verdict.waits import Case
from tests.support.evidence import entry, in_c10d, in_user, job, past, rank, record, waiting


def test_rules_conclude_exactly_the_catalogued_causes() -> None:
    declared = {cause for rule in RULES for cause in rule.concludes}
    # No rule finds these: two say why, or where, what a rule found is so; samples of a running job show the third.
    assert declared == set(CAUSES) - {"swallowed-exception", "node-behind", "late-rank"}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_one_sentence_summary(rule) -> None:  # type: ignore[no-untyped-def]
    assert rule.summary.endswith((".", "?"))
    assert len(rule.summary) < 130


def test_rule_with_an_undeclared_conclusion_fails_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    (last,) = RULES[-1:]
    monkeypatch.setattr(sys.modules[_conclude.__module__], "RULES", (replace(last, concludes=("group-order",)),))
    with pytest.raises(AssertionError, match="no_rank_stands_out concludes no-rank-stands-out"):
        _conclude(Case.of(job(waiting(0), waiting(1))))


def test_rule_with_unmet_needs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    last = replace(RULES[-1], needs=("a crash",))
    monkeypatch.setattr(sys.modules[_conclude.__module__], "RULES", (last, RULES[-1]))
    case = Case.of(job(waiting(0), waiting(1)))
    assert last.ask(case) == ""
    assert _conclude(case)[0].cause == "no-rank-stands-out"


# --- what was not seen is not ruled out -------------------------------------------------------------------------------


def test_empty_evidence_rules_nothing_out() -> None:
    verdict = diagnose(Evidence("hang", 0, (), launched=Launched()))
    assert (verdict.cause, verdict.confidence, verdict.ruled_out) == ("no-rank-stands-out", "low", ())
    assert verdict.doubts == (Doubt.STATE_UNKNOWN.why,)
    assert len(verdict.suggestions) == 1 and "safelaunch doctor" in verdict.suggestions[0]


# --- the example of the Flight Recorder tutorial ----------------------------------------------------------------------


@pytest.mark.parametrize("made", [3, 2])
def test_diagnosis_cost_grows_linearly_with_ranks(made: int) -> None:
    """In calls of functions, which unlike seconds are the same each time. The last rank has made ``made`` groups."""

    def work(world: int) -> int:
        groups = {"0": tuple(range(world))}
        ranks = [
            rank(n, in_c10d("all_reduce", 50), flight=record(*past(3), entry("all_reduce", 4), groups=groups),
                 gil=GilTest(True, True, groups=groups, groups_made=3))
            for n in range(world - 1)
        ]  # fmt: skip
        ranks.append(rank(world - 1, in_user(7), "sleep", flight=record(*past(3), groups=groups),
                          gil=GilTest(True, True, groups=groups, groups_made=made)))  # fmt: skip
        profile = cProfile.Profile()
        profile.runcall(diagnose, job(*ranks))
        return sum(one.callcount for one in profile.getstats())

    assert work(400) < 5 * work(100)
