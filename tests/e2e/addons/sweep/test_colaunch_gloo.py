"""A sweep of 30 real torchrun jobs on four slots, killed in its middle and resumed."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.sweeps import Sweep

pytestmark = [pytest.mark.torch, pytest.mark.nightly, pytest.mark.timeout(900)]  # test_colaunch is about other programs

RANKS = 2
STEPS = 5
LINES = 40


def spec(count: int) -> str:
    return f"""
defaults:
  command: --nproc-per-node={RANKS} {PROGRAMS / "swept_gloo.py"} {{name}} {STEPS}
  env: {{SEED: "{{seed}}"}}
  metric: val_loss=([0-9.]+)
matrix: {{seed: 0..{count - 1}}}
jobs: {{j: {{name: "j{{seed}}"}}}}
"""


def test_killed_sweep_is_completed_by_resume(tmp_path: Path) -> None:
    count = 30
    with Sweep(tmp_path, spec(count), "--slots", "4") as sweep:
        sweep.until(lambda: len(sweep.recorded()) >= count // 3, "a third of the jobs", 400)
        recorded = sweep.recorded()
        sweep.process.kill()
        sweep.process.wait()
        assert len(recorded) < count
        with Sweep(tmp_path, spec(count), "--slots", "4", "--resume") as again:
            result = again.wait(600)
        assert sweep.left_behind() == []
    assert result.leftovers == ()
    assert result.code == 0, result.stderr
    assert set(again.states().values()) == {"succeeded"}
    assert len(again.jobs) == count
    begun = again.marks("begun")
    assert {name: begun[name] for name in recorded} == dict.fromkeys(recorded, 1), "a finished job was repeated"
    assert sorted(again.marks("done")) == sorted(again.jobs)
    assert again.marks("twice") == {}
    for name, entry in again.jobs.items():
        log = again.log(name, entry["attempts"])
        expected = {(rank, step, line) for rank in range(RANKS) for step in range(STEPS) for line in range(LINES)}
        line = rf"^{name} rank (\d) step (\d) line (\d+)$"
        found = [tuple(int(group) for group in match.groups()) for match in re.finditer(line, log, re.M)]
        assert len(found) == len(expected)
        assert set(found) == expected
        assert entry["metrics"] == {"val_loss": pytest.approx(4 - 4 * 0.1 * 0.1 * STEPS)}
        assert entry["last_step"] in (STEPS, None)  # None: it ended unwatched, and left only its exit code
    for path in (tmp_path / "s" / "jobs").rglob("attempt-*.log"):
        assert "Address already in use" not in path.read_text()
    with (tmp_path / "s" / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [f"j{seed}" for seed in range(count)]
    assert [row["seed"] for row in rows] == [str(seed) for seed in range(count)]
