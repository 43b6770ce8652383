"""A GPU that an earlier bundle blames: one line in the verdict and the reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job, Result
from tests.support.nvml import stub
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.nightly]

LINE = f"{stub.uuid(1)} was named in the last bundle here"


def hang(node: stub.Node, scratch: Path) -> Result:
    words = ["--stall-timeout=2", "--nproc-per-node=2", PROGRAMS / "stuck_gpu.py"]
    with Job(words, scratch, env={**node.environ, "SAFELAUNCH_NO_LEASE": None}) as job:
        return job.wait()


def test_a_gpu_that_the_last_bundle_blames(node: stub.Node, tmp_path: Path) -> None:
    first = hang(node, tmp_path)
    assert (first.verdict["cause"], first.verdict["culprits"][0]["gpu"]) == ("gpu-kernel", stub.uuid(1)), first.stderr
    assert "blamed_before" not in first.verdict
    second = hang(node, tmp_path)
    newest = max(second.bundles, key=lambda bundle: bundle.path.name)
    assert newest.verdict["blamed_before"] == [LINE]
    assert not newest.problems()
    assert LINE in " ".join(line.removeprefix("safelaunch:").strip() for line in second.stderr.splitlines())
    assert LINE in newest.text("report.md").replace("\\", "")
    command = [sys.executable, "-m", "safelaunch", "diagnose", "--json", os.fspath(newest.path)]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(again.stdout)["blamed_before"] == [LINE], "the bundle has what the line rests on"
