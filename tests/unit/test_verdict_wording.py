"""The sentences of verdicts read as the catalogue says. ``tests/support/verdict_wording.py`` updates it."""

from __future__ import annotations

import difflib

import msgspec

from tests.support import verdict_wording
from tests.support.verdict_cases import all_cases
from tests.support.verdict_wording import FILE, catalogue, todays_catalogue

ADVICE = """
If the wording is meant to change: python -m tests.support.verdict_wording --update
If a number differs, compare what this prints before and after: python -m tests.support.verdict_wording --cases
"""


def test_sentences_read_as_catalogued() -> None:
    before, now = FILE.read_text().splitlines(), todays_catalogue().splitlines()
    changed = [*difflib.unified_diff(before, now, str(FILE), "today", lineterm="", n=0)]
    assert not changed, "\n".join([*changed[:40], ADVICE])


def entries_of(text: str) -> list[list[str]]:
    """Returns the numbers and the sentence of each entry."""
    return [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  ")]


def test_catalogue_counts_the_cases_with_each_sentence() -> None:
    verdict = all_cases()[0].read().verdict
    once = entries_of(catalogue([("one", verdict)]))
    twice = entries_of(catalogue([("one", verdict), ("two", verdict)]))
    assert once
    assert twice == [[numbers.replace("1", "2"), sentence] for numbers, sentence in once]


def test_catalogue_depends_on_sentences_and_their_cases() -> None:
    case, other = (one.read().verdict for one in all_cases()[:2])
    changed = msgspec.structs.replace(case, summary="It hangs at line 7.")
    before = catalogue([("one", case), ("two", other)])
    assert catalogue([("one", changed), ("two", other)]) != before
    assert catalogue([("one", case), ("two", case)]) != before


def test_templates_ignore_ranks_places_and_calls() -> None:
    one = verdict_wording.templates_of("Ranks 0-2 wait in all_reduce at train.py:50 (train); rank 3 is asleep.")
    assert one == verdict_wording.templates_of("Rank 7 waits in barrier #3 at data.py:9 (load); ranks 3,5 are asleep.")
    assert len(one) == 2
