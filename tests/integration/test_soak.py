"""A shorter form of ``scripts/soak.py``: under ``auto``, no healthy job is ended and no freeze is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak
from jobs import Job

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


def test_the_evidence_is_taken_before_the_process_groups_time_out(tmp_path: Path) -> None:
    """The default floor of 60 s would come too late for a time-out of 24 s."""
    mine = ["--how=steady", "--freeze=sleep", "--after=60", "--culprit=1", "--timeout=24", f"--scratch={tmp_path}"]
    with Job(["--nproc-per-node=2", soak.SCRIPT, *mine], tmp_path) as job:
        result = job.wait()
    assert result.code == 124, result.stderr
    assert (result.verdict["cause"], [c["rank"] for c in result.verdict["culprits"]]) == ("stuck-in-user-code", [1])
    watch = result.bundle.json("manifest.json")["watch"]
    assert watch["threshold_s"] == pytest.approx(0.7 * 24)
    assert "time-out" in watch["why"]
