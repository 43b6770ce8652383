"""Queries NVML. Callers import ``pynvml`` themselves, in a process that can be killed if the driver hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ask(nvml: Any, function: Callable[[], Any]) -> Any:
    """Returns ``function()``, or None if this GPU or driver doesn't support the query."""
    try:
        return function()
    except (nvml.NVMLError, AttributeError):
        return None


def text(value: str | bytes) -> str:
    """Decodes a string from NVML, which older bindings return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def processes(nvml: Any, handle: Any) -> list[dict[str, Any]] | None:
    """Returns the compute processes on a GPU (``pid`` and ``memory_bytes``); None if NVML doesn't list them."""

    def read() -> list[dict[str, Any]]:  # includes the conversion, because the binding can fail on any element
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return [{"pid": process.pid, "memory_bytes": process.usedGpuMemory} for process in running]

    listed: list[dict[str, Any]] | None = ask(nvml, read)
    return listed
