"""Chooses GPUs for a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.system.errors import ResourceError

MOST_UNUSED_BYTES = 256 << 20  # used by an idle GPU

GpuRanking = int | Literal["all"] | None


@dataclass(frozen=True, slots=True)
class GpuUser:
    pid: int
    memory_bytes: int | None = None  # None: NVML doesn't report it


@dataclass(frozen=True, slots=True)
class LeasableGpu:
    label: str  # number of the GPU, or ``number.instance``
    uuid: str
    name: str = ""
    parent: str = ""  # UUID of the instance's GPU
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    processes: tuple[GpuUser, ...] = ()
    error: str = ""  # of a GPU that doesn't respond

    @property
    def index(self) -> str:
        """The GPU's number in NVML."""
        return self.label.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's GPUs. Instead of a GPU in MIG mode, it lists the GPU's instances."""

    gpus: tuple[LeasableGpu, ...] = ()
    missing: str = ""  # why ``gpus`` is empty
    trouble: Literal["", "silent", "garbled"] = ""  # of a loaded driver: no answer in time, or an unusable one


@dataclass(frozen=True, slots=True)
class GpuCandidates:
    gpus: tuple[LeasableGpu, ...]
    origin: str = ""  # of the limit, if any
    exact: bool = False  # the job uses all, because CUDA_VISIBLE_DEVICES limits them


@dataclass(frozen=True, slots=True)
class GpuRequest:
    candidates: tuple[LeasableGpu, ...]
    count: int
    origin: str  # for messages
    keep: bool = False  # leave CUDA_VISIBLE_DEVICES unchanged


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool_of(environ: Mapping[str, str], gpus: Sequence[LeasableGpu]) -> GpuCandidates:
    """Returns the GPUs that the user or the scheduler allows this job to use.

    CUDA_VISIBLE_DEVICES takes precedence, then Slurm's GPU_DEVICE_ORDINAL (the same value), SLURM_STEP_GPUS and
    SLURM_JOB_GPUS. Those last two contain the node's own GPU numbers. If a cgroup hides other GPUs, NVML numbers the
    visible ones from 0, and all of them belong to the job.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return GpuCandidates(_named(visible, gpus), f"CUDA_VISIBLE_DEVICES={visible}", exact=True)
    if not any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID")):
        return GpuCandidates(tuple(gpus))
    ordinal = environ.get("GPU_DEVICE_ORDINAL")
    if ordinal is not None:
        return GpuCandidates(_named(ordinal, gpus), f"GPU_DEVICE_ORDINAL={ordinal}")
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name, "").strip():
            return GpuCandidates(_of_node(environ[name], gpus), f"{name}={environ[name]}")
    return GpuCandidates(tuple(gpus))


def _named(text: str, gpus: Sequence[LeasableGpu]) -> tuple[LeasableGpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID prefix.

    As in CUDA, the list ends at the first unknown name. The name of a GPU in MIG mode stands for its instances.
    """
    named: dict[str, LeasableGpu] = {}
    for word in text.split(","):
        matches = matching(word.strip(), gpus)
        if not matches:
            break
        named.update({gpu.uuid: gpu for gpu in matches})
    return tuple(named.values())


def _of_node(text: str, gpus: Sequence[LeasableGpu]) -> tuple[LeasableGpu, ...]:
    numbers = {str(number) for number in numbers_in(text)}
    present = {gpu.index for gpu in gpus}
    if not numbers <= present and len(present) <= len(numbers):
        return tuple(gpus)
    return tuple(gpu for gpu in gpus if gpu.index in numbers)


def numbers_in(text: str) -> Iterator[int]:
    """Yields the numbers in a list such as ``0,2-4``. Skips items that aren't numbers of at most 5 digits."""
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", word)
        if match:
            yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def matching(word: str, gpus: Sequence[LeasableGpu]) -> tuple[LeasableGpu, ...]:
    """Returns the GPU that ``word`` names by number (``3``, or ``3.1`` for a MIG instance) or by UUID prefix.

    For a GPU in MIG mode, returns its instances.
    """
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return tuple(gpu for gpu in gpus if word in (gpu.label, gpu.index))
    if not word.startswith(("GPU-", "MIG-")):
        return ()
    direct = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    if direct:
        return tuple(direct[:1])
    return tuple(gpu for gpu in gpus if gpu.parent.startswith(word))


# --- the wish ---------------------------------------------------------------------------------------------------------


def wish_of(request: str | None, ranks: GpuRanking, pool: GpuCandidates, found: Inventory) -> GpuRequest | None:
    """Returns the GPUs that a job requests; None if it needs no lease.

    By default, these are the GPUs in CUDA_VISIBLE_DEVICES, else one per rank, or all if there are fewer GPUs than
    ranks. Raises ResourceError if requested GPUs don't exist.

    Args:
        request: Value of ``--gpus``, except ``none``.
        ranks: Number of ranks; ``all`` means one per GPU; None means unknown, or independent of GPUs.
    """
    if request is None:
        return _by_default(ranks, pool)
    if request == "all":
        if not pool.gpus:
            raise ResourceError(
                f"--gpus all: no GPU is available{_because(pool, found)}.", "--gpus none starts the job without GPUs."
            )
        return GpuRequest(pool.gpus, len(pool.gpus), "--gpus all", keep=pool.exact)
    if request.isdigit():
        if int(request) > len(pool.gpus):
            some = f"only {len(pool.gpus)} GPU{'s are' if len(pool.gpus) > 1 else ' is'} available"
            limit = some if pool.gpus else "no GPU is available"
            fix = "Request fewer; 'safelaunch gpus' lists them." if pool.gpus else "--gpus none starts without GPUs."
            raise ResourceError(f"--gpus {request}: {limit}{_because(pool, found)}.", fix)
        return GpuRequest(pool.gpus, int(request), f"--gpus {request}")
    named = [_by_name(word, pool, found) for word in request.split(",") if word]
    chosen = tuple({gpu.uuid: gpu for gpu in named}.values())
    return GpuRequest(chosen, len(chosen), f"--gpus {request}")


def _by_default(ranks: GpuRanking, pool: GpuCandidates) -> GpuRequest | None:
    if not pool.gpus:
        return None
    if pool.exact:
        return GpuRequest(pool.gpus, len(pool.gpus), pool.origin, keep=True)
    if ranks is None:
        return None
    if ranks == "all":
        return GpuRequest(pool.gpus, len(pool.gpus), "all GPUs, because of --nproc-per-node")
    count = min(ranks, len(pool.gpus))
    if count < ranks:
        return GpuRequest(pool.gpus, count, f"for {ranks} ranks, which share them")
    return GpuRequest(pool.gpus, count, "for 1 rank" if ranks == 1 else f"one for each of {ranks} ranks")


def _by_name(word: str, pool: GpuCandidates, found: Inventory) -> LeasableGpu:
    matches = matching(word, pool.gpus)
    if len(matches) == 1:
        return matches[0]
    if matches:
        instances = ", ".join(gpu.label for gpu in matches)
        raise ResourceError(f"--gpus: GPU {word} is split into MIG instances.", f"Name one of them: {instances}.")
    available = ", ".join(gpu.label for gpu in pool.gpus) or "none"
    raise ResourceError(
        f"--gpus: GPU {word!r} is not available{_because(pool, found)}.", f"Available GPUs: {available}."
    )


def _because(pool: GpuCandidates, found: Inventory) -> str:
    reason = found.missing if not found.gpus else pool.origin
    return f" ({reason})" if reason else ""


# --- unleased use -----------------------------------------------------------------------------------------------------


def users_of(gpu: LeasableGpu) -> str:
    """Describes how a GPU is used without a lease; empty if it is idle.

    If more memory is in use than the driver itself needs, an invisible process must be using it.
    """
    if gpu.error:
        return f"not answering: {gpu.error}"
    if gpu.processes:
        return f"used without a lease by pid {', '.join(str(process.pid) for process in gpu.processes)}"
    if gpu.memory_used_bytes is not None and gpu.memory_used_bytes > MOST_UNUSED_BYTES:
        return f"used without a lease by an invisible process ({gpu.memory_used_bytes >> 20} MiB in use)"
    return ""
