"""Parses torch's CUDA out-of-memory error, which says how much memory the GPU had left."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = r"(?P<{}>\d+(?:\.\d+)?) ?(?P<{}_unit>bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _pattern(before: str, name: str, after: str = "") -> re.Pattern[str]:
    return re.compile(before + _SIZE.format(name, name) + after)


_DEVICE = re.compile(r"\bGPU (?P<number>\d+)\b")
_SIZES = {
    "asked": _pattern(r"Tried to allocate ", "asked"),
    "total": _pattern(r"total capaci?ty of ", "total"),
    "free": _pattern(r"of which ", "free", " is free"),
    "own": _pattern(r"this process has ", "own", " memory in use"),
    "allocated": _pattern(r"Of the allocated memory ", "allocated", " is allocated by PyTorch"),  # english: ok
    "unused": _pattern(r"and ", "unused", " is reserved by PyTorch but unallocated"),
}
_OTHER = _pattern(r"Process (?P<pid>\d+) has ", "of", " memory in use")


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes; None if the error doesn't state them."""

    device: int  # number of the GPU as the rank counts them; -1: unknown
    asked: int | None
    total: int | None
    free: int | None
    own: int | None  # used by the process, including CUDA itself
    allocated: int | None
    unused: int | None  # reserved from the GPU, but not used by tensors
    # Pid and usage of other processes. In a container, whose pids differ, the process itself might be among them. Then
    # ``others`` is empty and ``own`` is None.
    others: tuple[tuple[int, int], ...] = ()

    @property
    def is_fragmented(self) -> bool:
        """True if the memory that torch had reserved but wasn't using would have sufficed."""
        return bool(self.asked and self.unused and self.unused >= self.asked)


def shortage(message: str) -> Shortage | None:
    if "out of memory. Tried to allocate" not in message:
        return None
    device = _DEVICE.search(message)
    sizes = {name: _size(pattern.search(message), name) for name, pattern in _SIZES.items()}
    other_processes = tuple(
        (int(hit["pid"]), _size(hit, "of") or 0) for hit in _OTHER.finditer(message) if sizes["own"]
    )
    return Shortage(int(device["number"]) if device else -1, **sizes, others=other_processes)


def _size(hit: re.Match[str] | None, name: str) -> int | None:
    return int(float(hit[name]) * _UNITS[hit[f"{name}_unit"]]) if hit is not None else None
