"""Wrong results of real jobs, as --check-every finds them. ``scripts/consistency.py`` runs all the programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import PROGRAMS, Job

pytestmark = pytest.mark.torch

REPLICAS = PROGRAMS / "replicas.py"


def test_a_flipped_bit_ends_the_job_with_a_bundle_that_names_rank_step_and_parameter(tmp_path: Path) -> None:
    own = ["--check-every=3", "--on-inconsistent=stop", "--nproc-per-node=3"]
    with Job([*own, REPLICAS, "bit-flip", "100000"], tmp_path) as job:
        result = job.wait()
    assert result.code == 123, result.stderr
    line = "diverged between steps 6 and 9: rank 2 differs from the others in 2.weight"
    assert result.stderr.count(line) == 1
    (bundle,) = result.bundles
    (found,) = bundle.json("inconsistent.json")
    assert (found["kind"], found["ranks"], found["step"], found["parameter"]) == (
        "replicas-diverged",
        [2],
        9,
        "2.weight",
    )
    assert "Wrong results" in bundle.text("report.md") and bundle.problems() == [] and not result.leftovers


@pytest.mark.rare
def test_a_healthy_job_is_told_what_was_compared(tmp_path: Path) -> None:
    with Job(["--check-every=3", "--nproc-per-node=2", REPLICAS, "ddp", "30"], tmp_path) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    assert "nothing inconsistent: " in result.stderr and "wrong result" not in result.stderr
    assert "tensors known to be replicated" in result.stderr


@pytest.mark.rare
def test_probes_return_records_and_print_once(tmp_path: Path) -> None:
    with Job(["--nproc-per-node=2", PROGRAMS / "probing.py"], tmp_path) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    assert result.stdout.count("1 of 7 tensors differ") == 1
