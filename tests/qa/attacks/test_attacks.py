"""A sample of every area of ``scripts/qa/attacks.py``, so that the attacks themselves keep up with the product."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.qa.attacks.attack import attacks

SAMPLE = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "area", ["dumps", "bundles", *(pytest.param(area, marks=pytest.mark.nightly) for area in ("secrets", "strangers"))]
)
def test_none_of_a_sample_falls(area: str, tmp_path: Path) -> None:
    found = [one for one in attacks(area, 4, seed=5) if "a job that" not in one.name]
    tried = list(islice(found, 0, None, max(1, len(found) // SAMPLE)))
    ready = [one for one in tried if not one.needs()]
    assert ready
    fallen = {}
    for number, one in enumerate(ready):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        if wrong := one.run(scratch):
            fallen[one.name] = wrong
    assert fallen == {}
