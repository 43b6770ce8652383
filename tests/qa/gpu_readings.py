"""Readings of a GPU by NVML, the facts about its software, and the state that the readings reveal.

A broken driver blocks its callers forever, so ``ask`` runs each question in a process that it can kill:

    python -m tests.qa.gpu_readings sample INDEX SECONDS | about | torch
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from safelaunch.system import nvml as questions

ROOT = Path(__file__).resolve().parents[2]
FIELDS = UTILISATION, MEMORY, POWER, CLOCK = ("utilisation %", "memory utilisation %", "power W", "SM clock MHz")
EVERY_S = 0.25
START_S = 120.0  # most time besides sampling: the first import of torch reads gigabytes
Reading = Mapping[str, Any]


def ask(*words: str, env: Mapping[str, str], seconds: float = 0.0) -> Any:
    """Returns the answer of a process that runs this module with ``words``. Raises RuntimeError or TimeoutExpired."""
    command = [sys.executable, "-m", "tests.qa.gpu_readings", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_S + seconds)
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]}: {done.stderr.strip().rpartition(chr(10))[2] or done.returncode}")
    return json.loads(done.stdout)


# --- pure: what readings show -----------------------------------------------------------------------------------------


class Spread(NamedTuple):
    low: float
    middle: float
    high: float


def spreads(readings: Sequence[Reading]) -> dict[str, Spread]:
    """Returns the median and the range of each field that the GPU reports."""
    values = {name: _reported(readings, name) for name in FIELDS}
    return {name: Spread(min(found), median(found), max(found)) for name, found in values.items() if found}


def distinguishing(first: Sequence[Reading], second: Sequence[Reading]) -> list[str]:
    """Returns the fields that tell two states apart.

    Their medians differ by a tenth or more, and nine tenths of the values of one are above nine tenths of the other's.
    """
    return [name for name in FIELDS if _are_apart(_reported(first, name), _reported(second, name))]


def _are_apart(*sides: Sequence[float]) -> bool:
    if min(map(len, sides)) < 2:
        return False
    lower, upper = sorted(sides, key=median)
    ranges_differ = quantiles(lower, n=10, method="inclusive")[-1] < quantiles(upper, n=10, method="inclusive")[0]
    return ranges_differ and median(upper) - median(lower) >= 0.1 * median(upper)


def _reported(readings: Sequence[Reading], name: str) -> list[float]:
    return [each[name] for each in readings if each[name] is not None]


def state_of(seen: Mapping[str, Spread], idle_w: float, computing_w: float) -> str:
    """Returns ``idle``, ``computing`` or ``spinning``, by the rule that a verdict about a hang could use.

    Args:
        idle_w: Power of this GPU when a process holds it and launches nothing.
        computing_w: Power of this GPU while the job computes.
    """
    if seen[UTILISATION].middle < 10:
        return "idle"
    little_power = seen[POWER].middle < (idle_w + computing_w) / 2
    return "spinning" if little_power and seen[MEMORY].middle <= 1 else "computing"


# --- in the separate process ------------------------------------------------------------------------------------------


def sample(nvml: Any, index: int, seconds: float) -> list[Reading]:
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    events = questions.ask(nvml, lambda: _xid_events(nvml, handle))
    calls = {
        UTILISATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        MEMORY: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
        POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "clock reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    }
    readings: list[Reading] = []
    end = time.monotonic() + seconds
    while not readings or time.monotonic() < end:
        values = {name: questions.ask(nvml, call) for name, call in calls.items()}
        readings.append({"time": time.time(), **values, "Xid": _new_xids(nvml, events)})
        time.sleep(EVERY_S)
    return readings


def _xid_events(nvml: Any, handle: Any) -> Any:
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    return events


def _new_xids(nvml: Any, events: Any) -> list[int] | None:
    """Returns the Xid numbers since the last call; None if the driver doesn't report them."""
    if events is None:
        return None
    numbers = []
    while (event := questions.ask(nvml, lambda: nvml.nvmlEventSetWait_v2(events, 0))) is not None:
        numbers.append(event.eventData)
    return numbers


def about(nvml: Any) -> dict[str, Any]:
    """Returns the driver's version, and MIG state and persistence mode of each GPU, None if they aren't reported."""
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {
        "driver": questions.text(nvml.nvmlSystemGetDriverVersion()),
        "CUDA of the driver": questions.ask(nvml, nvml.nvmlSystemGetCudaDriverVersion),
        "names": [questions.text(nvml.nvmlDeviceGetName(handle)) for handle in handles],
        "MIG": [questions.ask(nvml, partial(nvml.nvmlDeviceGetMigMode, handle)) for handle in handles],
        "persistence": [questions.ask(nvml, partial(nvml.nvmlDeviceGetPersistenceMode, handle)) for handle in handles],
    }


def about_torch() -> dict[str, Any]:
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NCCL": torch.cuda.nccl.version() if properties else None,
        "python": sys.version.split()[0],
        "gpus": [str(getattr(each, "uuid", each.name)) for each in properties],
    }


def main(words: Sequence[str]) -> None:
    if words[0] == "torch":
        answer: Any = about_torch()
    else:
        import pynvml

        answer = about(pynvml) if words[0] == "about" else sample(pynvml, int(words[1]), float(words[2]))
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
