"""--on-stall restart: ranks are started again after a hang or a crash, until the same failure comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import PROGRAMS, Job, Result

pytestmark = pytest.mark.torch


def run(scratch: Path, hangs: str) -> Result:
    options = ["--on-stall", "restart", "--stall-timeout", "2", "--nproc-per-node", "1", "--max-restarts=3"]
    with Job([*options, PROGRAMS / "attempts.py", hangs], scratch) as job:
        return job.wait()


def test_a_hang_that_does_not_come_back_is_survived(tmp_path: Path) -> None:
    result = run(tmp_path, "first")
    assert result.code == 0, result.stderr
    assert result.stdout == "finished in attempt 1\n"
    assert result.said.count("from its beginning, which must load its own checkpoint") == 1
    assert result.verdict["cause"] == "stuck-in-user-code"
    assert [culprit["rank"] for culprit in result.verdict["culprits"]] == [0]
    assert not result.leftovers


def test_the_same_hang_twice_ends_the_job_with_125(tmp_path: Path) -> None:
    result = run(tmp_path, "always")
    assert result.code == 125, result.stderr
    assert "the same hang came back" in result.said
    assert "attempts.py:" in result.said.rpartition("not restarting")[2]
    assert [bundle.verdict["outcome"] for bundle in result.bundles] == ["hang", "hang"], "each attempt has its own"
    assert not result.leftovers
