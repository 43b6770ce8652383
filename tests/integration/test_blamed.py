"""The same GPU blamed twice, by different lines: said as a suspicion, and left out of the next lease."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub
from jobs import PROGRAMS, Job, Result
from nodes import TwoNodes

pytestmark = pytest.mark.torch

WATCH = ["--stall-timeout=2", "--nproc-per-node=2"]
SAID = 'echo "[$SAFELAUNCH_SUSPECT_GPU] [$SAFELAUNCH_SUSPECT_HOST]" >> "$SAFELAUNCH_BUNDLE/../told"'


def hang(node: stub.Node, scratch: Path, where: str) -> Result:
    words = [*WATCH, "--on-bundle", SAID, PROGRAMS / "stuck_gpu.py", where]
    with Job(words, scratch, env={**node.environ, "SAFELAUNCH_NO_LEASE": None}) as job:
        return job.wait()


def safelaunch(node: stub.Node, scratch: Path, *words: str) -> str:
    """What safelaunch says where the jobs were run."""
    done = subprocess.run(
        [sys.executable, "-m", "safelaunch", *words],
        env={**os.environ, **node.environ},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout + done.stderr


def test_a_gpu_that_is_blamed_twice_is_suspected_and_left_out(node: stub.Node, tmp_path: Path) -> None:
    first = hang(node, tmp_path, "first")
    assert (first.verdict["cause"], "suspects" in first.verdict) == ("gpu-kernel", False), first.stderr
    second = hang(node, tmp_path, "second")
    bundles = sorted(second.bundles, key=lambda bundle: bundle.path.name)
    verdict = bundles[-1].verdict
    (suspect,) = verdict["suspects"]
    assert (suspect["unit"], suspect["name"], suspect["times"]) == ("gpu", stub.uuid(1), 2)
    assert [one["bundle"] for one in suspect["before"]] == [os.fspath(first.bundle.path)]
    assert not bundles[-1].problems()
    screen = " ".join(line.removeprefix("safelaunch:").strip() for line in second.stderr.splitlines())
    assert f"GPU {stub.uuid(1)} of {suspect['host']} is blamed for the second time" in screen
    assert os.fspath(first.bundle.path) in screen
    assert "Suspected hardware" in bundles[-1].text("report.md")
    told = (bundles[-1].path.parent / "told").read_text().splitlines()
    assert told == ["[] []", f"[{stub.uuid(1)}] [{suspect['host']}]"]
    again = safelaunch(node, tmp_path, "diagnose", os.fspath(bundles[-1].path), "--json")
    assert json.loads(again)["suspects"] == verdict["suspects"], "the bundle has what the suspicion rests on"

    where = f"--bundle-dir={bundles[-1].path.parent}"
    rows = json.loads(safelaunch(node, tmp_path, "gpus", "--json", where))["gpus"]
    assert [row["gpu"] for row in rows if row["blamed"]] == ["1"]
    plain = safelaunch(node, tmp_path, "exec", where, "--gpus=2", "--", "true")
    assert "GPUs of this job: 0, 1 " in plain
    other = safelaunch(node, tmp_path, "exec", where, "--gpus=2", "--exclude-blamed", "--", "true")
    assert "GPUs of this job: 0, 2 " in other
    assert "left out, as earlier verdicts make it suspect: GPU 1" in other
    node.write(gpus=2)
    both = safelaunch(node, tmp_path, "exec", where, "--gpus=2", "--exclude-blamed", "--", "true")
    assert "GPUs of this job: 0, 1 " in both
    assert "not enough others are free" in both


def test_ranks_that_are_started_anew_get_another_gpu(node: stub.Node, tmp_path: Path) -> None:
    words = [*WATCH, "--on-stall=restart", "--exclude-blamed", "--max-restarts=2", PROGRAMS / "restarted_gpu.py"]
    with Job(words, tmp_path, env={**node.environ, "SAFELAUNCH_NO_LEASE": None}) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    assert result.stdout == f"finished with {stub.uuid(0)},{stub.uuid(2)}\n"
    assert f"have GPU {stub.uuid(2)} in place of {stub.uuid(1)}" in result.said
    assert [[one["name"] for one in bundle.verdict.get("suspects", [])] for bundle in result.bundles] == [
        [],
        [stub.uuid(1)],
    ]
    assert not result.leftovers


def crash_on_a_host(scratch: Path, where: str) -> tuple[Result, Result]:
    """A job of two nodes, whose rank 1 on ``node-b`` dies of SIGSEGV; both keep their bundles on one disk."""
    place, shared = scratch / where, scratch / "bundles"
    place.mkdir()
    shared.mkdir(exist_ok=True)
    own = ["--on-bundle", f'echo "$SAFELAUNCH_SUSPECT_HOST $SAFELAUNCH_SUSPECT_CHANCE" >> {scratch}/{where}.told']
    program = [PROGRAMS / "faulty_host.py", where]
    with TwoNodes(
        place, own, program, ranks=(1, 1), over="static", hosts=("node-a", "node-b"), bundle_dir=shared
    ) as nodes:
        first, second = (job.wait() for job in nodes.jobs)
    return first, second


@pytest.mark.rare
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="naming a host needs root and unshare")
def test_a_host_that_is_blamed_twice_is_named_for_the_scheduler(tmp_path: Path) -> None:
    first = crash_on_a_host(tmp_path, "first")
    assert [one.code for one in first] == [1, 1], first[0].stderr + first[1].stderr
    known = set(first[0].bundles)
    assert {one.verdict["cause"] for one in known} == {"rank-killed"}
    assert not any("suspects" in one.verdict for one in known)
    second = crash_on_a_host(tmp_path, "second")
    anew = set(second[0].bundles) - known
    suspects = [one.verdict["suspects"] for one in anew]
    assert suspects and all(one == suspects[0] for one in suspects), "one job, one verdict"
    (suspect,) = suspects[0]
    assert (suspect["unit"], suspect["name"], suspect["times"], suspect["chance"]) == ("host", "node-b", 2, 0.5)
    assert "may be the hardware" in suspect["words"]
    assert any("scontrol update nodename=node-b state=drain" in text for text in anew.pop().verdict["suggestions"])
    assert set((tmp_path / "first.told").read_text().splitlines()) == {" "}
    assert set((tmp_path / "second.told").read_text().splitlines()) == {"node-b 0.5000"}


@pytest.mark.rare
def test_after_a_crash_the_next_attempt_has_another_gpu(node: stub.Node, tmp_path: Path) -> None:
    words = ["--nproc-per-node=2", "--exclude-blamed", "--max-restarts=2", PROGRAMS / "crashing_gpu.py"]
    with Job(words, tmp_path, env={**node.environ, "SAFELAUNCH_NO_LEASE": None}) as job:
        result = job.wait()
    assert result.code == 0, result.stderr
    assert result.stdout == f"finished with {stub.uuid(0)},{stub.uuid(2)}\n", result.stderr
    assert [bundle.verdict["cause"] for bundle in result.bundles] == ["rank-exception"] * 2
    assert not result.leftovers


@pytest.mark.rare
def test_without_another_gpu_the_ranks_keep_theirs(node: stub.Node, tmp_path: Path) -> None:
    node.write(gpus=2)
    words = ["--nproc-per-node=2", "--exclude-blamed", "--max-restarts=2", PROGRAMS / "crashing_gpu.py"]
    with Job(words, tmp_path, env={**node.environ, "SAFELAUNCH_NO_LEASE": None}) as job:
        result = job.wait()
    assert result.stdout == f"finished with {stub.uuid(0)},{stub.uuid(1)}\n", result.stderr
    assert f"the ranks keep GPU {stub.uuid(1)}: no other GPU that this job may have is free" in result.said
