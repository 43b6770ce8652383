"""Reads processes' GPU memory from NVML, in a thread."""

from __future__ import annotations

from collections.abc import Callable

from safelaunch.capture import gpu
from safelaunch.capture.result import Result
from safelaunch.model import Gpus
from safelaunch.system.task import BackgroundTask

GPUS_EVERY_S = 10.0


class GpuMemory:
    def __init__(self, ask: Callable[[], Result[Gpus]] = gpu.gpus) -> None:
        self._ask = ask
        self._bytes: dict[int, int] = {}
        self._asking: BackgroundTask[Result[Gpus]] | None = None
        self._next_s: float | None = 0.0

    def ask(self, now: float) -> None:
        self._take()
        if self._asking is None and self._next_s is not None and now >= self._next_s:
            self._next_s = now + GPUS_EVERY_S
            self._asking = BackgroundTask("GPU memory", self._ask)

    def of(self, pid: int) -> int:
        """Returns the process's memory on all GPUs; 0 if unknown."""
        self._take()
        return self._bytes.get(pid, 0)

    def _take(self) -> None:
        if self._asking is None or not self._asking.done:
            return
        task, self._asking = self._asking, None
        try:
            self._bytes = memory_by_process(task.result())
        except Exception:  # noqa: BLE001 - no GPUs, no driver, no answer
            self._bytes, self._next_s = {}, None


def memory_by_process(answer: Result[Gpus]) -> dict[int, int]:
    if answer.value is None:
        raise ValueError(answer.missing)
    sizes: dict[int, int] = {}
    for device in answer.value.gpus:
        for process in device.processes or ():
            sizes[process.pid] = sizes.get(process.pid, 0) + (process.size or 0)
    return sizes
