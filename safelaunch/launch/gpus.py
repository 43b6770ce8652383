"""Which GPUs a job gets: the node's inventory (an effect, bounded in time), and the choice (pure)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from safelaunch.errors import ResourceError

QUERY_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML lists it. ``uuid`` is what CUDA_VISIBLE_DEVICES accepts whatever the order."""

    index: int
    uuid: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's GPUs, or none and the reason in ``missing``."""

    gpus: tuple[Gpu, ...]
    missing: str = ""


def inventory() -> Inventory:
    """Asks NVML, in a process of its own: a wedged driver can block the call for ever."""
    import json
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-m", "safelaunch.capture.gpu"],
            capture_output=True,
            timeout=QUERY_DEADLINE_S,
            check=False,
        )
        answer = json.loads(done.stdout or b"{}")
    except subprocess.TimeoutExpired:
        return Inventory((), f"the NVIDIA driver did not answer within {QUERY_DEADLINE_S:g} s")
    except (OSError, ValueError) as error:
        return Inventory((), f"NVML could not be asked: {error}")
    listed = answer.get("gpus", []) if isinstance(answer, dict) else []
    gpus = tuple(Gpu(int(g["index"]), str(g["uuid"]), str(g.get("name", ""))) for g in listed)
    missing = "" if gpus else str(answer.get("missing") or "no NVIDIA GPU found")
    return Inventory(gpus, missing)


def choose(request: str, pool: str | None, found: Inventory) -> str | None:
    """The value for CUDA_VISIBLE_DEVICES, or None to leave it as it is.

    ``request`` is ``--gpus``: ``none``, ``all``, a number (written ``N``), or ids and UUIDs separated by commas.
    ``pool`` is CUDA_VISIBLE_DEVICES as the user or the scheduler set it: nothing outside it is ever given.
    Raises ResourceError when what is asked for does not exist.
    """
    if request == "none":
        return ""
    if request == "all":
        return None
    available = _within(pool, found.gpus)
    if "," not in request and request.isdigit():
        wanted = int(request)
        if wanted > len(available):
            raise ResourceError(_too_few(wanted, available, pool, found), "Ask for fewer, or run 'safelaunch gpus'.")
        return ",".join(gpu.uuid for gpu in available[:wanted])
    return ",".join(_by_name(word.strip(), available, found).uuid for word in request.split(",") if word.strip())


def _within(pool: str | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    if pool is None:
        return list(gpus)
    words = [word.strip() for word in pool.split(",") if word.strip()]
    return [gpu for word in words for gpu in gpus if word == str(gpu.index) or gpu.uuid.startswith(word)]


def _by_name(word: str, available: Sequence[Gpu], found: Inventory) -> Gpu:
    matches = [gpu for gpu in available if word == str(gpu.index) or gpu.uuid == word]
    if not matches:
        there = ", ".join(str(gpu.index) for gpu in available) or found.missing or "none"
        raise ResourceError(f"--gpus: there is no GPU {word!r} to use (available: {there}).", "Name one of those.")
    return matches[0]


def _too_few(wanted: int, available: Sequence[Gpu], pool: str | None, found: Inventory) -> str:
    if not found.gpus:
        return f"--gpus {wanted}: there is no GPU here ({found.missing})."
    limit = f" (CUDA_VISIBLE_DEVICES={pool})" if pool is not None else ""
    return f"--gpus {wanted}: only {len(available)} GPU(s) can be used here{limit}."
