"""Presets in a real job: each lets it train, and hang-debug prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from safelaunch.settings.presets import list_presets, load_presets

DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
import os; os.write(1, b"trained\\n")
"""


def run(script: Path, presets: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks under torchrun, with what the presets set for the installed torch."""
    (scratch / "flight_recorder").mkdir(exist_ok=True)
    found = load_presets(presets, cwd=Path(), torch_version=version("torch"))
    added = {setting.name: setting.expand(str(scratch)) for setting in found.env}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **added},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.torch
def test_a_ddp_job_trains_under_all_presets_at_once(tmp_path: Path) -> None:
    """On this machine those for CUDA and NCCL have nothing to do but to break nothing."""
    script = tmp_path / "job.py"
    script.write_text(DDP)
    names = [preset.name for preset in list_presets()]
    done = run(script, names, tmp_path)
    if done.returncode:
        broken = [name for name in names if run(script, [name], tmp_path).returncode]
        pytest.fail(f"broken by {broken or 'all together'}: {done.stderr}")
    assert done.stdout.count("trained") == 2


@pytest.mark.nightly
@pytest.mark.torch
def test_hang_debug_adds_nothing_to_the_console(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(3): dist.all_reduce(torch.ones(4))\n"
        "import os; os.write(1, b'done\\n')\n"
        "dist.destroy_process_group()\n"
    )
    outputs = []
    for presets in ([], ["hang-debug"]):
        done = run(script, presets, tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append((sorted(done.stdout.splitlines()), sorted(done.stderr.splitlines())))
    assert outputs[0][0] == ["done", "done"]
    assert outputs[1] == outputs[0]
