"""A job whose ranks all stop at the same line. What their GPUs do is what NVML reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.nvml import stub

pytestmark = [pytest.mark.torch, pytest.mark.nightly]

SCRIPT = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
for _ in range(5):
    optimizer.step()
    dist.all_reduce(torch.ones(4))
dist.barrier()
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("readings", "cause", "culprits"),
    [
        ([stub.SPINS, stub.SPINS, stub.IDLE], "gpu-kernel", [2]),
        ([stub.SPINS, stub.SPINS, stub.SPINS], "no-rank-stands-out", []),
    ],
)
def test_gpu_that_differs_names_its_rank(
    readings: Sequence[Mapping[str, int]], cause: str, culprits: list[int], node: stub.Node, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--stall-timeout=3", "--nproc-per-node=3", tmp_path / "train.py"]
    with Job(words, tmp_path, env=node.environ) as job:
        job.until(lambda: len(job.ranks()) == 3, "the ranks")
        users = [f"process {rank} {pid} {stub.GIB}" for rank, pid in job.ranks().items()]
        values = [line for index, reading in enumerate(readings) for line in stub.values(index, **reading)]
        node.write(*users, *values, gpus=3)
        result = job.wait()
    (bundle,) = result.bundles
    verdict = bundle.verdict
    assert (verdict["cause"], [one["rank"] for one in verdict["culprits"]]) == (cause, culprits), result.stderr
    assert bundle.problems() == []
    command = [sys.executable, "-m", "safelaunch", "diagnose", "--json", os.fspath(bundle.path)]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(again.stdout)["summary"] == verdict["summary"], "the bundle has what the verdict rests on"
