"""Wrong results of real jobs, as --check-every finds them. ``scripts/qa/consistency.py`` runs all the programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.nodes import TwoNodes
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

REPLICAS = PROGRAMS / "replicas.py"


def test_flipped_bit_ends_job_with_rank_step_and_parameter_in_bundle(tmp_path: Path) -> None:
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
    again = subprocess.run(
        [sys.executable, "-m", "safelaunch", "diagnose", "--json", bundle.path], capture_output=True, check=True
    )
    assert json.loads(again.stdout) == bundle.verdict and bundle.verdict["cause"] == "replicas-diverged"
    assert [(culprit["rank"], culprit["step"]) for culprit in bundle.verdict["culprits"]] == [(2, 9)]
    assert "Wrong results" in bundle.text("report.md") and bundle.problems() == [] and not result.leftovers


@pytest.mark.nightly
def test_diverging_loss_is_found(tmp_path: Path) -> None:
    with Job(["--check-every=3", "--nproc-per-node=3", REPLICAS, "loss", "60"], tmp_path) as job:
        result = job.wait()
    assert result.code == 0 and "loss: rank 1 diverged" in result.stderr, result.stderr


@pytest.mark.nightly
def test_finding_in_last_checks_gets_bundle_and_exit_code(tmp_path: Path) -> None:
    own = ["--check-every=3", "--on-inconsistent=stop", "--nproc-per-node=3"]
    with Job([*own, PROGRAMS / "replicas_more.py", "ends-apart", "9"], tmp_path) as job:
        result = job.wait()
    assert result.code == 123, result.stderr
    assert "writing a bundle of what was found; the ranks have ended" in result.stderr
    (bundle,) = result.bundles
    assert (bundle.verdict["outcome"], bundle.verdict["cause"]) == ("dump", "replicas-diverged")
    assert bundle.json("inconsistent.json")[0]["sides"] == [[0], [1]] and bundle.problems() == []


@pytest.mark.nightly
def test_probes_without_numpy_return_records_and_print_once(tmp_path: Path) -> None:
    with Job(["--nproc-per-node=2", PROGRAMS / "probing.py"], tmp_path) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    assert result.stdout.count("1 of 7 tensors differ") == 1 and result.stdout.count("1 of 5 tensors differ") == 1


@pytest.mark.nightly
def test_diverged_replicas_on_two_nodes_end_both_nodes(tmp_path: Path) -> None:
    own = ["--check-every=3", "--on-inconsistent=stop"]
    with TwoNodes(tmp_path, own, [REPLICAS, "hsdp-flip", "100000"]) as nodes:
        results = [job.wait() for job in nodes.jobs]
    line = "wrong result: parameters that should be replicas diverged between steps 6 and 9: rank 0 against rank 2 in"
    for result in results:
        assert result.code == 123, result.stderr
        assert result.stderr.count(line) == 1 and not result.leftovers
    (bundle,) = [bundle for result in results for bundle in result.bundles]
    assert (bundle.verdict["outcome"], bundle.verdict["cause"]) == ("dump", "replicas-diverged")
    assert sorted(int(path.name) for path in (bundle.path / "ranks").iterdir()) == [0, 1, 2, 3]


@pytest.mark.nightly
def test_nan_from_another_node_is_traced_there(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, ["--check-every=3", "--on-inconsistent=dump"], [REPLICAS, "nan", "100000"]) as nodes:
        one, other = nodes.jobs
        for job in nodes.jobs:
            job.until(lambda job=job: "not finite on rank 1 since step 7" in job.stderr, "the finding")  # type: ignore[misc]
        one.until(lambda: "bundle: " in one.stderr + other.stderr, "the bundle")
        assert (one.stderr + other.stderr).count("non-finite-gradient (confidence: high)") == 1
    found = json.loads(next(tmp_path.glob("node-*/bundles/latest/verdict.json")).read_text())
    assert [culprit["rank"] for culprit in found["culprits"]] == [1] and found["culprits"][0]["step"] == 7


@pytest.mark.nightly
def test_check_on_gpu_never_waits() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "without_waiting.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
