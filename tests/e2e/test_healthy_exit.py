"""Healthy jobs end as under torchrun, again and again: nothing of the beacon may abort a rank at its exit."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(f"import sys; sys.path.append({str(PROGRAMS)!r}); import uncompiled\n", marks=pytest.mark.quick),
        pytest.param("", marks=pytest.mark.nightly),
    ],
    ids=["without torch's compiler", "with all that torch imports"],
)
def test_two_short_trainings_at_once(tmp_path: Path, first: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(first + TRAINING)
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    with Job(["--nproc-per-node=2", script], places[0]) as one, Job(["--nproc-per-node=2", script], places[1]) as two:
        for job in (one, two):
            result = job.wait()
            assert (result.code, result.stderr, result.bundles, result.leftovers) == (0, "", (), ())


def test_the_script_runs_in_the_active_environment(tmp_path: Path) -> None:
    """As after ``pipx install safelaunch``: the environment of the script has torch, and not safelaunch."""
    there = tmp_path / "user"
    venv.create(there, symlinks=True)
    (packages,) = there.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "safelaunch" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    (packages / "only_there.py").touch()
    script = tmp_path / "train.py"
    imports = f"import sys; sys.path.append({str(PROGRAMS)!r}); import uncompiled, only_there, safelaunch\n"
    script.write_text(f"{imports}safelaunch.probes, safelaunch.step\n{TRAINING}")
    with Job(["--nproc-per-node=1", script], tmp_path, env={"VIRTUAL_ENV": str(there)}) as job:
        result = job.wait()
    said = f"the job runs with {there}/bin/python (VIRTUAL_ENV); safelaunch itself is installed in {sys.prefix}"
    assert (result.code, result.stderr) == (0, f"safelaunch: {said}\n")
