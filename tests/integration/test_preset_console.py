"""hang-debug in a real job: nothing more on the console than without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.settings.presets import load_presets


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
    (tmp_path / "flight_recorder").mkdir()
    version = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    preset = load_presets(["hang-debug"], cwd=Path(), torch_version=version)
    extra = {setting.name: setting.expand(str(tmp_path)) for setting in preset.env}
    outputs = []
    for added in ({}, extra):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **added},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        outputs.append((sorted(done.stdout.splitlines()), sorted(done.stderr.splitlines())))
    assert outputs[0][0] == ["done", "done"]
    assert outputs[1] == outputs[0]
