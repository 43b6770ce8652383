"""The environment contract: local rank to device, and the batch of a rank."""

from __future__ import annotations

from safelaunch.model import Evidence, GilTest, RankEvidence, RankException
from safelaunch.report import overview


def job(*ranks: RankEvidence) -> Evidence:
    return Evidence("hang", len(ranks), ranks)


def rank(number: int, local: int, gpu: str = "", message: str = "", **batches: int) -> RankEvidence:
    raised = RankException("RuntimeError", message, 0.0) if message else None
    return RankEvidence(
        rank=number,
        host="node",
        pid=100 + number,
        local_rank=local,
        gpu=gpu,
        exception=raised,
        gil=GilTest(batches=batches),
    )


def test_without_devices_and_loaders_nothing_is_said() -> None:
    assert (overview.devices(job(rank(0, 0))), overview.batches(job(rank(0, 0)))) == ("", "")


def test_each_local_rank_has_its_device() -> None:
    nodes = job(rank(0, 0, "0"), rank(1, 1, "1"), rank(2, 0, "0"), rank(3, 1, "GPU-5ac1e2d3-77"))
    assert overview.devices(nodes) == "local rank 0: GPU 0, 1: GPU 1 or GPU-5ac1e2d3"


def test_a_rank_taken_for_a_device_is_named() -> None:
    message = "CUDA error: invalid device ordinal"
    second = job(rank(0, 0, "0"), rank(1, 0, message=message))
    assert overview.devices(second).endswith(
        "rank 1 requested a device that does not exist: a device is numbered by LOCAL_RANK, not by RANK"
    )
    assert "LOCAL_RANK" not in overview.devices(job(rank(1, 1, message=message))), "they are the same on one node"


def test_the_batch_of_a_rank_is_not_that_of_a_step() -> None:
    assert overview.batches(job(rank(0, 0, loader=32), rank(1, 1, loader=32))) == (
        "32 (loader) a rank, 64 a step if all 2 ranks are data-parallel"
    )
    assert overview.batches(job(rank(0, 0, train=32, val=64), rank(1, 1))) == "32 (train), 64 (val) a rank"
    uneven = job(rank(0, 0, loader=32), rank(1, 1, loader=16))
    assert overview.batches(uneven) == "not the same on all ranks: 32 (loader) or 16 (loader)"


def test_the_world_is_told_with_its_mesh() -> None:
    assert overview.world(8, (("dp", 2), ("tp", 4))) == "8 ranks = dp 2 x tp 4"
    assert (overview.world(8), overview.world(0)) == ("8 ranks", "")
