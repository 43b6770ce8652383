"""A sample of every area of ``scripts/attack.py``, so that the attacks themselves keep up with the product."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("integration", "unit"))]

from attack import attacks  # noqa: E402

SAMPLE = 8


@pytest.mark.slow
@pytest.mark.parametrize("area", ["dumps", "bundles", "secrets", "strangers"])
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
