"""A job whose rank 1 makes rank 0 wait at each step: safelaunch says which rank it is, and where it spends the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch


@pytest.mark.nightly
def test_rank_that_slows_the_job_down_is_named_with_its_line_in_a_bundle_and_nothing_is_ended(tmp_path: Path) -> None:
    program = [PROGRAMS / "live.py", f"--until={tmp_path / 'stop'}", "--how=slow"]
    command = f'echo "$SAFELAUNCH_OUTCOME $SAFELAUNCH_RANKS $SAFELAUNCH_BUNDLE" > {tmp_path / "suspect"}'
    with Job(["--nproc-per-node=2", f"--on-suspect={command}", *program], tmp_path) as job:
        job.until(lambda: "wait for rank 1" in job.stderr, "rank 1 to be named", every_s=0.5)
        (line,) = [line for line in job.stderr.splitlines() if "wait for rank 1" in line]
        assert "it spends" in line and "live.py:" in line and "The job continues." in job.stderr
        job.until((tmp_path / "suspect").exists, "the command of --on-suspect", every_s=0.2)
        (tmp_path / "stop").touch()
        result = job.wait()
    (bundle,) = result.bundles
    assert result.code == 0 and bundle.verdict["outcome"] == "slow" and bundle.verdict["cause"] == "late-rank"
    assert [culprit["rank"] for culprit in bundle.verdict["culprits"]] == [1]
    assert bundle.verdict["culprits"][0]["frame"]["file"].endswith("live.py")
    assert (tmp_path / "suspect").read_text().split() == ["slow", "1", str(bundle.path)]
