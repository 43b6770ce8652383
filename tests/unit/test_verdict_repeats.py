"""Hardware that a verdict blames, and how often the last bundles have."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msgspec import structs

from safelaunch.model import Evidence, Frame
from safelaunch.supervise.earlier_bundles import blamed_hardware
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import MODULE, SITE, at, in_c10d, job, rank

SYNCHRONIZE = Frame(f"{SITE}/torch/cuda/__init__.py", 1108, "synchronize")


def stuck(gpu: str = "GPU-1", **more: object) -> Evidence:
    """Rank 1 waits for its GPU, the others for it."""
    peers = [rank(n, in_c10d("all_reduce", 60)) for n in (0, 2, 3)]
    return job(structs.replace(rank(1, (SYNCHRONIZE, at(41), MODULE), "run"), gpu=gpu), *peers, **more)


def test_gpu_blamed_in_recent_bundles_is_counted() -> None:
    verdict = diagnose(stuck(earlier=(("GPU-1",), (), ("GPU-2", "node7"), ("GPU-1",), ())))
    assert verdict.blamed_before == ("GPU-1 was named in 2 of the last 5 bundles here",)
    assert diagnose(stuck(earlier=(("GPU-1",),))).blamed_before == ("GPU-1 was named in the last bundle here",)


def bundle(directory: Path, second: int, outcome: str = "hang", **more: object) -> Path:
    path = directory / f"train-20260101T0000{second:02}Z-{outcome}"
    path.mkdir()
    (path / "verdict.json").write_text(json.dumps({"outcome": outcome, "culprits": [], **more}))
    return path


def test_blamed_hardware_is_read_from_the_recent_bundles(tmp_path: Path) -> None:
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
    assert blamed_hardware(tmp_path) == (("GPU-1",), (), (), ("b",), ("GPU-1",))
