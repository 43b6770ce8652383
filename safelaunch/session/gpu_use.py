"""Who uses the job's GPUs, from one answer of NVML: ranks that share one by mistake, and strangers' memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MIB = 1 << 20
NOTICEABLE_BYTES = 256 * MIB  # a CUDA context alone takes as much


def notes(document: Mapping[str, Any], ranks: Mapping[int, int], own: Collection[int]) -> tuple[str, ...]:
    """What a person should know. ``document``: of ``capture.gpu.query``; ``ranks``: rank → pid; ``own``: all pids of
    the job.

    Where the driver numbers processes otherwise (a container with pids of its own), nothing is said.
    """
    by_pid = {pid: rank for rank, pid in ranks.items()}
    found: list[str] = []
    for gpu in document.get("gpus") or ():
        processes = gpu.get("processes") or ()
        here = sorted({by_pid[item["pid"]] for item in processes if item.get("pid") in by_pid})
        if not here:
            continue
        name = f"GPU {gpu.get('index')}"
        if len(here) > 1:
            both = f"ranks {', '.join(map(str, here))}"
            found.append(f"{both} are on the same {name}: is torch.cuda.set_device(LOCAL_RANK) called?")
        for item in processes:
            held = item.get("memory_bytes") or 0
            if item.get("pid") not in own and held >= NOTICEABLE_BYTES:
                much = f"{held / MIB:.0f} MiB on {name}"
                found.append(f"pid {item['pid']}, not of this job, holds {much}, which rank {here[0]} uses")
    return tuple(found)
