"""Hardware that a verdict blames, and how often the last bundles have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from evidence import MODULE, SITE, at, in_c10d, job, rank
from msgspec import UNSET, structs

from safelaunch.model import Evidence, Frame, GpuProcess, GpuUse, NodeEvidence, RankException, RankExit
from safelaunch.supervise.recall import blamed_in
from safelaunch.verdict.diagnose import diagnose

SYNCHRONIZE = Frame(f"{SITE}/torch/cuda/__init__.py", 1108, "synchronize")
RESET = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def stuck(gpu: str = "GPU-1", **more: object) -> Evidence:
    """Rank 1 waits for its GPU, the others for it."""
    peers = [rank(n, in_c10d("all_reduce", 60)) for n in (0, 2, 3)]
    return job(structs.replace(rank(1, (SYNCHRONIZE, at(41), MODULE), "run"), gpu=gpu), *peers, **more)


def gpu_of(evidence: Evidence) -> object:
    (culprit,) = diagnose(evidence).culprits
    return culprit.gpu


def test_a_gpu_that_the_last_bundles_blame() -> None:
    verdict = diagnose(stuck(earlier=(("GPU-1",), (), ("GPU-2", "node7"), ("GPU-1",), ())))
    assert verdict.blamed_before == ("GPU-1 was named in 2 of the last 5 bundles here",)
    assert diagnose(stuck(earlier=(("GPU-1",),))).blamed_before == ("GPU-1 was named in the last bundle here",)


@pytest.mark.parametrize("earlier", [None, (), ((), ()), (("GPU-2",),)])
def test_without_a_repeat_there_is_not_a_word(earlier: tuple[tuple[str, ...], ...] | None) -> None:
    assert diagnose(stuck(earlier=earlier)).blamed_before is UNSET
    assert diagnose(stuck("", earlier=(("GPU-1",),))).blamed_before is UNSET, "which GPU it has is not known"


def test_a_gpu_by_the_memory_that_the_rank_has_on_it() -> None:
    pid = stuck().ranks[0].pid
    mine, other = (GpuProcess(pid, 1), GpuProcess(pid + 1, 1))
    assert gpu_of(stuck("0", gpus=(GpuUse("node1", 0, "GPU-x", (other,)), GpuUse("node1", 1, "GPU-y", (mine,))))) == (
        "GPU-y"
    )
    assert gpu_of(stuck("0", gpus=(GpuUse("node2", 0, "GPU-x", (mine,)),))) is UNSET, "another node's"
    both = (GpuUse("node1", 0, "GPU-x", (mine,)), GpuUse("node1", 1, "GPU-y", (mine,)))
    assert gpu_of(stuck("", gpus=both)) is UNSET


@pytest.mark.parametrize(
    ("message", "gpu"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "GPU-0"),
        ("CUDA error: hardware stack error", "GPU-0"),
        ("CUDA error: an illegal memory access was encountered", UNSET),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", UNSET),
    ],
)
def test_which_exceptions_blame_the_gpu(message: str, gpu: object) -> None:
    more = {"exception": RankException("RuntimeError", message, -1.0, (at(41), MODULE)), "exit": RankExit(1, -1.0)}
    failed = structs.replace(rank(0, seen=False, more=more), gpu="GPU-0")
    assert gpu_of(job(failed, rank(1, in_c10d("all_reduce", 60)), outcome="crash")) == gpu


def test_a_node_that_the_last_bundles_blame() -> None:
    more = {"exception": RankException("RuntimeError", RESET, -1.0, (at(41), MODULE)), "exit": RankExit(1, -1.0)}
    evidence = job(
        *(structs.replace(rank(n, seen=False, more=more), host="a") for n in (0, 1)),
        outcome="crash",
        missing_ranks=(2, 3),
        nodes=(NodeEvidence("a", 1, (0, 1), here=True), NodeEvidence("b", 2, (2, 3), silent_s=20.0)),
        earlier=(("b",), ()),
    )
    assert diagnose(evidence).blamed_before == ("b was named in 1 of the last 2 bundles here",)


def bundle(directory: Path, second: int, outcome: str = "hang", **more: object) -> Path:
    path = directory / f"train-20260101T0000{second:02}Z-{outcome}"
    path.mkdir()
    (path / "verdict.json").write_text(json.dumps({"outcome": outcome, "culprits": [], **more}))
    return path


def test_whom_the_last_bundles_blame(tmp_path: Path) -> None:
    bundle(tmp_path, 0, culprits=[{"rank": 1, "gpu": "GPU-too-old"}])
    bundle(tmp_path, 1, "crash", culprits=[{"rank": 1, "gpu": "GPU-1"}, {"rank": 2}])
    bundle(tmp_path, 2, nodes=[{"host": "b", "ranks": "", "reason": ""}])
    bundle(tmp_path, 3, "suspect", culprits=[{"gpu": "GPU-1"}])
    bundle(tmp_path, 4, bundle={"host": "a", "path": "/b", "whole": False}, culprits=[{"gpu": "GPU-1"}])
    bundle(tmp_path, 5, suspects=[{"unit": "gpu", "name": "GPU-9"}])  # of an older safelaunch
    bundle(tmp_path, 6)
    (bundle(tmp_path, 7) / "verdict.json").write_text("{")
    os.mkfifo(tmp_path / "train-20260101T000008Z-hang")
    bundle(tmp_path, 9, culprits=[{"gpu": "GPU-1"}])
    assert blamed_in(tmp_path) == (("GPU-1",), (), (), ("b",), ("GPU-1",))
