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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from safelaunch.system import nvml as questions

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "utilisation_percent": "utilisation",
    "memory_percent": "memory utilisation",
    "power_w": "power",
    "sm_clock_mhz": "SM clock",
}
EVERY_S = 0.25
START_S = 120.0  # most time besides sampling: the first import of torch reads gigabytes
Reading = Mapping[str, Any]
State = Literal["idle", "computing", "spinning"]


class NoAnswer(Exception):
    """A question to the driver or to torch failed."""


def ask(*words: str, env: Mapping[str, str], seconds: float = 0.0) -> Any:
    """Returns the answer of a process that runs this module with ``words``. Raises NoAnswer."""
    command = [sys.executable, "-m", "tests.qa.gpu_readings", *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S + seconds
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{words[0]}: no answer within {START_S + seconds:g} s") from None
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoAnswer(f"{words[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}") from None


# --- pure: what readings show -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.0f} [{self.low:.0f}..{self.high:.0f}]"


def spreads(readings: Sequence[Reading]) -> dict[str, Spread]:
    """Returns the median and the range of each field that the GPU reports."""
    values = {name: [each[name] for each in readings if each[name] is not None] for name in FIELDS}
    return {name: Spread(min(found), median(found), max(found)) for name, found in values.items() if found}


def distinguishing(first: Sequence[Reading], second: Sequence[Reading]) -> tuple[str, ...]:
    """Returns the fields that tell two states apart.

    Their medians differ by a tenth or more, and nine tenths of the values of one are above nine tenths of the other's.
    """
    return tuple(name for name in FIELDS if _are_apart(*([r[name] for r in rs] for rs in (first, second))))


def _are_apart(*sides: Sequence[float | None]) -> bool:
    values = [[value for value in side if value is not None] for side in sides]
    if min(map(len, values)) < 2:
        return False
    lower, upper = sorted(values, key=median)
    tenths = quantiles(lower, n=10, method="inclusive")[-1], quantiles(upper, n=10, method="inclusive")[0]
    return tenths[0] < tenths[1] and median(upper) - median(lower) >= 0.1 * median(upper)


def state_of(seen: Mapping[str, Spread], idle_w: float, computing_w: float) -> State:
    """Returns the state by the rule that a verdict about a hang could use.

    Args:
        idle_w: Power of this GPU when a process holds it and launches nothing.
        computing_w: Power of this GPU while the job computes.
    """
    if seen["utilisation_percent"].middle < 10:
        return "idle"
    little_power = seen["power_w"].middle < (idle_w + computing_w) / 2
    return "spinning" if little_power and seen["memory_percent"].middle <= 1 else "computing"


# --- in the separate process ------------------------------------------------------------------------------------------


def sample(nvml: Any, index: int, seconds: float) -> list[Reading]:
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    events = questions.ask(nvml, lambda: _xid_events(nvml, handle))
    readings: list[Reading] = []
    begin = time.monotonic()
    while (at := time.monotonic() - begin) < seconds:
        readings.append({"at_s": round(at, 2), **_reading(nvml, handle), "xids": _new_xids(nvml, events)})
        time.sleep(EVERY_S)
    return readings


def _reading(nvml: Any, handle: Any) -> Reading:
    calls = {
        "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "clock_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    }
    return {name: questions.ask(nvml, call) for name, call in calls.items()}


def _xid_events(nvml: Any, handle: Any) -> Any:
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    return events


def _new_xids(nvml: Any, events: Any) -> list[int] | None:
    """Returns the Xid numbers since the last call; None if the driver doesn't report them."""
    numbers: list[int] = []
    while events is not None:
        event = questions.ask(nvml, lambda: nvml.nvmlEventSetWait_v2(events, 0))  # fails if there is no event
        if event is None:
            return numbers
        numbers.append(event.eventData)
    return None


def about(nvml: Any) -> dict[str, Any]:
    """Returns the driver's version, and MIG state and persistence mode of each GPU, None if they aren't reported."""
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = questions.ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return {
        "driver": questions.text(nvml.nvmlSystemGetDriverVersion()),
        "CUDA of the driver": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        "names": [questions.text(nvml.nvmlDeviceGetName(handle)) for handle in handles],
        "MIG": [questions.ask(nvml, partial(nvml.nvmlDeviceGetMigMode, handle)) for handle in handles],
        "persistence": [questions.ask(nvml, partial(nvml.nvmlDeviceGetPersistenceMode, handle)) for handle in handles],
    }


def about_torch() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
        "python": sys.version.split()[0],
        "gpus": [str(getattr(each, "uuid", each.name)) for each in properties],
    }


def main(words: Sequence[str]) -> int:
    if words[0] == "torch":
        answer: Any = about_torch()
    else:
        import pynvml

        answer = about(pynvml) if words[0] == "about" else sample(pynvml, int(words[1]), float(words[2]))
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
