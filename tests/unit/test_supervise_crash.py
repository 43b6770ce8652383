"""Crashes that are reported without a bundle."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from safelaunch.model import RankException
from safelaunch.supervise.crash import unreadable_script
from tests.support.evidence import progress, rank, waiting

TYPO = RankException("IndentationError", "unexpected indent (train.py, line 3)", 100.0)


@pytest.mark.parametrize(
    ("raised", "steps", "found"),
    [
        ((TYPO, TYPO), (None, None), True),
        ((TYPO, None), (0, 0), True),  # torchrun has ended the other one before it came so far
        ((TYPO, replace(TYPO, message="another")), (None, None), False),
        ((TYPO, RankException("ValueError", "", 100.0)), (None, None), False),
        ((TYPO, None), (0, 3), False),  # of code that is read later
        ((replace(TYPO, type="ValueError"), None), (None, None), False),
        ((None, None), (None, None), False),
    ],
)
def test_syntax_error_on_all_ranks_means_unreadable_script(
    raised: tuple[RankException | None, ...], steps: tuple[int | None, ...], found: bool
) -> None:
    ranks = [
        replace(rank(n) if one is not None else waiting(n), exception=one, progress=replace(progress(n), step=step))
        for n, (one, step) in enumerate(zip(raised, steps, strict=True))
    ]
    assert bool(unreadable_script(ranks)) is found
