"""Tables of the GPUs that a job can use, and of the number that it wants."""

from __future__ import annotations

import pytest

from safelaunch.leases.choose import (
    GpuRanking,
    GpuUser,
    Inventory,
    LeasableGpu,
    pool_of,
    users_of,
    wish_of,
)
from safelaunch.system.errors import ResourceError

GPUS = tuple(LeasableGpu(str(n), f"GPU-{n}{n}{n}") for n in range(8))
MIG = (
    LeasableGpu("0.0", "MIG-a0", parent="GPU-000"),
    LeasableGpu("0.1", "MIG-a1", parent="GPU-000"),
    LeasableGpu("1", "GPU-111"),
    LeasableGpu("2.3", "MIG-c3", parent="GPU-222"),
)
SLURM = {"SLURM_JOB_ID": "1"}


def labels(gpus: tuple[LeasableGpu, ...] | None) -> str | None:
    return None if gpus is None else " ".join(gpu.label for gpu in gpus)


@pytest.mark.parametrize(
    ("environ", "gpus", "expected"),
    [
        ({}, GPUS, "0 1 2 3 4 5 6 7"),
        ({"CUDA_VISIBLE_DEVICES": "5,2"}, GPUS, "5 2"),
        ({"CUDA_VISIBLE_DEVICES": " GPU-3, 1 "}, GPUS, "3 1"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, GPUS, "1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, GPUS, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, GPUS, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, GPUS, ""),
        # As in CUDA, entries after the first invalid one are ignored.
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, GPUS, "2"),
        ({"CUDA_VISIBLE_DEVICES": "2,9,3"}, GPUS, "2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, GPUS, "0"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a1"}, MIG, "0.1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, MIG, "0.0 0.1 1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-000"}, MIG, "0.0 0.1"),
        ({"CUDA_VISIBLE_DEVICES": "1", **SLURM, "SLURM_JOB_GPUS": "2,3"}, GPUS, "1"),
        ({**SLURM, "SLURM_JOB_GPUS": "2,3"}, GPUS, "2 3"),
        ({**SLURM, "SLURM_JOB_GPUS": "2,4-6"}, GPUS, "2 4 5 6"),
        ({**SLURM, "SLURM_JOB_GPUS": "2,3,4", "SLURM_STEP_GPUS": "3"}, GPUS, "3"),
        ({**SLURM, "GPU_DEVICE_ORDINAL": "0", "SLURM_JOB_GPUS": "2,3"}, GPUS, "0"),
        # A cgroup hides the other GPUs, and NVML counts from 0, so all visible GPUs are the job's.
        ({**SLURM, "SLURM_JOB_GPUS": "6,7"}, GPUS[:2], "0 1"),
        ({**SLURM}, GPUS, "0 1 2 3 4 5 6 7"),
        ({"SLURM_JOB_GPUS": "2"}, GPUS, "0 1 2 3 4 5 6 7"),
    ],
)
def test_gpu_pool_follows_environment(environ: dict[str, str], gpus: tuple[LeasableGpu, ...], expected: str) -> None:
    assert labels(pool_of(environ, gpus).gpus) == expected


@pytest.mark.parametrize(
    ("request_", "ranks", "environ", "expected"),
    [
        (None, 2, {}, (2, 8, False)),
        (None, 16, {}, (8, 8, False)),  # more ranks than GPUs share all GPUs
        (None, "all", {}, (8, 8, False)),
        (None, None, {}, None),
        (None, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, (3, 3, True)),
        (None, None, {"CUDA_VISIBLE_DEVICES": "4"}, (1, 1, True)),
        (None, 2, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (None, 1, {**SLURM, "SLURM_JOB_GPUS": "2,3"}, (1, 2, False)),
        ("all", 1, {}, (8, 8, False)),
        ("all", 1, {"CUDA_VISIBLE_DEVICES": "4,5"}, (2, 2, True)),
        ("2", 1, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, (2, 3, False)),
        ("3,5", 1, {}, (2, 2, False)),
        ("3,", 1, {}, (1, 1, False)),
        ("GPU-444,5", 1, {}, (2, 2, False)),
        ("GPU-444,4", 1, {}, (1, 1, False)),
    ],
)
def test_gpu_wish_has_count_and_candidates(
    request_: str | None, ranks: GpuRanking, environ: dict[str, str], expected: tuple[int, int, bool] | None
) -> None:
    wish = wish_of(request_, ranks, pool_of(environ, GPUS), Inventory(GPUS))
    assert (None if wish is None else (wish.count, len(wish.candidates), wish.keep)) == expected


@pytest.mark.parametrize(
    ("request_", "environ", "gpus", "words"),
    [
        ("9", {}, GPUS, "only 8 GPUs are available"),
        ("2", {"CUDA_VISIBLE_DEVICES": "4"}, GPUS, "only 1 GPU is available (CUDA_VISIBLE_DEVICES=4)"),
        ("1", {}, (), "no GPU is available (nothing found)"),
        ("all", {"CUDA_VISIBLE_DEVICES": ""}, GPUS, "no GPU is available"),
        ("9,", {}, GPUS, "GPU '9' is not available"),
        ("3,", {"CUDA_VISIBLE_DEVICES": "4,5"}, GPUS, "Available GPUs: 4, 5."),
        ("0,", {}, MIG, "Name one of them: 0.0, 0.1."),
    ],
)
def test_wish_for_unavailable_gpu_names_available_ones(
    request_: str, environ: dict[str, str], gpus: tuple[LeasableGpu, ...], words: str
) -> None:
    inventory = Inventory(gpus, missing="" if gpus else "nothing found")
    with pytest.raises(ResourceError) as raised:
        wish_of(request_, 1, pool_of(environ, gpus), inventory)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (LeasableGpu("0", "GPU-0"), ""),
        (LeasableGpu("0", "GPU-0", memory_used_bytes=256 << 20), ""),
        (
            LeasableGpu("0", "GPU-0", memory_used_bytes=(256 << 20) + 1),
            "used without a lease by an invisible process (256 MiB in use)",
        ),
        (LeasableGpu("0", "GPU-0", processes=(GpuUser(7), GpuUser(9))), "used without a lease by pid 7, 9"),
        (LeasableGpu("0", "unknown-0", error="GPU is lost"), "not answering: GPU is lost"),
    ],
)
def test_gpu_use_without_lease_is_described(gpu: LeasableGpu, expected: str) -> None:
    users = users_of(gpu)
    assert users.startswith(expected) and bool(users) == bool(expected)
