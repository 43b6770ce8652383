"""GPU readings that change over time, from the driver to the verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.capture.node import NodeSubject, sources
from safelaunch.model import Evidence, Gpu, Gpus, Verdict
from safelaunch.supervise.health import read_gpus
from safelaunch.verdict.diagnose import diagnose
from tests.support import evidence as ev
from tests.support.nvml import stub

State = Sequence[Mapping[str, int]]
SPINS, IDLE, COMPUTES = stub.SPINS, stub.IDLE, stub.COMPUTES
RANKS = 4
NOT_SUPPORTED, LOST = 3, 15  # return codes of NVML
NOBODY = ("no-rank-stands-out", "medium", list[int]())


def lines_of(readings: State) -> list[str]:
    return [line for index, reading in enumerate(readings) for line in stub.values(index, **reading)]


def write(node: stub.Node, readings: State, *lines: str) -> None:
    users = [f"process {rank} {ev.waiting(rank).pid} {stub.GIB}" for rank in range(RANKS)]
    node.write(*lines_of(readings), *users, *lines, gpus=RANKS)


def verdict_of(node: stub.Node, readings: State, *lines: str) -> Verdict:
    """Returns the verdict on ranks that all wait in one call. They made steps before, and their GPUs computed."""
    write(node, [{**COMPUTES, "uncorrected": 0}] * RANKS)
    usual = read_gpus()
    assert [gpu.utilisation_percent for gpu in usual] == [98] * RANKS
    write(node, readings, *lines)
    return verdict_after(usual)


def verdict_after(usual: tuple[Gpu, ...]) -> Verdict:
    result = sources()["gpus"](NodeSubject(usual_gpus=usual))
    assert result is not None and isinstance(result.value, Gpus), result
    ranks = tuple(replace(ev.waiting(rank), gpu=stub.uuid(rank)) for rank in range(RANKS))
    uses = result.value.uses(ranks[0].host)
    assert all(len(use.looks) == 2 and use.usual is not None for use in uses)
    evidence = Evidence("hang", RANKS, ranks)
    assert diagnose(evidence).cause == "no-rank-stands-out"
    return diagnose(replace(evidence, gpus=uses))


@pytest.mark.parametrize(
    ("readings", "lines", "expected"),
    [
        ([SPINS, SPINS, SPINS, IDLE], (), ("gpu-kernel", "medium", [3])),
        ([SPINS, COMPUTES, SPINS, SPINS], (), ("gpu-kernel", "medium", [1])),
        ([SPINS, SPINS, SPINS, SPINS], (f"fail nvmlDeviceGetHandleByIndex_v2 {LOST} 2",), ("gpu-lost", "high", [2])),
        ([SPINS, {**SPINS, "uncorrected": 1}, SPINS, SPINS], (), ("gpu-lost", "medium", [1])),
        ([SPINS, SPINS, SPINS, {**SPINS, "uncorrected": 0}], (), NOBODY),
        ([SPINS, SPINS, SPINS, SPINS], (), NOBODY),
        ([IDLE, IDLE, IDLE, IDLE], (), NOBODY),
        ([SPINS, SPINS, IDLE, IDLE], (), NOBODY),
        ([SPINS, SPINS, SPINS, IDLE], ("then", *lines_of([SPINS] * RANKS)), NOBODY),
        ([SPINS, SPINS, SPINS, IDLE], ("then", *lines_of([IDLE] * RANKS)), NOBODY),
        ([SPINS, SPINS, SPINS, IDLE], (f"process 3 999 {stub.GIB}",), NOBODY),
        ([SPINS, SPINS, SPINS, IDLE], (f"fail nvmlDeviceGetUtilizationRates {NOT_SUPPORTED}",), NOBODY),
    ],
)
def test_readings_from_driver_to_verdict(
    readings: State,
    lines: Sequence[str],
    expected: tuple[str, str, list[int]],
    node: stub.Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    verdict = verdict_of(node, readings, *lines)
    assert (verdict.cause, verdict.confidence, [culprit.rank for culprit in verdict.culprits]) == expected, verdict


# --- NVIDIA's mock of NVML --------------------------------------------------------------------------------------------
# To run these tests, build ``pkg/gpu/mocknvml`` of github.com/NVIDIA/k8s-test-infra (``make NO_PADDING=1``), and set
# MOCK_NVML to that folder. The mock reads its configuration when it is initialized.


MOCK = os.environ.get("MOCK_NVML", "")
SYSTEM = {"num_devices": RANKS, "driver_version": "550.163.01", "nvml_version": "12.550.163.01", "cuda_version": "12.4"}
DEFAULTS = {"name": "NVIDIA H100 80GB HBM3", "memory": {"total_bytes": 80 * stub.GIB}}


def configuration(readings: State, **broken: Any) -> str:
    devices = []
    for index, reading in enumerate(readings):
        user = {"pid": ev.waiting(index).pid, "type": "C", "used_memory_mib": 1024}
        device = {
            "index": index,
            "uuid": stub.uuid(index),
            "processes": [user],
            **(broken if index == RANKS - 1 else {}),
        }
        device["utilization"] = {"gpu": reading["utilisation"], "memory": reading["memory"]}
        device["power"] = {"management_supported": True, "current_draw_mw": reading["power"]}
        devices.append(device)
    return json.dumps({"version": "1.0", "system": SYSTEM, "device_defaults": DEFAULTS, "devices": devices})


@pytest.mark.nightly
@pytest.mark.skipif(not MOCK, reason="needs NVIDIA's mock of NVML: set MOCK_NVML")
@pytest.mark.parametrize(
    ("readings", "broken", "expected"),
    [
        ([SPINS, SPINS, SPINS, IDLE], {}, ("gpu-kernel", "medium", [3])),
        ([SPINS, SPINS, SPINS, COMPUTES], {}, ("gpu-kernel", "medium", [3])),
        ([SPINS, SPINS, SPINS, SPINS], {"failure": {"mode": "lost"}}, ("gpu-lost", "high", [3])),
        ([SPINS, SPINS, SPINS, SPINS], {"failure": {"mode": "ecc_uncorrectable"}}, ("gpu-lost", "medium", [3])),
        ([SPINS, SPINS, SPINS, SPINS], {}, NOBODY),
        ([SPINS, SPINS, IDLE, IDLE], {}, NOBODY),
    ],
)
def test_readings_of_mock_nvml_agree(
    readings: State,
    broken: Mapping[str, Any],
    expected: tuple[str, str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "mock.yaml"
    monkeypatch.setenv("LD_LIBRARY_PATH", MOCK)
    monkeypatch.setenv("MOCK_NVML_CONFIG", os.fspath(config))
    config.write_text(configuration([COMPUTES] * RANKS))
    usual = read_gpus()
    assert [gpu.utilisation_percent for gpu in usual] == [98] * RANKS
    config.write_text(configuration(readings, **broken))
    verdict = verdict_after(usual)
    assert (verdict.cause, verdict.confidence, [culprit.rank for culprit in verdict.culprits]) == expected, verdict
