"""A sweep through a real Slurm. scripts/qa/slurm.py has all rows; here is the one that says most."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.qa import slurm
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm.why_not()), reason=f"no private Slurm: {slurm.why_not()}"),
]


def test_sweep_killed_right_after_sbatch_is_completed() -> None:
    """Four jobs, a dependency, ``kill -9`` before the job's number is known, and ``--resume``: every job runs once."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.qa.slurm", "--only", "kill_after"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept" in done.stdout
