"""Asks the GPU driver: NVML and ``nvidia-smi``.

A broken driver blocks its callers for ever, so a separate process asks NVML, which can be killed:
``python -m safelaunch.capture.gpu`` prints one record of :class:`Gpus`.
"""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
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


def gpus(*, deadline_s: float = 5.0, python: str = sys.executable) -> Result[Gpus]:
    """The GPUs of this node through NVML; never raises."""

    def read() -> Gpus:
        # With -m, the working directory comes first on the module path: use ours, not the user's.
        argv = [python, "-m", "safelaunch.capture.gpu"]
        output = command.run(argv, deadline_s=deadline_s, cwd=_PACKAGE_ROOT)
        if output.timed_out:
            raise CaptureError(f"NVML: no answer within {deadline_s:g} s: the driver may be stuck", kind="timeout")
        try:
            found = from_json(output.stdout, Gpus)
        except (msgspec.DecodeError, RecursionError) as error:
            said = output.stderr.strip().splitlines()
            raise CaptureError(f"NVML: {said[-1] if said else error}") from error
        if found.missing:
            raise CaptureError(found.missing, kind="" if found.installed else "not installed")
        return found

    return attempt("NVML", read)


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


def query(nvml: Any) -> Gpus:
    """Driver and GPUs by the module ``pynvml``, or why there are none."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return Gpus(missing="no NVIDIA driver on this node (libnvidia-ml.so.1 not found)")
        return Gpus(missing=f"NVML: {error}")
    try:
        return Gpus(
            driver=ask(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion())),
            cuda_driver=ask(nvml, nvml.nvmlSystemGetCudaDriverVersion),
            gpus=tuple(_gpu(nvml, index) for index in range(min(nvml.nvmlDeviceGetCount(), MAX_GPUS))),
        )
    except nvml.NVMLError as error:
        return Gpus(missing=f"NVML: {error}")
    finally:
        ask(nvml, nvml.nvmlShutdown)


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # fallen off the bus: the most interesting GPU
        return Gpu(index, error=str(error))

    def told(function: Callable[[], Any]) -> Any:
        return ask(nvml, function)

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    held = processes(nvml, handle)
    return Gpu(
        index=index,
        uuid=told(lambda: text(nvml.nvmlDeviceGetUUID(handle))),
        name=told(lambda: text(nvml.nvmlDeviceGetName(handle))),
        utilisation_percent=told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_w=told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        temperature_c=told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        sm_clock_mhz=told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ecc_errors=told(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        processes=tuple(_process(one["pid"], one["memory_bytes"]) for one in held) if held is not None else None,
    )


# Docs: "XID Errors" of NVIDIA. Left out: records of repaired memory, and recommendations that follow an error.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-f:.]+)\): (?!(?:63|92|154)\b)\d+(?:, pid='?(?P<pid>\d+))?", re.I)
_MOST_ERRORS, _MOST_LINE = 3, 200


def errors_of(
    pid: int, uuid: str, kernel_log: Iterable[str], driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """The driver's newest lines on errors of a process, or of the GPU with this UUID, oldest first."""
    found = [(one, line.strip()[:_MOST_LINE]) for line in kernel_log if (one := _XID.search(line))]
    places = driver.glob("*/information") if found and uuid else ()
    pci = next((place.parent.name.lower() for place in places if uuid in text_of(place)), "")
    mine = [text for one, text in found if one["pid"] == str(pid) or (pci and _is_at(pci, one["pci"]))]
    return tuple(mine[-_MOST_ERRORS:])


def _is_at(pci: str, logged: str) -> bool:
    """Whether ``0000:3b:00.0`` is what the log calls ``0000:3b:00``, with or without the function."""
    return pci == logged.lower() or pci.startswith(f"{logged.lower()}.")


def _process(pid: int, size: int | None) -> GpuProcess:
    """Without a name if it is not to be seen from here."""
    return GpuProcess(pid, size, text_of(f"/proc/{pid}/comm").strip())


def _main() -> int:
    warnings.simplefilter("ignore")
    try:
        import pynvml
    except ImportError:
        found = Gpus(missing="the Python package nvidia-ml-py is not installed", installed=False)
    else:
        found = query(pynvml)
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
