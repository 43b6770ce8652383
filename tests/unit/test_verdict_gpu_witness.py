"""The GPU that differs, from readings of all ranks' GPUs."""

from __future__ import annotations

import pytest

from safelaunch.model import Gpu, GpuProcess, Gpus, GpuUse
from safelaunch.verdict.gpu_witness import GpuActivity, activity_of, odd_gpu

# utilisation %, memory utilisation %, W
Reading = tuple[float | None, float | None, float | None]
SPINS, IDLE, COMPUTES, UNKNOWN = (100, 0, 190), (0, 0, 90), (100, 40, 600), (None, None, None)


def gpu(reading: Reading) -> Gpu:
    busy, memory, power = reading
    return Gpu(utilisation_percent=busy, memory_utilisation_percent=memory, power_w=power)


@pytest.mark.parametrize(
    ("reading", "usual", "activity"),
    [
        (UNKNOWN, None, ""),
        ((None, 0, 90), None, ""),
        ((9, 0, 90), None, "idle"),
        ((9, None, None), None, "idle"),
        ((10, 0, 90), None, ""),
        ((89, 0, 190), None, ""),
        ((90, 0, None), None, "spins"),
        ((100, 1, 190), None, "spins"),
        ((100, None, 190), None, ""),
        ((100, 2, 190), None, ""),
        ((100, 9, 190), None, ""),
        ((100, 10, 190), None, "computes"),
        (IDLE, COMPUTES, "idle"),
        (IDLE, IDLE, ""),
        (IDLE, UNKNOWN, "idle"),
        (SPINS, IDLE, "spins"),
    ],
)  # fmt: skip
def test_activity_of_one_reading(reading: Reading, usual: Reading | None, activity: GpuActivity) -> None:
    assert activity_of(gpu(reading), gpu(usual) if usual is not None else None) == activity


@pytest.mark.parametrize(
    ("readings", "world_size", "odd"),
    [
        ([SPINS, SPINS, IDLE], 3, (2, "idle")),
        ([SPINS, SPINS, COMPUTES], 3, (2, "computes")),
        ([SPINS, SPINS, (100, 0, 285)], 3, (2, "computes")),
        ([SPINS, SPINS, (100, 0, 284)], 3, None),
        ([SPINS, (100, 0, None), (100, 0, 600)], 3, None),
        ([SPINS, (100, 0, 600)], 2, None),
        ([SPINS, IDLE], 2, None),
        ([SPINS, SPINS, SPINS], 3, None),
        ([IDLE, IDLE, IDLE], 3, None),
        ([COMPUTES, COMPUTES, IDLE], 3, None),
        ([SPINS, SPINS, IDLE, IDLE], 4, None),
        ([SPINS] * 6 + [IDLE, IDLE], 8, None),
        ([SPINS] * 6 + [IDLE, COMPUTES], 8, None),
        ([SPINS, SPINS, UNKNOWN, IDLE], 3, (3, "idle")),
        ([SPINS, SPINS, UNKNOWN, IDLE], 4, None),
        ([SPINS] * 7 + [IDLE], 14, None),
        ([SPINS] * 7 + [IDLE], 13, (7, "idle")),
        ([UNKNOWN] * 4, 4, None),
        ([], 4, None),
    ],
)
def test_gpu_that_differs_is_the_only_one(
    readings: list[Reading], world_size: int, odd: tuple[int, GpuActivity] | None
) -> None:
    look = {rank: gpu(reading) for rank, reading in enumerate(readings)}
    found = odd_gpu([look, look], {}, world_size)
    assert (found and (found.rank, found.activity)) == odd
    assert odd_gpu([look], {}, world_size) is None, "one look"


def test_looks_must_agree() -> None:
    first, second = ({rank: gpu(one) for rank, one in enumerate(look)} for look in ([SPINS] * 4, [SPINS] * 3 + [IDLE]))
    assert odd_gpu([first, second], {}, 4) is odd_gpu([second, first], {}, 4) is None
    moved = {rank: gpu(one) for rank, one in enumerate([IDLE, SPINS, SPINS, SPINS])}
    assert odd_gpu([second, moved], {}, 4) is None
    unread = {rank: second[rank] for rank in range(3)}
    assert odd_gpu([second, unread], {}, 4) is None


def test_usual_power_explains_a_difference() -> None:
    look = {rank: gpu((100, 0, power)) for rank, power in enumerate([190, 190, 190, 400])}
    same = {rank: gpu((98, 40, power)) for rank, power in enumerate([300, 310, 300, 640])}
    alike = {rank: gpu(COMPUTES) for rank in range(4)}
    found = odd_gpu([look, look], alike, 4)
    assert found is not None and (found.rank, found.activity) == (3, "computes")
    assert odd_gpu([look, look], same, 4) is None
    low = {**alike, 3: gpu((30, 2, 200))}  # the reading was taken between two of its steps
    equal = {rank: gpu(SPINS) for rank in range(4)}
    assert odd_gpu([equal, equal], low, 4) is None


def test_lost_gpu_keeps_the_processes_of_the_usual_reading() -> None:
    worker = (GpuProcess(7, 1),)
    lost = Gpu(0, error="GPU is lost")
    usual = Gpu(0, uuid="GPU-0", processes=worker, power_w=600)
    (use,) = Gpus(gpus=(lost,), before=(lost,), usual=(usual,)).uses("a")
    assert use == GpuUse("a", 0, "GPU-0", worker, (lost, lost), Gpu(0, uuid="GPU-0", power_w=600))
    assert Gpus(gpus=(lost, Gpu(1))).uses("a") == ()
    (older,) = Gpus(gpus=(Gpu(2, processes=worker),)).uses("a")
    assert (older.index, older.processes, older.usual) == (2, worker, None)
