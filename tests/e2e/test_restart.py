"""--on-stall restart: ranks are started again after a hang or a crash, until the same failure comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Job, Result, line_of
from tests.support.paths import PROGRAMS

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


@pytest.mark.nightly
def test_a_crash_that_comes_back_has_one_line_and_no_further_bundle(tmp_path: Path) -> None:
    """The third attempt fails at another line, which is told in full."""
    script = PROGRAMS / "again.py"
    with Job(["--nproc-per-node=1", "--max-restarts=3", script, "2"], tmp_path) as job:
        result = job.wait()
    assert (result.code, result.leftovers) == (1, ()), result.stderr
    assert [bundle.verdict["culprits"][0]["frame"]["line"] for bundle in result.bundles] == [
        line_of(script, "FAILS: same"),
        line_of(script, "FAILS: other"),
    ]
    (first, _) = result.bundles
    again = [line for line in result.said.splitlines() if line.startswith("the same failure as attempt 1")]
    assert [line.partition(":")[0] for line in again] == [f"the same failure as attempt 1 ({n} of 4)" for n in (2, 4)]
    assert all(str(first.path) in line for line in again)
    assert "raised ValueError: loss 1.5" in again[0] and "raised ValueError: loss 3.5" in again[1]
    assert result.said.count("the job crashed: ") == 2
