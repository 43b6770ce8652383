"""Asks the GPU driver: NVML and ``nvidia-smi``.

A broken driver blocks its callers for ever, so a separate process asks NVML, which can be killed:
``python -m safelaunch.capture.gpu`` prints one JSON document.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from safelaunch.capture import command
from safelaunch.capture.result import Result, attempt
from safelaunch.model import GpuProcess, GpuUse
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.nvml import ask, processes, text

MAX_GPUS = 256
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def gpus_json(*, deadline_s: float = 5.0, python: str = sys.executable) -> Result[bytes]:
    """The GPUs of this node as JSON (see ``query``) through NVML; never raises."""

    def read() -> bytes:
        # With -m, the working directory comes first on the module path: use ours, not the user's.
        argv = [python, "-m", "safelaunch.capture.gpu"]
        output = command.run(argv, deadline_s=deadline_s, cwd=_PACKAGE_ROOT)
        if output.timed_out:
            raise CaptureError(f"NVML: no answer within {deadline_s:g} s: the driver may be stuck", kind="timeout")
        try:
            document = json.loads(output.stdout)
            reason, installed = document.get("missing", ""), document.get("installed", True)
        except (ValueError, AttributeError) as error:
            said = output.stderr.strip().splitlines()
            raise CaptureError(f"NVML: {said[-1] if said else error}") from error
        if reason:
            raise CaptureError(str(reason), kind="" if installed else "not installed")
        return output.stdout

    return attempt("NVML", read)


def uses(document: bytes, host: str) -> tuple[GpuUse, ...]:
    """Who has memory of which GPU, by the JSON of ``gpus_json``; empty where that is damaged."""
    try:
        found = from_json(document, _Document)
    except (msgspec.DecodeError, RecursionError):
        return ()
    return tuple(
        GpuUse(host, one.index, one.uuid or "", tuple(GpuProcess(p.pid, p.memory_bytes, p.name) for p in one.processes))
        for one in found.gpus[:MAX_GPUS]
        if one.processes
    )


class _Process(msgspec.Struct):
    pid: int
    memory_bytes: int | None = None
    name: str = ""


class _Gpu(msgspec.Struct):
    index: int
    uuid: str | None = None
    processes: list[_Process] | None = None


class _Document(msgspec.Struct):
    gpus: list[_Gpu] = []


def nvidia_smi_text(*, deadline_s: float = 10.0) -> Result[str]:
    """The output of ``nvidia-smi``; never raises."""

    def read() -> str:
        program = shutil.which("nvidia-smi")
        if not program:
            raise CaptureError("nvidia-smi is not installed on this node")
        output = command.run([program], deadline_s=deadline_s)
        if output.timed_out:
            stuck = f"nvidia-smi: no answer within {deadline_s:g} s: the driver may be stuck"
            raise CaptureError(stuck, kind="timeout")
        text = output.stdout.decode("utf-8", "replace")
        if output.returncode != 0:
            raise CaptureError(f"nvidia-smi: exit status {output.returncode}: {(output.stderr or text).strip()[:300]}")
        return text

    return attempt("nvidia-smi", read)


def query(nvml: Any) -> dict[str, Any]:
    """Driver and GPUs by the module ``pynvml``, or ``{"missing": reason}``.

    ``gpus``: index, uuid, name, utilisation_percent, memory_used_bytes, memory_total_bytes, power_w, temperature_c,
    sm_clock_mhz, ecc_errors (uncorrected, since the driver was loaded) and processes (pid, memory_bytes, name). A value
    that a GPU does not report is null.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return {"missing": "no NVIDIA driver on this node (libnvidia-ml.so.1 not found)"}
        return {"missing": f"NVML: {error}"}
    try:
        count = nvml.nvmlDeviceGetCount()
        return {
            "driver": ask(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion())),
            "cuda_driver": ask(nvml, nvml.nvmlSystemGetCudaDriverVersion),
            "gpus": [_gpu(nvml, index) for index in range(count)],
        }
    except nvml.NVMLError as error:
        return {"missing": f"NVML: {error}"}
    finally:
        ask(nvml, nvml.nvmlShutdown)


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # fallen off the bus: the most interesting GPU
        return {"index": index, "error": str(error)}

    def told(function: Callable[[], Any]) -> Any:
        return ask(nvml, function)

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return {
        "index": index,
        "uuid": told(lambda: text(nvml.nvmlDeviceGetUUID(handle))),
        "name": told(lambda: text(nvml.nvmlDeviceGetName(handle))),
        "utilisation_percent": told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_used_bytes": memory.used if memory else None,
        "memory_total_bytes": memory.total if memory else None,
        "power_w": told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "temperature_c": told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "sm_clock_mhz": told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "ecc_errors": told(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        "processes": _named(processes(nvml, handle)),
    }


def _named(found: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return [{**one, "name": _name(one["pid"])} for one in found] if found is not None else None


def _name(pid: int) -> str:
    """Empty for a process that is not to be seen from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _main() -> int:
    warnings.simplefilter("ignore")
    try:
        import pynvml
    except ImportError:
        document: dict[str, Any] = {"missing": "the Python package nvidia-ml-py is not installed", "installed": False}
    else:
        document = query(pynvml)
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
