"""Queries the GPU driver through NVML and ``nvidia-smi``.

A broken driver blocks its callers forever. So NVML is called in a separate process that can be killed: ``python -m
safelaunch.capture.gpu`` prints a :class:`Gpus` record.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from safelaunch.capture import command
from safelaunch.capture.result import Result, attempt
from safelaunch.model import Gpu, GpuProcess, Gpus
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import text_of
from safelaunch.system.nvml import ask, processes, text

MAX_GPUS = 256
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def gpus(*, deadline_s: float = 5.0, python: str = sys.executable, apart_s: float = 0.0) -> Result[Gpus]:
    """Reads this node's GPUs through NVML; never raises.

    Args:
        apart_s: Time between two readings; 0 for a single one.
    """

    def read() -> Gpus:
        # With -m, the working directory comes first on the module path: use this package's, not the user's.
        argv = [python, "-m", "safelaunch.capture.gpu", str(apart_s)]
        output = command.run(argv, deadline_s=deadline_s, cwd=_PACKAGE_ROOT)
        if output.timed_out:
            raise CaptureError(f"NVML: no answer within {deadline_s:g} s: the driver might be stuck", kind="timeout")
        try:
            reply = from_json(output.stdout, Gpus)
        except (msgspec.DecodeError, RecursionError) as error:
            lines = output.stderr.strip().splitlines()
            raise CaptureError(f"NVML: {lines[-1] if lines else error}") from error
        if reply.missing:
            raise CaptureError(reply.missing, kind="" if reply.installed else "not installed")
        return reply

    return attempt("NVML", read)


def nvidia_smi_text(*, deadline_s: float = 10.0) -> Result[str]:

    def read() -> str:
        program = shutil.which("nvidia-smi")
        if not program:
            raise CaptureError("nvidia-smi is not installed on this node")
        output = command.run([program], deadline_s=deadline_s)
        if output.timed_out:
            stuck = f"nvidia-smi: no answer within {deadline_s:g} s: the driver might be stuck"
            raise CaptureError(stuck, kind="timeout")
        text = output.stdout.decode("utf-8", "replace")
        if output.returncode != 0:
            raise CaptureError(f"nvidia-smi: exit status {output.returncode}: {(output.stderr or text).strip()[:300]}")
        return text

    return attempt("nvidia-smi", read)


def query(nvml: Any, apart_s: float = 0.0) -> Gpus:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return Gpus(missing="no NVIDIA driver on this node (libnvidia-ml.so.1 not found)")
        return Gpus(missing=f"NVML: {error}")
    try:
        before = _gpus(nvml) if apart_s else ()
        time.sleep(apart_s)
        return Gpus(
            driver=ask(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion())),
            cuda_driver=ask(nvml, nvml.nvmlSystemGetCudaDriverVersion),
            gpus=_gpus(nvml),
            before=before,
        )
    except nvml.NVMLError as error:
        return Gpus(missing=f"NVML: {error}")
    finally:
        ask(nvml, nvml.nvmlShutdown)


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    return tuple(_gpu(nvml, index) for index in range(min(nvml.nvmlDeviceGetCount(), MAX_GPUS)))


def _answer(nvml: Any, lost: list[str], function: Callable[[], Any]) -> Any:
    """Returns the driver's answer; None if there is none. Adds the error to ``lost`` if the GPU is lost."""
    try:
        return function()
    except AttributeError:
        return None
    except nvml.NVMLError as error:
        lost.extend([str(error)] if error.value == nvml.NVML_ERROR_GPU_IS_LOST else [])
        return None


def _ecc_errors(nvml: Any, handle: Any, kind: str) -> int:
    kind = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # it has fallen off the bus: the most interesting GPU
        return Gpu(index, error=str(error))

    lost: list[str] = []
    answer = partial(_answer, nvml, lost)
    memory = answer(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = answer(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    remapped = answer(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    users = processes(nvml, handle)
    return Gpu(
        index=index,
        uuid=answer(lambda: text(nvml.nvmlDeviceGetUUID(handle))),
        name=answer(lambda: text(nvml.nvmlDeviceGetName(handle))),
        utilisation_percent=rates.gpu if rates else None,
        memory_utilisation_percent=rates.memory if rates else None,
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_w=answer(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        temperature_c=answer(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        sm_clock_mhz=answer(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_clock_mhz=answer(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        power_limit_w=answer(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        clocks_event_reasons=answer(lambda: _clocks_event_reasons(nvml, handle)),
        ecc_errors=answer(lambda: _ecc_errors(nvml, handle, "UNCORRECTED")),
        corrected_ecc_errors=answer(lambda: _ecc_errors(nvml, handle, "CORRECTED")),
        row_remap_pending=bool(remapped[2]) if remapped else None,
        row_remap_failed=bool(remapped[3]) if remapped else None,
        pcie_replays=answer(lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle)),
        nvlink_errors=answer(lambda: _nvlink_errors(nvml, handle)),
        processes=tuple(_process(user["pid"], user["memory_bytes"]) for user in users) if users is not None else None,
        error=lost[0] if lost else "",
    )


# Bit -> the name that ``nvidia-smi --query-gpu=clocks_event_reasons.NAME`` uses.
_CLOCKS_EVENT_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
)  # fmt: skip


def _clocks_event_reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):  # drivers before 535 and their bindings
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bit, name in enumerate(_CLOCKS_EVENT_REASONS) if bits >> bit & 1)


def _nvlink_errors(nvml: Any, handle: Any) -> int | None:
    kinds = ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
    fields = [getattr(nvml, f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL") for kind in kinds]
    found = [one.value.ullVal for one in nvml.nvmlDeviceGetFieldValues(handle, fields) if one.nvmlReturn == 0]
    return sum(found) if found else None


# See NVIDIA's "XID Errors". Excluded: records of repaired memory, and recommendations that follow an error.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-f:.]+)\): (?!(?:63|92|154)\b)\d+(?:, pid='?(?P<pid>\d+))?", re.I)
_MOST_ERRORS, _MOST_LINE = 3, 200


def errors_of(
    pid: int, uuid: str, kernel_log: Iterable[str], driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """Returns the newest errors that the driver logged for a process, or for the GPU with this UUID, oldest first."""
    errors = [(error, line.strip()[:_MOST_LINE]) for line in kernel_log if (error := _XID.search(line))]
    places = driver.glob("*/information") if errors and uuid else ()
    pci = next((place.parent.name.lower() for place in places if uuid in text_of(place)), "")
    matches = [text for error, text in errors if error["pid"] == str(pid) or (pci and _is_at(pci, error["pci"]))]
    return tuple(matches[-_MOST_ERRORS:])


def _is_at(pci: str, logged: str) -> bool:
    return pci == logged.lower() or pci.startswith(f"{logged.lower()}.")


def _process(pid: int, size: int | None) -> GpuProcess:
    return GpuProcess(pid, size, text_of(f"/proc/{pid}/comm").strip())


def _main() -> int:
    warnings.simplefilter("ignore")
    try:
        import pynvml
    except ImportError:
        reply = Gpus(missing="the Python package nvidia-ml-py is not installed", installed=False)
    else:
        reply = query(pynvml, *map(float, sys.argv[1:]))
    print(msgspec.json.encode(reply).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
