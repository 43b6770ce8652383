"""What the error of torch's CUDA allocator says when the memory of a GPU is used up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from safelaunch.model.words import size as size_words

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
    "allocated": _pattern(r"Of the allocated memory ", "allocated", " is allocated by PyTorch"),
    "unused": _pattern(r"and ", "unused", " is reserved by PyTorch but unallocated"),
}
_OTHER = _pattern(r"Process (?P<pid>\d+) has ", "of", " memory in use")


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes, None where the error does not give them.

    - ``device``: the rank's own number of the GPU; -1 unknown
    - ``own``: what the process has of it, with CUDA's own part
    - ``allocated``: in tensors; ``unused``: reserved from the GPU, and in no tensor
    - ``others``: pid → what it has. In a container, where pids are others, the process itself may be among them: then
      ``own`` is None, and they are left out.
    """

    device: int
    asked: int | None
    total: int | None
    free: int | None
    own: int | None
    allocated: int | None
    unused: int | None
    others: tuple[tuple[int, int], ...] = ()

    @property
    def is_fragmented(self) -> bool:
        """What torch holds and does not use would have been enough."""
        return bool(self.asked and self.unused and self.unused >= self.asked)


def shortage(message: str) -> Shortage | None:
    """None for the message of another error."""
    if "out of memory. Tried to allocate" not in message:
        return None
    device = _DEVICE.search(message)
    sizes = {name: _size(pattern.search(message), name) for name, pattern in _SIZES.items()}
    others = tuple((int(found["pid"]), _size(found, "of") or 0) for found in _OTHER.finditer(message) if sizes["own"])
    return Shortage(int(device["number"]) if device else -1, **sizes, others=others)


def _size(found: re.Match[str] | None, name: str) -> int | None:
    return int(float(found[name]) * _UNITS[found[f"{name}_unit"]]) if found is not None else None


def words(size: int) -> str:
    """``1.5 GiB``, ``40 MiB``."""
    return size_words(size)
