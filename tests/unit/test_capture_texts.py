"""Parsing of logs, NVML's answers and node facts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from safelaunch.capture import gpu, kernel_log, node, rank_output, worker_server
from safelaunch.capture.result import Result, attempt
from safelaunch.model import Gpu, GpuProcess, Gpus
from safelaunch.system.errors import CaptureError

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], ""),
        ([(0, 1, b"one\ntwo\n")], "00:00:00.000 out| one\n00:00:00.000 out| two\n"),
        (
            [(SECOND, 1, b"hal"), (2 * SECOND, 2, b"other\n"), (3 * SECOND, 1, b"f\nrest")],
            "00:00:01.000 out| half\n00:00:02.000 err| other\n00:00:03.000 out| rest\n",
        ),
        ([(1_500_000_000, 2, b" 10%\r 20%\r 30%")], "00:00:01.500 err|  30%\n"),
        ([(0, 1, b"dos\r\n")], "00:00:00.000 out| dos\n"),
        ([(0, 1, "grün\n".encode()), (0, 1, b"\xff\n")], "00:00:00.000 out| grün\n00:00:00.000 out| \ufffd\n"),
    ],
)
def test_log_tail_joins_lines_by_stream(records: list[tuple[int, int, bytes]], expected: str) -> None:
    assert rank_output.log_tail(records) == expected


def test_node_pressure_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("some avg10=1.50 avg60=0.70 avg300=0.20 total=9\n")
    (tmp_path / "io").write_text("some avg10=0.00 total=0\nfull avg10=0.00 total=0\n")
    assert (node.pressure(str(tmp_path)).value or "").splitlines() == [
        "cpu: some avg10=1.50 avg60=0.70 avg300=0.20 total=9",
        "io: some avg10=0.00 total=0",
        "io: full avg10=0.00 total=0",
    ]
    assert node.pressure(str(tmp_path / "gone")).missing.endswith("this kernel doesn't provide it")


def test_kernel_log_record_is_parsed() -> None:
    record = "4,2,1500000,-;NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus\n SUBSYSTEM=pci\n"
    assert kernel_log.parse_kmsg(record, 0.0) == (
        "1970-01-01 00:00:01 NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus"
    )
    assert kernel_log.parse_kmsg("nonsense", 0.0) == ""


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 4711 (python) total-vm:1kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)",
        "NVRM: Xid (PCI:0000:65:00): 79",
        "INFO: task python:4711 blocked for more than 120 seconds.",
        "nfs: server storage not responding, still trying",
        "blk_update_request: I/O error, dev nvme0n1, sector 5",
    ],
)
def test_kernel_log_keeps_relevant_lines(line: str) -> None:
    assert kernel_log.relevant(["usb 1-1: new device", line, "eth0: link becomes ready"]) == [line]


def test_kernel_log_keeps_last_relevant_lines() -> None:
    lines = [f"oom-kill: {number}" for number in range(kernel_log.MAX_KERNEL_LINES + 5)]
    assert kernel_log.relevant(lines) == lines[5:]


# --- NVML -------------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    value = 12


def nvml(**functions: Any) -> Any:
    """Returns a ``pynvml`` module of a node with one GPU, on which only these functions are supported."""

    def unsupported(*_: object) -> Any:
        raise NvmlError("Not Supported")

    names = [
        "Init", "Shutdown", "SystemGetDriverVersion", "SystemGetCudaDriverVersion", "DeviceGetCount",
        "DeviceGetHandleByIndex", "DeviceGetMemoryInfo", "DeviceGetUUID", "DeviceGetName",
        "DeviceGetUtilizationRates", "DeviceGetPowerUsage", "DeviceGetTemperature", "DeviceGetClockInfo",
        "DeviceGetTotalEccErrors", "DeviceGetComputeRunningProcesses",
    ]  # fmt: skip
    constants = dict.fromkeys(["TEMPERATURE_GPU", "CLOCK_SM", "MEMORY_ERROR_TYPE_UNCORRECTED", "VOLATILE_ECC"], 0) | {
        "ERROR_LIBRARY_NOT_FOUND": 12,
        "ERROR_GPU_IS_LOST": 15,
    }
    return SimpleNamespace(
        NVMLError=NvmlError,
        **{f"nvml{name}": functions.get(name, unsupported) for name in names},
        **{f"NVML_{name}": value for name, value in constants.items()},
    )


NOBODY = 1 << 23  # the kernel numbers no process so high


def test_gpu_query_leaves_unsupported_values_empty() -> None:
    process = SimpleNamespace(pid=NOBODY, usedGpuMemory=1 << 30)
    document = gpu.query(
        nvml(
            Init=lambda: None,
            SystemGetDriverVersion=lambda: b"550.54",
            DeviceGetCount=lambda: 1,
            DeviceGetHandleByIndex=lambda index: index,
            DeviceGetUUID=lambda handle: "GPU-0",
            DeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1, total=2),
            DeviceGetPowerUsage=lambda handle: 70500,
            DeviceGetComputeRunningProcesses=lambda handle: [process],
        )
    )
    assert document.driver == "550.54"
    (first_gpu,) = document.gpus
    assert (first_gpu.uuid, first_gpu.power_w, first_gpu.memory_total_bytes) == ("GPU-0", 70.5, 2)
    assert first_gpu.processes == (GpuProcess(NOBODY, 1 << 30),)
    assert first_gpu.name is None
    (written,) = json.loads(msgspec.json.encode(document))["gpus"]
    assert written["name"] is None and written["processes"] == [{"pid": NOBODY, "memory_bytes": 1 << 30}]


def test_gpu_that_fell_off_bus_is_listed_with_error() -> None:
    document = gpu.query(nvml(Init=lambda: None, DeviceGetCount=lambda: 1))
    assert document.gpus == (Gpu(0, error="Not Supported"),)


def test_gpu_query_without_driver_is_missing() -> None:
    assert gpu.query(nvml()) == Gpus(missing="no NVIDIA driver on this node (libnvidia-ml.so.1 not found)")


# --- node -------------------------------------------------------------------------------------------------------------


def test_environ_is_parsed() -> None:
    assert node.parse_environ(b"A=1\0B=x=y\0broken\0=z\0C=\0") == {"A": "1", "B": "x=y", "C": ""}


def test_meminfo_and_limits_are_parsed() -> None:
    assert node.parse_meminfo("MemTotal:       2048 kB\nHugePages_Total:       0\nBuffers: 1 kB\n") == {
        "MemTotal": 2048 * 1024
    }
    limits = "Limit                     Soft Limit           Hard Limit           Units     \n"
    limits += "Max open files            1024                 4096                 files     \n"
    assert node.parse_limits(limits) == {"Max open files": "1024"}


def test_network_devices_are_read(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("net/lo/operstate", "unknown\n")
    put("net/docker0/operstate", "down\n")
    put("net/eth0/operstate", "up\n")
    put("net/eth0/speed", "25000\n")
    put("net/eth0/mtu", "9000\n")
    put("net/ib0/speed", "-1\n")
    put("net/eth0/statistics/rx_errors", "0\n")
    put("net/eth0/statistics/tx_dropped", "7\n")
    put("net/ib0/operstate", "down\n")
    put("net/ib0/device/vendor", "x")
    put("infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    put("infiniband/mlx5_0/ports/1/rate", "10 Gb/sec (4X SDR)\n")
    put("infiniband/mlx5_0/ports/1/counters/link_downed", "3\n")
    put("infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err", "2\n")
    assert node.network(tmp_path) == {
        "eth0": {"state": "up", "speed_mbit": 25000, "mtu": 9000, "tx_dropped": 7},
        "ib0": {"state": "down"},
        "mlx5_0/1": {"state": "DOWN", "rate": "10 Gb/sec (4X SDR)", "link_downed": 3, "packet_seq_err": 2},
    }
    assert node.network(tmp_path / "none") == {}


def test_growth_of_link_errors() -> None:
    before: node.Links = {"eth0": {"state": "up", "rx_errors": 5}, "mlx5_0/1": {"state": "ACTIVE"}}
    now: node.Links = {
        "eth0": {"state": "up", "rx_errors": 5, "rx_dropped": 70, "mtu": 9000},
        "mlx5_0/1": {"state": "ACTIVE", "local_ack_timeout_err": 7, "symbol_error": 1},
        "mlx5_1/1": {"state": "ACTIVE", "symbol_error": 9},
    }
    assert node.grown(before, now) == {"mlx5_0/1": {"symbol_error": 1, "local_ack_timeout_err": 7}}
    assert node.grown(now, before) == node.grown(now, now) == {}


def test_versions_of_other_installation_are_read(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\ngit_version = 'abc'\nhip: Optional[str] = None\n"
    )
    for name, version in [("torch", "2.9.1"), ("nvidia_nccl_cu12", "2.27.5")]:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    versions = node.versions([str(tmp_path), "/opt/x/lib/python3.12/site-packages"]).value
    assert versions is not None
    expected = {"torch": "2.9.1", "torch_cuda": "12.8", "torch_git": "abc", "nvidia-nccl-cu12": "2.27.5"}
    assert expected.items() <= versions.items()
    assert versions["python"] == "3.12"
    assert "torch_hip" not in versions
    assert "deepspeed" not in versions


# --- failures ---------------------------------------------------------------------------------------------------------


def test_attempt_returns_value_or_failure_reason() -> None:
    def fail() -> int:
        raise CaptureError("the disk is full", "delete something")

    assert attempt("x", fail).missing == "the disk is full (delete something)"
    assert attempt("x", lambda: 1 // 0).missing.startswith("ZeroDivisionError: ")
    assert attempt("x", lambda: 5).value == 5


def test_result_becomes_manifest_artifact() -> None:
    artifact = Result(None, "NVML", 0.25, missing="no driver").artifact("node/n/gpus.json")
    assert (artifact.path, artifact.how, artifact.duration_s, artifact.missing, artifact.bytes) == (
        "node/n/gpus.json", "NVML", 0.25, "no driver", 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4", (200, 4)),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length:  55  \r\nX: y", (404, 55)),
        (b"HTTP/1.0 200 OK", (200, None)),
    ],
)
def test_worker_server_head_is_parsed(head: bytes, expected: object) -> None:
    assert worker_server.parse_head(head) == expected


@pytest.mark.parametrize("head", [b"", b"SSH-2.0-OpenSSH", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"])
def test_worker_server_head_of_other_protocol_is_rejected(head: bytes) -> None:
    with pytest.raises(ValueError):
        worker_server.parse_head(head)
