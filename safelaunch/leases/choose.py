"""Which GPUs a job may have, how many it wants, and which of the free ones are nearest to each other. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Literal

from safelaunch.errors import ResourceError

# How far two GPUs are from each other: NVLink, then NVML's topology levels (10 to 50), then not known.
NVLINK = 0
SAME_NODE = 40  # NVML_TOPOLOGY_NODE: beyond, the way leads through the link between processors
UNKNOWN = 60
_MOST_COMBINATIONS = 3000

Ranks = int | Literal["all"] | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU; ``memory_bytes`` None where NVML does not tell."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of one (``parent``: the GPU's UUID), as NVML lists it.

    ``label`` is the GPU's number, for an instance ``number.instance``; ``uuid`` is what CUDA_VISIBLE_DEVICES accepts
    whatever the order. ``error``: it is listed and does not answer.
    """

    label: str
    uuid: str
    name: str = ""
    parent: str = ""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    error: str = ""

    @property
    def index(self) -> str:
        """NVML's number of the GPU itself."""
        return self.label.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's GPUs, those in MIG mode as their instances; or none, and the reason in ``missing``.

    ``distances``: pairs of UUIDs, the smaller first → distance.
    """

    gpus: tuple[Gpu, ...] = ()
    distances: Mapping[tuple[str, str], int] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Pool:
    """The GPUs that a job may have. ``origin``: what limits it, empty where nothing does.

    ``exact``: CUDA_VISIBLE_DEVICES, which says what the job is to see, not only what it may.
    """

    gpus: tuple[Gpu, ...]
    origin: str = ""
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """``count`` of ``candidates``. ``origin``: who wants that. ``keep``: CUDA_VISIBLE_DEVICES stays as it is."""

    candidates: tuple[Gpu, ...]
    count: int
    origin: str
    keep: bool = False


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool_of(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Pool:
    """The GPUs that the user or the scheduler allows.

    CUDA_VISIBLE_DEVICES counts, then, under Slurm, GPU_DEVICE_ORDINAL (which Slurm sets to the same), SLURM_STEP_GPUS
    and SLURM_JOB_GPUS. The last two are the node's own numbers: where a cgroup hides other GPUs, NVML counts anew, and
    everything that is seen is the job's.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return Pool(_named(visible, gpus), f"CUDA_VISIBLE_DEVICES={visible}", exact=True)
    if not any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID")):
        return Pool(tuple(gpus))
    ordinal = environ.get("GPU_DEVICE_ORDINAL")
    if ordinal is not None:
        return Pool(_named(ordinal, gpus), f"GPU_DEVICE_ORDINAL={ordinal}")
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name, "").strip():
            return Pool(_of_node(environ[name], gpus), f"{name}={environ[name]}")
    return Pool(tuple(gpus))


def _named(text: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """As CUDA reads CUDA_VISIBLE_DEVICES: numbers and beginnings of UUIDs; the first that names nothing ends the list.

    A GPU in MIG mode stands for its instances.
    """
    found: dict[str, Gpu] = {}
    for word in text.split(","):
        matches = matching(word.strip(), gpus)
        if not matches:
            break
        found.update({gpu.uuid: gpu for gpu in matches})
    return tuple(found.values())


def _of_node(text: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    numbers = _numbers(text)
    there = {gpu.index for gpu in gpus}
    if numbers <= there:
        return tuple(gpu for gpu in gpus if gpu.index in numbers)
    return tuple(gpus) if len(there) <= len(numbers) else tuple(gpu for gpu in gpus if gpu.index in numbers)


def _numbers(text: str) -> set[str]:
    """``0,2-4`` as the numbers that it means."""
    found: set[str] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", word)
        if match:
            found |= {str(number) for number in range(int(match[1]), int(match[2] or match[1]) + 1)}
    return found


def matching(word: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a number (``3``; ``3.1``: an instance) or the beginning of a UUID means: one, or its instances."""
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return tuple(gpu for gpu in gpus if word in (gpu.label, gpu.index))
    if not word.startswith(("GPU-", "MIG-")):
        return ()
    direct = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    if direct:
        return tuple(direct[:1])
    return tuple(gpu for gpu in gpus if gpu.parent.startswith(word))


# --- the wish ---------------------------------------------------------------------------------------------------------


def wish_of(request: str | None, ranks: Ranks, pool: Pool, found: Inventory) -> Wish | None:
    """What a job wants, or None: nothing that could be leased.

    ``request`` is ``--gpus`` (not ``none``); ``ranks`` how many ranks there will be, ``all`` where torchrun makes that
    depend on the GPUs, None where it is not known or has nothing to do with them. Without a request: what
    CUDA_VISIBLE_DEVICES shows, else a GPU for each rank; where there are fewer GPUs than ranks, the ranks share them
    all. Raises ResourceError when what is asked for does not exist.
    """
    if request is None:
        return _by_default(ranks, pool)
    if request == "all":
        if not pool.gpus:
            raise ResourceError(f"--gpus all: there is no GPU to use here{_because(pool, found)}.", "Ask for none.")
        return Wish(pool.gpus, len(pool.gpus), "--gpus all", keep=pool.exact)
    if request.isdigit():
        if int(request) > len(pool.gpus):
            limit = f"only {len(pool.gpus)} GPU(s) can be used here" if found.gpus else "there is no GPU here"
            raise ResourceError(
                f"--gpus {request}: {limit}{_because(pool, found)}.", "Ask for fewer; 'safelaunch gpus' lists them."
            )
        return Wish(pool.gpus, int(request), f"--gpus {request}")
    named = [_by_name(word, pool, found) for word in request.split(",") if word]
    chosen = tuple({gpu.uuid: gpu for gpu in named}.values())
    return Wish(chosen, len(chosen), f"--gpus {request}")


def _by_default(ranks: Ranks, pool: Pool) -> Wish | None:
    if not pool.gpus:
        return None
    if pool.exact:
        return Wish(pool.gpus, len(pool.gpus), pool.origin, keep=True)
    if ranks is None:
        return None
    if ranks == "all":
        return Wish(pool.gpus, len(pool.gpus), "all that there are, as --nproc-per-node asks")
    return Wish(pool.gpus, min(ranks, len(pool.gpus)), f"one for each of {ranks} rank(s)")


def _by_name(word: str, pool: Pool, found: Inventory) -> Gpu:
    matches = matching(word, pool.gpus)
    if len(matches) == 1:
        return matches[0]
    if matches:
        instances = ", ".join(gpu.label for gpu in matches)
        raise ResourceError(f"--gpus: GPU {word} is divided into MIG instances.", f"Name one of those: {instances}.")
    there = ", ".join(gpu.label for gpu in pool.gpus) or "none"
    raise ResourceError(f"--gpus: there is no GPU {word!r} to use here{_because(pool, found)}.", f"There are: {there}.")


def _because(pool: Pool, found: Inventory) -> str:
    reason = found.missing if not found.gpus else pool.origin
    return f" ({reason})" if reason else ""


# --- the choice -------------------------------------------------------------------------------------------------------


def users_of(gpu: Gpu, most_bytes: int) -> str:
    """How a GPU is used, to be asked of one without a lease; empty when it is not.

    Compute processes use it, and more than ``most_bytes`` of memory means that somebody does whom we cannot see.
    """
    if gpu.error:
        return f"does not answer: {gpu.error}"
    if gpu.processes:
        return f"used without a lease by pid {', '.join(str(process.pid) for process in gpu.processes)}"
    if gpu.memory_used_bytes is not None and gpu.memory_used_bytes > most_bytes:
        return f"{gpu.memory_used_bytes >> 20} MiB of its memory are in use, and nobody is seen who uses it"
    return ""


def nearest(free: Sequence[Gpu], count: int, distances: Mapping[tuple[str, str], int]) -> tuple[Gpu, ...] | None:
    """``count`` of ``free`` that are nearest to each other, in their order; None when there are not enough.

    Among equals those that leave the others together: where four GPUs share one node and two another, a job that wants
    two gets the two.
    """
    if count > len(free):
        return None
    if count == len(free):
        return tuple(free)

    def cost(chosen: tuple[int, ...]) -> tuple[int, int, list[int]]:
        inside = sum(_distance(free[a], free[b], distances) for a, b in combinations(chosen, 2))
        outside = sum(_distance(free[a], free[b], distances) for a in chosen for b in rest(chosen))
        return inside, -outside, sorted(chosen)

    def rest(chosen: tuple[int, ...]) -> list[int]:
        return [number for number in range(len(free)) if number not in chosen]

    best = min(_some_combinations(count, free, distances), key=cost)
    return tuple(free[number] for number in sorted(best))


def _some_combinations(
    count: int, free: Sequence[Gpu], distances: Mapping[tuple[str, str], int]
) -> list[tuple[int, ...]]:
    """All of them; on a node with very many GPUs those that grow from each by its nearest neighbours."""
    total = len(free)
    if comb(total, count) <= _MOST_COMBINATIONS:
        return list(combinations(range(total), count))
    return [_grown(seed, count, free, distances) for seed in range(total)]


def _grown(seed: int, count: int, free: Sequence[Gpu], distances: Mapping[tuple[str, str], int]) -> tuple[int, ...]:
    chosen = [seed]

    def to_chosen(other: int) -> int:
        return sum(_distance(free[other], free[one], distances) for one in chosen)

    while len(chosen) < count:
        chosen.append(min((other for other in range(len(free)) if other not in chosen), key=to_chosen))
    return tuple(sorted(chosen))


def _distance(one: Gpu, other: Gpu, distances: Mapping[tuple[str, str], int]) -> int:
    a, b = sorted((one.parent or one.uuid, other.parent or other.uuid))
    return 0 if a == b else distances.get((a, b), UNKNOWN)
