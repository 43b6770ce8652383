"""Under a real Slurm: a controller, and several nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.docs.pages import blocks
from tests.qa import slurm
from tests.support.nodes import APART, TASK
from tests.support.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm.why_not()), reason=f"no Slurm of its own: {slurm.why_not()}"),
]
QUICK = {"SAFELAUNCH_STALL_TIMEOUT": "3", "SAFELAUNCH_MAX_STALL": "120"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    root = Path(tempfile.mkdtemp(prefix="sl-slurm-", dir="/tmp"))
    try:
        with slurm.Cluster(root) as cluster:
            yield cluster
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    runtime = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))  # sockets need a short path
    yield {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": os.fspath(runtime),
        "GLOO_SOCKET_IFNAME": "lo",
        "SAFELAUNCH_BUNDLE_DIR": os.fspath(tmp_path / "bundles"),
        **QUICK,
    }
    shutil.rmtree(runtime, ignore_errors=True)


def verdicts(place: Path) -> list[dict[str, Any]]:
    """Those of all nodes, the whole one first."""
    found = [json.loads(path.read_text()) for path in place.glob("[!.]*Z-*/verdict.json")]
    return sorted(found, key=lambda verdict: not verdict["bundle"]["whole"])


def script(title: str, train: Path, *words: str) -> str:
    """A script of the page, for another program; its bundles go where the test says."""
    text = next(block.text for block in blocks("docs/schedulers.md") if block.title == title)
    assert "train.py" in text
    text = text.replace("train.py", " ".join([os.fspath(train), *words]))
    return text.replace('--bundle-dir="$SLURM_SUBMIT_DIR/bundles"', "")


def submitted(cluster: slurm.Cluster, place: Path, env: Mapping[str, str], nodes: int) -> tuple[int, str]:
    """The exit code of a job and what it said. Once its supervisors have met, one rank misbehaves."""
    out = place.parent / "out.txt"
    job = cluster.begin(["sbatch", "--wait", f"--output={out}", place], env=env)
    try:
        until(
            lambda: out.exists() and out.read_text().count("one verdict for all") == nodes,
            "all to meet",
            more=lambda: output(out),
        )
        (place.parent / "met").touch()
        return job.wait(150.0), out.read_text()
    finally:
        job.kill()
        job.wait()


def test_the_script_of_the_page_and_a_hang(cluster: slurm.Cluster, env: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "train.sbatch"
    place.write_text(
        script("train.sbatch", APART, "--how=asleep", "--culprit=3", f"--once={tmp_path}/met", f"--scratch={tmp_path}")
    )
    code, said = submitted(cluster, place, env, nodes=2)
    assert code == 124, said
    whole, half = verdicts(tmp_path / "bundles")
    assert [one["rank"] for one in whole["culprits"]] == [3], said
    assert {k: v for k, v in whole.items() if k != "bundle"} == {k: v for k, v in half.items() if k != "bundle"}
    assert said.count("together with 1 other node") == 2, said


@pytest.mark.parametrize("port", [pytest.param("named", marks=pytest.mark.nightly), "reserved"])
def test_one_supervisor_for_each_task(
    cluster: slurm.Cluster, env: dict[str, str], tmp_path: Path, port: Literal["named", "reserved"]
) -> None:
    """They meet on the step's first node, at the port of the page's script or at one that Slurm has reserved."""
    text = script(
        "tasks.sbatch", TASK, "--how=asleep", "--culprit=3", f"--once={tmp_path}/met", f"--scratch={tmp_path}"
    )
    if port == "reserved":
        text = text.replace("--cluster-store=$((MASTER_PORT + 1))", "").replace("srun ", "srun --resv-ports=1 ")
    place = tmp_path / "tasks.sbatch"
    place.write_text(text)
    code, said = submitted(cluster, place, env, nodes=4)
    assert code == 124, said
    assert said.count("started a store") == 1, said
    found = verdicts(tmp_path / "bundles")
    assert len(found) == 4
    assert found[0]["bundle"]["whole"] is True
    assert all([one["rank"] for one in verdict["culprits"]] == [3] for verdict in found), said


def test_scancel_of_a_healthy_job_accuses_nobody(cluster: slurm.Cluster, env: dict[str, str], tmp_path: Path) -> None:
    place, out = tmp_path / "train.sbatch", tmp_path / "out.txt"
    place.write_text(script("train.sbatch", APART, "--how=evaluates", "--seconds=0", f"--scratch={tmp_path}"))
    job = cluster.run(["sbatch", "--parsable", f"--output={out}", place], env=env).stdout.strip()
    until(
        lambda: (tmp_path / "evaluated").exists() and out.read_text().count("together with") == 2,
        "training",
        more=lambda: output(out),
    )
    cluster.run(["scancel", job])
    until(
        lambda: not cluster.run(["squeue", "--noheader", "-j", job]).stdout.strip(),
        "its end",
        more=lambda: output(out),
    )
    until(lambda: not running(tmp_path), "its processes to end", more=lambda: output(out))
    assert verdicts(tmp_path / "bundles") == []
    assert "crashed" not in out.read_text() and "hangs" not in out.read_text()


def running(scratch: Path) -> str:
    return subprocess.run(["pgrep", "-f", f"--scratch={scratch}"], capture_output=True, text=True).stdout


def output(out: Path) -> str:
    return out.read_text() if out.exists() else "no output"
