"""What every question to NVML needs. Its module (``pynvml``) is passed in: it is imported where the driver may hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ask(nvml: Any, function: Callable[[], Any]) -> Any:
    """``function()``, or None where this GPU or driver does not support the question."""
    try:
        return function()
    except (nvml.NVMLError, AttributeError):
        return None


def text(value: str | bytes) -> str:
    """NVML's texts, which older bindings return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def processes(nvml: Any, handle: Any) -> list[dict[str, Any]] | None:
    """The compute processes on a GPU: pid, memory_bytes. None where they are not told."""

    def read() -> list[dict[str, Any]]:  # whole within the question: the binding may fail at any of its elements
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return [{"pid": process.pid, "memory_bytes": process.usedGpuMemory} for process in found]

    found: list[dict[str, Any]] | None = ask(nvml, read)
    return found
