"""The sentences of verdicts read as the catalogue says. ``tests/support/verdict_wording.py`` updates it."""

from __future__ import annotations

import difflib

import msgspec

from tests.support import verdict_wording
from tests.support.verdict_cases import all_cases
from tests.support.verdict_wording import FILE, catalogue, todays_catalogue

UPDATE = "python -m tests.support.verdict_wording --update"


def test_sentences_read_as_catalogued() -> None:
    before, now = FILE.read_text().splitlines(), todays_catalogue().splitlines()
    changed = [*difflib.unified_diff(before, now, str(FILE), "today", lineterm="", n=0)]
    assert not changed, "\n".join([*changed[:40], f"if the wording is meant to change: {UPDATE}"])


def test_catalogue_shows_a_changed_sentence_and_one_example_of_each_template() -> None:
    [case, *_] = all_cases()
    verdict = case.read().verdict
    text = catalogue([(case.name, verdict)])
    assert verdict.summary.split(". ")[0] in text
    assert catalogue([(case.name, verdict), ("another", verdict)]) == text
    assert catalogue([(case.name, msgspec.structs.replace(verdict, summary="It hangs at line 7."))]) != text


def test_templates_are_the_same_for_other_ranks_places_and_calls() -> None:
    one = verdict_wording.templates_of("Ranks 0-2 wait in all_reduce at train.py:50 (train); rank 3 is asleep.")
    assert one == verdict_wording.templates_of("Rank 7 waits in barrier #3 at data.py:9 (load); ranks 3,5 are asleep.")
    assert len(one) == 2
