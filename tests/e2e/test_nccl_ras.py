"""NCCL's own witness at a real hang: what a stand-in for its RAS service says is in the bundle and in the verdict."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS, ROOT

pytestmark = [pytest.mark.torch, pytest.mark.nightly, pytest.mark.timeout(240)]
PROGRAM, STAND_IN = PROGRAMS / "nccl_ras.py", ROOT / "tests" / "support"


@pytest.mark.parametrize("version", [pytest.param("2.28.9", marks=pytest.mark.nightly), "2.29.7"])
def test_nccl_says_that_the_stopped_rank_does_not_answer(version: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--stall-timeout=4", "--nproc-per-node=2", PROGRAM, f"--service={STAND_IN}", f"--nccl={version}"]
    with Job(words, tmp_path, env={"NCCL_RAS_ADDR": f"localhost:{port}"}) as job:
        result = job.wait()
    assert result.code == 124, result.stderr
    bundle, verdict = result.bundle, result.verdict
    assert bundle.problems() == []
    assert (verdict["cause"], verdict["confidence"]) == ("rank-stopped", "medium")
    [answer] = bundle.path.glob("node/*/nccl_ras.txt")
    assert json.dumps(version) in answer.read_text()
    [claim] = [claim for claim in verdict["evidence"] if claim["file"].endswith("nccl_ras.txt")]
    assert claim["claim"].startswith("NCCL has no answer from rank 1 (pid "), claim
    assert "What NCCL says" in bundle.text("report.md")
    assert "The raw answer" in bundle.text("report.html")
    again = subprocess.run(
        [sys.executable, "-m", "safelaunch", "diagnose", "--json", bundle.path], capture_output=True, check=True
    )
    assert claim in json.loads(again.stdout)["evidence"]
