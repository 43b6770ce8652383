"""Readings of GPUs through the real NVML binding and a stand-in library."""

from __future__ import annotations

import msgspec
import pytest

from safelaunch.capture import gpu
from safelaunch.model import Gpu, Gpus
from tests.support.nvml import stub

NOT_SUPPORTED, LOST = 3, 15


def read(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, ...]:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    reply = gpu.gpus(deadline_s=60)
    assert reply.value is not None, reply.missing
    return reply.value.gpus


def test_gpu_readings_are_complete(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = stub.values(
        0, utilisation=100, memory=3, power=251_500, power_limit=700_000, sm_clock=1980, memory_clock=2619,
        reasons=0x44, corrected=7, uncorrected=1, remap_pending=1, remap_failed=0, replays=12, nvlink=4,
    )  # fmt: skip
    node.write(*readings, gpus=1)
    (one,) = read(node, monkeypatch)
    assert (one.utilisation_percent, one.memory_utilisation_percent) == (100, 3)
    assert (one.power_w, one.power_limit_w) == (251.5, 700)
    assert (one.sm_clock_mhz, one.memory_clock_mhz) == (1980, 2619)
    assert one.clocks_event_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert (one.ecc_errors, one.corrected_ecc_errors) == (1, 7)
    assert (one.row_remap_pending, one.row_remap_failed) == (True, False)
    assert (one.pcie_replays, one.nvlink_errors) == (12, 4)


def test_gpu_readings_not_reported_have_no_value(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(f"fail nvmlDeviceGetUtilizationRates {NOT_SUPPORTED}", gpus=1)
    (one,) = read(node, monkeypatch)
    fields = (
        "utilisation_percent", "memory_utilisation_percent", "power_limit_w", "sm_clock_mhz", "memory_clock_mhz",
        "clocks_event_reasons", "ecc_errors", "corrected_ecc_errors", "row_remap_pending", "row_remap_failed",
        "pcie_replays", "nvlink_errors",
    )  # fmt: skip
    assert {name: getattr(one, name) for name in fields} == dict.fromkeys(fields)
    assert one.power_w == 70.5


def test_gpu_that_is_lost_between_two_queries(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(f"fail nvmlDeviceGetPowerUsage {LOST} 1", gpus=2)
    whole, lost = read(node, monkeypatch)
    assert (whole.error, lost.error, lost.power_w) == ("", "GPU is lost", None)


def test_gpu_in_mig_mode_has_no_utilisation(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(f"mig 0 1 {stub.mig_uuid(0, 1)} 0 {10 * stub.GIB}", gpus=1)
    (one,) = read(node, monkeypatch)
    assert one.utilisation_percent is None and one.error == ""


def test_gpus_of_an_older_bundle_are_read() -> None:
    older = b'{"gpus": [{"index": 0, "name": "H100", "power_w": 70.5, "processes": null, "error": ""}]}'
    assert msgspec.json.decode(older, type=Gpus).gpus == (Gpu(0, name="H100", power_w=70.5),)
