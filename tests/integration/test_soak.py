"""A shorter form of ``scripts/soak.py``: under ``auto``, no healthy job is ended and no freeze is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

HEALTHY = (
    "evaluation",
    "rank 0 saves",
    "stopped for a while",
    "workers asleep 4 s an item",
    "a rank that only evaluates",
)
FROZEN = ("steady, sleep", "evaluating, lock, busy thread", "bimodal, loader, busy thread")


@pytest.mark.parametrize("case", [case for case in soak.HEALTHY if case.name in HEALTHY], ids=lambda case: case.name)
def test_a_healthy_job_is_left_alone(case: soak.Healthy, tmp_path: Path) -> None:
    assert soak.run_healthy(case, tmp_path) == []


@pytest.mark.parametrize("case", [case for case in soak.FROZEN if case.name in FROZEN], ids=lambda case: case.name)
def test_a_frozen_job_is_found(case: soak.Frozen, tmp_path: Path) -> None:
    wrong, _ = soak.run_frozen(case, tmp_path)
    assert wrong == []


def test_the_cases_of_the_short_form_exist() -> None:
    names = {case.name for case in (*soak.HEALTHY, *soak.FROZEN)}
    assert {*HEALTHY, *FROZEN} <= names
    assert len(soak.HEALTHY) >= 40 and len(soak.FROZEN) >= 40
